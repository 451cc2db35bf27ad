"""Flow events of several hosts as trails: one packet's way from end to end, with the outer packets that carried it. Pure.

What holds events together, from the surest to what is inferred:

- a packet's points on one host: the kernel's number of its passage (``exact``), whatever its addresses and ports become on the way;
- outer packet to outer packet, host to host: WireGuard's receiver index and counter are the same bytes on both (``exact``);
- inner packet to inner packet: protocol, ports, length, and IPv4's identification or an echo's number (``high``); without these two, as
  for UDP over IPv6, packets that are alike are told apart by their order alone (``inferred``);
- inner to overlay packet on one host: by the same headers, where the kernel showed what is inside; else lengths must fit, and order is
  kept (``inferred``);
- inner to WireGuard's outer packet on one host: nothing in an encrypted packet names what is inside. The peer whose AllowedIPs hold the
  inner address must be the one at the outer address, the lengths must fit, and order is kept (``inferred``). Where both hosts come to the
  same outer packet each by itself, it is ``high``.

A packet that left in fragments has an outer packet for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from schemas.flow import Correlation, FlowEvent
from services.auditor.trace.carriers import Carried, Carriers, carrying, has_ends_of, is_open, may_carry, seconds
from services.auditor.trace.groups import HEADERS

Way = Literal["forward", "reply"]
WaysOf = Callable[[FlowEvent], tuple[Way, ...]]
"""Which way a packet of the traced flow goes: none for any other packet, and both where the ends have the same addresses there."""

_SAME_PACKET_S = 5.0
_GUESSED, _GUESSED_PIECES = "allowed-ips, order and length", "allowed-ips, order and lengths of fragments"
_UNWRAPPED, _UNWRAPPED_PIECES = "order and length", "order and lengths of fragments"
_SEEN_PIECES = f"{HEADERS} and lengths of fragments"


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
    swallowed: list[str] = []
    """Hosts on which it went into a WireGuard device that sent nothing to the peer then."""

    def nodes(self) -> list[str]:
        """The hosts that saw it, or dropped what it was in, in the order of its way."""
        route = self.route if self.way == "forward" else self.route[::-1]
        events = [*self.seen, *(link.event for link in self.outer if link.event.verdict == "DROPPED")]

        def place(node: str) -> tuple[int, str]:
            return route.index(node) if node in route else len(route), min(event.time for event in events if event.node_name == node)

        return sorted({event.node_name for event in events}, key=place)

    @property
    def is_dropped(self) -> bool:
        """Whether a host dropped it, or the overlay packet that it was in."""
        return any(event.verdict == "DROPPED" for event in (*self.seen, *(link.event for link in self.outer)))

    def at(self, node: str) -> list[FlowEvent]:
        """Its own and the outer packets' events on a host, in the order of time, those of outer packets with how they were found."""
        found = [event for event in self.seen if event.node_name == node]
        found += [replace(link.event, corr=link.corr) for link in self.outer if link.event.node_name == node]
        return sorted(found, key=lambda event: event.time)


def trails(events: Iterable[FlowEvent], ways_of: WaysOf, route: Sequence[str]) -> list[Trail]:
    """All packets of the traced flow, in the order of time, with what carried them as far as it can be told. `route` is of hosts."""
    ordered = sorted(events, key=lambda event: event.time)
    found = list(_inner(ordered, ways_of, tuple(route)))
    overlay = Carriers("overlay", (event for event in ordered if event.tunnel is not None and event.verdict == "FORWARDED"))
    drops = [event for event in ordered if is_open(event) and event.verdict == "DROPPED"]
    outer = Carriers("wireguard", (event for event in ordered if event.wg is not None and event.wg.msg_type == "data"))
    for trail in found:
        for event in trail.seen:
            for wrapped in _wrapped(event, overlay):
                trail.outer.append(wrapped)
        trail.outer += _dropped(trail, drops)
    handed = [(event, trail) for trail in found for event in (*trail.seen, *(link.event for link in trail.outer))]
    handed.sort(key=lambda pair: pair[0].time)
    # What leaves comes first: what arrives elsewhere is then found by its number, not by guessing.
    for event, trail in handed:
        if event.trace_observation_point != "TO_CRYPTO":
            continue
        if sent := outer.after(event):
            trail.outer += _found(sent, outer)
        elif not outer.any_after(event):
            trail.swallowed.append(event.node_name)
    for event, trail in handed:
        if event.trace_observation_point == "FROM_CRYPTO":
            _add_received(trail, event, outer)
    return found


def _dropped(trail: Trail, drops: Iterable[FlowEvent]) -> Iterator[Link]:
    """Overlay packets with this one inside that a host dropped: there is no other point at which these were seen."""
    for event in drops:
        if (
            event.corr
            and event.corr.group == trail.corr.group
            and any(has_ends_of(event, seen) for seen in trail.seen)
            and _fits(trail, event)
        ):
            yield Link(event, event.corr)


