"""The planner's decisions: order, repetition, what waits, and how tunnels are rolled out."""

from __future__ import annotations

import itertools

import pytest
from msgspec import structs
from msgspec.structs import replace

from schemas.codec import decode, encode
from schemas.host_objects import Route, WireguardLink
from schemas.plan import HostPlan, PlanDiff, unit_digest
from schemas.snapshot import Chunks, join
from schemas.status import ApplyReport, UnitReport
from schemas.topology import Cluster, Peering, PeeringEnd, Topology
from schemas.values import Address, Name, Prefix
from services.planner import layout
from services.planner.admit import Problem
from services.planner.allocate import Allocations, Rollout, advance
from services.planner.core import Claim, Core, Said
from services.planner.state import HostId
from tests.topologies import MILAN_GATEWAY, ROME_GATEWAY, cluster, gateway, keys, node, peering, pod, said, tell, two_clusters

UNIT = "peering/rome/rome-milan"


def publish(core: Core) -> set[HostId]:
    """Do as the service does with steps; returns the hosts that got a plan."""
    steps = core.steps()
    core.published.update({step.host: step.plan for step in steps})
    return {step.host for step in steps}


def acknowledge(core: Core, *hosts: HostId) -> None:
    for host in hosts:
        plan = core.published[host]
        digest = unit_digest(plan.units[UNIT].values())
        core.report(ApplyReport(Name(host.cluster), Name(host.name), 1, 1, (UnitReport(UNIT, digest, digest, "applied"),)))


def tunnels(plan: HostPlan) -> tuple[int, int]:
    """How many tunnels the plan has as devices, and how many carry traffic."""
    devices = sum(isinstance(item, WireguardLink) for item in plan.objects().values())
    hops = [item.hops for item in plan.objects().values() if isinstance(item, Route) and item.table == layout.OUTGOING_TABLE and item.hops]
    return devices, max((len(found) for found in hops), default=0)


def test_nothing_new_publishes_nothing() -> None:
    """Repeated and late copies of what is in force change nothing."""
    core = Core()
    items = two_clusters()
    tell(core, items)
    assert publish(core)
    outcome = tell(core, items)
    assert not outcome
    assert publish(core) == set()
    tell(core, items, first=100)
    assert publish(core) == set()


def test_a_host_without_anything_to_hold_gets_a_plan_once() -> None:
    """Who has no peering yet is told so, and answers: it is known from one that is silent."""
    core = Core()
    tell(core, [cluster("rome"), node("worker-1", 1)])
    assert publish(core) == {HostId("rome", "worker-1")}
    assert core.published[HostId("rome", "worker-1")].units == {}
    tell(core, [node("worker-1", 1)], first=10)
    assert publish(core) == set()


def test_a_removed_host_takes_its_key_along() -> None:
    """A cluster can go when its hosts are gone: their keys, which only they may delete, do not hold it; nor does an old one come back."""
    core = Core()
    tell(core, [cluster("rome"), gateway("rome"), keys()[0]])
    outcome = core.hear([Said(("gateway", "rome", "gateway"), b"", 10), Said(("cluster", "rome", "rome"), b"", 11)])
    assert [entry.ref for entry in outcome.admitted] == ["Gateway/rome/gateway", "PublicKey/rome/gateway", "Cluster/rome/rome"]
    assert not core.state.objects
    assert not tell(core, [keys()[0]], first=3)


def test_a_restored_core_publishes_nothing() -> None:
    """A planner that takes over what an earlier one admitted and published finds no difference."""
    core = Core()
    tell(core, [*two_clusters(), *keys()])
    publish(core)
    assert publish(restored(core)) == set()


def restored(core: Core) -> Core:
    second = Core()
    for host, number in core.allocations.numbers.items():
        second.allocations.put_number(host, number)
    second.allocations.rollouts.update(core.allocations.rollouts)
    second.restore([(item, core.sequences[ref]) for ref, item in core.state.objects.items()], core.published, core.reports)
    return second


def test_what_misses_its_cluster_waits_for_it() -> None:
    """A node that comes before its cluster is refused with a reason, and admitted when the cluster comes."""
    core = Core()
    early = tell(core, [node("worker-1", 1)])
    assert [refusal.field for refusal in early.refused] == ["$.cluster"]
    late = tell(core, [cluster("rome")], first=2)
    assert [entry.ref for entry in late.admitted] == ["Cluster/rome/rome", "Node/rome/worker-1"]


