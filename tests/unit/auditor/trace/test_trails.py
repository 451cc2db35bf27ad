"""Which outer packet carried which inner one, never more than can be told, and what that says about encryption."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from schemas.flow import IP, Correlation, Encryption, EventType, FlowEvent, Layer4, PointName, Tunnel, WireguardSeen
from services.auditor.trace.trails import Trail, Way, trails
from services.auditor.trace.verdicts import UNSEEN, courses, crossings, packet_verdict, verdict

HERE, THERE = "rome/one", "rome/two"
_BY_NODE = {HERE: "HERE", THERE: "THERE"}


def at(point: PointName, node: str = HERE, ms: int = 0, group: str = "a", length: int = 84) -> FlowEvent:
    """An inner packet at a point."""
    wg = WireguardSeen("me.0", "peer") if point.endswith("CRYPTO") else None
    return FlowEvent(
        time=f"2026-01-01T00:00:00.{ms:03}000Z",
        uuid=f"{node} {point} {ms} {group}",
        verdict="FORWARDED",
        ip=IP("10.0.0.1", "10.0.0.2", "IPv4"),
        node_name=node,
        event_type=EventType(4),
        trace_observation_point=point,
        length=length,
        corr=Correlation(group, "headers", "high"),
        wg=wg,
    )


def outer(node: str, ms: int, counter: int, length: int = 156, peer: str = "peer") -> FlowEvent:
    """A packet of WireGuard's own, at the uplink: leaving one host, coming to the other."""
    point: PointName = "TO_NETWORK" if node == HERE else "FROM_NETWORK"
    made = at(point, node, ms, f"wg/{counter}", length)
    return replace(
        made, wg=WireguardSeen("me.0", peer, "data", 1, counter), corr=Correlation(f"wg/{counter}", "wireguard-counter", "exact")
    )


def forward(event: FlowEvent) -> tuple[Way, ...]:
    del event
    return ("forward",)


def found(*events: FlowEvent) -> list[Trail]:
    return trails(events, forward, (HERE, THERE))


def carriers(trail: Trail) -> list[tuple[str, int | None, str]]:
    return [(_BY_NODE[link.event.node_name], link.event.wg and link.event.wg.counter, link.corr.confidence) for link in trail.outer]


def test_both_hosts_guess_the_same_packet() -> None:
    """The one that left is found by peer, order and length, the one that came by its number, and it fits: that is high, not exact."""
    (trail,) = found(at("TO_CRYPTO"), outer(HERE, 1, 5), outer(THERE, 2, 5), at("FROM_CRYPTO", THERE, 3))
    assert carriers(trail) == [("HERE", 5, "high"), ("THERE", 5, "exact")]


def test_packets_in_between_are_somebody_elses() -> None:
    """Of another length, for another peer, or sent before."""
    events = [
        outer(HERE, 1, 1),
        at("TO_CRYPTO", ms=10),
        outer(HERE, 11, 2, length=172),
        outer(HERE, 12, 3, peer="other"),
        outer(HERE, 13, 4),
    ]
    (trail,) = found(*events)
    assert carriers(trail) == [("HERE", 4, "inferred")]


def test_packets_that_are_alike_keep_their_order() -> None:
    """Each outer packet carries one inner packet."""
    first, second = found(at("TO_CRYPTO"), at("TO_CRYPTO", ms=1, group="b"), outer(HERE, 2, 7), outer(HERE, 3, 8))
    assert (carriers(first), carriers(second)) == ([("HERE", 7, "inferred")], [("HERE", 8, "inferred")])


def test_nothing_is_said_of_what_was_not_seen() -> None:
    """Without an outer packet in time there is none, and a peer that nobody knows fits nothing."""
    (trail,) = found(at("TO_CRYPTO"), outer(HERE, 1, 1, peer=""))
    assert trail.outer == []
    late = replace(outer(HERE, 0, 1), time="2026-01-01T00:00:05.000000Z")
    assert found(at("TO_CRYPTO"), late)[0].outer == []


def test_an_equal_packet_at_the_same_point_is_another_one() -> None:
    """A retransmission has the same headers."""
    assert len(found(at("FROM_ENDPOINT"), at("TO_STACK", ms=1), at("FROM_ENDPOINT", ms=2))) == 2


