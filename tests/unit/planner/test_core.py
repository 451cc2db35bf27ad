"""The planner's decisions: order, repetition, what waits, and how tunnels are rolled out."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from schemas.codec import decode, encode
from schemas.host_objects import Route, WireguardLink
from schemas.plan import HostPlan, PlanDiff, unit_digest
from schemas.snapshot import Chunks, join
from schemas.status import ApplyReport, UnitReport
from schemas.values import Name, Prefix
from services.planner import layout
from services.planner.allocate import Allocations, Rollout, advance
from services.planner.core import Claim, Core, Said
from services.planner.state import HostId
from tests.topologies import MILAN_GATEWAY, ROME_GATEWAY, cluster, gateway, keys, node, peering, tell, two_clusters

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
