"""A gateway's part of a peering (seed 000): outgoing and incoming classes, prefix NAT, two route tables, tunnels, overlay links.

Outgoing: a packet from a node gets class OUTGOING at prerouting, its destination is translated to the far cluster's real address, and the
class's table sends it through the tunnels. Incoming: a packet from a tunnel gets class INCOMING, the class's table finds the node that
owns the pod, and the source is translated to the address by which this cluster sees the far one. Policy rules grow neither with tunnels
nor with nodes.

What nodes send comes under an external address of the node's own, or under its overlay address, which becomes the one external address
that all nodes share: which of them is the nodes' business (``Cluster.sources``), and a gateway takes both, so that a change of mind is
one element on each node. Connection tracking makes the ports of shared flows unique; there is neither a mark nor a rule per node.

All of this is made once for each family that the peering carries: objects of the second have a 6 in their names.

Whatever meets no translation, no route or no tunnel is dropped or unreachable: class tables end in `unreachable`, and so does each remote
prefix in main, for the case that somebody removes the tables of nftables. The rule texts follow a trial that carried packets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from schemas.host_objects import (
    GUARD_METRIC,
    MAIN_TABLE,
    GeneveLink,
    LinkAddress,
    NextHop,
    NftChain,
    NftElement,
    NftSet,
    NftTable,
    PlanObject,
    PolicyRule,
    Route,
    Sysctl,
    VxlanLink,
)
from schemas.nft import ClampMss, Match, Nat, Notrack, SetMark, VerdictMap
from schemas.topology import TUNNELS_MAX, Cluster, Gateway, Node, Pod
from schemas.values import IPV4, IPV6, Family, Mac, Prefix
from services.planner import layout, names
from services.planner.allocate import Allocations, peering_id
from services.planner.compile import control, drops, tunnels, uplinks
from services.planner.compile.words import EVERYWHERE, FORWARDING, WORDS, of_family
from services.planner.external import node_source, shared_source
from services.planner.families import carried, overlay_address, overlay_mtu, underlay_ends
from services.planner.state import Attachment, HostId, State, seen_prefixes

_OVERLAY, _TUNNEL = f"{names.OVERLAY_LINK_PREFIX}*", f"{names.TUNNEL_LINK_PREFIX}*"
_OUTGOING = Match("meta mark", (f"{layout.CLASS_OUTGOING:#x}",), mask=layout.CLASS_MASK)
_INCOMING = Match("meta mark", (f"{layout.CLASS_INCOMING:#x}",), mask=layout.CLASS_MASK)
_PROBING = Sysctl("net/ipv4/ping_group_range", "0 2147483647")
"""Tunnels are probed by ICMP echo of either family, without a right to raw packets. These are all groups, as systemd and Docker have it."""
_SYSCTLS = {
    IPV4: {
        FORWARDING[IPV4]: "1",
        "net/ipv4/fwmark_reflect": "1",
        # By packet: policy 1 trusts a hash that the sender's socket chose, and a new socket with the same ports takes another tunnel.
        "net/ipv4/fib_multipath_hash_policy": "3",
        "net/ipv4/fib_multipath_hash_fields": "55",
        # The reverse path of a marked packet is in the other class's table; nftables checks sources instead (fib).
        "net/ipv4/conf/all/rp_filter": "0",
        "net/ipv4/conf/default/rp_filter": "0",
    },
    IPV6: {
        FORWARDING[IPV6]: "1",
        "net/ipv6/fwmark_reflect": "1",
        "net/ipv6/fib_multipath_hash_policy": "3",
        "net/ipv6/fib_multipath_hash_fields": "55",
    },
}


def base(state: State, allocations: Allocations, attachment: Attachment) -> Iterator[PlanObject]:
    """What does not depend on nodes and pods."""
    table = names.table(*peering_id(attachment))
    cluster, families = state.clusters[attachment.end.cluster], carried(state, attachment.peering)
    for family in families:
        yield from (Sysctl(name, value) for name, value in _SYSCTLS[family].items())
    yield _PROBING
    yield from _guards(state, attachment, families)
    yield from control.rules(cluster)
    yield from (rule for family in families for rule in _rules(family))
    yield from uplinks.objects(state.gateways[cluster.name][attachment.end.gateway])
    yield NftTable(table)
    yield from control.objects(table, cluster)
    yield from _sets(state, attachment, table, families)
    yield from _chains(state, attachment, table, families)
    yield from tunnels.objects(state, allocations, attachment)


def translations(objects: Iterable[PlanObject]) -> dict[Prefix, Prefix]:
    """How a gateway sees real prefixes, read back from its part of a peering."""
    sets = {f"to_seen{words.suffix}" for words in WORDS.values()}
    elements = [item for item in objects if isinstance(item, NftElement) and item.set in sets]
    return {Prefix.parse(item.element): Prefix.parse(item.value) for item in elements}


def node(state: State, allocations: Allocations, attachment: Attachment, item: Node) -> Iterator[PlanObject]:
    """The overlay link to one node, and the routes to its pods."""
    cluster = state.clusters[item.cluster]
    gateway = state.gateways[item.cluster][attachment.end.gateway]
    families = carried(state, attachment.peering)
    yield from overlay_link(allocations, cluster, gateway, item, families)
    link = names.overlay_link(item.name)
    number = allocations.number(HostId(item.cluster, item.name))
    for family in families:
        address = overlay_address(cluster, number, family)
        yield Route(layout.INCOMING_TABLE, address.host_prefix, hops=(NextHop(link),))
        if (own := node_source(cluster, number, family)) is not None:
            yield Route(layout.INCOMING_TABLE, own.host_prefix, hops=(NextHop(link, address, onlink=True),))
        for prefix in of_family(item.pod_prefixes, family):
            yield Route(layout.INCOMING_TABLE, prefix, hops=(NextHop(link, address, onlink=True),))


def pod(state: State, allocations: Allocations, attachment: Attachment, item: Pod) -> Iterator[PlanObject]:
    """Host routes to a pod's addresses, where its node's prefixes do not lead there already."""
    owner = state.nodes[item.cluster].get(item.node)
    if owner is None:
        return
    strays = [address for address in item.addresses if not any(prefix.covers(address) for prefix in owner.pod_prefixes)]
    if not strays:
        return
    cluster, number = state.clusters[item.cluster], allocations.number(HostId(item.cluster, item.node))
    families = carried(state, attachment.peering)
    for address in strays:
        if address.family in families:
            hop = NextHop(names.overlay_link(item.node), overlay_address(cluster, number, address.family), onlink=True)
            yield Route(layout.INCOMING_TABLE, address.host_prefix, hops=(hop,))


def overlay_link(
    allocations: Allocations, cluster: Cluster, here: Node | Gateway, there: Node | Gateway, families: Iterable[Family]
) -> Iterator[PlanObject]:
    """One end of the point-to-point link between a gateway and a node of its cluster, with this end's overlay addresses.

    The overlay's id (VNI) is the gateway's and the node's number together, so that it differs among all links of either host; the Ethernet
    address is fixed, so that a link that is made again is found at once.
    """
    number = allocations.number(HostId(cluster.name, here.name))
    gateway, member = (here, there) if isinstance(here, Gateway) else (there, here)
    vni = allocations.number(HostId(cluster.name, gateway.name)) << layout.HOST_NUMBER_BITS | allocations.number(
        HostId(cluster.name, member.name)
    )
    side = 1 if isinstance(here, Gateway) else 2
    local, remote = underlay_ends(here, there)
    link = names.overlay_link(there.name)
    mac = Mac(":".join(f"{octet:02x}" for octet in (0x02, 0x4D, side, *vni.to_bytes(3, "big"))))
    mtu, port = overlay_mtu(cluster, here, there), layout.OVERLAY_PORT[cluster.overlay]
    yield (
        GeneveLink(link, vni, remote, mac, mtu, port)
        if cluster.overlay == "geneve"
        else VxlanLink(link, vni, local, remote, mac, mtu, port)
    )
    for family in families:
        address = overlay_address(cluster, number, family)
        yield LinkAddress(link, address, address.host_prefix.length)
        if family == IPV6:
            yield LinkAddress(link, layout.OVERLAY_LINK_LOCAL[side], 64)


def overlay_port(cluster: Cluster) -> str:
    """The UDP port of the overlay's outer packets, as nftables is told."""
    return str(layout.OVERLAY_PORT[cluster.overlay])


