"""A packet's passage as flow events, one for each observation point. Pure.

Which point a sighting is follows from the chain and from what the plan says of the link (`view`):

| chain | link | point |
|---|---|---|
| arriving (prerouting) | in: endpoint, uplink, WireGuard, overlay | from-endpoint, from-network, from-crypto, from-overlay |
| entering (input) | | to-host, but for outer packets, which WireGuard and overlay take |
| passing (forward) | in: endpoint, out: uplink, WireGuard | to-stack |
| leaving (output) | | from-host, but for outer packets |
| left (postrouting) | out: endpoint, uplink, WireGuard, overlay | to-endpoint, to-network, to-crypto, to-overlay |

Names are Cilium's, and so is what they mean, as far as a host without eBPF has such a point.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime

from msgspec.structs import replace

from schemas.flow import (
    DROP_EVENT,
    DROP_REASONS,
    IP,
    POINTS,
    TRACE_EVENT,
    Connection,
    Direction,
    DropReason,
    EventType,
    FlowEvent,
    Icmp,
    Interface,
    Layer4,
    NftPlace,
    PointName,
    Ports,
    Reason,
    Tunnel,
    WireguardSeen,
)
from schemas.host_objects import WireguardLink
from schemas.values import IPV4
from services.auditor.trace.groups import inner_group, outer_group, piece_group
from services.auditor.trace.passages import Passage, Sighting
from services.auditor.trace.view import Role, View
from services.kernel.headers import ECHO, ICMP, ICMPV6, SCTP, TCP, UDP, OverlayProtocol, Packet, WireguardHeader, tunnel
from services.kernel.nflog import inner_of, packet_of
from services.kernel.nftrace import TraceEvent, Tracked

Text = Callable[[], str]
Names = Callable[[int], str]
Because = Callable[[str], tuple[str, ...]]
Comments = Callable[[TraceEvent], str]

FROM: dict[Role, PointName] = {
    "endpoint": "FROM_ENDPOINT",
    "network": "FROM_NETWORK",
    "crypto": "FROM_CRYPTO",
    "overlay": "FROM_OVERLAY",
}
TO: dict[Role, PointName] = {"endpoint": "TO_ENDPOINT", "network": "TO_NETWORK", "crypto": "TO_CRYPTO", "overlay": "TO_OVERLAY"}
_EGRESS = frozenset(("FROM_ENDPOINT", "FROM_HOST", "TO_STACK", "TO_OVERLAY", "TO_CRYPTO", "TO_NETWORK"))
_FLAGS = ("FIN", "SYN", "RST", "PSH", "ACK", "URG", "ECE", "CWR")
_REASONS: dict[str | None, Reason] = {"new": "NEW", "established": "ESTABLISHED", "related": "RELATED"}
_FAMILIES = {1: "inet", 2: "ip", 5: "netdev", 7: "bridge", 10: "ip6"}
_Outer = tuple[WireguardLink, WireguardHeader]


class Flows:
    """Makes flow events of passages on one host. `new_id` gives each its uuid, `comment` asks for the comment of the rule that dropped."""

    def __init__(self, view: View, because: Because, names: Names, new_id: Text, comment: Comments) -> None:
        self._view = view
        self._because = because
        self._names = names
        self._new_id = new_id
        self._comment = comment

    def of(self, passage: Passage) -> Iterator[FlowEvent]:
        """The events of a passage that has ended, in the order in which they happened."""
        found = [(point, seen) for seen in passage.sightings if (point := self._point(seen)) is not None]
        for number, (point, seen) in enumerate(found):
            following = [later.packet for _, later in found[number + 1 :]]
            yield self._event(passage, point, seen, following[-1] if following else seen.packet)
        if passage.drop is not None and passage.dropped is not None:
            yield self._dropped(passage, passage.drop, passage.dropped)

    def _point(self, seen: Sighting) -> PointName | None:
        view = self._view
        comes, goes = view.role(self._names(seen.iif)), view.role(self._names(seen.oif))
        match seen.chain:
            case "arriving":
                return FROM.get(comes) if comes else None
            case "passing":
                return "TO_STACK" if comes == "endpoint" and goes in ("network", "crypto") else None
            case "left":
                return TO.get(goes) if goes else None
            case "entering":
                return None if self._is_outer(seen.packet, leaves=False) else "TO_HOST"
            case "leaving":
                return None if self._is_outer(seen.packet, leaves=True) else "FROM_HOST"
        return None

    def _is_outer(self, item: Packet, *, leaves: bool) -> bool:
        return self._view.overlay(item) is not None or self._view.outer(item, leaves=leaves) is not None

    def _event(self, passage: Passage, point: PointName, seen: Sighting, later: Packet) -> FlowEvent:
        view, item = self._view, seen.packet
        link = seen.oif if point.startswith("TO_") and seen.oif else seen.iif or seen.oif
        outer = view.outer(item, leaves=point == "TO_NETWORK") if point in ("TO_NETWORK", "FROM_NETWORK") else None
        overlay = view.overlay(item)
        wg = self._outer_wireguard(outer, point, item) if outer else self._inner_wireguard(point, item, self._names(link))
        address = _addresses(item, later)
        if outer and self._is_encrypted(outer[0], point, seen):
            address = replace(address, encrypted=True)
        tracked = passage.tracked if outer is None and overlay is None else None
        event = FlowEvent(
            time=when(seen.at_s),
            uuid=self._new_id(),
            verdict="FORWARDED",
            ip=address,
            l4=_layer4(item),
            node_name=view.node,
            event_type=EventType(TRACE_EVENT, POINTS[point]),
            traffic_direction=_direction(point),
            trace_observation_point=point,
            trace_reason=_reason(tracked),
            is_reply=tracked.is_reply if tracked else None,
            interface=Interface(link, self._names(link)),
            summary=summary(item),
            length=item.length,
            nft=NftPlace(passage.id),
            ct=_connection(tracked),
            mark=seen.mark,
            decrypted=view.was_decrypted(seen.mark),
            wg=wg,
            corr=outer_group(outer[1]) if outer else None if overlay else inner_group(item),
        )
        return _wrapped(event, item, overlay, passage.data) if overlay else event

    def _dropped(self, passage: Passage, drop: TraceEvent, seen: Sighting) -> FlowEvent:
        item, tracked, family = seen.packet, passage.tracked, _FAMILIES.get(drop.family, str(drop.family))
        comment = self._comment(drop) if drop.handle else ""
        reason: DropReason = "UNENCRYPTED_TRAFFIC" if (drop.table, drop.chain) in self._view.clear else "POLICY_DENIED"
        link = seen.oif or seen.iif
        leaves = bool(seen.oif)
        overlay, outer = self._view.overlay(item), self._view.outer(item, leaves=leaves)
        event = FlowEvent(
            time=when(seen.at_s),
            uuid=self._new_id(),
            verdict="DROPPED",
            drop_reason_desc=reason,
            ip=_addresses(item, item),
            l4=_layer4(item),
            node_name=self._view.node,
            event_type=EventType(DROP_EVENT, DROP_REASONS[reason]),
            trace_reason=_reason(tracked),
            is_reply=tracked.is_reply if tracked else None,
            interface=Interface(link, self._names(link)),
            summary=summary(item),
            length=item.length,
            nft=NftPlace(passage.id, family, drop.table, drop.chain, drop.handle, comment, drop.verdict),
            ct=_connection(tracked),
            mark=seen.mark or drop.mark,
            decrypted=self._view.was_decrypted(seen.mark or drop.mark),
            corr=outer_group(outer[1]) if outer else None if overlay else inner_group(item),
            because=self._because(f"chain {drop.table} {drop.chain}"),
        )
        return _wrapped(event, item, overlay, passage.data) if overlay else event

    def _outer_wireguard(self, outer: _Outer, point: PointName, item: Packet) -> WireguardSeen:
        link, said = outer
        leaves = point == "TO_NETWORK"
        address, port = (item.destination, item.destination_port) if leaves else (item.source, item.source_port)
        peer = self._view.peer_at(link.name, address, port)
        return WireguardSeen(link.name, peer.public_key if peer else "", said.message, said.index, said.counter)

    def _inner_wireguard(self, point: PointName, item: Packet, link: str) -> WireguardSeen | None:
        if point not in ("TO_CRYPTO", "FROM_CRYPTO"):
            return None
        peer = self._view.peer_for(link, item.destination if point == "TO_CRYPTO" else item.source)
        return WireguardSeen(link, peer.public_key if peer else "")

    def _is_encrypted(self, link: WireguardLink, point: PointName, seen: Sighting) -> bool:
        """Cilium's strict flag: leaving with the mark of the device's own packets, or coming from the endpoint of a peer."""
        if point == "TO_NETWORK":
            return seen.mark & link.fwmark == link.fwmark
        return self._view.peer_at(link.name, seen.packet.source, seen.packet.source_port) is not None


def _wrapped(event: FlowEvent, item: Packet, protocol: OverlayProtocol, data: bytes) -> FlowEvent:
    """An overlay packet: its own headers as the tunnel's, and as the event's those of the packet inside, where that was shown."""
    header, ip, l4 = tunnel(item, protocol), event.ip, event.l4
    assert ip is not None
    assert l4 is not None
    seen = Tunnel(protocol, replace(ip, source_xlated="", destination_xlated=""), l4, header.vni if header else 0, item.length)
    inner = _inside(item, protocol, data)
    if inner is None:
        return replace(event, ip=None, l4=None, tunnel=seen, summary=wrapping(seen))
    return replace(
        event,
        ip=_addresses(inner, inner),
        l4=_layer4(inner),
        tunnel=seen,
        summary=summary(inner) + (", fragment" if inner.fragment else ""),
        length=inner.length,
        corr=piece_group(inner) if inner.fragment else inner_group(inner),
    )


def _inside(item: Packet, protocol: OverlayProtocol, data: bytes) -> Packet | None:
    """The packet inside, from the first bytes of the outer one; None where these do not say, or it would not fit."""
    outer = packet_of(data)
    found = inner_of(outer, protocol) if outer is not None else None
    return found[1] if found is not None and found[1].length < item.length else None


def wrapping(found: Tunnel) -> str:
    """The overlay and its network, as people write it."""
    return f"{found.protocol} {found.vni}"


def _addresses(item: Packet, later: Packet) -> IP:
    return IP(
        item.source,
        item.destination,
        "IPv4" if item.family == IPV4 else "IPv6",
        later.source if later.source != item.source else "",
        later.destination if later.destination != item.destination else "",
    )


def _layer4(item: Packet) -> Layer4:
    ports = Ports(item.source_port, item.destination_port)
    match item.protocol:
        case protocol if protocol == TCP:
            flags = {name: True for bit, name in enumerate(_FLAGS) if item.flags >> bit & 1}
            return Layer4(tcp=replace(ports, flags=flags))
        case protocol if protocol == UDP:
            return Layer4(udp=ports)
        case protocol if protocol == SCTP:
            return Layer4(sctp=ports)
        case protocol if protocol == ICMP:
            return Layer4(icmp4=Icmp(item.kind, item.code))
        case protocol if protocol == ICMPV6:
            return Layer4(icmp6=Icmp(item.kind, item.code))
    return Layer4()


def summary(item: Packet) -> str:
    """The packet in Hubble's words."""
    match item.protocol:
        case protocol if protocol == TCP:
            return "TCP Flags: " + ", ".join(name for bit, name in enumerate(_FLAGS) if item.flags >> bit & 1)
        case protocol if protocol in (ICMP, ICMPV6):
            name = "ICMPv4" if protocol == ICMP else "ICMPv6"
            return f"{name} {ECHO.get(item.kind, f'type {item.kind}') if item.kind is not None else ''}".rstrip()
        case protocol if protocol in (UDP, SCTP):
            return "UDP" if protocol == UDP else "SCTP"
    return f"protocol {item.protocol}" if item.protocol is not None else "unknown protocol"


def _direction(point: PointName) -> Direction:
    return "EGRESS" if point in _EGRESS else "INGRESS"


def _reason(tracked: Tracked | None) -> Reason:
    if tracked is None:
        return "TRACE_REASON_UNKNOWN"
    if tracked.is_reply and tracked.state == "established":
        return "REPLY"
    return _REASONS.get(tracked.state, "TRACE_REASON_UNKNOWN")


def _connection(tracked: Tracked | None) -> Connection | None:
    if tracked is None:
        return None
    return Connection(tracked.id, tracked.state or "", "reply" if tracked.is_reply else "original", tracked.status)


def when(at_s: float) -> str:
    """Unix time in Hubble's form."""
    return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
