"""Turns on the kernel in memory: order, all or nothing by unit, undo, cold start."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from schemas.host_objects import LinkAddress, NextHop, PolicyRule, Route, VxlanLink, WireguardLink
from schemas.plan import Entry, HostPlan, unit_tag
from schemas.topology import Topology
from schemas.values import Address, Mac, Name, Prefix
from services.applier.core import Applier
from services.applier.steps import order
from services.kernel.fake import FakeHost, FakeKernel
from services.kernel.transaction import Change, Listed, changes, repairs
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
    by_hand = LinkAddress("mo.worker-1", Address("192.0.2.1"), 32)
    host.objects[by_hand.key] = by_hand
    moved = renumbered(FIRST)
    one.apply(moved, 1, 2)
    assert by_hand.key not in host.objects, "the link has never gone"
    assert holds(host, moved)
    on_link = [key for key, item in host.objects.items() if key.startswith("address mo.worker-1 ") or leads_by(item, "mo.worker-1")]
    assert {key.partition(" ")[0] for key in on_link} == {"address", "route"}


def renumbered(plan: HostPlan) -> HostPlan:
    """The same plan with other numbers of overlays, which no link changes in place."""
    units = {
        name: {
            key: replace(entry, object=replace(entry.object, vni=entry.object.vni + 1)) if isinstance(entry.object, VxlanLink) else entry
            for key, entry in unit.items()
        }
        for name, unit in plan.units.items()
    }
    return HostPlan(plan.cluster, plan.host, units)


def leads_by(item: object, link: str) -> bool:
    return isinstance(item, Route) and any(hop.link == link for hop in item.hops)


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


def test_a_removed_shared_object_stays_for_the_other_unit() -> None:
    """An object leaves with the last unit that holds it."""
    host = FakeHost()
    one = applier(host)
    one.apply(two_units(), 1, 1)
    without = HostPlan(Name("rome"), Name("gateway"), {"second": two_units().units["second"]})
    one.apply(without, 1, 2)
    assert holds(host, without)
    assert host.sysctls["net/ipv4/ip_forward"] == "1"


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


@pytest.mark.parametrize("back", [False, True])
def test_a_link_goes_before_one_that_takes_its_place(back: bool) -> None:
    """Of another name with the same far end and number, or the same port: the kernel has room for one. Nothing else goes early."""
    far, mac = Address("172.18.0.11"), Mac("02:00:00:00:00:01")
    vxlans = [VxlanLink(name, 7, Address("172.18.0.10"), far, mac, 1450) for name in ("mo.new", "liqo.old")]
    tunnels = [WireguardLink(name, 51840, 1420) for name in ("mt.0", "wg.old")]
    other = VxlanLink("mo.other", 8, Address("172.18.0.10"), far, mac, 1450)
    new, old = ({item.key: item for item in pair} for pair in zip(vxlans, tunnels, strict=True))
    before, after = (new, old) if back else ({**old, other.key: other}, new)
    steps = order(changes(before, after), before, after, ())
    made = [(change.key, change.verb) for change in steps.connect]
    assert len(made) == 4
    for pair in (vxlans, tunnels):
        going, coming = (item.key for item in (pair if back else pair[::-1]))
        assert made.index((going, "remove")) < made.index((coming, "add"))
    assert [change.key for change in steps.remove] == ([] if back else [other.key])


def test_an_address_goes_before_routes_that_have_it_as_their_source() -> None:
    """Those by its link, be they new or there already; Linux 6.1 takes it from them as it goes. Another address goes last."""
    own, other = Address("2001:db8:18::11"), Address("2001:db8:18::12")
    old = [LinkAddress("me.0", own, 128), LinkAddress("me.0", other, 128), LinkAddress("me.1", own, 128)]
    stays, comes = (Route(10, Prefix(f"fd00:{number}::/48"), hops=(NextHop("me.0"),), source=own) for number in (1, 2))
    before = {item.key: item for item in (*old, stays)}
    after = {item.key: item for item in (stays, comes)}
    steps = order(changes(before, after), before, after, ())
    first, *others = steps.connect
    assert (first.key, first.verb) == (old[0].key, "remove")
    assert {change.key for change in others} == {stays.key, comes.key}
    assert {change.key for change in steps.remove} == {old[1].key, old[2].key}


def test_fewer_tunnels_on_other_ports_do_not_meet() -> None:
    """The last tunnel goes before the one before it moves to its port."""
    before, after = (settled_plans([*base(), item, *keys()])[ROME_GATEWAY].objects() for item in (peering(3), peering(2, port=51841)))
    steps = order(changes(before, after), before, after, ())
    links = [change.key for change in steps.connect if change.key.startswith("link mt.")]
    assert links == ["link mt.2", "link mt.1", "link mt.0"]