def guard(table: int, prefix: Prefix) -> Route:
    """A route that answers `unreachable` wherever no other route leads."""
    return Route(table, prefix, "unreachable", GUARD_METRIC)


def _guards(state: State, attachment: Attachment, families: Iterable[Family]) -> Iterator[PlanObject]:
    cluster = state.clusters[attachment.end.cluster]
    remote = {prefix for pair in seen_prefixes(state, attachment) for prefix in pair}
    for prefix in sorted(remote | {*cluster.pod_prefixes, *cluster.external_prefixes}):
        if prefix.family in families:
            yield guard(MAIN_TABLE, prefix)
    for family in families:
        for table in (layout.OUTGOING_TABLE, layout.INCOMING_TABLE):
            yield guard(table, EVERYWHERE[family])


def _rules(family: Family) -> Iterator[PlanObject]:
    outgoing, incoming, mask = layout.CLASS_OUTGOING, layout.CLASS_INCOMING, layout.CLASS_MASK
    yield PolicyRule(layout.RULE_LOCAL_OUTGOING, layout.INCOMING_TABLE, outgoing, mask, iif="lo", family=family)
    yield PolicyRule(layout.RULE_LOCAL_INCOMING, layout.OUTGOING_TABLE, incoming, mask, iif="lo", family=family)
    yield PolicyRule(layout.RULE_OUTGOING, layout.OUTGOING_TABLE, outgoing, mask, family=family)
    yield PolicyRule(layout.RULE_INCOMING, layout.INCOMING_TABLE, incoming, mask, family=family)


