"""What is said of a packet's encryption, and of a flow's, from where it was seen."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from schemas.flow import Encryption, PointName
from services.auditor.trace.verdicts import UNSEEN, courses, crossings, packet_verdict, verdict
from tests.unit.auditor.trace.packets import BEYOND, HERE, THERE, at, found, outer, wrapped


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


def test_a_way_from_nobody_knows_where_counts() -> None:
    """Of a host that alone was heard; the peer's device says that it came encrypted."""
    (trail,) = found(at("FROM_CRYPTO", THERE), at("TO_ENDPOINT", THERE, 1))
    assert [(one.source, one.destination, one.verdict) for one in crossings(trail)] == [(UNSEEN, THERE, "encrypted")]


def test_a_direction_that_only_one_host_saw_has_the_verdict_of_its_way_to_nowhere() -> None:
    """Beside packets that the other host saw it is left out, unless it says that something went in clear."""
    whole = [at("TO_CRYPTO"), at("FROM_CRYPTO", THERE, 1)]
    sent = [at("TO_CRYPTO", ms=10, group="b"), outer(HERE, 11, 7)]
    leaked = [at("TO_NETWORK", ms=20, group="c")]
    for events, wanted in (
        (sent, [(HERE, UNSEEN, "encrypted")]),
        ((*whole, *sent), [(HERE, THERE, "encrypted")]),
        ((*whole, *leaked), [(HERE, THERE, "encrypted"), (HERE, UNSEEN, "plaintext")]),
    ):
        (course,) = courses(found(*events))
        assert [(hop.source, hop.destination, hop.verdict) for hop in course.hops] == wanted
        assert course.verdict == verdict(said for _, _, said in wanted)


def test_of_an_overlay_the_packets_at_another_host_say_nothing() -> None:
    """It came to a gateway in clear, and from there to the next host, where no overlay packet was seen: of that way nothing is known."""
    (trail,) = found(
        *(at("TO_OVERLAY"), wrapped(HERE, 1), wrapped(THERE, 2), at("FROM_OVERLAY", THERE, 3), at("TO_OVERLAY", THERE, 4)),
        at("FROM_OVERLAY", BEYOND, 5),
        route=(HERE, THERE, BEYOND),
    )
    assert [(one.source, one.destination, one.verdict) for one in crossings(trail)] == [
        (HERE, THERE, "plaintext"),
        (THERE, BEYOND, "unknown"),
    ]
