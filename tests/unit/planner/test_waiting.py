"""What is refused and waits: for what it misses, for others that wait for it, and for a third to make way."""

from __future__ import annotations

import itertools

import pytest
from msgspec import structs
from msgspec.structs import replace

from schemas.topology import Cluster, Peering, PeeringEnd, Topology
from schemas.values import Address, Name, Prefix
from services.planner.admit import Problem
from services.planner.core import Core, Said
from tests.topologies import MILAN_GATEWAY, cluster, gateway, node, peering, pod, said, tell, two_clusters


def test_what_misses_its_cluster_waits_for_it() -> None:
    """A node that comes before its cluster is refused with a reason, and admitted when the cluster comes."""
    core = Core()
    early = tell(core, [node("worker-1", 1)])
    assert [refusal.field for refusal in early.refused] == ["$.cluster"]
    late = tell(core, [cluster("rome")], first=2)
    assert [entry.ref for entry in late.admitted] == ["Cluster/rome/rome", "Node/rome/worker-1"]


def test_removal_waits_for_users() -> None:
    """A gateway that is deleted before its peering goes when the peering has gone."""
    core = Core()
    tell(core, two_clusters())
    gone = core.hear([Said(("gateway", "rome", "gateway"), b"", 50)])
    assert gone.refused
    later = core.hear([Said(("peering", "rome", "rome-milan"), b"", 51)])
    assert [(entry.ref, entry.item) for entry in later.admitted] == [("Peering/rome/rome-milan", None), ("Gateway/rome/gateway", None)]


def test_what_is_in_force_is_not_told_as_refused() -> None:
    """A node that comes just before its cluster, in one batch, is admitted and nothing else."""
    outcome = tell(Core(), [node("worker-1", 1), cluster("rome")])
    assert outcome.refused == []
    assert {entry.ref for entry in outcome.admitted} == {"Cluster/rome/rome", "Node/rome/worker-1"}


def test_an_older_copy_does_not_replace_what_waits() -> None:
    """A late redelivery of an older message does not take the place of the newer one that waits for its cluster."""
    core = Core()
    newer, older = node("worker-1", 17), node("worker-1", 11)
    core.hear([said(newer, 9)])
    core.hear([said(older, 5)])
    tell(core, [cluster("rome")], first=10)
    assert core.state.objects["Node/rome/worker-1"] == newer


def grown() -> list[Topology]:
    """Rome with one more pod prefix, and each peering of it with one more remap: valid together only."""
    wider = cluster("rome", pod_prefixes=(Prefix("10.200.0.0/16"), Prefix("10.201.0.0/16")))
    rome, milan = peering().ends
    return [wider, peering(ends=(rome, replace(milan, remap_pods=(Prefix("10.63.0.0/16"), Prefix("10.65.0.0/16")))))]


@pytest.mark.parametrize("order", [1, -1])
def test_what_is_valid_together_only_is_admitted_together(order: int) -> None:
    """A peered cluster gets a second pod prefix: cluster and peering wait for each other, whichever is said first."""
    core = Core()
    tell(core, two_clusters())
    first, second = grown()[::order]
    assert [refusal.other for refusal in tell(core, [first], first=50).refused] == [second.ref]
    outcome = tell(core, [second], first=51)
    assert {entry.ref for entry in outcome.admitted} == {first.ref, second.ref}
    assert outcome.refused == []
    assert (core.state.objects[first.ref], core.state.objects[second.ref]) == (first, second)
    assert "element meshmark.rome.rome-milan to_real 10.65.0.0/16" in {
        key for step in core.steps() if step.host == MILAN_GATEWAY for key in step.plan.objects()
    }


