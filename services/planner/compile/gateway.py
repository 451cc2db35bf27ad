"""A gateway's part of a peering (seed 000): outgoing and incoming classes, prefix NAT, two route tables, tunnels, overlay links.

Outgoing: a packet from a node gets class OUTGOING at prerouting, its destination is translated to the far cluster's real address, and the
class's table sends it through the tunnels. Incoming: a packet from a tunnel gets class INCOMING, the class's table finds the node that
owns the pod, and the source is translated to the address by which this cluster sees the far one. Policy rules grow neither with tunnels
nor with nodes.

Whatever meets no translation, no route or no tunnel is dropped or unreachable: class tables end in `unreachable`, and so does each remote
prefix in main, for the case that somebody removes the tables of nftables. The rule texts follow a trial that carried packets.
"""

from __future__ import annotations

from collections.abc import Iterator

from schemas.nft import ClampMss, Counter, Match, Nat, Notrack, SetMark, Verdict, VerdictMap
from schemas.plan import (
    GUARD_METRIC,
    MAIN_TABLE,
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
    WireguardLink,
    WireguardPeer,
)
from schemas.topology import TUNNELS_MAX, Cluster, Gateway, Node, Pod
from schemas.values import Endpoint, Mac, Prefix
from services.planner import layout, names
from services.planner.allocate import Allocations, peering_id
from services.planner.state import Attachment, HostId, State, seen_prefixes

_DROP = (Counter(), Verdict("drop"))
_OVERLAY, _TUNNEL = f"{names.OVERLAY_LINK_PREFIX}*", f"{names.TUNNEL_LINK_PREFIX}*"
_OUTGOING = Match("meta mark", (f"{layout.CLASS_OUTGOING:#x}",), mask=layout.CLASS_MASK)
_INCOMING = Match("meta mark", (f"{layout.CLASS_INCOMING:#x}",), mask=layout.CLASS_MASK)
_SYSCTLS = {
    "net/ipv4/ip_forward": "1",
    "net/ipv4/fwmark_reflect": "1",
    # By packet: policy 1 trusts a hash that the sender's socket chose, and a new socket with the same ports takes another tunnel.
    "net/ipv4/fib_multipath_hash_policy": "3",
    "net/ipv4/fib_multipath_hash_fields": "55",
    # The reverse path of a marked packet is in the other class's table; nftables checks sources instead (fib).
    "net/ipv4/conf/all/rp_filter": "0",
    "net/ipv4/conf/default/rp_filter": "0",
}


def base(state: State, allocations: Allocations, attachment: Attachment) -> Iterator[PlanObject]:
    """What does not depend on nodes and pods."""
    table = names.table(*peering_id(attachment))
    for name, value in _SYSCTLS.items():
        yield Sysctl(name, value)
    yield from _guards(state, attachment)
    yield from _rules()
    yield NftTable(table)
    yield from _sets(state, attachment, table)
    yield from _chains(attachment, table)
    yield from _tunnels(state, allocations, attachment)


def node(state: State, allocations: Allocations, attachment: Attachment, item: Node) -> Iterator[PlanObject]:
    """The overlay link to one node, and the routes to its pods."""
    cluster = state.clusters[item.cluster]
    gateway = state.gateways[item.cluster][attachment.end.gateway]
    yield from overlay_link(allocations, cluster, gateway, item)
    link = names.overlay_link(item.name)
    address = cluster.internal_prefix.address(allocations.number(HostId(item.cluster, item.name)))
    yield Route(layout.INCOMING_TABLE, address.host_prefix, hops=(NextHop(link),))
    for prefix in item.pod_prefixes:
        yield Route(layout.INCOMING_TABLE, prefix, hops=(NextHop(link, address, onlink=True),))


def pod(state: State, allocations: Allocations, item: Pod) -> Iterator[PlanObject]:
    """Host routes to a pod's addresses, where its node's prefixes do not lead there already."""
    owner = state.nodes[item.cluster].get(item.node)
    if owner is None:
        return
    via = state.clusters[item.cluster].internal_prefix.address(allocations.number(HostId(item.cluster, item.node)))
    for address in item.addresses:
        if not any(prefix.covers(address) for prefix in owner.pod_prefixes):
            hop = NextHop(names.overlay_link(item.node), via, onlink=True)
            yield Route(layout.INCOMING_TABLE, address.host_prefix, hops=(hop,))


