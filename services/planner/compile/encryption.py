"""A node's part of its cluster's encryption (seed 004): the WireGuard device, its peers, and what leads packets into it.

A packet for another node's pod is marked once its destination is what it will be, after the translation of a service's address, and the
mark is looked up in table 10 (rule 1000), whose default is the device. What the node itself sends is led there by destination (rule
1001): a mark would come after the choice of its source. `throw` routes let out what no peer would decrypt: what is for the node's own
pods, and for those of nodes that do not encrypt. Whatever finds no route meets `unreachable`.

WireGuard's own packets have a value of the same field, which nothing leads back into the device: a peer's AllowedIPs hold its very
endpoint where nodes' traffic, or an overlay's outer packets, are what is encrypted.

Of an overlay, the outer packet is encrypted: the driver looks its way up with the inner packet's mark. `overlay` says that there is one, be
it for all that pods send or, in native routing, for what leaves the cluster through other nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from schemas.encryption import Point
from schemas.host_objects import (
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
    WireguardLink,
    WireguardPeer,
)
from schemas.nft import ClampMss, Comment, Counter, Masquerade, Match, Notrack, Rule, SetMark, Verdict
from schemas.topology import Cluster, Node
from schemas.values import FAMILIES, IPV4, IPV6, Address, Family, Key, Prefix
from services.planner import layout, mesh, names
from services.planner.compile import control, drops
from services.planner.compile.gateway import guard, overlay_port
from services.planner.compile.words import EVERYWHERE, FORWARDING, WORDS, of_family
from services.planner.families import overlay_address
from services.planner.rotation import Lane, Turn

_LINK, _BESIDE = names.ENCRYPTION_LINK, names.ENCRYPTION_LINK_BESIDE
DEVICES, OVERLAY = f"{names.ENCRYPTION_LINK_PREFIX}*", f"{names.MESH_LINK_PREFIX}*"
_INTO_CRYPTO = Comment(Point("to-crypto", "inner").comment("into the device"))
_OUT_OF_CRYPTO = Comment(Point("from-crypto", "inner").comment("out of the device"))
_INTO_OVERLAY = Comment(Point("to-overlay", "inner").comment("into the overlay"))
_OUT_OF_OVERLAY = Comment(Point("from-overlay", "inner").comment("out of the overlay"))
_OUT_ENCRYPTED = Comment(Point("to-network", "encrypted").comment("WireGuard's own packets left"))
_IN_ENCRYPTED = Comment(Point("from-network", "encrypted").comment("WireGuard's own packets arrived"))
INTO_DEVICE = Match("oifname", (DEVICES,))
NEIGHBOURS: Rule = (
    Match("icmpv6 type", ("nd-router-solicit", "nd-router-advert", "nd-neighbor-solicit", "nd-neighbor-advert", "nd-redirect")),
    Verdict("return"),
)
"""Neighbours on the underlay ask for each other: in a tunnel, nobody would be found any more."""


def device(cluster: Cluster, node: Node, number: int, key: Key | None, *, overlay: bool, beside: bool = False) -> Iterator[PlanObject]:
    """The WireGuard device, which is there before the node's key is known: its applier then publishes that. Or the one `beside` it."""
    link, port = (_BESIDE if beside else _LINK), mesh.ports(cluster)[beside]
    yield WireguardLink(link, port, mesh.device_mtu(cluster, node), key, cluster.marks.encrypted)
    for family in steered(cluster, node, overlay=overlay):
        # Without an IPv4 address of its own a device that checks reverse paths takes nothing in.
        address = _device_address(cluster, node, number, family)
        yield LinkAddress(link, address, address.host_prefix.length)
        if family == IPV4:
            yield Sysctl(f"net/ipv4/conf/{link}/rp_filter", "2")