def test_a_third_that_is_in_the_way_is_waited_for() -> None:
    """Two peerings of one cluster: neither cluster nor peerings are admitted before the last one has come."""
    core = Core()
    naples = [cluster("naples"), gateway("naples"), gateway("rome", "second", 20)]
    rome = PeeringEnd(
        cluster=Name("rome"), gateway=Name("second"), remap_pods=(Prefix("10.66.0.0/16"),), remap_external=(Prefix("10.67.0.0/16"),)
    )
    far = PeeringEnd(
        cluster=Name("naples"), gateway=Name("gateway"), remap_pods=(Prefix("10.68.0.0/16"),), remap_external=(Prefix("10.69.0.0/16"),)
    )
    other = Peering(name=Name("rome-naples"), cluster=Name("rome"), ends=(rome, far))
    assert tell(core, [*two_clusters(), *naples, other]).refused == []
    more = replace(other, ends=(rome, replace(far, remap_pods=(Prefix("10.68.0.0/16"), Prefix("10.65.0.0/16")))))
    for sequence, item in enumerate(grown(), 50):
        assert len(tell(core, [item], first=sequence).refused) == 1
    outcome = tell(core, [more], first=60)
    assert {entry.ref for entry in outcome.admitted} == {"Cluster/rome/rome", "Peering/rome/rome-milan", "Peering/rome/rome-naples"}


def test_what_contradicts_together_too_stays_out() -> None:
    """A cluster and a peering that wait for each other and are wrong together change nothing, and are told as refused."""
    core = Core()
    tell(core, two_clusters())
    wider, joined = grown()
    assert isinstance(joined, Peering)
    rome, milan = joined.ends
    wrong = replace(joined, ends=(rome, replace(milan, remap_pods=(Prefix("10.63.0.0/16"), Prefix("10.64.0.0/16")))))
    assert tell(core, [wider], first=50).refused
    (refusal,) = tell(core, [wrong], first=51).refused
    assert refusal.field.startswith("$.ends")
    assert core.state.objects["Cluster/rome/rome"] == cluster("rome")


def test_what_waits_for_each_other_is_tried_again_when_a_third_makes_way() -> None:
    """A node's address keeps cluster and peering from being admitted together; once it is gone, both are, without being said again."""
    core = Core()
    milan_node = node("blocker", 9, "milan", addresses=(Address("10.65.0.1"),), pod_prefixes=())
    tell(core, [*two_clusters(), milan_node])
    for sequence, item in enumerate(grown(), 50):
        assert tell(core, [item], first=sequence).refused
    outcome = core.hear([Said(("node", "milan", "blocker"), b"", 60)])
    assert {entry.ref for entry in outcome.admitted} == {milan_node.ref, *(item.ref for item in grown())}


def test_a_circle_that_stands_still_costs_no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was tried together in vain is tried again only when what was in the way has changed."""
    trials = []
    core = Core()
    milan_node = node("blocker", 9, "milan", addresses=(Address("10.65.0.1"),), pod_prefixes=())
    tell(core, [*two_clusters(), milan_node])
    for sequence, item in enumerate(grown(), 50):
        tell(core, [item], first=sequence)
    monkeypatch.setattr("services.planner.core.admit_together", lambda *_: trials.append(1) or Problem("no", other=milan_node.ref))
    tell(core, [pod("late", "worker-1", "10.200.1.77")], first=70)
    assert trials == []


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_node_with_pods_gets_another_name(order: tuple[int, ...]) -> None:
    """The old node goes, the new one comes with its addresses, its pods follow: in whatever order that is said, all of it holds."""
    core = Core()
    old, new = node("worker-1", 1), node("worker-9", 1)
    moved = pod("shop", "worker-9", "10.200.1.10")
    tell(core, [cluster("rome"), old, pod("shop", "worker-1", "10.200.1.10")])
    words = [Said(("node", "rome", "worker-1"), b"", 0), said(new, 0), said(moved, 0)]
    for sequence, place in enumerate(order, 50):
        core.hear([structs.replace(words[place], sequence=sequence)])
    assert set(core.state.objects) == {"Cluster/rome/rome", new.ref, moved.ref}
    assert core.state.objects[moved.ref] == moved


def test_a_succession_is_judged_in_company_too() -> None:
    """A lower revision, or another internal prefix under hosts, is no better for coming with others."""
    core = Core()
    tell(core, two_clusters())
    wider, joined = grown()
    assert isinstance(wider, Cluster)
    tell(core, [replace(wider, internal_prefixes=(Prefix("10.99.0.0/16"),))], first=50)
    tell(core, [joined], first=51)
    assert core.state.objects["Cluster/rome/rome"] == cluster("rome")