def overlay_link(allocations: Allocations, cluster: Cluster, here: Node | Gateway, there: Node | Gateway) -> Iterator[PlanObject]:
    """One end of the point-to-point link between a gateway and a node of its cluster, with this end's overlay address.

    The VXLAN id is the gateway's and the node's number together, so that it differs among all links of either host; the Ethernet
    address is fixed, so that a link that is made again is found at once.
    """
    number = allocations.number(HostId(cluster.name, here.name))
    gateway, member = (here, there) if isinstance(here, Gateway) else (there, here)
    vni = allocations.number(HostId(cluster.name, gateway.name)) << layout.HOST_NUMBER_BITS | allocations.number(
        HostId(cluster.name, member.name)
    )
    side = 1 if isinstance(here, Gateway) else 2
    link = names.overlay_link(there.name)
    yield VxlanLink(
        link,
        vni=vni,
        local=here.address,
        remote=there.address,
        mac=Mac(":".join(f"{octet:02x}" for octet in (0x02, 0x4D, side, *vni.to_bytes(3, "big")))),
        mtu=cluster.mtu - layout.VXLAN_OVERHEAD_BYTES,
        port=layout.VXLAN_PORT,
    )
    yield LinkAddress(link, cluster.internal_prefix.address(number), 32)


def guard(table: int, prefix: Prefix) -> Route:
    """A route that answers `unreachable` wherever no other route leads."""
    return Route(table, prefix, "unreachable", GUARD_METRIC)


def _guards(state: State, attachment: Attachment) -> Iterator[PlanObject]:
    cluster = state.clusters[attachment.end.cluster]
    remote = {prefix for pair in seen_prefixes(state, attachment) for prefix in pair}
    for prefix in sorted(remote | {*cluster.pod_prefixes, *cluster.external_prefixes}):
        yield guard(MAIN_TABLE, prefix)
    for table in (layout.OUTGOING_TABLE, layout.INCOMING_TABLE):
        yield guard(table, Prefix("0.0.0.0/0"))


def _rules() -> Iterator[PlanObject]:
    outgoing, incoming, mask = layout.CLASS_OUTGOING, layout.CLASS_INCOMING, layout.CLASS_MASK
    yield PolicyRule(layout.RULE_LOCAL_OUTGOING, layout.INCOMING_TABLE, outgoing, mask, iif="lo")
    yield PolicyRule(layout.RULE_LOCAL_INCOMING, layout.OUTGOING_TABLE, incoming, mask, iif="lo")
    yield PolicyRule(layout.RULE_OUTGOING, layout.OUTGOING_TABLE, outgoing, mask)
    yield PolicyRule(layout.RULE_INCOMING, layout.INCOMING_TABLE, incoming, mask)


def _sets(state: State, attachment: Attachment, table: str) -> Iterator[PlanObject]:
    cluster = state.clusters[attachment.end.cluster]
    yield NftSet(table, "classes", "ifname", "verdict", interval=True)
    yield NftElement(table, "classes", _OVERLAY, "jump from_overlay")
    yield NftElement(table, "classes", _TUNNEL, "jump from_tunnel")
    yield NftSet(table, "tunnels", "ifname", interval=True)
    yield NftElement(table, "tunnels", _TUNNEL)
    yield NftSet(table, "sources", "ipv4_addr", interval=True)
    for prefix in (*cluster.pod_prefixes, *cluster.external_prefixes):
        yield NftElement(table, "sources", element(prefix))
    yield NftSet(table, "to_real", "ipv4_addr", "ipv4_addr", interval=True, value_interval=True)
    yield NftSet(table, "to_seen", "ipv4_addr", "ipv4_addr", interval=True, value_interval=True)
    for seen, real in seen_prefixes(state, attachment):
        yield NftElement(table, "to_real", element(seen), element(real))
        yield NftElement(table, "to_seen", element(real), element(seen))


def element(prefix: Prefix) -> str:
    """A prefix as nftables lists it: a whole-length prefix is a bare address."""
    return prefix.removesuffix("/32")


