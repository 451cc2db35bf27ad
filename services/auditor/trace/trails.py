"""Flow events of several hosts as trails: one packet's way from end to end, with the outer packets that carried it. Pure.

What holds events together, from the surest to what is inferred:

- outer packet to outer packet, host to host: WireGuard's receiver index and counter are the same bytes on both (``exact``);
- inner packet to inner packet: protocol, ports, length, and IPv4's identification or an echo's number (``high``); without these two, as
  for UDP over IPv6, packets that are alike are told apart by their order alone (``inferred``);
- inner to outer on one host: nothing in an encrypted packet names what is inside. The peer whose AllowedIPs hold the inner address must be
  the one at the outer address, the lengths must fit, and order is kept (``inferred``). Where both hosts come to the same outer packet each
  by itself, it is ``high``.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from schemas.flow import Correlation, FlowEvent

Way = Literal["forward", "reply"]
WaysOf = Callable[[FlowEvent], tuple[Way, ...]]
"""Which way a packet of the traced flow goes: none for any other packet, and both where the ends have the same addresses there."""

_APART_S = 1.0
"""Events of one packet on one host are no further apart."""
_EARLY_S = 0.002
"""Clocks of one host's two queues may differ by so much."""
_SAME_PACKET_S = 5.0
_UDP_BYTES, _WIREGUARD_BYTES, _BLOCK_BYTES = 8, 32, 16
_OVERLAY_BYTES = 8 + 8 + 14  # UDP, overlay header, inner Ethernet
_ADDRESS_HEADER_BYTES = {"IPv4": 20, "IPv6": 40}
_GUESSED = "allowed-ips, order and length"
_UNWRAPPED = "order and length"


class Link(Struct, frozen=True):
    """An outer packet of a trail, and how it was found."""

    event: FlowEvent
    corr: Correlation


class Trail(Struct):
    """A packet's way. `seen` are its own events in the order of time, `outer` what carried it."""

    way: Way
    corr: Correlation
    seen: list[FlowEvent]
    outer: list[Link]
    route: tuple[str, ...] = ()
    """The flow's hosts from where it begins to where it ends. Hosts tell late: times do not say who was first."""

    def nodes(self) -> list[str]:
        """The hosts that saw it, in the order of its way."""
        route = self.route if self.way == "forward" else self.route[::-1]

        def place(node: str) -> tuple[int, str]:
            return route.index(node) if node in route else len(route), min(event.time for event in self.seen if event.node_name == node)

        return sorted({event.node_name for event in self.seen}, key=place)

    def at(self, node: str) -> list[FlowEvent]:
        """Its own and the outer packets' events on a host, in the order of time, those of outer packets with how they were found."""
        found = [event for event in self.seen if event.node_name == node]
        found += [replace(link.event, corr=link.corr) for link in self.outer if link.event.node_name == node]
        return sorted(found, key=lambda event: event.time)


def trails(events: Iterable[FlowEvent], ways_of: WaysOf, route: Sequence[str]) -> list[Trail]:
    """All packets of the traced flow, in the order of time, with what carried them as far as it can be told. `route` is of hosts."""
    ordered = sorted(events, key=lambda event: event.time)
    found = list(_inner(ordered, ways_of, tuple(route)))
    overlay = _Carriers([event for event in ordered if event.tunnel is not None])
    outer = _Carriers([event for event in ordered if event.wg is not None and event.wg.msg_type == "data"])
    for trail in found:
        for event in trail.seen:
            for wrapped in _wrapped(event, overlay):
                trail.outer.append(wrapped)
    handed = [(event, trail) for trail in found for event in (*trail.seen, *(link.event for link in trail.outer))]
    handed.sort(key=lambda pair: pair[0].time)
    # What leaves comes first: what arrives elsewhere is then found by its number, not by guessing.
    for event, trail in handed:
        if event.trace_observation_point == "TO_CRYPTO" and (sent := outer.after(event, _encrypted_length(event), by_peer=True)):
            trail.outer += [Link(sent, _guess(sent)), *outer.same(sent)]
    for event, trail in handed:
        if event.trace_observation_point == "FROM_CRYPTO":
            _add_received(trail, event, outer)
    return found


def _add_received(trail: Trail, event: FlowEvent, outer: _Carriers) -> None:
    here = [link for link in trail.outer if link.event.node_name == event.node_name]
    known = [link for link in here if link.event.trace_observation_point == "FROM_NETWORK"]
    if not known:
        if received := outer.before(event, _encrypted_length(event), by_peer=True):
            trail.outer += [Link(received, _guess(received)), *outer.same(received)]
        return
    if all(link.event.length == _outer_length(link.event, _encrypted_length(event)) for link in known if link.event.tunnel is None):
        # The other host's guess leads to a packet that fits what came out here.
        trail.outer = [_surer(link) if link.corr.confidence == "inferred" else link for link in trail.outer]


def _surer(link: Link) -> Link:
    return replace(link, corr=replace(link.corr, confidence="high")) if link.corr.method == _GUESSED else link


def _guess(event: FlowEvent) -> Correlation:
    return Correlation(event.corr.group if event.corr else event.uuid, _GUESSED, "inferred")


