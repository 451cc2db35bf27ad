"""Turns on the kernel in memory: order, all or nothing by unit, undo, cold start."""

from __future__ import annotations

import pytest

from schemas.host_objects import LinkAddress, NextHop, NftElement, PolicyRule, Route, VxlanLink, WireguardLink
from schemas.plan import Entry, HostPlan, unit_tag
from schemas.status import DeadTunnel, TunnelHealth
from schemas.topology import Topology
from schemas.values import Address, Name, Prefix
from services.applier.core import Applier
from services.applier.steps import order
from services.kernel.fake import FakeHost, FakeKernel
from services.kernel.transaction import Change, Listed, changes, repairs
from services.runtime.errors import Conflict, OutcomeUnknown, Permanent, Transient, Waiting
from tests.topologies import ROME_GATEWAY, keys, node, peering, settled_plans, two_clusters

UNIT = "peering/rome/rome-milan"
FIRST = settled_plans([*two_clusters(), *keys()])[ROME_GATEWAY]
EMPTY = HostPlan(FIRST.cluster, FIRST.host, {})


def applier(host: FakeHost, fail: object = None) -> Applier:
    kernel = FakeKernel(host, fail or (lambda _: None))  # type: ignore[arg-type]
    return Applier(kernel, lambda: 0.0)


def holds(host: FakeHost, plan: HostPlan) -> bool:
    """True when reading the kernel finds nothing to do."""
    kernel = FakeKernel(host)
    objects = plan.objects()
    return repairs(objects, kernel.reference(objects), kernel.read(objects)) == []


def two_units() -> HostPlan:
    """The gateway's unit, and a second one that shares one object with it and has two of its own."""
    own = [Route(8000, Prefix("10.99.0.0/16"), "unreachable", 5), PolicyRule(950, 8000)]
    shared = next(entry for key, entry in FIRST.units[UNIT].items() if key == "sysctl net/ipv4/ip_forward")
    second = {item.key: type(shared)(item, ("Peering/rome/second",)) for item in own}
    return HostPlan(FIRST.cluster, FIRST.host, {**FIRST.units, "second": {**second, shared.key: shared}})


def test_applies_and_reports() -> None:
    """After a turn the kernel holds the plan and its marker, and the report says so."""
    host = FakeHost()
    report = applier(host).apply(FIRST, 1, 7)
    assert holds(host, FIRST)
    assert (report.outcome, report.generation) == ("applied", 7)
    assert host.marker is not None
    assert host.marker.units == {unit_tag(UNIT): FIRST.digests()[UNIT]}


def test_a_plan_without_units_leaves_no_trace() -> None:
    """When the last unit goes, the marker goes with it."""
    host = FakeHost()
    one = applier(host)
    one.apply(FIRST, 1, 1)
    one.apply(HostPlan(FIRST.cluster, FIRST.host, {}), 1, 2)
    assert host.objects == {}
    assert host.marker is None


def test_the_same_plan_again_writes_nothing() -> None:
    """A repeated plan makes no change, in memory or after a restart."""
    host = FakeHost()
    first = applier(host)
    first.apply(FIRST, 1, 1)
    assert first.apply(FIRST, 1, 1).operations == 0
    assert applier(host).apply(FIRST, 1, 1).operations == 0