def test_equal_addresses_of_both_ends_are_told_apart_by_the_packets_other_points() -> None:
    """Between gateways of clusters that overlap, source and destination may be the same."""

    def ways(event: FlowEvent) -> tuple[Way, ...]:
        return ("forward", "reply") if event.trace_observation_point == "TO_CRYPTO" else ("reply",)

    (trail,) = trails([at("FROM_OVERLAY"), at("TO_CRYPTO", ms=1)], ways, (HERE, THERE))
    assert (trail.way, len(trail.seen)) == ("reply", 2)


@pytest.mark.parametrize(
    "points,wanted",
    [
        ([("TO_CRYPTO", HERE), ("FROM_CRYPTO", THERE)], "encrypted"),
        ([("TO_CRYPTO", HERE), ("TO_ENDPOINT", THERE)], "encrypted"),
        ([("FROM_ENDPOINT", HERE), ("FROM_CRYPTO", THERE)], "encrypted"),
        ([("TO_NETWORK", HERE), ("FROM_NETWORK", THERE)], "plaintext"),
        ([("FROM_ENDPOINT", HERE), ("FROM_NETWORK", THERE)], "plaintext"),
        ([("TO_CRYPTO", HERE), ("FROM_NETWORK", THERE)], "partial"),
        ([("FROM_ENDPOINT", HERE), ("TO_ENDPOINT", THERE)], "unknown"),
        ([("FROM_ENDPOINT", HERE), ("TO_ENDPOINT", HERE)], "unknown"),
        ([("TO_CRYPTO", HERE)], "unknown"),
        ([("TO_CRYPTO", THERE)], "encrypted"),
        ([("TO_OVERLAY", HERE), ("FROM_OVERLAY", THERE)], "unknown"),
    ],
)
def test_a_verdict_needs_evidence(points: list[tuple[PointName, str]], wanted: Encryption) -> None:
    """One end's word is enough; two that contradict each other are partial; none is unknown."""
    (trail,) = found(*(at(point, node, ms) for ms, (point, node) in enumerate(points)))
    assert packet_verdict(trail) == wanted


def test_the_mark_of_the_decrypted_is_evidence() -> None:
    """It survives the overlay's unwrapping."""
    (trail,) = found(at("TO_OVERLAY"), replace(at("FROM_OVERLAY", THERE, 1), decrypted=True))
    assert packet_verdict(trail) == "encrypted"


def test_a_host_that_saw_nothing_is_named_as_such() -> None:
    """What left for nobody knows where has been on its way all the same."""
    (trail,) = found(at("FROM_ENDPOINT"), at("TO_CRYPTO", ms=1), outer(HERE, 2, 7))
    assert [(one.source, one.destination, one.verdict) for one in crossings(trail)] == [(HERE, UNSEEN, "encrypted")]


def test_what_a_device_swallowed_is_not_called_encrypted() -> None:
    """It went into one that sent nothing, as without the peer, and the next host of its way did not see it. Where it went in is said."""
    (trail,) = found(at("FROM_ENDPOINT"), at("TO_CRYPTO", ms=1))
    (crossing,) = crossings(trail)
    assert (crossing.source, crossing.destination, crossing.verdict) == (HERE, UNSEEN, "unknown")
    assert [(one.node, one.method) for one in crossing.evidence] == [(HERE, "into a WireGuard device, which sent nothing then")]


def test_a_device_that_cuts_up_what_it_is_given_has_not_swallowed_it() -> None:
    """As TCP's large segments: outer packets of other lengths left for the peer."""
    (trail,) = found(at("FROM_ENDPOINT"), at("TO_CRYPTO", ms=1), outer(HERE, 2, 7, length=1480), outer(HERE, 3, 8, length=1480))
    assert [(one.destination, one.verdict) for one in crossings(trail)] == [(UNSEEN, "encrypted")]