def base(cluster: Cluster, node: Node, number: int, link: str, *, overlay: bool) -> Iterator[PlanObject]:
    """What leads packets into the device `link`: natively what is for pods, of an `overlay` the outer packets.

    It is there before the node's key is known, and then lets all out: nothing that could hold packets up is made when peers come.
    """
    table, marks = names.mesh_table(cluster.name), cluster.marks
    yield NftTable(table)
    yield from control.objects(table, cluster)
    for family in mesh.pod_families(cluster):
        yield Sysctl(FORWARDING[family], "1")
    for family in steered(cluster, node, overlay=overlay):
        yield guard(layout.ENCRYPT_TABLE, EVERYWHERE[family])
        source = _device_address(cluster, node, number, family)
        yield Route(layout.ENCRYPT_TABLE, EVERYWHERE[family], hops=(NextHop(link),), source=source)
        yield PolicyRule(layout.RULE_ENCRYPT, layout.ENCRYPT_TABLE, marks.encrypt, marks.mask, family=family)
    if cluster.routing == "native":
        for prefix in cluster.pod_prefixes:
            # Strictly: also what pods send, when nothing is marked because somebody has emptied nftables. Of a family without an underlay
            # there is no other way, and none back either: what a device takes in would fail its check of reverse paths.
            is_only_way = prefix.family not in mesh.underlay_families(node)
            whose = "" if cluster.strict == "enforce" or is_only_way else "lo"
            yield PolicyRule(layout.RULE_OWN_ENCRYPT, layout.ENCRYPT_TABLE, iif=whose, to=prefix, family=prefix.family)
        yield from (Route(layout.ENCRYPT_TABLE, prefix, "throw") for prefix in node.pod_prefixes)
    yield from _sets(cluster, node, table, overlay=overlay)
    yield from _chains(cluster, node, number, table, overlay=overlay)


def allowed(cluster: Cluster, there: Node, number: int, pods: Iterable[Address], *, overlay: bool) -> tuple[Prefix, ...]:
    """What a peer may send, and is sent, and nothing else. `pods` are addresses there to which its prefixes do not lead.

    With `overlay`, outer packets of one are among it.
    """
    found: list[Prefix] = []
    if cluster.routing == "native":
        found += there.pod_prefixes
        found += [address.host_prefix for address in (*pods, *_overlay_sources(cluster, there, number))]
    if overlay or cluster.wireguard.nodes:
        found += [address.host_prefix for address in there.addresses]
    return tuple(sorted(found))


def peer(
    cluster: Cluster, families: Iterable[Family], there: Node, lane: Lane, prefixes: tuple[Prefix, ...], *, roams: bool, turns: bool
) -> WireguardPeer:
    """Another node as a peer of one with underlay addresses of `families`, which `roams` or not.

    When one of the two `turns` to another key, they say so often that they are there, whatever else they send.
    """
    keepalive = cluster.wireguard.keepalive_seconds or (mesh.ROAMING_KEEPALIVE_SECONDS if roams else 0)
    if turns:
        keepalive = min(keepalive or mesh.TURNING_KEEPALIVE_SECONDS, mesh.TURNING_KEEPALIVE_SECONDS)
    place = mesh.endpoint(cluster, families, there)
    endpoint = place if lane.link == _LINK else mesh.endpoint_beside(place)
    return WireguardPeer(lane.link, lane.key, endpoint, prefixes, keepalive)


def said_of(cluster: Cluster, families: Iterable[Family], there: Node, *, overlay: bool) -> Iterator[PlanObject]:
    """What says that a node encrypts, to one with underlay addresses of `families`."""
    if speaks_of_nodes(cluster, overlay=overlay):
        table, known = names.mesh_table(cluster.name), set(families)
        for address in there.addresses:
            if address.family in known:
                yield NftElement(table, f"encnodes{WORDS[address.family].suffix}", address)


def way_to(cluster: Cluster, there: Node, number: int, link: str) -> Iterator[PlanObject]:
    """The way to a node that encrypts, besides the default one."""
    for address in _overlay_sources(cluster, there, number):
        yield guard(MAIN_TABLE, address.host_prefix)
        yield Route(MAIN_TABLE, address.host_prefix, hops=(NextHop(link),))