def test_the_last_good_value_stays_in_force() -> None:
    """A bad value is refused and changes nothing; the refusal names the field and the place in the stream."""
    core = Core()
    tell(core, two_clusters())
    before = core.state.objects["Peering/rome/rome-milan"]
    bad = replace(peering(), ends=(replace(peering().ends[0], remap_pods=(Prefix("10.61.0.0/24"),)), peering().ends[1]))
    outcome = tell(core, [bad], first=50)
    assert [(refusal.field, refusal.sequence) for refusal in outcome.refused] == [("$.ends[0].remapPods[0]", 50)]
    assert core.state.objects["Peering/rome/rome-milan"] == before


@pytest.mark.parametrize(
    "payload,reason",
    [
        (b"{", "not valid JSON"),
        (b"[]", "Expected `object`"),
        (b'{"kind":"Node","name":"worker-1","cluster":"rome","addresses": ["172.18.0.11"],"colour":"red"}', "unknown field `colour`"),
        (b'{"kind":"Node","name":"worker-9","cluster":"rome","addresses": ["172.18.0.11"]}', "must be the same"),
        (b'{"kind":"Node","name":"worker-1","cluster":"rome","addresses": ["172.18.0.11/24"]}', "without a length"),
        (b'{"kind":"Node","name":"worker-1","cluster":"rome","addresses": ["172.18.0.11"],"podPrefixes":["10.200.1.5/24"]}', "host bits"),
    ],
)
def test_unreadable_payloads_are_refused(payload: bytes, reason: str) -> None:
    """What is no such object is refused under the subject's own name."""
    core = Core()
    tell(core, two_clusters())
    outcome = core.hear([Said(("node", "rome", "worker-1"), payload, 90)])
    (refusal,) = outcome.refused
    assert (refusal.kind, refusal.cluster, refusal.name) == ("Node", "rome", "worker-1")
    assert reason in refusal.reason


def test_subjects_that_name_no_object_are_dead_letters() -> None:
    """A message under an unknown kind, or with too few tokens, is set aside with a reason."""
    outcome = Core().hear([Said(("planet", "rome", "x"), b"{}", 1), Said(("node",), b"{}", 2)])
    assert len(outcome.unreadable) == 2
    assert not outcome.refused


def test_removal_waits_for_users() -> None:
    """A gateway that is deleted before its peering goes when the peering has gone."""
    core = Core()
    tell(core, two_clusters())
    gone = core.hear([Said(("gateway", "rome", "gateway"), b"", 50)])
    assert gone.refused
    later = core.hear([Said(("peering", "rome", "rome-milan"), b"", 51)])
    assert [(entry.ref, entry.item) for entry in later.admitted] == [("Peering/rome/rome-milan", None), ("Gateway/rome/gateway", None)]


def test_tunnels_carry_traffic_once_both_ends_have_them() -> None:
    """Devices at the first end, then at the second; routes when both hold devices and each other's keys."""
    core = Core()
    tell(core, two_clusters())
    publish(core)
    assert (tunnels(core.published[ROME_GATEWAY]), tunnels(core.published[MILAN_GATEWAY])) == ((3, 0), (0, 0))
    acknowledge(core, ROME_GATEWAY, MILAN_GATEWAY)
    assert publish(core) == {MILAN_GATEWAY}
    assert tunnels(core.published[MILAN_GATEWAY]) == (3, 0)
    acknowledge(core, MILAN_GATEWAY)
    assert publish(core) == set()
    tell(core, keys(), first=60)
    assert publish(core) == {ROME_GATEWAY, MILAN_GATEWAY}
    acknowledge(core, ROME_GATEWAY)
    assert publish(core) == set()
    acknowledge(core, MILAN_GATEWAY)
    assert publish(core) == {ROME_GATEWAY, MILAN_GATEWAY}
    assert tunnels(core.published[ROME_GATEWAY]) == (3, 3)


def test_a_new_tunnel_comes_at_one_end_first() -> None:
    """Two devices never greet each other at once: the second end's comes when the first end holds its own."""
    core = settled()
    tell(core, [peering(4)], first=70)
    assert publish(core) == {ROME_GATEWAY}
    assert tunnels(core.published[ROME_GATEWAY]) == (4, 3)
    acknowledge(core, ROME_GATEWAY)
    assert publish(core) == {MILAN_GATEWAY}
    assert tunnels(core.published[MILAN_GATEWAY]) == (4, 3)


def test_a_removed_tunnel_loses_its_routes_first() -> None:
    """Routes leave at both ends; devices follow when both have acknowledged that."""
    core = settled()
    tell(core, [peering(2)], first=70)
    publish(core)
    assert tunnels(core.published[ROME_GATEWAY]) == (3, 2)
    acknowledge(core, ROME_GATEWAY, MILAN_GATEWAY)
    publish(core)
    assert tunnels(core.published[MILAN_GATEWAY]) == (2, 2)


