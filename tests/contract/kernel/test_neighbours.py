"""Forwarding entries and neighbours on links of ours: what any kernel promises of them."""

from __future__ import annotations

import msgspec
import pytest

from schemas.host_objects import FdbEntry, Neighbour, PlanObject, VxlanLink
from schemas.values import Address, Mac
from services.cli.render import object_lines
from services.kernel.transaction import Change, Listed
from services.runtime.errors import Conflict, Permanent, Waiting
from tests.contract.kernel.gateway_plan import overlay, tunnel
from tests.contract.kernel.machines import LinuxMachine, Machine, converge, differences

pytestmark = pytest.mark.any_kernel

OTHER = Mac("02:4d:03:00:00:77")


def _entries(plan: dict[str, PlanObject]) -> list[FdbEntry | Neighbour]:
    return [item for item in plan.values() if isinstance(item, FdbEntry | Neighbour)]


def test_entries_come_change_in_place_and_go(machine: Machine, plan: dict[str, PlanObject]) -> None:
    """Each is written, read as planned, led elsewhere without a gap, and taken away twice."""
    converge(machine.kernel, plan)
    assert differences(machine.kernel, plan) == []
    changed = dict(plan)
    for item in _entries(plan):
        field = {"remote": Address("127.0.0.7")} if isinstance(item, FdbEntry) else {"mac": OTHER}
        changed[item.key] = msgspec.structs.replace(item, **field)
        machine.kernel.write(Change(item, changed[item.key]))
    assert differences(machine.kernel, changed) == []
    for item in _entries(plan):
        machine.kernel.write(Change(changed[item.key], None))
        machine.kernel.write(Change(changed[item.key], None))
        del changed[item.key]
    assert differences(machine.kernel, changed) == []


def test_entries_are_found_after_a_restart(machine: Machine, plan: dict[str, PlanObject]) -> None:
    """They are ours by their link alone: without a plan they are listed, and one that nobody wants is to go."""
    converge(machine.kernel, plan)
    found = machine.restart().read({}, {"neighbour"})
    assert found == {item.key: item for item in _entries(plan)}


@pytest.mark.parametrize(
    "item",
    [
        FdbEntry("mo.gone", OTHER, Address("127.0.0.2")),
        Neighbour("mo.gone", Address("10.80.3.9"), OTHER),
    ],
    ids=["fdb", "neighbour"],
)
def test_an_entry_waits_for_its_link(machine: Machine, item: FdbEntry | Neighbour) -> None:
    """The error names the link; taking the entry away is done already."""
    with pytest.raises(Waiting) as caught:
        machine.kernel.write(Change(None, item))
    assert caught.value.waiting_for == "link mo.gone"
    machine.kernel.write(Change(item, None))


def test_an_entry_on_a_link_of_others_is_a_conflict(machine: Machine) -> None:
    """Nothing is written there, and nothing is listed."""
    machine.add_foreign()
    for item in (FdbEntry("foreign0", OTHER, Address("127.0.0.2")), Neighbour("foreign0", Address("10.80.3.9"), OTHER)):
        with pytest.raises(Conflict):
            machine.kernel.write(Change(None, item))
    assert dict(machine.kernel.read({})) == {}


def test_a_forwarding_entry_is_for_one_address_of_a_vxlan_device(machine: Machine, plan: dict[str, PlanObject]) -> None:
    """An entry for all or for a group would be added to, not replaced; a WireGuard device has none."""
    converge(machine.kernel, plan)
    mesh, far = overlay(machine.tag, 3), Address("127.0.0.2")
    for item in (
        FdbEntry(mesh, Mac("00:00:00:00:00:00"), far),
        FdbEntry(mesh, Mac("33:33:00:00:00:01"), far),
        FdbEntry(tunnel(machine.tag), OTHER, far),
    ):
        with pytest.raises(Permanent):
            machine.kernel.write(Change(None, item))
    assert differences(machine.kernel, plan) == []


def test_a_link_takes_its_entries_along(machine: Machine, plan: dict[str, PlanObject]) -> None:
    """One that is made again, since it shall have one far end, has none of them."""
    converge(machine.kernel, plan)
    link = plan[f"link {overlay(machine.tag, 3)}"]
    assert isinstance(link, VxlanLink)
    machine.kernel.write(Change(link, msgspec.structs.replace(link, remote=Address("127.0.0.4"))))
    assert dict(machine.kernel.read({}, {"neighbour"})) == {}
    converge(machine.kernel, plan)
    assert differences(machine.kernel, plan) == []


def test_another_mac_costs_a_link_its_neighbours(machine: Machine, plan: dict[str, PlanObject]) -> None:
    """The kernel forgets who is where on the link, also what is permanent; forwarding entries stay."""
    converge(machine.kernel, plan)
    link = plan[f"link {overlay(machine.tag, 3)}"]
    assert isinstance(link, VxlanLink)
    changed = {**plan, link.key: msgspec.structs.replace(link, mac=OTHER)}
    machine.kernel.write(Change(link, changed[link.key]))
    assert {change.key for change in differences(machine.kernel, changed)} == {
        item.key for item in _entries(plan) if isinstance(item, Neighbour)
    }


def test_entries_by_other_hands_are_differences(machine: Machine, plan: dict[str, PlanObject]) -> None:
    """One that is led elsewhere, one that is new, one that ages and one that has two far ends: all of them are put right."""
    converge(machine.kernel, plan)
    link = overlay(machine.tag, 3)
    changed = {
        f"fdb {link} 02:4d:03:00:00:02": FdbEntry(link, Mac("02:4d:03:00:00:02"), Address("127.0.0.66")),
        f"fdb {link} 02:4d:03:00:00:03": Listed("neighbour", f"fdb {link} 02:4d:03:00:00:03", "ages"),
        f"fdb {link} 00:00:00:00:00:00": Listed("neighbour", f"fdb {link} 00:00:00:00:00:00", "more than one"),
        f"neighbour {link} 10.80.3.66": Neighbour(link, Address("10.80.3.66"), OTHER),
    }
    machine.tamper(
        "bridge fdb replace 02:4d:03:00:00:02 dev {o}3 dst 127.0.0.66 self permanent;"
        "bridge fdb replace 02:4d:03:00:00:03 dev {o}3 dst 127.0.0.3 self dynamic;"
        "bridge fdb append 00:00:00:00:00:00 dev {o}3 dst 127.0.0.5 self permanent;"
        "bridge fdb append 00:00:00:00:00:00 dev {o}3 dst 127.0.0.6 self permanent;"
        "ip neigh add 10.80.3.66 lladdr 02:4d:03:00:00:77 dev {o}3 nud permanent",
        lambda host, _tag: host.objects.update(changed),
    )
    assert {change.key for change in differences(machine.kernel, plan)} == changed.keys()
    converge(machine.kernel, plan)
    assert differences(machine.kernel, plan) == []


@pytest.mark.privileged
@pytest.mark.parametrize("machine", ["linux"], indirect=True)
def test_what_is_printed_makes_the_same_in_a_kernel(machine: LinuxMachine, plan: dict[str, PlanObject]) -> None:
    """The lines that a person is shown for a link and its entries, run by hand, make exactly the plan but for whose the link is."""
    link = overlay(machine.tag, 3)
    objects = {key: item for key, item in plan.items() if getattr(item, "link", getattr(item, "name", "")) == link}
    machine.run("; ".join(line for item in objects.values() for line in object_lines(item)))
    machine.run(f"ip link set {link} alias meshmark")
    assert differences(machine.kernel, objects) == []