def _sets(state: State, attachment: Attachment, table: str, families: Iterable[Family]) -> Iterator[PlanObject]:
    cluster = state.clusters[attachment.end.cluster]
    yield NftSet(table, "classes", "ifname", "verdict", interval=True)
    yield NftElement(table, "classes", _OVERLAY, "jump from_overlay")
    yield NftElement(table, "classes", _TUNNEL, "jump from_tunnel")
    yield NftSet(table, "tunnels", "ifname", interval=True)
    yield NftElement(table, "tunnels", _TUNNEL)
    for words in map(WORDS.__getitem__, families):
        yield NftSet(table, f"sources{words.suffix}", words.type, interval=True)
        yield NftSet(table, f"to_real{words.suffix}", words.type, words.type, interval=True, value_interval=True)
        yield NftSet(table, f"to_seen{words.suffix}", words.type, words.type, interval=True, value_interval=True)
        yield NftSet(table, f"mapped{words.suffix}", words.type, words.type)
        yield NftSet(table, f"to_external{words.suffix}", words.type, words.type, interval=True)
    for internal in cluster.internal_prefixes:
        shared = shared_source(cluster, internal.family)
        if internal.family in families and shared is not None:
            suffix = WORDS[internal.family].suffix
            yield NftElement(table, f"sources{suffix}", internal.bare)
            yield NftElement(table, f"to_external{suffix}", internal.bare, shared)
    for prefix in (*cluster.pod_prefixes, *cluster.external_prefixes):
        if prefix.family in families:
            yield NftElement(table, f"sources{WORDS[prefix.family].suffix}", prefix.bare)
    for seen, real in seen_prefixes(state, attachment):
        suffix = WORDS[real.family].suffix
        yield NftElement(table, f"to_real{suffix}", seen.bare, real.bare)
        yield NftElement(table, f"to_seen{suffix}", real.bare, seen.bare)