def test_cold_start_with_nothing_new_commits_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even the marker is written again: who listens to nftables hears nothing of a restart."""
    host = FakeHost()
    applier(host).apply(FIRST, 1, 1)
    monkeypatch.setattr(FakeKernel, "commit", lambda *_: pytest.fail("there is nothing to commit"))
    assert applier(host).apply(FIRST, 1, 1).outcome == "applied"


def test_cold_start_repairs_only_what_differs() -> None:
    """After a restart only what somebody changed meanwhile is written again."""
    host = FakeHost()
    applier(host).apply(FIRST, 1, 1)
    del host.objects["rule 900 fwmark 0xff00/0xff00 iif - to -"]
    assert applier(host).apply(FIRST, 1, 1).operations == 1
    assert holds(host, FIRST)


def test_steps_come_in_the_order_that_leaks_nothing() -> None:
    """Guards, sysctls, rules; nft; links, addresses, peers; class routes at last."""
    steps = order(changes({}, FIRST.objects()), {}, FIRST.objects(), ())
    staged = [change.subject.layer for change in steps.stage]
    assert staged == sorted(staged, key=("route", "sysctl", "rule").index)
    assert {change.subject.layer for change in steps.commit} == {"nft"}
    connected = [change.subject.layer for change in steps.connect]
    assert connected == sorted(connected, key=("link", "address", "wireguard", "route").index)
    assert not steps.leave
    assert not steps.remove


def test_what_goes_as_a_whole_leaves_links_first_and_guards_last() -> None:
    """Links and class routes go before nft, rules and sysctls after it, guards at the very end."""
    steps = order(changes(FIRST.objects(), {}), FIRST.objects(), {}, FIRST.objects().keys())
    assert {change.subject.layer for change in steps.leave} == {"link", "route", "address", "wireguard"}
    assert steps.leave[0].subject.layer == "link"
    removed = [change.subject.layer for change in steps.remove]
    assert removed == sorted(removed, key=("rule", "sysctl", "route").index)


def routed(link: str = "lo") -> HostPlan:
    """The gateway's unit, and published routes: by a device, by a neighbour behind it, and one that leads nowhere."""
    near = LinkAddress("mo.worker-1", Address("10.99.0.1"), 30)
    objects = [
        Route(9000, Prefix("10.98.0.0/16"), hops=(NextHop("mo.worker-1", Address("10.99.0.2")),)),
        Route(9000, Prefix("10.99.0.0/30"), hops=(NextHop(link),)),
        Route(9000, Prefix("10.97.0.0/16"), "throw"),
        PolicyRule(5000, 9000, to=Prefix("10.98.0.0/15")),
        near,
    ]
    unit = {item.key: Entry(item, ("RouteConfiguration/rome/test",)) for item in objects}
    return HostPlan(FIRST.cluster, FIRST.host, {**FIRST.units, "route/rome/test": unit})


def test_rules_of_a_table_without_guards_come_after_its_routes_and_go_before_them() -> None:
    """With their unit or alone; and a route by a device comes before one by a neighbour there."""
    made: list[Change] = []
    host = FakeHost()
    one = applier(host, made.append)
    one.apply(FIRST, 1, 1)
    made.clear()
    one.apply(routed(), 1, 2)
    rule = "rule 5000 fwmark 0x0/0x0 iif - to 10.98.0.0/15"
    assert [change.key for change in made] == [
        "route 9000 10.97.0.0/16 0",
        "address mo.worker-1 10.99.0.1/30",
        "route 9000 10.99.0.0/30 0",
        "route 9000 10.98.0.0/16 0",
        rule,
    ]
    assert holds(host, routed())
    made.clear()
    one.apply(FIRST, 1, 3)
    assert [change.key for change in made][:3] == [rule, "route 9000 10.98.0.0/16 0", "route 9000 10.99.0.0/30 0"]
    one.apply(routed(), 1, 4)
    made.clear()
    less = routed()
    less.units["route/rome/test"].clear()  # type: ignore[attr-defined]
    one.apply(less, 1, 5)
    assert made[0].key == rule


def test_a_rule_is_not_there_while_a_route_of_its_unit_waits_for_a_link() -> None:
    """The unit waits and leaves nothing behind; the link's arrival lets all of it come."""
    host = FakeHost()
    one = applier(host)
    one.apply(FIRST, 1, 1)
    before = dict(host.objects)
    report = one.apply(routed("eth7"), 1, 2)
    assert [(unit.outcome, unit.unit) for unit in report.units if unit.outcome != "applied"] == [("waiting", "route/rome/test")]
    assert host.objects == before
    host.foreign["link eth7"] = Listed("link", "link eth7", "a link of another owner")
    assert one.apply(routed("eth7"), 1, 2).outcome == "applied"
    assert holds(host, routed("eth7"))