def way_beside(cluster: Cluster, families: Iterable[Family], there: Node, turn: Turn, *, overlay: bool) -> Iterator[PlanObject]:
    """The way to a node that changes its key, while it is not the default one. `families` are those that are spoken with it."""
    if turn.link == _LINK:
        return
    prefixes = list(there.pod_prefixes) if cluster.routing == "native" else []
    if overlay or cluster.wireguard.nodes:
        prefixes += [address.host_prefix for address in there.addresses if address.family in families]
    yield from (Route(layout.ENCRYPT_TABLE, prefix, hops=(NextHop(turn.link),)) for prefix in prefixes)


def let_out(cluster: Cluster, there: Node, *, overlay: bool) -> Iterator[PlanObject]:
    """The way to a node that does not encrypt, or not yet: around the device."""
    if cluster.routing == "native":
        yield from (Route(layout.ENCRYPT_TABLE, prefix, "throw") for prefix in there.pod_prefixes)
    if overlay:
        yield from (Route(layout.ENCRYPT_TABLE, address.host_prefix, "throw") for address in there.addresses)


def outer_way(here: Node, there: Node, link: str) -> Iterator[PlanObject]:
    """The way of outer packets that get their source by it: natively the device's own address is a pod's, which no far end expects."""
    for address in there.addresses:
        if (own := mesh.address_of(here, address.family)) is not None:
            yield Route(layout.ENCRYPT_TABLE, address.host_prefix, hops=(NextHop(link),), source=own)


def pod_here(cluster: Cluster, address: Address) -> Iterator[PlanObject]:
    """A pod of the node itself, at an address outside of its prefixes."""
    if cluster.routing == "native":
        yield NftElement(names.mesh_table(cluster.name), f"own{WORDS[address.family].suffix}", address)
        yield Route(layout.ENCRYPT_TABLE, address.host_prefix, "throw")


def pod_there(cluster: Cluster, address: Address, link: str | None) -> Iterator[PlanObject]:
    """A pod of another node, at an address that may be inside the prefixes of any node. `link` leads there; None where none does."""
    if cluster.routing != "native":
        return
    if link is not None:
        yield NftElement(names.mesh_table(cluster.name), f"roaming{WORDS[address.family].suffix}", address)
        yield Route(layout.ENCRYPT_TABLE, address.host_prefix, hops=(NextHop(link),))
    else:
        yield Route(layout.ENCRYPT_TABLE, address.host_prefix, "throw")


def steered(cluster: Cluster, node: Node, *, overlay: bool) -> tuple[Family, ...]:
    """The families of what goes into the device: of pods natively, and of outer packets or what nodes send."""
    found = set(mesh.pod_families(cluster)) if cluster.routing == "native" else set()
    if overlay or cluster.wireguard.nodes:
        found.update(mesh.underlay_families(node))
    return tuple(family for family in FAMILIES if family in found)


def speaks_of_nodes(cluster: Cluster, *, overlay: bool) -> bool:
    """Whether rules look at the addresses of nodes that encrypt."""
    return cluster.wireguard.nodes or overlay


def wears(cluster: Cluster, value: int, op: str = "==") -> Match:
    """A match on a value of the cluster's field in packets' marks."""
    return Match("meta mark", (f"{value:#x}",), "==" if op == "==" else "!=", cluster.marks.mask)


def _ports(cluster: Cluster) -> tuple[str, ...]:
    """Both ports of WireGuard, whether there is a second device or not: no rule changes when keys do."""
    return tuple(map(str, mesh.ports(cluster)))


def _device_address(cluster: Cluster, node: Node, number: int, family: Family) -> Address:
    """The device's own address, which is what the node itself sends into it from, where a packet is not bound to another one.

    Peers take it: natively it is among the node's pods, else it is the one that the uplink has, too.
    """
    native = cluster.routing == "native" and family in mesh.pod_families(cluster)
    found = mesh.source(cluster, node, number, family) if native else mesh.address_of(node, family)
    assert found is not None, "a family without pods is steered only where the node has an address of it"
    return found


def _overlay_sources(cluster: Cluster, node: Node, number: int) -> list[Address]:
    """The overlay addresses by which a node sends to pods, for want of pods of its own."""
    if cluster.routing != "native":
        return []
    lacking = [family for family in mesh.pod_families(cluster) if mesh.pod_source(node, family) is None]
    return [address for family in lacking if (address := mesh.overlay_source(cluster, number, family)) is not None]


