"""Outer packets, and which of them may carry a packet: by what is seen inside, else by their lengths, their peer and their order. Pure.

A packet larger than the MTU of the device is seen whole by the rules, as connection tracking puts its fragments together, and leaves in
pieces: several outer packets then carry it. Their lengths follow from that of the first one.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import Literal

from msgspec import Struct

from schemas.flow import FlowEvent
from services.auditor.trace.groups import is_piece, pieces_of

Kind = Literal["wireguard", "overlay"]

_APART_S = 1.0
"""Events of one packet on one host are no further apart."""
_EARLY_S = 0.002
"""Clocks of one host's two queues may differ by so much."""
_UDP_BYTES, _WIREGUARD_BYTES, _BLOCK_BYTES = 8, 32, 16
_OVERLAY_BYTES = 8 + 8 + 14  # UDP, overlay header, inner Ethernet
_IP_BYTES = {"IPv4": 20, "IPv6": 40}
_FRAGMENT_BYTES = {"IPv4": 20, "IPv6": 48}
"""The headers of a fragment: with IPv6, an extension is added."""
_UNIT_BYTES = 8
"""A fragment that is not the last one carries a multiple of this."""
_PIECE_MIN_BYTES = 552
"""No link that carries these packets has a smaller MTU, so that no fragment but the last is smaller."""


class Carried(Struct, frozen=True):
    """The outer packets that carry a packet, more than one where it left in fragments.

    `by_headers` says that the packet was seen inside; `is_named` that it was by what no other one has: all fragments of a packet have one
    number, but of IPv6's the packet itself has none.
    """

    events: tuple[FlowEvent, ...]
    by_headers: bool = False
    is_named: bool = False

    @property
    def in_pieces(self) -> bool:
        return len(self.events) > 1


class Carriers:
    """Outer packets of one kind in the order of time. Each carries a packet, or a piece of one. On a host, and of a peer, order is kept."""

    def __init__(self, kind: Kind, events: Iterable[FlowEvent]) -> None:
        self._kind: Kind = kind
        self._by_place: dict[tuple[str, bool], tuple[list[float], list[FlowEvent]]] = {}
        self._by_group: dict[str, list[FlowEvent]] = {}
        self._taken: set[str] = set()
        for event in events:
            times, there = self._by_place.setdefault((event.node_name, event.trace_observation_point.startswith("TO_")), ([], []))
            times.append(seconds(event))
            there.append(event)
            if event.corr is not None:
                self._by_group.setdefault(event.corr.group, []).append(event)

    def after(self, event: FlowEvent) -> Carried | None:
        """The first that left the host after this and may carry it."""
        at_s = seconds(event)
        return self._take(event, self._between(event.node_name, at_s - _EARLY_S, at_s + _APART_S, leaves=True))

    def before(self, event: FlowEvent) -> Carried | None:
        """The first that came to the host before this and may have carried it."""
        at_s = seconds(event)
        return self._take(event, self._between(event.node_name, at_s - _APART_S, at_s + _EARLY_S, leaves=False))

    def any_after(self, event: FlowEvent) -> bool:
        """Whether the host sent anything to the packet's peer in the time in which this packet would have left."""
        at_s = seconds(event)
        return any(_is_for_peer(item, event) for item in self._between(event.node_name, at_s - _EARLY_S, at_s + _APART_S, leaves=True))

    def same(self, event: FlowEvent) -> list[FlowEvent]:
        """The same packet on other hosts."""
        group = self._by_group.get(event.corr.group if event.corr else "", ())
        found = [item for item in group if item.node_name != event.node_name and item.uuid not in self._taken]
        self._taken.update(item.uuid for item in found)
        return found

    def _between(self, node: str, first_s: float, last_s: float, *, leaves: bool) -> Sequence[FlowEvent]:
        times, there = self._by_place.get((node, leaves), ([], []))
        return there[bisect_left(times, first_s) : bisect_right(times, last_s)]

    def _take(self, event: FlowEvent, near: Sequence[FlowEvent]) -> Carried | None:
        possible = [item for item in near if item.uuid not in self._taken and (self._kind == "overlay" or _is_for_peer(item, event))]
        found = holding(event, [item for item in possible if is_open(item)])
        if found is None and (guessed := carrying(self._kind, event, [item for item in possible if not is_open(item)])):
            found = Carried(guessed)
        if found is not None:
            self._taken.update(item.uuid for item in found.events)
        return found