def test_a_link_made_again_gets_its_routes_and_addresses_back() -> None:
    """A link whose identity changes is made anew; what the kernel drops with it is connected again in the same turn."""
    host = FakeHost()
    one = applier(host)
    one.apply(FIRST, 1, 1)
    moved = settled_plans([*two_clusters(), *keys(), node("worker-1", 1, addresses=(Address("172.18.0.99"),))])[ROME_GATEWAY]  # type: ignore[arg-type]
    one.apply(moved, 1, 2)
    assert holds(host, moved)
    assert any(isinstance(item, LinkAddress) and item.link == "mo.worker-1" for item in host.objects.values())


def test_removal_leaves_nothing_and_gives_sysctls_back() -> None:
    """After the empty plan nothing of ours is left, and sysctls are as before; what is foreign was never touched."""
    foreign = Route(254, Prefix("192.0.2.0/24"), "unreachable", 9)
    host = FakeHost(sysctls={"net/ipv4/fwmark_reflect": "0"}, foreign={foreign.key: foreign})
    one = applier(host)
    one.apply(FIRST, 1, 1)
    assert host.sysctls["net/ipv4/fwmark_reflect"] == "1"
    one.apply(EMPTY, 1, 2)
    assert host.objects == {}
    assert host.sysctls["net/ipv4/fwmark_reflect"] == "0"
    assert host.foreign == {foreign.key: foreign}


def test_removal_after_a_restart_leaves_nothing() -> None:
    """The same when the applier was started anew in between and knows the old plan only from the kernel."""
    host = FakeHost()
    applier(host).apply(FIRST, 1, 1)
    applier(host).apply(EMPTY, 1, 2)
    assert host.objects == {}
    assert host.kept_sysctls == {}


@pytest.mark.parametrize(
    "error", [Permanent("no"), Transient("later"), Waiting("no link", "link x"), Conflict("taken")], ids=lambda e: type(e).__name__
)
@pytest.mark.parametrize("failing", [item for item in FIRST.objects().values() if item.layer != "nft"], ids=lambda item: item.key)
def test_a_failure_anywhere_leaves_the_old_state(failing: object, error: Exception) -> None:
    """Whichever change fails, nothing of the unit is left but its guards; the report names the object; the next turn completes it."""
    host = FakeHost(sysctls=dict.fromkeys(("net/ipv4/conf/all/rp_filter", "net/ipv4/conf/default/rp_filter"), "2"))
    broken = [True]
    one = applier(host, lambda change: error if broken[0] and change.new == failing else None)
    report = one.apply(FIRST, 1, 1)
    left = [item for item in host.objects.values() if not (isinstance(item, Route) and item.is_guard)]
    assert left == []
    (unit,) = report.units
    assert unit.held == ""
    assert unit.outcome == ("waiting" if isinstance(error, Waiting) else "degraded")
    assert failing.key in unit.error  # type: ignore[attr-defined]
    broken[0] = False
    assert one.apply(FIRST, 1, 1).outcome == "applied"
    assert holds(host, FIRST)


def test_a_failing_batch_leaves_the_old_state() -> None:
    """An nft batch that the kernel refuses undoes what was staged."""
    host = FakeHost()
    element = next(item for item in FIRST.objects().values() if isinstance(item, NftElement))
    report = applier(host, lambda change: Permanent("bad element") if change.new == element else None).apply(FIRST, 1, 1)
    assert report.outcome == "degraded"
    assert all(isinstance(item, Route) and item.is_guard for item in host.objects.values())


def test_other_units_go_on() -> None:
    """A unit that fails stays at its old version; the other one is applied, and objects they share stay."""
    host = FakeHost()
    plan = two_units()
    report = applier(host, lambda change: Permanent("no") if isinstance(change.new, VxlanLink) else None).apply(plan, 1, 1)
    outcomes = {unit.unit: unit.outcome for unit in report.units}
    assert outcomes == {UNIT: "degraded", "second": "applied"}
    assert "rule 950 fwmark 0x0/0x0 iif - to -" in host.objects
    assert host.sysctls["net/ipv4/ip_forward"] == "1"
    assert host.marker is not None
    assert host.marker.units == {unit_tag("second"): plan.digests()["second"]}