def _sets(cluster: Cluster, node: Node, table: str, *, overlay: bool) -> Iterator[PlanObject]:
    for family in mesh.pod_families(cluster):
        words = WORDS[family]
        yield NftSet(table, f"pods{words.suffix}", words.type, interval=True)
        yield from (NftElement(table, f"pods{words.suffix}", prefix.bare) for prefix in of_family(cluster.pod_prefixes, family))
        if cluster.routing == "native":
            yield NftSet(table, f"own{words.suffix}", words.type, interval=True)
            yield from (NftElement(table, f"own{words.suffix}", prefix.bare) for prefix in of_family(node.pod_prefixes, family))
            yield NftSet(table, f"roaming{words.suffix}", words.type)
    if speaks_of_nodes(cluster, overlay=overlay):
        for family in mesh.underlay_families(node):
            yield NftSet(table, f"encnodes{WORDS[family].suffix}", WORDS[family].type)


def _chains(cluster: Cluster, node: Node, number: int, table: str, *, overlay: bool) -> Iterator[PlanObject]:
    keep = control.passes(cluster)
    yield from _notrack(cluster, table, overlay=overlay)
    yield NftChain(table, "arrivals", tuple(_arrivals(cluster, node, overlay=overlay)), "filter", "prerouting", layout.PRIORITY_MANGLE)
    if steer := (*_steer_pods(cluster), *_steer_to_nodes(cluster, node)):
        yield NftChain(table, "steer", steer, "filter", "prerouting", layout.PRIORITY_AFTER_DSTNAT)
    if speaks_of_nodes(cluster, overlay=overlay):
        yield NftChain(table, "steer_own", _steer_own(cluster, node), "route", "output", layout.PRIORITY_AFTER_DSTNAT)
    inside = (DEVICES,) if cluster.routing == "native" else (OVERLAY,)
    clamp = (Match("oifname", inside), Match("tcp flags & (syn | rst)", ("syn",)), ClampMss())
    yield NftChain(table, "forward", (clamp,), "filter", "forward", layout.PRIORITY_FILTER)
    if senders := tuple(_senders(cluster, node, number)):
        yield NftChain(table, "senders", (*keep, *senders), "nat", "postrouting", layout.PRIORITY_BEFORE_SRCNAT)
    yield NftChain(table, "leave", (*keep, *_leave(cluster, node)), "filter", "postrouting", layout.PRIORITY_LAST)


def _arrivals(cluster: Cluster, node: Node, *, overlay: bool) -> Iterator[Rule]:
    marks = cluster.marks
    yield (Match("iifname", (DEVICES,)), Counter(), SetMark(marks.decrypted, marks.mask), _OUT_OF_CRYPTO)
    if overlay:
        yield (Match("iifname", (OVERLAY,)), Counter(), _OUT_OF_OVERLAY)
    own = (Match("udp dport", _ports(cluster)), Match("fib daddr type", ("local",)))
    yield (Match("iifname", (node.uplink,)), *own, Counter(), _IN_ENCRYPTED)


def _notrack(cluster: Cluster, table: str, *, overlay: bool) -> Iterator[PlanObject]:
    """Outer packets stay out of connection tracking. A peer may be found at any port, so those that leave are known by their source's."""
    arrives, leaves = Match("fib daddr type", ("local",)), Match("fib saddr type", ("local",))
    ports, outer = _ports(cluster), (overlay_port(cluster),) if overlay else ()
    leaving = [(leaves, Match("udp sport", ports), Notrack())]
    leaving += [(leaves, Match("udp dport", (each,)), Notrack()) for each in outer]
    arriving = (arrives, Match("udp dport", (*outer, *ports)), Notrack())
    yield NftChain(table, "notrack_in", (arriving,), "filter", "prerouting", layout.PRIORITY_RAW)
    yield NftChain(table, "notrack_out", tuple(leaving), "filter", "output", layout.PRIORITY_RAW)


