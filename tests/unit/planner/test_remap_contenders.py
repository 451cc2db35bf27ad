"""Who contends with an allocated remap: what is in use is defended, what is only kept makes room."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from schemas.values import Endpoint, Prefix
from services.planner.core import Core
from tests.topologies import gateway, node, peering, tell
from tests.unit.planner.test_remaps import allocated, bare, delete, exclusive_in_rome, joined, overlaps, pooled, remaps, restarted

CONTENDERS = {
    "a given remap": exclusive_in_rome,
    "an external prefix of the cluster": lambda prefix: [
        pooled("rome", "10.128.0.0/12", external_prefixes=(Prefix("10.70.0.0/16"), prefix)),
    ],
    "a reservation": lambda prefix: [pooled("rome", reserved=(prefix,))],
    "a node": lambda prefix: [node("extra", 9, addresses=(prefix.address(9),))],
    "the far gateway": lambda prefix: [gateway("milan", address=prefix.address(9))],
    "the far endpoint": lambda prefix: [
        peering(ends=(bare().ends[0], replace(bare().ends[1], endpoint=Endpoint(f"{prefix.address(9)}:51840"))))
    ],
}


@pytest.mark.parametrize("case", CONTENDERS)
def test_who_wants_what_was_given_out_is_refused(case: str) -> None:
    """An allocated remap is as established as a given one: it does not move, and what overlaps it is refused, naming both."""
    core = Core()
    tell(core, joined())
    before = allocated(core)
    others = CONTENDERS[case](before)
    (refusal,) = tell(core, others, first=50).refused
    if case != "the far endpoint":
        assert refusal.other == bare().ref
    assert str(before) in refusal.reason
    assert allocated(core) == before


@pytest.mark.parametrize("case", CONTENDERS)
def test_the_pool_goes_around_what_is_established(case: str) -> None:
    """The same, the other way round: what would be given out first is in use, and the peering gets another."""
    core = Core()
    tell(core, joined())
    before = allocated(core)
    second = Core()
    others = CONTENDERS[case](before)
    items = {item.ref: item for item in [*joined(), *others]}
    last = items.pop(bare().ref)
    tell(second, [*items.values(), last])
    assert bare().ref in second.state.objects
    assert allocated(second) != before
    assert overlaps(second) == []


@pytest.mark.parametrize("case", [case for case in CONTENDERS if case != "the far endpoint"])
def test_what_is_only_kept_makes_room(case: str) -> None:
    """While its peering is gone, a remap stands in nobody's way; when the peering is back, it gets another."""
    core = Core()
    tell(core, joined())
    before = allocated(core)
    delete(core, bare().ref, 50)
    assert tell(core, CONTENDERS[case](before), first=60).refused == []
    assert tell(core, [bare()], first=70).refused == []
    assert allocated(core) != before
    assert overlaps(core) == []
    assert remaps(restarted(core)) == remaps(core)