def test_a_changed_unit_that_fails_keeps_its_old_version() -> None:
    """When a change of a running unit fails, the unit is again exactly what it was."""
    host = FakeHost()
    fault: list[Exception | None] = [None]
    one = applier(host, lambda change: fault[0] if isinstance(change.new, VxlanLink) else None)
    one.apply(FIRST, 1, 1)
    more = settled_plans([*two_clusters(3, 4), *keys()])[ROME_GATEWAY]
    fault[0] = Permanent("no more links")
    report = one.apply(more, 1, 2)
    assert report.units[0].held == FIRST.digests()[UNIT]
    assert holds(host, FIRST)


def test_a_removed_shared_object_stays_for_the_other_unit() -> None:
    """An object leaves with the last unit that holds it."""
    host = FakeHost()
    one = applier(host)
    one.apply(two_units(), 1, 1)
    without = HostPlan(Name("rome"), Name("gateway"), {"second": two_units().units["second"]})
    one.apply(without, 1, 2)
    assert holds(host, without)
    assert host.sysctls["net/ipv4/ip_forward"] == "1"


def test_an_unknown_outcome_is_read_back() -> None:
    """When the answer to a commit is lost but the marker is there, the turn goes on; nothing is written twice."""
    host = FakeHost()
    element = next(item for item in FIRST.objects().values() if isinstance(item, NftElement))
    report = applier(host, lambda change: OutcomeUnknown("no answer") if change.new == element else None).apply(FIRST, 1, 1)
    assert report.outcome == "applied"
    assert host.commits == 1
    assert holds(host, FIRST)


def test_a_kernel_that_holds_something_else_is_read_again() -> None:
    """A batch that does not fit what the kernel holds is no failure: the kernel is read and the plan applied against that."""
    host = FakeHost()
    one = applier(host)
    one.apply(FIRST, 1, 1)
    gone = next(key for key, item in host.objects.items() if isinstance(item, NftElement) and item.set == "to_real")
    del host.objects[gone]
    other_ends = (
        peering()
        .ends[0]
        .__class__(
            cluster=Name("rome"), gateway=Name("gateway"), remap_pods=(Prefix("10.91.0.0/16"),), remap_external=(Prefix("10.92.0.0/16"),)
        ),
        peering().ends[1],
    )
    moved = settled_plans([*(item for item in two_clusters() if item.kind != "Peering"), *keys(), peering(ends=other_ends)])[ROME_GATEWAY]
    assert one.apply(moved, 1, 2).outcome == "applied"
    assert holds(host, moved)


def test_differences_name_object_and_unit() -> None:
    """What ``meshmark plan --diff`` shows: the key, its unit, what is wanted and found."""
    host = FakeHost()
    one = applier(host)
    one.apply(FIRST, 1, 1)
    assert one.differences(FIRST) == []
    del host.objects["rule 900 fwmark 0xff00/0xff00 iif - to -"]
    (difference,) = one.differences(FIRST)
    assert (difference.key, difference.unit, difference.found) == ("rule 900 fwmark 0xff00/0xff00 iif - to -", UNIT, "")


def test_change_of_nothing_is_no_change() -> None:
    """A change needs an object on one side."""
    with pytest.raises(ValueError, match="old or a new"):
        _ = Change(None, None).key


MORE = settled_plans([*two_clusters(3, 4), *keys(), node("worker-1", 1, addresses=(Address("172.18.0.99"),))])[ROME_GATEWAY]
STEPS = [change for change in changes(FIRST.objects(), MORE.objects()) if change.subject.layer != "nft"]


@pytest.mark.parametrize("failing", STEPS, ids=lambda change: change.key)
def test_a_change_that_fails_anywhere_is_undone(failing: Change) -> None:
    """Nodes and tunnels come and one node moves: whichever change fails, the kernel, the report and the marker say the old version."""
    host = FakeHost()
    fault: list[Exception | None] = [None]
    one = applier(host, lambda change: fault[0] if change.new == failing.new else None)
    one.apply(FIRST, 1, 1)
    fault[0] = Permanent("no")
    (unit,) = one.apply(MORE, 1, 2).units
    assert unit.held == FIRST.digests()[UNIT]
    assert holds(host, FIRST)
    assert host.marker is not None
    assert host.marker.units == {unit_tag(UNIT): FIRST.digests()[UNIT]}
    fault[0] = None
    assert one.apply(MORE, 1, 2).outcome == "applied"
    assert holds(host, MORE)