def _add_received(trail: Trail, event: FlowEvent, outer: Carriers) -> None:
    here = [link.event for link in trail.outer if link.event.node_name == event.node_name and link.event.tunnel is None]
    known = [item for item in here if item.trace_observation_point == "FROM_NETWORK"]
    if not known:
        if received := outer.before(event):
            trail.outer += _found(received, outer)
        return
    # The other host's guess leads to packets that fit what came out here.
    fits = [item for item in known if may_carry("wireguard", item, event.outer_length)] or carrying("wireguard", event, known)
    groups = {item.corr.group for item in fits if item.corr}
    trail.outer = [_surer(link) if link.event.corr and link.event.corr.group in groups else link for link in trail.outer]


def _found(carried: Carried, outer: Carriers) -> Iterator[Link]:
    """The packets that were found by guessing, and the same on other hosts by their numbers."""
    method = _GUESSED_PIECES if carried.in_pieces else _GUESSED
    for event in carried.events:
        yield Link(event, Correlation(event.corr.group if event.corr else event.uuid, method, "inferred"))
        yield from (Link(item, item.corr) for item in outer.same(event) if item.corr)


def _surer(link: Link) -> Link:
    return replace(link, corr=replace(link.corr, confidence="high")) if link.corr.method in (_GUESSED, _GUESSED_PIECES) else link


def _inner(ordered: Sequence[FlowEvent], ways_of: WaysOf, route: tuple[str, ...]) -> Iterator[Trail]:
    """Events of the flow's own packets, by packet. A host that sees an equal packet at the same point again sees another one.

    What a host made of a packet, as by a translation of its source, is the packet's that its passage began with, and no other one's.
    """
    possible = [(event, ways_of(event), event.corr) for event in ordered if event.corr and _is_inner(event)]
    # Between two gateways, both ends may have the same address; elsewhere the packet shows which way it goes.
    certain = {corr.group: ways[0] for _, ways, corr in possible if len(ways) == 1}
    found: list[Trail] = []
    under_way: dict[tuple[Way, str], list[Trail]] = {}
    passing: dict[tuple[str, int], Trail | None] = {}
    for event, ways, corr in possible:
        passage = _passage(event)
        if event.trace_observation_point.startswith("FROM_"):
            passing.pop(passage, None)  # numbers recur
        trail = passing.get(passage)
        if passage in passing and trail is None:
            continue
        if trail is None or not _fits(trail, event):
            if not ways:
                passing[passage] = None
                continue
            way = ways[0] if len(ways) == 1 else certain.get(corr.group, ways[0])
            trail = next((same for same in under_way.get((way, corr.group), ()) if _fits(same, event)), None)
            if trail is None:
                trail = Trail(way, corr, [], [], route)
                found.append(trail)
        trail.seen.append(event)
        passing[passage] = trail
        same = under_way.setdefault((trail.way, corr.group), [])
        if trail not in same:
            same.append(trail)
    yield from sorted(found, key=lambda trail: trail.seen[0].time)


def _passage(event: FlowEvent) -> tuple[str, int]:
    """Which packet it is in a host's stack, as the kernel numbers them; by itself where no number is told."""
    return (event.node_name, event.nft.trace_id) if event.nft is not None else (event.uuid, 0)


def _is_inner(event: FlowEvent) -> bool:
    return event.ip is not None and event.tunnel is None and not (event.wg and event.wg.msg_type)


def _fits(trail: Trail, event: FlowEvent) -> bool:
    place = _place(event)
    return seconds(event) - seconds(trail.seen[0]) < _SAME_PACKET_S and all(_place(seen) != place for seen in trail.seen)


def _place(event: FlowEvent) -> tuple[str, str, str]:
    return event.node_name, event.trace_observation_point, event.verdict


def _wrapped(event: FlowEvent, overlay: Carriers) -> Iterator[Link]:
    """The overlay packets that the packet went into, or came out of, on this host, at each point where that was seen."""
    if event.trace_observation_point == "TO_OVERLAY":
        found = overlay.after(event)
    elif event.trace_observation_point == "FROM_OVERLAY":
        found = overlay.before(event)
    else:
        return
    if found is None:
        return
    for item in found.events:
        if found.by_headers and event.corr is not None:
            method, sure = _SEEN_PIECES if found.in_pieces else HEADERS, event.corr.confidence if found.is_named else "inferred"
            yield Link(item, Correlation(event.corr.group, method, sure))
        else:
            yield Link(item, Correlation(item.uuid, _UNWRAPPED_PIECES if found.in_pieces else _UNWRAPPED, "inferred"))
