"""Revisions: what late copies cannot do, whether an object is admitted, waits, or is gone, before and after a restart."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from schemas.topology import Node, Topology
from schemas.values import Address
from services.planner.core import Core, Said
from tests.topologies import cluster, node, said, tell

REF = "Node/rome/worker-1"


def at(revision: int | None, host: int = 11) -> Node:
    """The node with a revision, at an address ending in `host`."""
    return node("worker-1", 1, revision=revision, addresses=(Address(f"172.18.0.{host}"),))


def gone(sequence: int) -> Said:
    return Said(("node", "rome", "worker-1"), b"", sequence, subject="node.rome.worker-1")


def spoken(item: Topology, sequence: int) -> Said:
    return replace(said(item, sequence), subject="node.rome.worker-1")


def joined() -> Core:
    core = Core()
    tell(core, [cluster("rome")])
    return core


def restarted(core: Core, messages: list[Said]) -> Core:
    """A planner that reads the admitted objects, and then topology as the service does: the last word on each object."""
    second = Core()
    second.restore([(item, core.sequences[ref]) for ref, item in core.state.objects.items()], {}, {})
    second.sequences.update(core.sequences)
    last: dict[str, Said] = {}
    for message in messages:
        if not second.is_overtaken(message, last.get(message.subject)):
            last[message.subject] = message
    second.hear(sorted(last.values(), key=lambda one: one.sequence), quiet=True)
    return second


@pytest.mark.parametrize(
    "item,words",
    [
        (at(4, 99), "revision 4 is older than revision 5, which is admitted"),
        (at(0), "revision 0 is older than revision 5, which is admitted"),
        (at(5, 99), "revision 5 is admitted with other content; a change needs a higher one"),
    ],
)
def test_an_old_copy_changes_nothing(item: Node, words: str) -> None:
    """What is admitted stays; the refusal names the field and both revisions, and does not wait."""
    core = joined()
    tell(core, [at(5)], first=10)
    (refusal,) = tell(core, [item], first=20).refused
    assert (refusal.field, refusal.other, refusal.reason) == ("$.revision", REF, words)
    core.hear([Said(("node", "rome", "worker-1"), b"", 30)])
    assert REF not in core.state.objects, "nothing waits"


def test_what_may_follow() -> None:
    """The same again, a higher one, and one without a revision, after which any may come."""
    core = joined()
    for sequence, item in enumerate((at(5), at(5), at(6, 12), at(None, 13), at(2, 14)), 10):
        assert tell(core, [item], first=sequence).refused == []
        assert core.state.objects[REF] == item


def test_a_deletion_ends_the_count() -> None:
    """Whoever makes an object anew counts from the beginning."""
    core = joined()
    tell(core, [at(5)], first=10)
    core.hear([gone(20)])
    assert tell(core, [at(1)], first=30).refused == []
    assert core.state.objects[REF] == at(1)


@pytest.mark.parametrize("late", [at(6, 99), at(7, 99)])
def test_an_old_copy_does_not_take_the_place_of_what_waits(late: Node) -> None:
    """The newest revision waits for its cluster; a copy of an older one that comes later is refused, before and after a restart."""
    core = Core()
    messages = [spoken(at(7), 10), spoken(late, 11)]
    core.hear(messages[:1])
    (refusal,) = core.hear(messages[1:]).refused
    assert "waits to be admitted" in refusal.reason
    for planner in (restarted(core, messages), core):
        tell(planner, [cluster("rome")], first=20)
        assert planner.state.objects[REF] == at(7)


def test_what_waits_is_not_lost_by_a_copy_of_what_was() -> None:
    """An object without a revision waits; a copy of what was before the admitted one is refused, and the waiting one is tried again."""
    core = joined()
    taken = node("worker-2", 2, addresses=(Address("172.18.0.50"),))
    tell(core, [at(7), taken], first=10)
    messages = [spoken(at(7), 10), spoken(at(None, 50), 20), spoken(at(6, 99), 21)]
    assert core.hear(messages[1:2]).refused[0].other == taken.ref
    assert "is older than revision 7, which is admitted" in core.hear(messages[2:]).refused[0].reason
    for planner in (restarted(core, messages), core):
        planner.hear([Said(("node", "rome", "worker-2"), b"", 30)])
        assert planner.state.objects[REF] == at(None, 50)


@settings(max_examples=150)
@given(st.permutations(range(1, 7)), st.lists(st.integers(0, 5), max_size=10), st.integers(0, 6))
def test_replays_in_any_order_lead_to_the_newest(order: list[int], late: list[int], cluster_at: int) -> None:
    """Copies of six revisions in any order, some of them again, with the cluster coming at any time: the highest is in force."""
    items = {revision: at(revision, 10 + revision) for revision in order}
    wanted: list[Topology] = [items[revision] for revision in [*order, *(order[place] for place in late)]]
    wanted.insert(cluster_at, cluster("rome"))
    core = Core()
    messages = []
    for sequence, item in enumerate(wanted, 1):
        message = spoken(item, sequence) if isinstance(item, Node) else said(item, sequence)
        messages.append(message)
        core.hear([message])
    assert core.state.objects[REF] == items[6]
    assert restarted(core, messages).state.objects == core.state.objects