@pytest.mark.parametrize("failing", [item for item in FIRST.objects().values() if item.layer != "nft"], ids=lambda item: item.key)
def test_a_removal_that_fails_is_undone_and_reported(failing: object) -> None:
    """A unit that cannot go stays whole, is reported as held and unwanted, and goes with the next turn that can."""
    host = FakeHost(sysctls=dict.fromkeys(("net/ipv4/conf/all/rp_filter", "net/ipv4/conf/default/rp_filter"), "2"))
    fault: list[Exception | None] = [None]
    one = applier(host, lambda change: fault[0] if change.new is None and change.old == failing else None)
    one.apply(FIRST, 1, 1)
    fault[0] = Permanent("busy")
    (unit,) = one.apply(EMPTY, 1, 2).units
    assert (unit.held, unit.wanted, unit.outcome) == (FIRST.digests()[UNIT], "", "degraded")
    assert holds(host, FIRST)
    fault[0] = None
    one.apply(EMPTY, 1, 2)
    assert host.objects == {}


def test_a_repair_that_fails_is_not_believed() -> None:
    """After a repair that failed, the retry looks at the kernel again instead of calling the plan applied."""
    host = FakeHost()
    fault: list[Exception | None] = [None]
    one = applier(host, lambda change: fault[0] if isinstance(change.new, VxlanLink) else None)
    one.apply(FIRST, 1, 1)
    FakeKernel(host).write(Change(FIRST.objects()["link mo.worker-1"], None))
    fault[0] = Transient("later")
    assert one.repair(FIRST, 1, 1).outcome == "degraded"
    fault[0] = None
    assert one.apply(FIRST, 1, 1).outcome == "applied"
    assert holds(host, FIRST)


def test_one_table_that_cannot_be_listed_stops_one_unit() -> None:
    """When the kernel refuses to say how it would list a unit, that unit is reported, and the other is applied."""

    class Picky(FakeKernel):
        def reference(self, wanted):
            if any(item.layer == "nft" for item in wanted.values()):
                msg = "nft: syntax error"
                raise Permanent(msg)
            return super().reference(wanted)

    host = FakeHost()
    report = Applier(Picky(host), lambda: 0.0).apply(two_units(), 1, 1)
    assert {unit.unit: unit.outcome for unit in report.units} == {UNIT: "degraded", "second": "applied"}
    assert "rule 950 fwmark 0x0/0x0 iif - to -" in host.objects


def test_a_repair_goes_as_far_as_it_can() -> None:
    """Somebody's route is in the way of one of ours while the table is gone: the table comes back and stays, and the rest is told."""
    host = FakeHost()
    one = applier(host)
    one.apply(FIRST, 1, 1)
    route = FIRST.objects()["route 7002 10.200.1.0/24 0"]
    for key in [key for key, item in host.objects.items() if item.layer == "nft"]:
        del host.objects[key]
    del host.objects[route.key]
    host.foreign[route.key] = route
    report = one.repair(FIRST, 1, 1)
    assert report.outcome == "degraded"
    assert {key for key, item in FIRST.objects().items() if item.layer == "nft"} <= host.objects.keys()
    assert host.marker is not None
    assert host.marker.units == {unit_tag(UNIT): FIRST.digests()[UNIT]}
    del host.foreign[route.key]
    assert one.apply(FIRST, 1, 1).outcome == "applied"
    assert holds(host, FIRST)