def settled() -> Core:
    core = Core()
    tell(core, [*two_clusters(), *keys()])
    for _ in range(4):
        publish(core)
        acknowledge(core, ROME_GATEWAY, MILAN_GATEWAY)
    assert tunnels(core.published[ROME_GATEWAY]) == tunnels(core.published[MILAN_GATEWAY]) == (3, 3)
    return core


@pytest.mark.parametrize("wanted", range(1, 6))
@pytest.mark.parametrize("start", [Rollout(0, 0, 0), Rollout(3, 3, 3), Rollout(3, 0, 0), Rollout(3, 3, 0), Rollout(5, 3, 2)], ids=str)
def test_rollouts_end_where_they_should(start: Rollout, wanted: int) -> None:
    """From any state, acknowledged steps lead to the wanted number, and routes never outnumber devices on the way."""
    current = start
    for _ in range(6):
        current = advance(current, wanted, first_holds=True, both_hold=True)
        assert current.used <= current.joined <= current.present
    assert current == Rollout.complete(wanted)


def test_numbers_stay_with_their_hosts() -> None:
    """A host that goes and comes back has its number again; numbers do not depend on the order of arrival."""
    core, other = Core(), Core()
    tell(core, [cluster("rome"), node("a", 1), node("b", 2)])
    tell(other, [cluster("rome"), node("b", 2), node("a", 1)])
    assert core.allocations.numbers == other.allocations.numbers
    before = core.allocations.number(HostId("rome", "a"))
    core.hear([Said(("node", "rome", "a"), b"", 10)])
    tell(core, [node("a", 1)], first=11)
    assert core.allocations.number(HostId("rome", "a")) == before


def test_a_full_internal_prefix_refuses_by_name() -> None:
    """A /29 has room for six hosts; the seventh is refused with the prefix named, and room is made by one that goes."""
    core = Core()
    hosts = [node(f"n{number}", number) for number in range(1, 8)]
    outcome = tell(core, [cluster("rome", internal_prefixes=(Prefix("10.80.0.0/29"),)), *hosts])
    (refusal,) = outcome.refused
    assert "10.80.0.0/29 has no room" in refusal.reason
    core.hear([Said(("node", "rome", "n1"), b"", 50)])
    assert "Node/rome/n7" in core.state.objects


def test_allocations_are_written_once() -> None:
    """Each allocation shows up among the changes once."""
    allocations = Allocations()
    allocations.set_rollout(("rome", "x"), Rollout(1, 0, 0))
    assert allocations.take_changes() == [("tunnels", "rome", "x")]
    allocations.set_rollout(("rome", "x"), Rollout(1, 0, 0))
    assert allocations.take_changes() == []


def test_another_spelling_of_a_subject_is_a_dead_letter() -> None:
    """A kind written with needless escapes would pass a permission that forbids the kind; it names no object."""
    from schemas import subjects

    with pytest.raises(ValueError, match="write"):
        subjects.parse("mesh.topology.%70ublickey.rome.gateway")
    assert Core().hear([Said((), b"{}", 1, subject="mesh.topology.%70ublickey.rome.gateway")]).unreadable


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


def test_an_object_that_no_broker_could_hand_on_is_refused() -> None:
    """What is larger than half a megabyte would not fit with the headers that it gets on its way."""
    core = Core()
    tell(core, [cluster("rome")])
    payload = b" " * 600_000 + encode(node("worker-1", 1))
    (refusal,) = core.hear([Said(("node", "rome", "worker-1"), payload, 90)]).refused
    assert "524288" in refusal.reason


def test_a_list_without_end_is_refused() -> None:
    """A cluster of thousands of prefixes would keep everybody waiting while they are compared with one another."""
    many = cluster("rome", pod_prefixes=tuple(Prefix(f"10.{number // 256}.{number % 256}.0/24") for number in range(300)))
    (refusal,) = tell(Core(), [many]).refused
    assert refusal.field == "$.podPrefixes"
    assert "256" in refusal.reason


def test_a_host_that_comes_back_to_a_smaller_prefix_gets_another_number() -> None:
    """A kept number that the new internal prefix has no address for is given up."""
    core = Core()
    tell(core, [cluster("rome"), node("a", 1)])
    assert core.allocations.number(HostId("rome", "a")) > 6
    core.hear([Said(("node", "rome", "a"), b"", 10), Said(("cluster", "rome", "rome"), b"", 11)])
    tell(core, [cluster("rome", internal_prefixes=(Prefix("10.80.0.0/29"),)), node("a", 1)], first=12)
    assert 1 <= core.allocations.number(HostId("rome", "a")) <= 6