def _inner(ordered: Sequence[FlowEvent], ways_of: WaysOf, route: tuple[str, ...]) -> Iterator[Trail]:
    """Events of the flow's own packets, by packet. A host that sees an equal packet at the same point again sees another one."""
    possible = [(event, ways, event.corr) for event in ordered if event.corr and _is_inner(event) and (ways := ways_of(event))]
    # Between two gateways, both ends may have the same address; elsewhere the packet shows which way it goes.
    certain = {corr.group: ways[0] for _, ways, corr in possible if len(ways) == 1}
    under_way: dict[tuple[Way, str], list[Trail]] = {}
    for event, ways, corr in possible:
        way = ways[0] if len(ways) == 1 else certain.get(corr.group, ways[0])
        same = under_way.setdefault((way, corr.group), [])
        trail = next((trail for trail in same if _fits(trail, event)), None)
        if trail is None:
            trail = Trail(way, corr, [], [], route)
            same.append(trail)
        trail.seen.append(event)
    yield from sorted((trail for same in under_way.values() for trail in same), key=lambda trail: trail.seen[0].time)


def _is_inner(event: FlowEvent) -> bool:
    return event.ip is not None and not (event.wg and event.wg.msg_type)


def _fits(trail: Trail, event: FlowEvent) -> bool:
    place = _place(event)
    return seconds(event) - seconds(trail.seen[0]) < _SAME_PACKET_S and all(_place(seen) != place for seen in trail.seen)


def _place(event: FlowEvent) -> tuple[str, str, str]:
    return event.node_name, event.trace_observation_point, event.verdict


def _wrapped(event: FlowEvent, overlay: _Carriers) -> Iterator[Link]:
    """The overlay packet that the packet went into, or came out of, on this host, at each point where that was seen."""
    length = event.length + _OVERLAY_BYTES
    if event.trace_observation_point == "TO_OVERLAY":
        found = overlay.after(event, length)
    elif event.trace_observation_point == "FROM_OVERLAY":
        found = overlay.before(event, length)
    else:
        return
    if found is not None:
        yield Link(found, Correlation(found.uuid, _UNWRAPPED, "inferred"))


def _encrypted_length(event: FlowEvent) -> int:
    """What WireGuard makes of a packet, from the UDP header on: padded to a multiple of 16."""
    return _UDP_BYTES + _WIREGUARD_BYTES + (event.length + _BLOCK_BYTES - 1) // _BLOCK_BYTES * _BLOCK_BYTES


def _outer_length(event: FlowEvent, carried: int) -> int:
    return carried + (_ADDRESS_HEADER_BYTES[event.outer.ip_version] if event.outer else 0)


class _Carriers:
    """Outer packets in the order of time, each of which carries one packet. On a host, and of a peer, order is kept."""

    def __init__(self, events: Sequence[FlowEvent]) -> None:
        self._by_place: dict[tuple[str, bool], tuple[list[float], list[FlowEvent]]] = {}
        self._by_group: dict[str, list[FlowEvent]] = {}
        self._taken: set[str] = set()
        for event in events:
            times, there = self._by_place.setdefault((event.node_name, event.trace_observation_point.startswith("TO_")), ([], []))
            times.append(seconds(event))
            there.append(event)
            if event.corr is not None:
                self._by_group.setdefault(event.corr.group, []).append(event)

    def after(self, event: FlowEvent, carried: int, *, by_peer: bool = False) -> FlowEvent | None:
        """The first one that left the host after this and may carry it."""
        at_s = seconds(event)
        near = self._between(event.node_name, at_s - _EARLY_S, at_s + _APART_S, leaves=True)
        return self._take(item for item in near if _may_carry(item, event, carried, by_peer=by_peer))

    def before(self, event: FlowEvent, carried: int, *, by_peer: bool = False) -> FlowEvent | None:
        """The first one that came to the host before this and may have carried it."""
        at_s = seconds(event)
        near = self._between(event.node_name, at_s - _APART_S, at_s + _EARLY_S, leaves=False)
        return self._take(item for item in near if _may_carry(item, event, carried, by_peer=by_peer))

    def _between(self, node: str, first_s: float, last_s: float, *, leaves: bool) -> Iterator[FlowEvent]:
        times, there = self._by_place.get((node, leaves), ([], []))
        return itertools.islice(there, bisect_left(times, first_s), bisect_right(times, last_s))

    def same(self, event: FlowEvent) -> list[Link]:
        """The same packet on other hosts."""
        found: list[Link] = []
        for item in self._by_group.get(event.corr.group if event.corr else "", ()):
            if item.node_name != event.node_name and item.corr is not None and item.uuid not in self._taken:
                self._taken.add(item.uuid)
                found.append(Link(item, item.corr))
        return found

    def _take(self, candidates: Iterator[FlowEvent]) -> FlowEvent | None:
        found = next((item for item in candidates if item.uuid not in self._taken), None)
        if found is not None:
            self._taken.add(found.uuid)
        return found


def _may_carry(outer: FlowEvent, event: FlowEvent, carried: int, *, by_peer: bool) -> bool:
    if outer.length != _outer_length(outer, carried):
        return False
    if not by_peer:
        return True
    if outer.wg is None or event.wg is None:
        return False
    return outer.wg.device == event.wg.device and bool(outer.wg.peer) and outer.wg.peer == event.wg.peer


def seconds(event: FlowEvent) -> float:
    """The event's time as Unix time."""
    return datetime.fromisoformat(event.time).timestamp()
