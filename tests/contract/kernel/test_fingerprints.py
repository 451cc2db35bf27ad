"""What any kernel promises about fingerprints: nothing that differs has the one of before, and what nobody touches keeps its own."""

from __future__ import annotations

import pytest

from schemas.host_objects import Layer, NftElement, PlanObject, PolicyRule, Route
from services.kernel.transaction import Change, Marker
from tests.contract.kernel import test_drift as drift
from tests.contract.kernel import test_routing as routing
from tests.contract.kernel.machines import LinuxMachine, Machine, converge, differences

LAYERS: tuple[Layer, ...] = ("nft", "rule", "route")


def prints(machine: Machine) -> dict[Layer, bytes]:
    found = {layer: machine.kernel.fingerprint(layer) for layer in LAYERS}
    assert all(found.values())
    return found  # type: ignore[return-value]


def settled(machine: Machine, plan: dict[str, PlanObject]) -> dict[Layer, bytes]:
    """The fingerprints of a machine that holds the plan, once it has been read."""
    converge(machine.kernel, plan, Marker(1, 1, {}))
    assert differences(machine.kernel, plan) == []
    found = prints(machine)
    assert {layer: machine.kernel.seen(layer) for layer in LAYERS} == found
    assert differences(machine.kernel, plan) == []
    assert {layer: machine.kernel.seen(layer) for layer in LAYERS} == prints(machine) == found
    return found


@pytest.mark.parametrize("name", drift.TAMPERINGS)
def test_no_change_by_hand_has_the_fingerprint_of_before(machine: Machine, plan: dict[str, PlanObject], name: str) -> None:
    """In each layer in which something then differs."""
    tampering = drift.TAMPERINGS[name]
    before = settled(machine, plan)
    machine.tamper(tampering.commands, tampering.fake)
    after = prints(machine)
    differing = {change.subject.layer for change in differences(machine.kernel, plan)} & set(LAYERS)
    assert differing <= {layer for layer in LAYERS if before[layer] != after[layer]}


@pytest.mark.parametrize("name", routing.TAMPERINGS)
def test_no_change_of_routing_by_hand_has_the_fingerprint_of_before(machine: Machine, name: str) -> None:
    """With all that a person may say of routes and rules."""
    plan = routing.routing_plan(machine.tag)
    tampering = routing.TAMPERINGS[name]
    before = settled(machine, plan)
    machine.tamper(tampering.commands, tampering.fake)
    after = prints(machine)
    [change] = differences(machine.kernel, plan)
    assert change.subject.layer in ("rule", "route")
    assert before[change.subject.layer] != after[change.subject.layer]


def test_each_layer_s_own_changes_alone_change_its_fingerprint(machine: Machine, plan: dict[str, PlanObject]) -> None:
    """And other layers have none."""
    before = settled(machine, plan)
    route = Route(7002, plan[drift.ROUTE].prefix, "throw", 77)  # type: ignore[union-attr]
    element = next(item for item in plan.values() if isinstance(item, NftElement))
    for layer, act in (
        ("route", lambda: machine.kernel.write(Change(None, route))),
        ("rule", lambda: machine.kernel.write(Change(None, PolicyRule(977, 7002)))),
        ("nft", lambda: machine.kernel.commit([Change(element, None)], Marker(1, 2, {}))),
        ("nft", lambda: machine.kernel.commit([], Marker(1, 3, {}))),
    ):
        act()
        after = prints(machine)
        assert [name for name in LAYERS if before[name] != after[name]] == [layer]
        before = after
    assert machine.kernel.marker() == Marker(1, 3, {})
    assert machine.kernel.fingerprint("link") is None


@pytest.mark.privileged
@pytest.mark.parametrize("machine", ["linux"], indirect=True)
def test_a_link_that_gets_another_name_changes_the_fingerprint_of_routes(machine: LinuxMachine, plan: dict[str, PlanObject]) -> None:
    """Though the routes' own bytes, which name it by number, stay as they are."""
    before = settled(machine, plan)
    machine.ip("link", "set", f"mo.{machine.tag}1", "name", f"mo.{machine.tag}z")
    if f"link mo.{machine.tag}z" not in machine.kernel.read({}, {"link"}):
        pytest.skip("this kernel renames no link that is up")
    assert prints(machine)["route"] != before["route"]
