"""Whether a flow was encrypted: of each packet on each way between two hosts, and of all of them together. Pure.

A WireGuard device sends nothing in clear and lets nothing through that was not encrypted to it: a packet that was seen going into one, or
coming out of one, was encrypted on that way between two hosts. What was seen leaving by the uplink, or coming by it, as itself or inside an
overlay packet that is in clear, was not. Without either it is not known, and that is said; so of a packet that went into a device
that sent nothing to the peer then, as one without that peer, and was not seen by the next host of its way.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator

from msgspec import Struct
from msgspec.structs import replace

from schemas.flow import Confidence, Encryption, FlowEvent
from services.auditor.trace.carriers import is_open
from services.auditor.trace.trails import Trail, Way

UNSEEN = "?"
"""A host that did not see the packet."""


_Counted = dict[tuple[str, str], Counter[Encryption]]
"""How many packets had which verdict, by the hosts that they went between."""


class Evidence(Struct, frozen=True):
    """What was seen on which host that says how the packet went; with `encrypted` None, that it says nothing."""

    node: str
    encrypted: bool | None
    method: str
    confidence: Confidence


class Crossing(Struct, frozen=True):
    """A packet's way from one host to the next."""

    source: str
    destination: str
    verdict: Encryption
    evidence: tuple[Evidence, ...]


class Hop(Struct, frozen=True):
    """All of a direction's packets between two hosts, by what became of each."""

    source: str
    destination: str
    verdict: Encryption
    encrypted: int
    plaintext: int
    unknown: int
    partial: int


class Course(Struct, frozen=True):
    """A direction of a flow: its packets, how many of them were dropped, and its way from host to host."""

    way: Way
    verdict: Encryption
    packets: int
    dropped: int
    hops: tuple[Hop, ...]


def crossings(trail: Trail) -> tuple[Crossing, ...]:
    """From host to host. What left towards a host that did not see it, or came from one, has a crossing too."""
    nodes = trail.nodes()
    found: list[Crossing] = []
    if nodes and (came := tuple(_arrival(trail, nodes[0]))):
        found.append(_crossing(UNSEEN, nodes[0], came))
    for here, there in itertools.pairwise(nodes):
        found.append(_crossing(here, there, (*_departure(trail, here), *_arrival(trail, there))))
    if nodes and (left := tuple(_departure(trail, nodes[-1]))):
        found.append(_crossing(nodes[-1], UNSEEN, tuple(_lost(left)) if _is_lost(trail, nodes[-1]) else left))
    return tuple(found)


def verdict(found: Iterable[Encryption]) -> Encryption:
    """What several ways come to together."""
    known = set(found)
    if "partial" in known or {"encrypted", "plaintext"} <= known:
        return "partial"
    if "plaintext" in known:
        return "plaintext"
    return "encrypted" if known == {"encrypted"} else "unknown"


def packet_verdict(trail: Trail) -> Encryption:
    """Of one packet; ``unknown`` for one that never left its host."""
    return verdict(crossing.verdict for crossing in crossings(trail))


def courses(found: Iterable[Trail]) -> tuple[Course, ...]:
    """Each direction that has packets, forward first."""
    tally = Tally()
    tally.add(found)
    return tally.courses()


class Tally:
    """What any number of packets comes to: counted as they come, and not held."""

    def __init__(self) -> None:
        self._packets: Counter[Way] = Counter()
        self._dropped: Counter[Way] = Counter()
        self._hops: dict[Way, _Counted] = {"forward": {}, "reply": {}}

    def add(self, found: Iterable[Trail]) -> None:
        """Count packets in, each once."""
        for trail in found:
            self._packets[trail.way] += 1
            self._dropped[trail.way] += trail.is_dropped
            for crossing in crossings(trail):
                self._hops[trail.way].setdefault((crossing.source, crossing.destination), Counter())[crossing.verdict] += 1

    def courses(self) -> tuple[Course, ...]:
        """Each direction that has packets, forward first."""
        return tuple(self._course(way, counted) for way, counted in self._hops.items() if self._packets[way])

    def _course(self, way: Way, counted: _Counted) -> Course:
        hops = tuple(_hop(pair, counted[pair]) for pair in counted if not _says_less(pair, counted))
        return Course(way, verdict(hop.verdict for hop in hops), self._packets[way], self._dropped[way], hops)