def _chains(state: State, attachment: Attachment, table: str, families: Sequence[Family]) -> Iterator[PlanObject]:
    port = attachment.peering.port
    cluster = state.clusters[attachment.end.cluster]
    internal = [prefix for prefix in cluster.internal_prefixes if prefix.family in families]
    outer = (overlay_port(cluster), f"{port}-{port + TUNNELS_MAX - 1}")
    spoken = [WORDS[family] for family in families]
    checked = [_CHECKED[family] for family in families] if IPV6 in families else [()]
    yield NftChain(table, "from_overlay", ((SetMark(layout.CLASS_OUTGOING, layout.CLASS_MASK),),))
    yield NftChain(table, "from_tunnel", ((SetMark(layout.CLASS_INCOMING, layout.CLASS_MASK),),))
    yield from notrack(table, outer)
    yield NftChain(
        table,
        "classify",
        (
            (VerdictMap("iifname", "classes"),),
            # Chains of type nat never see such a packet, and untranslated its addresses mean others at the far end.
            (_ANY_CLASS, Match("ct state", ("invalid",)), *drops.UNKNOWN),
            # The reverse path must be where the packet came from. An ICMP error has the address of a router on the way.
            *((Match("iifname", (_OVERLAY,)), _NOT_RELATED, *what, _FROM_ELSEWHERE, *drops.SPOOFED) for what in checked),
            *((Match("iifname", (_TUNNEL,)), _NOT_RELATED, *what, _NOT_BY_A_TUNNEL, *drops.SPOOFED) for what in checked),
            # Overlay addresses are nobody's business but the cluster's. What is said to a node in answer has another destination here.
            *((Match("iifname", (_TUNNEL,)), Match(WORDS[one.family].destination, (one.bare,)), *drops.TO_INTERNAL) for one in internal),
        ),
        "filter",
        "prerouting",
        layout.PRIORITY_MANGLE,
    )
    to_real = tuple((_OUTGOING, Nat("dnat", f"to_real{WORDS[family].suffix}", family=family)) for family in families)
    mapped = tuple((_INCOMING, Nat("dnat", f"mapped{WORDS[family].suffix}", prefix=False, family=family)) for family in families)
    yield NftChain(table, "destinations", (*to_real, *mapped), "nat", "prerouting", layout.PRIORITY_DSTNAT)
    yield NftChain(
        table,
        "forward",
        (
            # As above; not before, where it would meet neighbour discovery, which is never tracked.
            (_ANY_CLASS, Match("ct state", ("untracked",)), *drops.UNTRACKED),
            (_OUTGOING, Match("oifname", (_TUNNEL,), "!="), *drops.NOT_BY_TUNNEL),
            *((_OUTGOING, _NOT_RELATED, Match(words.source, (f"@sources{words.suffix}",), "!="), *drops.STRANGER) for words in spoken),
            (_INCOMING, Match("oifname", (_OVERLAY,), "!="), *drops.NOT_TO_NODE),
            (Match("iifname", (_OVERLAY, _TUNNEL), "!="), Match("oifname", (_OVERLAY, _TUNNEL)), *drops.FROM_OUTSIDE),
            (Match("oifname", ("@tunnels",)), Match("tcp flags & (syn | rst)", ("syn",)), ClampMss()),
        ),
        "filter",
        "forward",
        layout.PRIORITY_FILTER,
    )
    to_seen = tuple((_INCOMING, Nat("snat", f"to_seen{WORDS[family].suffix}", family=family)) for family in families)
    to_external = tuple((_OUTGOING, Nat("snat", f"to_external{WORDS[family].suffix}", prefix=False, family=family)) for family in families)
    senders = (*control.passes(cluster), *to_seen, (_INCOMING, *drops.NOT_TRANSLATED), *to_external)
    yield NftChain(table, "senders", senders, "nat", "postrouting", layout.PRIORITY_SRCNAT)
    yield NftChain(
        table,
        "leave",
        (
            *control.passes(cluster),
            (_ANY_CLASS, Match("oifname", (_OVERLAY, _TUNNEL), "!="), *drops.BY_UPLINK),
            # The overlay looks its outer route up with the inner packet's mark; WireGuard does not.
            (Match("oifname", (_OVERLAY,)), SetMark(0, layout.CLASS_MASK)),
        ),
        "filter",
        "postrouting",
        layout.PRIORITY_LAST,
    )


_ANY_CLASS = Match("meta mark", ("0x0",), "!=", layout.CLASS_MASK)
_NOT_RELATED = Match("ct state", ("related",), "!=")
_FROM_ELSEWHERE = Match("fib saddr . mark . iif oif", ("missing",))
_NOT_BY_A_TUNNEL = Match("fib saddr . mark oifname", (_TUNNEL,), "!=")
_CHECKED = {IPV4: (Match("meta nfproto", ("ipv4",)),), IPV6: (Match("ip6 saddr", layout.NEVER_ROUTED, "!="),)}
"""What of a family is checked where both are in use: neighbours ask for each other with sources that no route leads to."""


def notrack(table: str, ports: tuple[str, ...]) -> Iterator[PlanObject]:
    """Outer packets of overlay and tunnels, to and from this host, stay out of connection tracking."""
    to_ports = Match("udp dport", ports)
    arriving, leaving = (
        (Match("fib daddr type", ("local",)), to_ports, Notrack()),
        (Match("fib saddr type", ("local",)), to_ports, Notrack()),
    )
    yield NftChain(table, "notrack_in", (arriving,), "filter", "prerouting", layout.PRIORITY_RAW)
    yield NftChain(table, "notrack_out", (leaving,), "filter", "output", layout.PRIORITY_RAW)
