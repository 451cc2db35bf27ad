"""Turns in which something fails: what is undone, what goes on, what is believed afterwards."""

from __future__ import annotations

import pytest

from schemas.host_objects import NftElement, Route, VxlanLink, WireguardLink, WireguardPeer
from schemas.plan import Entry, HostPlan, unit_tag
from schemas.values import Key, Name, Prefix
from services.applier.core import Applier
from services.kernel.curve25519 import public_key
from services.kernel.fake import FakeHost, FakeKernel
from services.kernel.transaction import Change, changes
from services.runtime.errors import Conflict, OutcomeUnknown, Permanent, Transient, Waiting
from tests.topologies import ROME_GATEWAY, keys, peering, settled_plans, two_clusters
from tests.unit.applier.test_turns import EMPTY, FIRST, MORE, UNIT, applier, base, holds, two_units


@pytest.mark.parametrize(
    "error", [Permanent("no"), Transient("later"), Waiting("no link", "link x"), Conflict("taken")], ids=lambda e: type(e).__name__
)
@pytest.mark.parametrize("failing", FIRST.objects().values(), ids=lambda item: item.key)
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
    left = {key for key, item in host.objects.items() if not (stuck.startswith("table") and item.layer == "nft")}
    assert left <= {stuck}
    assert set(host.kept_sysctls) <= {stuck.removeprefix("sysctl ")}
    assert applier(host).apply(EMPTY, 1, 3).outcome == "applied"
    assert host.objects == {}


# Dead tunnels --------------------------------------------------------------------------------------------------------------------------


def test_a_peer_that_fails_takes_its_unit_back_and_no_other() -> None:
    """Peers of two units go to their link together: the unit of the wrong one is undone, the other's peers are there."""
    link = WireguardLink("mt.node", 51871, 1420)
    peers = [WireguardPeer(link.name, Key(public_key(bytes([n]) * 32)), None, (Prefix(f"10.{n}.0.0/16"),)) for n in (1, 2, 3, 4)]
    units = {"a": [link, *peers[:2]], "b": [link, *peers[2:]]}
    plan = HostPlan(FIRST.cluster, FIRST.host, {name: {item.key: Entry(item, ()) for item in unit} for name, unit in units.items()})
    host = FakeHost()
    one = applier(host, lambda change: Permanent("no") if change.key == peers[3].key and change.new is not None else None)
    report = one.apply(plan, 1, 1)
    assert {unit.unit: unit.outcome for unit in report.units} == {"a": "applied", "b": "degraded"}
    assert report.units[1].error == f"{peers[3].key}: no"
    assert {key for key in host.objects if key.startswith("peer ")} == {peer.key for peer in peers[:2]}
    assert applier(host).apply(plan, 1, 1).outcome == "applied"
    assert holds(host, plan)


def test_of_many_routes_written_together_the_faulty_unit_s_go() -> None:
    """A refused route in the midst of two units' routes: its unit's are undone, before and after it, and the other unit's stay."""
    host = FakeHost()
    routes = {
        unit: [Route(8000, Prefix(f"10.99.{number}.0/24"), "throw") for number in numbers]
        for unit, numbers in (("a", range(0, 40, 2)), ("b", range(1, 41, 2)))
    }
    units = {unit: {item.key: Entry(item, ("RouteConfiguration/rome/x",)) for item in items} for unit, items in routes.items()}
    plan = HostPlan(FIRST.cluster, FIRST.host, units)
    refused = routes["b"][7:9]
    one = applier(host, lambda change: Permanent("no") if change.new in refused else None)
    report = one.apply(plan, 1, 1)
    assert {unit.unit: (unit.outcome, unit.error) for unit in report.units} == {
        "a": ("applied", ""),
        "b": ("degraded", f"{refused[0].key}: no"),
    }
    assert set(host.objects.values()) == set(routes["a"])
