"""The kernel's messages about one packet, put together."""

from __future__ import annotations

from schemas.host_objects import TRACE_TABLE
from services.auditor.trace.passages import IDLE_S, Passages
from services.kernel.nftrace import TraceEvent, Tracked

NETWORK = bytes.fromhex("45000021ff71400040113d587f0000017f000001")
TRANSPORT = bytes.fromhex("e5581e61000dfe2068656c6c6f")


def event(chain: str, kind: str = "policy", table: str = TRACE_TABLE, number: int = 7, **more: object) -> TraceEvent:
    verdict = more.pop("verdict", "accept")
    return TraceEvent(number, 1, table, chain, kind, verdict, network=NETWORK, transport=TRANSPORT, **more)  # type: ignore[arg-type]


def test_a_packet_is_followed_from_where_a_rule_found_it_to_where_it_left() -> None:
    """Chains of others say nothing of where it is."""
    passages = Passages()
    assert passages.hear(event("arriving", "rule"), 1.0) == []
    assert passages.hear(event("input", table="filter"), 1.1) == []
    assert passages.hear(event("passing"), 1.2) == []
    (passage,) = passages.hear(event("left"), 1.3)
    assert [seen.chain for seen in passage.sightings] == ["arriving", "passing", "left"]
    assert not passages


def test_chains_of_others_that_are_called_as_ours_begin_and_end_nothing() -> None:
    passages = Passages()
    assert passages.hear(event("arriving", "rule", "somebodys"), 1.0) == []
    assert not passages
    passages.hear(event("arriving", "rule"), 1.1)
    assert passages.hear(event("left", table="somebodys"), 1.2) == []
    assert passages.hear(event("leaving", "rule", "somebodys"), 1.2) == []
    (passage,) = passages.hear(event("left"), 1.3)
    assert [seen.chain for seen in passage.sightings] == ["arriving", "left"]


def test_the_connection_is_the_last_that_was_told() -> None:
    """A packet's first messages come before it has one, and some chains do not tell of it."""
    passages, tracked = Passages(), Tracked(99, "new", is_reply=False)
    passages.hear(event("arriving", "rule"), 1.0)
    passages.hear(event("passing", tracked=tracked), 1.1)
    (passage,) = passages.hear(event("left"), 1.2)
    assert passage.tracked == tracked


def test_what_others_trace_is_not_ours() -> None:
    """Somebody's own nftrace makes our chains tell, too, but none of our rules found the packet."""
    passages = Passages()
    assert passages.hear(event("arriving"), 1.0) == []
    assert passages.hear(event("left"), 1.1) == []
    assert not passages


def test_an_id_that_begins_again_is_another_packet() -> None:
    """Ids are hashes that recur."""
    passages = Passages()
    passages.hear(event("arriving", "rule"), 1.0)
    (first,) = passages.hear(event("leaving", "rule"), 1.01)
    assert [seen.chain for seen in first.sightings] == ["arriving"]
    (second,) = passages.hear(event("left"), 1.02)
    assert [seen.chain for seen in second.sightings] == ["leaving", "left"]


def test_a_packet_that_stays_is_over_when_nothing_more_is_said() -> None:
    """What a host takes in has no last chain."""
    passages = Passages()
    passages.hear(event("arriving", "rule"), 1.0)
    passages.hear(event("entering"), 1.0)
    assert passages.idle(1.0 + IDLE_S / 2) == []
    (passage,) = passages.idle(1.0 + IDLE_S * 2)
    assert [seen.chain for seen in passage.sightings] == ["arriving", "entering"]


def test_a_drop_in_any_table_ends_it() -> None:
    """With the rule that did it, and the packet as it was."""
    passages = Passages()
    passages.hear(event("arriving", "rule"), 1.0)
    (passage,) = passages.hear(event("forward", "rule", "somebodys", verdict="drop", handle=9), 1.1)
    assert passage.drop is not None
    assert (passage.drop.table, passage.drop.handle) == ("somebodys", 9)
    assert passage.dropped is not None


def test_the_open_ones_are_bounded() -> None:
    """Packets that were never heard of again do not pile up."""
    passages = Passages()
    ended = [passage for number in range(5000) for passage in passages.hear(event("arriving", "rule", number=number), 1.0)]
    assert [passage.id for passage in ended] == list(range(5000 - 4096))