@pytest.mark.parametrize("first,second", [(51840, 51841), (51841, 51840), (51840, 52000)])
def test_ports_move_without_meeting(first: int, second: int) -> None:
    """Tunnels change their ports in an order in which each port is free when it is wanted, both ways."""
    before, after = (settled_plans([*base(), peering(3, port=port), *keys()])[ROME_GATEWAY].objects() for port in (first, second))
    taken = {item.listen_port for item in before.values() if isinstance(item, WireguardLink)}
    for change in order(changes(before, after), before, after, ()).connect:
        if isinstance(change.old, WireguardLink) and isinstance(change.new, WireguardLink):
            taken.remove(change.old.listen_port)
            assert change.new.listen_port not in taken
            taken.add(change.new.listen_port)
    assert taken == {second, second + 1, second + 2}


def base() -> list[Topology]:
    return [item for item in two_clusters() if item.kind != "Peering"]


def test_a_half_made_replacement_is_put_back_and_not_believed() -> None:
    """A device that lost its port before the new one was refused is written as it was, and the kernel read before the next turn."""

    class HalfWay(FakeKernel):
        broken = False

        def write(self, change: Change) -> None:
            super().write(change)
            if self.broken and isinstance(change.new, WireguardLink) and change.new.listen_port == 52000:
                msg = "address already in use"
                raise Permanent(msg)

    host = FakeHost()
    kernel = HalfWay(host)
    one = Applier(kernel, lambda: 0.0)
    one.apply(FIRST, 1, 1)
    moved = settled_plans([*base(), peering(3, port=52000), *keys()])[ROME_GATEWAY]
    kernel.broken = True
    assert one.apply(moved, 1, 2).outcome == "degraded"
    assert holds(host, FIRST)
    del host.objects["link mt.1"]
    assert one.apply(FIRST, 1, 3).outcome == "applied"
    assert holds(host, FIRST)


@pytest.mark.parametrize("stuck", ["sysctl net/ipv4/ip_forward", "link mt.0", "table meshmark.rome.rome-milan"])
def test_what_nobody_plans_goes_as_far_as_it_can(stuck: str) -> None:
    """After a restart, one object that cannot be removed stays with its members, is reported, and brings nothing else back."""
    host = FakeHost()
    applier(host).apply(FIRST, 1, 1)
    blocked = applier(host, lambda change: Permanent("no") if change.key == stuck and change.new is None else None)
    report = blocked.apply(EMPTY, 1, 2)
    assert [(unit.unit, unit.outcome, unit.error) for unit in report.units] == [("-", "degraded", f"{stuck}: no")]
    left = {key for key in host.objects if not (stuck.startswith("table") and key.split()[1] == "meshmark.rome.rome-milan")}
    assert left <= {stuck}
    assert set(host.kept_sysctls) <= {stuck.removeprefix("sysctl ")}
    assert applier(host).apply(EMPTY, 1, 3).outcome == "applied"
    assert host.objects == {}


# Dead tunnels --------------------------------------------------------------------------------------------------------------------------

THREE = settled_plans([*two_clusters(3, 3), *keys()])[ROME_GATEWAY]
CLASS_ROUTES = [key for key, item in THREE.objects().items() if isinstance(item, Route) and len(item.hops) > 1]


def dead(*links: str) -> TunnelHealth:
    return TunnelHealth(withdrawn=tuple(DeadTunnel(link, 5.0, "no answer") for link in links))


def links_in(host: FakeHost, key: str) -> set[str]:
    item = host.objects[key]
    assert isinstance(item, Route)
    return {hop.link for hop in item.hops}


def test_a_dead_tunnel_leaves_the_class_routes_and_nothing_else() -> None:
    """One replacement per class route; link, own route, digests and marker stay; the report lists it; it comes back the same way."""
    host = FakeHost()
    one = applier(host)
    one.apply(THREE, 1, 1)
    before, marker = dict(host.objects), host.marker
    report = one.apply(THREE, 1, 1, tunnels=dead("mt.1"))
    assert CLASS_ROUTES
    assert report.operations == len(CLASS_ROUTES)
    assert {key for key in before.keys() | host.objects.keys() if before.get(key) != host.objects.get(key)} == set(CLASS_ROUTES)
    assert all(links_in(host, key) == {"mt.0", "mt.2"} for key in CLASS_ROUTES)
    assert (report.outcome, report.tunnels, report.units[0].held) == ("applied", dead("mt.1"), THREE.digests()[UNIT])
    assert host.marker == marker
    assert (one.withdrawn(), one.differences(THREE)) == (("mt.1",), [])
    assert one.apply(THREE, 1, 1).operations == len(CLASS_ROUTES)
    assert holds(host, THREE)
    assert one.withdrawn() == ()