def _steer_pods(cluster: Cluster) -> Iterator[Rule]:
    if cluster.routing != "native":
        return
    for family in mesh.pod_families(cluster):
        words, mark = WORDS[family], SetMark(cluster.marks.encrypt, cluster.marks.mask)
        elsewhere = Match(words.destination, (f"@own{words.suffix}",), "!=")
        yield (Match(words.destination, (f"@pods{words.suffix}",)), elsewhere, mark)
        yield (Match(words.destination, (f"@roaming{words.suffix}",)), mark)


def _steer_to_nodes(cluster: Cluster, node: Node) -> Iterator[Rule]:
    """What pods send to nodes."""
    for family in mesh.underlay_families(node) if cluster.wireguard.nodes else ():
        if family in mesh.pod_families(cluster):
            words = WORDS[family]
            senders, there = Match(words.source, (f"@pods{words.suffix}",)), Match(words.destination, (f"@encnodes{words.suffix}",))
            yield (senders, there, SetMark(cluster.marks.encrypt, cluster.marks.mask))


def _steer_own(cluster: Cluster, node: Node) -> tuple[Rule, ...]:
    """What the node itself sends to nodes, be it outer packets of an overlay only.

    These have the mark of what is inside, but where that is no IP packet: rules do not see what a daemon says about the host on its links.
    """
    families, nodes = mesh.underlay_families(node), cluster.wireguard.nodes
    there = [Match(WORDS[family].destination, (f"@encnodes{WORDS[family].suffix}",)) for family in families]
    what = () if nodes else (Match("udp dport", (overlay_port(cluster),)),)
    return (
        *control.passes_both(cluster, arriving=False),
        (wears(cluster, cluster.marks.encrypted), Verdict("return")),
        *((NEIGHBOURS,) if nodes and IPV6 in families else ()),
        *((*what, match, SetMark(cluster.marks.encrypt, cluster.marks.mask)) for match in there),
    )


def _senders(cluster: Cluster, node: Node, number: int) -> Iterator[Rule]:
    """A source that no peer would take, as that of a service's client outside, becomes the device's, and the answer finds back.

    By an overlay, the source becomes that of its link: answers to the node's own address, as of who dials a service, would go in clear.
    """
    native, nodes = cluster.routing == "native", cluster.wireguard.nodes
    for family in mesh.pod_families(cluster) if native else mesh.underlay_families(node) if nodes else ():
        words = WORDS[family]
        taken = [_device_address(cluster, node, number, family)]
        taken += [address for address in node.addresses if nodes and address.family == family]
        pods = (Match(words.source, (f"@own{words.suffix}",), "!="),) if native else ()
        yield (INTO_DEVICE, *pods, Match(words.source, tuple(dict.fromkeys(taken)), "!="), Masquerade())
    for family in () if native else mesh.pod_families(cluster):
        words, own = WORDS[family], overlay_address(cluster, number, family)
        others = (Match(words.source, (f"@pods{words.suffix}",), "!="), Match(words.source, (own,), "!="))
        yield (Match("oifname", (OVERLAY,)), *others, Masquerade())


def _leave(cluster: Cluster, node: Node) -> Iterator[Rule]:
    marks = cluster.marks
    # Loops: WireGuard's own packets have no business in WireGuard, be they known by mark or by port.
    yield (INTO_DEVICE, wears(cluster, marks.encrypted), *drops.LOOP)
    yield (INTO_DEVICE, Match("udp sport", _ports(cluster)), Match("fib saddr type", ("local",)), *drops.LOOP)
    yield (INTO_DEVICE, Counter(), _INTO_CRYPTO)
    # Whatever the mode: a node that turns from an overlay to none has the link, and routes by it, for a moment longer than these rules.
    yield (Match("oifname", (OVERLAY,)), Counter(), SetMark(marks.encrypt, marks.mask), _INTO_OVERLAY)
    # Not in `strict_out`: neighbours' and the broker's packets leave that before the end.
    yield (Match("oifname", (node.uplink,)), wears(cluster, marks.encrypted), Counter(), _OUT_ENCRYPTED)
    own = Match("meta mark", (f"{marks.encrypt:#x}", f"{marks.decrypted:#x}"), mask=marks.mask)
    yield (own, Match("oifname", (DEVICES, OVERLAY), "!="), SetMark(0, marks.mask))