def judged(found: Iterable[Trail]) -> Iterator[tuple[Way | None, FlowEvent]]:
    """All events of trails, each with the verdict of the packet that it is about, or that is inside; of outer ones no way is said.

    Those of overlay packets that show the packet itself go its way.
    """
    for trail in found:
        known = packet_verdict(trail)
        for node in trail.nodes():
            own = {event.uuid for event in trail.seen}
            for event in trail.at(node):
                yield trail.way if event.uuid in own or is_open(event) else None, replace(event, encryption=known)


def _hop(pair: tuple[str, str], verdicts: Counter[Encryption]) -> Hop:
    """Packets of which nothing is known do not make the others unknown."""
    together = verdict(one for one in verdicts if one != "unknown")
    return Hop(*pair, together, verdicts["encrypted"], verdicts["plaintext"], verdicts["unknown"], verdicts["partial"])


def _says_less(pair: tuple[str, str], counted: _Counted) -> bool:
    """Whether a way from or to nowhere, of packets that a host missed, says nothing beside those that it saw."""
    if UNSEEN not in pair or {"plaintext", "partial"} & set(counted[pair]):
        return False
    (seen,) = set(pair) - {UNSEEN}
    side = pair.index(seen)
    return any(other[side] == seen and UNSEEN not in other for other in counted)


def _crossing(source: str, destination: str, evidence: tuple[Evidence, ...]) -> Crossing:
    said = {one.encrypted for one in evidence if one.encrypted is not None}
    known: Encryption = "partial" if len(said) > 1 else "unknown" if not said else "encrypted" if True in said else "plaintext"
    return Crossing(source, destination, known, evidence)


def _is_lost(trail: Trail, node: str) -> bool:
    """Whether a device swallowed the packet, on its way to another host where outer packets would have been seen."""
    return node in trail.swallowed and node in trail.route and node != (trail.route[-1] if trail.way == "forward" else trail.route[0])


def _lost(evidence: Iterable[Evidence]) -> Iterator[Evidence]:
    for one in evidence:
        yield replace(one, encrypted=None, method=f"{one.method}, which sent nothing then") if one.encrypted else one


def _departure(trail: Trail, node: str) -> Iterator[Evidence]:
    for event in trail.seen:
        if event.node_name == node and event.trace_observation_point == "TO_CRYPTO":
            yield Evidence(node, encrypted=True, method="into a WireGuard device", confidence="exact")
        if event.node_name == node and event.trace_observation_point == "TO_NETWORK":
            yield Evidence(node, encrypted=False, method="in clear by the uplink", confidence="exact")
    for link in trail.outer:
        if link.event.node_name == node and link.event.tunnel is not None:
            if link.event.trace_observation_point == "TO_CRYPTO":
                yield Evidence(node, encrypted=True, method="overlay packet into a WireGuard device", confidence=link.corr.confidence)
            if link.event.trace_observation_point == "TO_NETWORK":
                yield Evidence(node, encrypted=False, method="overlay packet in clear by the uplink", confidence=link.corr.confidence)


def _arrival(trail: Trail, node: str) -> Iterator[Evidence]:
    came = [link for link in trail.outer if link.event.node_name == node and link.event.tunnel is not None]
    in_clear = [link for link in came if link.event.trace_observation_point == "FROM_NETWORK"]
    for event in trail.seen:
        if event.node_name != node:
            continue
        if event.trace_observation_point == "FROM_CRYPTO":
            yield Evidence(node, encrypted=True, method="out of a WireGuard device", confidence="exact")
        if event.trace_observation_point == "FROM_NETWORK":
            yield Evidence(node, encrypted=False, method="in clear by the uplink", confidence="exact")
        if event.trace_observation_point == "FROM_OVERLAY":
            if event.decrypted:
                yield Evidence(node, encrypted=True, method="overlay packet with the mark of the decrypted", confidence="exact")
            elif in_clear:
                sure = in_clear[0].corr.confidence
                yield Evidence(node, encrypted=False, method="overlay packet in clear by the uplink", confidence=sure)