@pytest.mark.parametrize(
    "parts,wanted",
    [
        (["encrypted", "encrypted"], "encrypted"),
        (["plaintext"], "plaintext"),
        (["encrypted", "plaintext"], "partial"),
        (["encrypted", "unknown"], "unknown"),
        (["plaintext", "unknown"], "plaintext"),
        (["partial"], "partial"),
        ([], "unknown"),
    ],
)
def test_several_ways_come_to_no_more_than_each_says(parts: list[Encryption], wanted: Encryption) -> None:
    assert verdict(parts) == wanted


def test_a_direction_counts_its_packets() -> None:
    """One that one host missed adds no way to nowhere, and does not make the others unknown."""
    whole = [at("FROM_ENDPOINT"), at("TO_CRYPTO", ms=1), at("FROM_CRYPTO", THERE, 2)]
    missed = [at("FROM_ENDPOINT", ms=10, group="b"), at("TO_CRYPTO", ms=11, group="b")]
    clear = [at("FROM_ENDPOINT", ms=20, group="c"), at("TO_NETWORK", ms=21, group="c"), at("FROM_NETWORK", THERE, 22, group="c")]
    (course,) = courses(found(*whole, *missed))
    assert (course.verdict, course.packets, [hop.encrypted for hop in course.hops]) == ("encrypted", 2, [1])
    (course,) = courses(found(*whole, *clear))
    assert (course.verdict, [(hop.encrypted, hop.plaintext) for hop in course.hops]) == ("partial", [(1, 1)])


def wrapped(node: str, ms: int, group: str = "a", **more: object) -> FlowEvent:
    """An overlay packet of which is known what is inside, leaving one host and coming to the other."""
    made = at("TO_NETWORK" if node == HERE else "FROM_NETWORK", node, ms, group)
    tunnel = Tunnel("VXLAN", IP("192.0.2.1", "192.0.2.2", "IPv4"), Layer4(), 77, 134)
    return replace(made, tunnel=tunnel, uuid=f"{made.uuid} wrapped", **more)


def test_an_overlay_packet_is_found_by_what_is_inside() -> None:
    """Not the neighbour of the same length that is nearer; what is inside is not taken for the packet itself."""
    (trail,) = found(
        at("TO_OVERLAY"), wrapped(HERE, 1, "b"), wrapped(HERE, 2), wrapped(THERE, 3), wrapped(THERE, 4, "b"), at("FROM_OVERLAY", THERE, 5)
    )
    assert [event.trace_observation_point for event in trail.seen] == ["TO_OVERLAY", "FROM_OVERLAY"]
    assert [(link.event.uuid, link.corr) for link in trail.outer] == [
        (event.uuid, Correlation("a", "headers", "high")) for event in (wrapped(HERE, 2), wrapped(THERE, 3))
    ]
    (crossing,) = crossings(trail)
    assert (crossing.verdict, {one.confidence for one in crossing.evidence}) == ("plaintext", {"high"})


def test_a_shown_packet_of_others_does_not_keep_one_that_was_not_shown_from_being_inferred() -> None:
    """Where the kernel had no room for it, by length and order, as if none had been shown."""
    blind = replace(wrapped(HERE, 3), ip=None, l4=None, corr=None, length=134)
    (trail,) = found(at("TO_OVERLAY"), wrapped(HERE, 1, "b"), blind)
    assert [(link.event.uuid, link.corr.method) for link in trail.outer] == [(blind.uuid, "order and length")]


def test_a_host_that_dropped_what_the_packet_was_in_is_on_its_way() -> None:
    """As one that drops what comes in clear, and never saw the packet itself. A drop of another packet's is none of it."""
    drop = {"verdict": "DROPPED", "trace_observation_point": "UNKNOWN_POINT"}
    (trail,) = found(at("TO_OVERLAY"), wrapped(HERE, 1), wrapped(THERE, 2, "b", **drop), wrapped(THERE, 3, **drop))
    assert trail.nodes() == [HERE, THERE]
    assert [link.event.uuid for link in trail.outer] == [wrapped(HERE, 1).uuid, wrapped(THERE, 3).uuid]
    assert [(course.verdict, course.dropped) for course in courses([trail])] == [("plaintext", 1)]
    assert [(one.source, one.destination) for one in crossings(trail)] == [(HERE, THERE)]