def is_open(outer: FlowEvent) -> bool:
    """Whether it is an overlay packet of which is known what is inside."""
    return outer.tunnel is not None and outer.ip is not None


def holding(event: FlowEvent, possible: Sequence[FlowEvent]) -> Carried | None:
    """The first of these open overlay packets that holds the packet, or those that hold its fragments."""
    inside = [item for item in possible if has_ends_of(item, event)]
    whole = next((item for item in inside if item.corr and event.corr and item.corr.group == event.corr.group), None)
    if whole is not None:
        return Carried((whole,), by_headers=True, is_named=True)
    named = pieces_of(event.corr) if event.corr else None
    groups = dict.fromkeys(item.corr.group for item in inside if item.corr and is_piece(item.corr) and named in (None, item.corr.group))
    for group in groups:
        if pieces := carrying("overlay", event, [item for item in inside if item.corr and item.corr.group == group]):
            return Carried(pieces, by_headers=True, is_named=named is not None)
    return None


def has_ends_of(outer: FlowEvent, event: FlowEvent) -> bool:
    """Whether what is inside goes from where the packet comes from to where that goes."""
    found, wanted = outer.ip, event.ip
    return found is not None and wanted is not None and (found.source, found.destination) == (wanted.source, wanted.destination)


def carrying(kind: Kind, event: FlowEvent, possible: Sequence[FlowEvent]) -> tuple[FlowEvent, ...]:
    """The first of these that may carry the packet, or the first ones that may carry it in pieces; nothing where none may."""
    whole = next((item for item in possible if may_carry(kind, item, event.outer_length)), None)
    if whole is not None:
        return (whole,)
    for place, first in enumerate(possible):
        for lengths in _in_pieces(kind, first, event):
            if pieces := _matching(kind, possible[place:], lengths):
                return pieces
    return ()


def may_carry(kind: Kind, outer: FlowEvent, length: int) -> bool:
    """Whether the outer packet is as long as one that carries so many bytes. WireGuard pads to a multiple of 16, but not beyond its MTU."""
    carried = _carried_bytes(kind, outer)
    return length <= carried <= _padded(length) if kind == "wireguard" else carried == length


def _carried_bytes(kind: Kind, outer: FlowEvent) -> int:
    if kind == "overlay" and is_open(outer):
        return outer.length
    header = _IP_BYTES[outer.outer.ip_version] if outer.outer else 0
    return outer.outer_length - header - (_UDP_BYTES + _WIREGUARD_BYTES if kind == "wireguard" else _OVERLAY_BYTES)


def _padded(length: int) -> int:
    return (length + _BLOCK_BYTES - 1) // _BLOCK_BYTES * _BLOCK_BYTES


def _in_pieces(kind: Kind, first: FlowEvent, event: FlowEvent) -> Iterator[list[int]]:
    """The lengths of the packet's fragments, if the first of them is in this outer packet. Of a padded one, several may be."""
    carried = _carried_bytes(kind, first)
    least = carried - _BLOCK_BYTES if kind == "wireguard" else carried - 1
    version = event.outer.ip_version if event.outer else "IPv4"
    header, rest = _FRAGMENT_BYTES[version], event.outer_length - _IP_BYTES[version]
    for piece in range(carried, max(least, _PIECE_MIN_BYTES - 1), -1):
        payload = piece - header
        if payload % _UNIT_BYTES == 0 and payload < rest:
            full, last = divmod(rest, payload)
            yield [piece] * full + ([last + header] if last else [])


def _matching(kind: Kind, possible: Sequence[FlowEvent], lengths: Iterable[int]) -> tuple[FlowEvent, ...]:
    """Outer packets for these lengths, in their order; nothing where one is missing."""
    following = iter(possible)
    found = [next((item for item in following if may_carry(kind, item, length)), None) for length in lengths]
    return tuple(item for item in found if item is not None) if None not in found else ()


def _is_for_peer(outer: FlowEvent, event: FlowEvent) -> bool:
    if outer.wg is None or event.wg is None:
        return False
    return outer.wg.device == event.wg.device and bool(outer.wg.peer) and outer.wg.peer == event.wg.peer


def seconds(event: FlowEvent) -> float:
    """The event's time as Unix time."""
    return datetime.fromisoformat(event.time).timestamp()
