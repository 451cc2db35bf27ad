"""Remaps from pools under histories of any order: the same for all, and never two that overlap."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from schemas.topology import Topology
from schemas.values import Address, Prefix
from services.planner.core import Core
from tests.topologies import cluster, gateway, node, peering, said, tell
from tests.unit.planner.test_remaps import HUB, bare, exclusive_in_rome, joined, outside, overlaps, pooled, remaps, restarted

SPOKES = [item for number in range(4) for item in outside(f"c{number}", "10.9.0.0/16", number)]


OFTEN: list[Topology] = [*HUB, *SPOKES]


def test_the_spokes_contend_for_nothing() -> None:
    """What the property below rests on: no two of these peerings begin with the same prefix."""
    core = Core()
    tell(core, OFTEN)
    assert len(core.state.peerings) == 4
    for item in core.state.peerings.values():
        alone = Core()
        tell(alone, [*HUB, *outside(item.ends[1].cluster, "10.9.0.0/16", int(item.ends[1].cluster[1:]))])
        assert remaps(alone).items() <= remaps(core).items()


@settings(max_examples=60)
@given(st.permutations(range(len(OFTEN))), st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=8))
def test_any_order_gives_the_same_remaps(order: list[int], late: list[tuple[int, int]]) -> None:
    """Events in any order, with old ones redelivered in between, lead to one map; a planner that starts anew has it too."""
    events = [said(OFTEN[place], sequence) for sequence, place in enumerate(order, 1)]
    for at, which in late:
        events.insert(at % len(events), events[which % len(events)])
    core, straight = Core(), Core()
    for event in events:
        core.hear([event])
        assert overlaps(core) == []
    tell(straight, OFTEN)
    assert remaps(core) == remaps(straight) == remaps(restarted(core))


TROUBLE: list[Topology] = [
    *joined(),
    peering(),
    *exclusive_in_rome(Prefix("10.97.0.0/16")),
    *exclusive_in_rome(Prefix("10.200.0.0/16"))[-1:],
    pooled("rome", "10.96.0.0/14"),
    pooled("rome", "10.96.0.0/15", reserved=(Prefix("10.96.0.0/16"),)),
    pooled("rome", "10.100.0.0/14", external_prefixes=(Prefix("10.98.0.0/16"),)),
    pooled("milan", pod_prefixes=(Prefix("10.200.0.0/16"), Prefix("10.70.0.0/16")), external_prefixes=()),
    cluster("rome"),
    node("worker-1", 1, addresses=(Address("10.97.3.3"),)),
    gateway("milan", address=Address("10.99.0.9")),
    peering(ends=(bare().ends[0], peering().ends[1])),
]


@settings(max_examples=150)
@given(st.lists(st.tuples(st.sampled_from(TROUBLE), st.booleans()), max_size=30))
def test_no_two_prefixes_in_use_overlap(history: list[tuple[Topology, bool]]) -> None:
    """After any history of contradictions, deletions and replays, what is in use in a cluster is apart, and a restart changes nothing."""
    core = Core()
    tell(core, joined())
    for sequence, (item, deleted) in enumerate(history, 100):
        event = said(item, sequence)
        core.hear([replace(event, payload=b"") if deleted else event])
        assert overlaps(core) == []
    again = restarted(core)
    assert remaps(again) == remaps(core)
    assert again.allocations.take_changes() == []
