"""What any kernel promises about Geneve links; and what it says where it has none."""

from __future__ import annotations

import msgspec
import pytest

from schemas.host_objects import GeneveLink, LinkAddress, NextHop, PlanObject, Route, VxlanLink
from schemas.values import Address, Mac, Prefix
from services.kernel.transaction import Change
from services.runtime.errors import Conflict, Permanent
from tests.contract.kernel.gateway_plan import overlay
from tests.contract.kernel.machines import FakeMachine, Machine, converge, differences
from tests.hosts import NO_GENEVE

MAC = Mac("02:4d:01:00:00:07")


def geneve(machine: Machine, number: int = 1) -> GeneveLink:
    return GeneveLink(overlay(machine.tag, number), 0x20000 + number, Address(f"127.0.0.{number + 1}"), MAC, 1450)


def vxlan(machine: Machine) -> VxlanLink:
    """A link of the same name and ends, of the other kind."""
    link = geneve(machine)
    return VxlanLink(link.name, link.vni, Address("127.0.0.1"), link.remote, link.mac, link.mtu)


@pytest.fixture
def plan(machine: Machine) -> dict[str, PlanObject]:
    """Two Geneve links with what lies on them; skipped where the kernel has no Geneve."""
    if not machine.has_geneve:
        pytest.skip(NO_GENEVE)
    items: list[PlanObject] = []
    for number in (1, 2):
        link = geneve(machine, number)
        items += [link, LinkAddress(link.name, Address("10.80.2.1"), 32)]
        items.append(Route(7002, Prefix(f"10.200.{number}.0/24"), hops=(NextHop(link.name, Address("10.80.2.11"), onlink=True),)))
    return {item.key: item for item in items}


def test_geneve_links_are_held_as_planned_found_again_and_removed(machine: Machine, plan: dict[str, PlanObject]) -> None:
    """What was applied reads back, also for a process that starts anew, and goes without a trace."""
    converge(machine.kernel, plan)
    assert differences(machine.kernel, plan) == []
    assert differences(machine.restart(), plan) == []
    converge(machine.kernel, {})
    assert dict(machine.kernel.read({})) == {}


@pytest.mark.parametrize("field", [{"mtu": 1300}, {"mac": Mac("02:00:00:00:00:77")}, {"remote": Address("127.0.0.7")}])
def test_a_geneve_link_changes_in_place(machine: Machine, plan: dict[str, PlanObject], field: dict[str, object]) -> None:
    """MTU, MAC and far end change without loss of the link's addresses and routes."""
    converge(machine.kernel, plan)
    old = geneve(machine)
    changed = {**plan, old.key: msgspec.structs.replace(old, **field)}
    machine.kernel.write(Change(old, changed[old.key]))
    assert differences(machine.kernel, changed) == []


@pytest.mark.parametrize("field", [{"vni": 77}, {"port": 6082}, {"remote": Address("fd00:18::2")}])
def test_a_geneve_link_that_is_made_again_loses_what_is_on_it(
    machine: Machine, plan: dict[str, PlanObject], field: dict[str, object]
) -> None:
    """Number, port and the far end's family need a new device: the caller writes addresses and routes again, and nothing else."""
    converge(machine.kernel, plan)
    old = geneve(machine)
    changed = {**plan, old.key: msgspec.structs.replace(old, **field)}
    machine.kernel.write(Change(old, changed[old.key]))
    assert {item.subject.layer for item in differences(machine.kernel, changed)} == {"address", "route"}
    converge(machine.kernel, changed)
    assert differences(machine.kernel, changed) == []


@pytest.mark.parametrize("back", [False, True], ids=["vxlan to geneve", "geneve to vxlan"])
def test_a_link_of_the_other_kind_takes_its_place(machine: Machine, plan: dict[str, PlanObject], back: bool) -> None:
    """A link of ours whose kind changes is made again under its name."""
    before, after = (geneve(machine), vxlan(machine)) if back else (vxlan(machine), geneve(machine))
    converge(machine.kernel, {**plan, before.key: before})
    changed = {**plan, after.key: after}
    machine.kernel.write(Change(before, after))
    assert {item.subject.layer for item in differences(machine.kernel, changed)} == {"address", "route"}
    converge(machine.kernel, changed)
    assert differences(machine.kernel, changed) == []


def test_two_geneve_links_cannot_have_the_same_far_end_and_number(machine: Machine, plan: dict[str, PlanObject]) -> None:
    """The kernel would not know which of them a packet is for: the second is a conflict, and the first stays."""
    converge(machine.kernel, plan)
    twin = msgspec.structs.replace(geneve(machine), name=overlay(machine.tag, 3))
    with pytest.raises(Conflict):
        machine.kernel.write(Change(None, twin))
    assert differences(machine.kernel, plan) == []


def test_somebody_elses_link_is_a_conflict_and_stays(machine: Machine, plan: dict[str, PlanObject]) -> None:
    """A link in the way is not replaced by a Geneve link either."""
    machine.add_foreign()
    before = machine.foreign_state()
    with pytest.raises(Conflict):
        machine.kernel.write(Change(None, msgspec.structs.replace(geneve(machine), name="foreign0")))
    assert machine.foreign_state() == before


def test_a_kernel_without_geneve_says_so(machine: Machine) -> None:
    """Trying again is of no use: the error is permanent, names the link and says what to do."""
    if isinstance(machine, FakeMachine):
        machine.host.geneve = False
    elif machine.has_geneve:
        pytest.skip("this kernel has geneve")
    with pytest.raises(Permanent, match=rf"link {overlay(machine.tag)}: this host's kernel has no geneve; load the module geneve"):
        machine.kernel.write(Change(None, geneve(machine)))
    assert dict(machine.kernel.read({})) == {}