def _chains(attachment: Attachment, table: str) -> Iterator[PlanObject]:
    port = attachment.peering.port
    outer = (str(layout.VXLAN_PORT), f"{port}-{port + TUNNELS_MAX - 1}")
    yield NftChain(table, "from_overlay", ((SetMark(layout.CLASS_OUTGOING, layout.CLASS_MASK),),))
    yield NftChain(table, "from_tunnel", ((SetMark(layout.CLASS_INCOMING, layout.CLASS_MASK),),))
    yield from notrack(table, outer)
    yield NftChain(
        table,
        "classify",
        (
            (VerdictMap("iifname", "classes"),),
            # The reverse path must be where the packet came from. An ICMP error has the address of a router on the way.
            (Match("iifname", (_OVERLAY,)), _NOT_RELATED, Match("fib saddr . mark . iif oif", ("missing",)), *_DROP),
            (Match("iifname", (_TUNNEL,)), _NOT_RELATED, Match("fib saddr . mark oifname", (_TUNNEL,), "!="), *_DROP),
        ),
        "filter",
        "prerouting",
        layout.PRIORITY_MANGLE,
    )
    yield NftChain(table, "outgoing", ((_OUTGOING, Nat("dnat", "to_real")),), "nat", "prerouting", layout.PRIORITY_DSTNAT)
    yield NftChain(
        table,
        "forward",
        (
            (_OUTGOING, Match("oifname", (_TUNNEL,), "!="), *_DROP),
            (_OUTGOING, _NOT_RELATED, Match("ip saddr", ("@sources",), "!="), *_DROP),
            (_INCOMING, Match("oifname", (_OVERLAY,), "!="), *_DROP),
            (Match("iifname", (_OVERLAY, _TUNNEL), "!="), Match("oifname", (_OVERLAY, _TUNNEL)), *_DROP),
            (Match("oifname", ("@tunnels",)), Match("tcp flags & (syn | rst)", ("syn",)), ClampMss()),
        ),
        "filter",
        "forward",
        layout.PRIORITY_FILTER,
    )
    yield NftChain(
        table, "incoming", ((_INCOMING, Nat("snat", "to_seen")), (_INCOMING, *_DROP)), "nat", "postrouting", layout.PRIORITY_SRCNAT
    )
    yield NftChain(
        table,
        "leave",
        (
            (Match("meta mark", ("0x0",), "!=", layout.CLASS_MASK), Match("oifname", (_OVERLAY, _TUNNEL), "!="), *_DROP),
            # The overlay looks its outer route up with the inner packet's mark; WireGuard does not.
            (Match("oifname", (_OVERLAY,)), SetMark(0, layout.CLASS_MASK)),
        ),
        "filter",
        "postrouting",
        layout.PRIORITY_LAST,
    )


_NOT_RELATED = Match("ct state", ("related",), "!=")


def notrack(table: str, ports: tuple[str, ...]) -> Iterator[PlanObject]:
    """Outer packets of overlay and tunnels, to and from this host, stay out of connection tracking."""
    to_ports = Match("udp dport", ports)
    arriving, leaving = (
        (Match("fib daddr type", ("local",)), to_ports, Notrack()),
        (Match("fib saddr type", ("local",)), to_ports, Notrack()),
    )
    yield NftChain(table, "notrack_in", (arriving,), "filter", "prerouting", layout.PRIORITY_RAW)
    yield NftChain(table, "notrack_out", (leaving,), "filter", "output", layout.PRIORITY_RAW)


def _tunnels(state: State, allocations: Allocations, attachment: Attachment) -> Iterator[PlanObject]:
    peering, rollout = attachment.peering, allocations.rollout(peering_id(attachment))
    own, far = state.keys.get(attachment.host), state.keys.get(attachment.far_host)
    mtu = min(state.clusters[end.cluster].mtu for end in peering.ends) - layout.WIREGUARD_OVERHEAD_BYTES
    network = Prefix(layout.TUNNEL_NETWORK)
    for index in range((rollout.present, rollout.joined)[attachment.place]):
        link = names.tunnel_link(index)
        yield WireguardLink(link, peering.port + index, mtu, own.key if own else None)
        yield LinkAddress(link, network.address(4 * index + 1 + attachment.place), 30)
        if far is not None:
            endpoint = _endpoint(state, attachment, index)
            yield WireguardPeer(link, far.key, endpoint, (Prefix("0.0.0.0/0"),), peering.keepalive_seconds)
    weights = peering.weights or (1,) * peering.tunnels
    hops = tuple(NextHop(names.tunnel_link(index), weight=weights[index]) for index in range(min(rollout.used, peering.tunnels)))
    for index in range(len(hops)):
        yield Route(layout.OUTGOING_TABLE, Prefix(f"{network.address(4 * index)}/30"), hops=(NextHop(names.tunnel_link(index)),))
    if hops:
        for _, real in seen_prefixes(state, attachment):
            yield Route(layout.OUTGOING_TABLE, real, hops=hops)


def _endpoint(state: State, attachment: Attachment, index: int) -> Endpoint:
    given = attachment.far.endpoint
    if given is not None:
        return Endpoint(f"{given.address}:{given.port + index}")
    gateway = state.gateways[attachment.far.cluster][attachment.far.gateway]
    return Endpoint(f"{gateway.address}:{attachment.peering.port + index}")