def test_a_host_that_stands_says_what_is_withdrawn() -> None:
    """One that leaves a plan alone reports what it holds, and so the tunnels whose hops it does not."""
    one = applier(FakeHost())
    one.apply(THREE, 1, 1, tunnels=dead("mt.1"))
    assert one.stand(THREE, 1, 1, "another store").tunnels == dead("mt.1")


def test_a_plan_that_changes_keeps_what_is_withdrawn() -> None:
    """A tunnel more, and a cold start, with one withdrawn: its hop is in no route at any time."""
    host = FakeHost()
    seen: list[set[str]] = []

    def watch(change: Change) -> None:
        if change.key in CLASS_ROUTES and isinstance(change.new, Route):
            seen.append({hop.link for hop in change.new.hops})

    one = applier(host, watch)
    one.apply(THREE, 1, 1, tunnels=dead("mt.1"))
    four = settled_plans([*two_clusters(3, 4), *keys()])[ROME_GATEWAY]
    assert one.apply(four, 1, 2, tunnels=dead("mt.1")).outcome == "applied"
    assert all(links_in(host, key) == {"mt.0", "mt.2", "mt.3"} for key in CLASS_ROUTES)
    again = applier(host, watch)
    assert again.found_withdrawn(four) == {"mt.1"}
    assert again.apply(four, 1, 2, tunnels=dead("mt.1")).operations == 0
    assert all("mt.1" not in links for links in seen)


def test_a_repair_brings_the_route_back_without_the_dead_hop() -> None:
    """Drift beside a withdrawal is repaired, and the withdrawal stays."""
    host = FakeHost()
    one = applier(host)
    one.apply(THREE, 1, 1, tunnels=dead("mt.1"))
    host.objects[CLASS_ROUTES[0]] = THREE.objects()[CLASS_ROUTES[0]]
    (difference,) = one.differences(THREE)
    assert difference.key == CLASS_ROUTES[0]
    assert one.repair(THREE, 1, 1, tunnels=dead("mt.1")).operations == 1
    assert links_in(host, CLASS_ROUTES[0]) == {"mt.0", "mt.2"}


def test_a_withdrawal_that_fails_is_undone_and_made_again() -> None:
    """Its routes are what they were; the next turn looks at the kernel and makes it."""
    host = FakeHost()
    fault: list[Exception | None] = [None]
    one = applier(host, lambda change: fault[0] if change.key == CLASS_ROUTES[-1] else None)
    one.apply(THREE, 1, 1)
    fault[0] = Transient("later")
    assert one.apply(THREE, 1, 1, tunnels=dead("mt.1")).outcome == "degraded"
    assert holds(host, THREE)
    fault[0] = None
    assert one.apply(THREE, 1, 1, tunnels=dead("mt.1")).outcome == "applied"
    assert all(links_in(host, key) == {"mt.0", "mt.2"} for key in CLASS_ROUTES)


def test_an_undo_goes_back_to_the_routes_without_the_dead_hop() -> None:
    """A change that fails while a tunnel is withdrawn, and makes links anew on its way back, does not bring the hop along."""
    host = FakeHost()
    fault: list[Exception | None] = [None]
    one = applier(host, lambda change: fault[0] if change.new == MORE.objects()[LAST] else None)
    one.apply(THREE, 1, 1, tunnels=dead("mt.1"))
    fault[0] = Permanent("no")
    assert one.apply(MORE, 1, 2, tunnels=dead("mt.1")).outcome == "degraded"
    assert all(links_in(host, key) == {"mt.0", "mt.2"} for key in CLASS_ROUTES)
    assert one.differences(THREE) == []


LAST = next(key for key, item in reversed(MORE.objects().items()) if isinstance(item, Route) and item.hops)