def test_an_evicted_number_is_written_as_gone() -> None:
    """A number that goes from a dead host to a new one belongs to one of them after a restart, too."""
    core = Core()
    tell(core, [cluster("rome", internal_prefixes=(Prefix("10.80.0.0/29"),)), *(node(f"n{number}", number) for number in range(1, 7))])
    core.allocations.take_changes()
    core.hear([Said(("node", "rome", "n1"), b"", 50)])
    tell(core, [node("n7", 7)], first=51)
    assert core.allocations.take_changes() == [("number", "rome", "n1"), ("number", "rome", "n7")]
    assert HostId("rome", "n1") not in core.allocations.numbers


def test_every_plan_survives_the_wire() -> None:
    """What is published can be read: encoding and decoding gives the same snapshot and the same difference."""
    core = Core()
    tell(core, [*two_clusters(), *keys()])
    for _ in range(4):
        for step in core.steps():
            chunks = Chunks(step.plan)
            head = chunks.head(step.plan, 1, 1)
            assert join(head, [chunks.encoded(number) for number in range(len(chunks))]) == step.plan
            diff = PlanDiff(step.plan.cluster, step.plan.host, 1, 1, step.diffs)
            assert decode(encode(diff), PlanDiff) == diff
            core.published[step.host] = step.plan
        acknowledge(core, ROME_GATEWAY, MILAN_GATEWAY)


@pytest.mark.parametrize(
    "event",
    [
        Said(("node", "a/b", "c"), b"", 1),
        Said(("node", "rome", "x" * 1000), b"{}", 1),
        Said(("node", "rome", "\ufffd" * 1200), b"", 1),
    ],
)
def test_names_that_are_no_use_are_dead_letters(event: Said) -> None:
    """A deletion of what cannot be named, and names that no subject could carry, are set aside and stop nobody."""
    outcome = Core().hear([event])
    assert len(outcome.unreadable) == 1
    assert not outcome.admitted


def test_what_is_nested_without_end_is_refused() -> None:
    """JSON that nests too deeply to be read is refused like any other that is not valid."""
    (refusal,) = Core().hear([Said(("node", "rome", "x"), b'{"a":' + b"[" * 200_000, 1)]).refused
    assert "not valid JSON" in refusal.reason


def claims(core: Core) -> dict[HostId, Claim]:
    """What hosts say that follow a planner that is no more: all that it published, under its epoch."""
    found = {}
    for host, plan in core.published.items():
        units = tuple(UnitReport(name, digest, "", "degraded", "x", len(plan.units[name])) for name, digest in plan.digests().items())
        found[host] = Claim.of_report(ApplyReport(Name(host.cluster), Name(host.name), 9, 4, units))
    return found


def test_after_a_lost_store_hosts_are_given_what_they_hold() -> None:
    """A planner that knows but what publishers say again makes the very same plans, tunnels rolled out, and takes over with them."""
    first, second = settled(), Core()
    for host, claim in claims(first).items():
        second.claim(host, claim)
    steps = {step.host: step for step in second.steps()}
    assert steps.keys() == first.published.keys()
    assert {host for host, step in steps.items() if step.losses()} == {host for host, plan in first.published.items() if plan.units}
    for step in steps.values():
        second.keep(step)
    tell(second, [*two_clusters(), *keys()])
    steps = {step.host: step for step in second.steps()}
    assert {host: step.plan for host, step in steps.items()} == first.published
    assert not any(step.losses() for step in steps.values())
    for step in steps.values():
        second.publish(step)
    assert second.steps() == []


def test_what_is_said_again_in_part_leaves_less() -> None:
    """Whatever part of the topology is missing, some host would lose something by it."""
    first = settled()
    items = [*two_clusters(), *keys()]
    for missing in ("PublicKey/milan/gateway", "Node/rome/worker-2", "Peering/rome/rome-milan"):
        second = Core()
        for host, claim in claims(first).items():
            second.claim(host, claim)
        tell(second, [item for item in items if item.ref != missing])
        assert any(step.losses() for step in second.steps()), missing


def test_lost_allocations_do_not_begin_a_rollout_anew() -> None:
    """Tunnels that both published plans have carry traffic: they are not taken away to be rolled out again."""
    first, second = settled(), Core()
    second.restore([(item, first.sequences[ref]) for ref, item in first.state.objects.items()], first.published, {})
    assert not any(step.takes_away for step in second.steps())


def test_a_plan_in_doubt_is_published_again_once_nothing_is_missing() -> None:
    """The topology behind a published plan was lost: the plan stays, and is confirmed when the topology is back."""
    first, second = settled(), Core()
    second.restore([], first.published, {})
    second.allocations.rollouts.update(first.allocations.rollouts)
    for host, plan in first.published.items():
        second.claim(host, Claim.of_plan(plan))
    assert any(step.losses() for step in second.steps())
    tell(second, [*two_clusters(), *keys()])
    steps = second.steps()
    assert {step.host for step in steps} == first.published.keys()
    assert not any(step.losses() or step.diffs for step in steps)
