"""What any kernel promises about whole states: convergence, idempotence, removal, restart, what is not ours."""

from __future__ import annotations

import msgspec
import pytest

from schemas.host_objects import PlanObject, WireguardLink
from schemas.plan import unit_tag
from services.kernel.transaction import Change, Marker, changes
from tests.contract.kernel.gateway_plan import tunnel
from tests.contract.kernel.machines import Machine, converge, differences, make

pytestmark = pytest.mark.any_kernel

MARKER = Marker(3, 17, {unit_tag("peering/rome/rome-milan"): "ab" * 16, unit_tag("other"): "cd" * 16})


def test_a_plan_applied_reads_back_as_its_reference(machine: Machine, plan: dict[str, PlanObject]) -> None:
    """Every object of every layer is held as the kernel itself says that it would hold it."""
    converge(machine.kernel, plan)
    assert dict(machine.kernel.read(plan)) == dict(machine.kernel.reference(plan))


def test_reference_has_the_keys_of_the_plan(machine: Machine, plan: dict[str, PlanObject]) -> None:
    """A normal form never renames an object."""
    assert machine.kernel.reference(plan).keys() == plan.keys()


def test_writing_twice_changes_nothing(machine: Machine, plan: dict[str, PlanObject]) -> None:
    """The same changes again, as after a lost answer, succeed and leave the same state, outside of nft batches."""
    added = changes({}, plan)
    make(machine.kernel, added)
    before = dict(machine.kernel.read(plan))
    make(machine.kernel, [change for change in added if change.subject.layer != "nft"])
    assert dict(machine.kernel.read(plan)) == before


def test_removing_twice_succeeds(machine: Machine, plan: dict[str, PlanObject]) -> None:
    """What is not there any more is removed without an error, outside of nft batches."""
    converge(machine.kernel, plan)
    removed = [Change(item, None) for item in plan.values() if item.layer != "nft"]
    make(machine.kernel, removed)
    make(machine.kernel, removed)
    assert all(item.layer == "nft" for item in machine.kernel.read({}).values())


def test_a_restarted_process_finds_everything_the_same(machine: Machine, plan: dict[str, PlanObject]) -> None:
    """Ownership is read from the kernel: a new object over the same host has nothing to repair and the same key."""
    converge(machine.kernel, plan, MARKER)
    key = machine.kernel.public_key()
    kernel = machine.restart()
    assert differences(kernel, plan) == []
    assert kernel.marker() == MARKER
    assert kernel.public_key() == key


def test_removal_leaves_nothing_of_ours_and_all_of_theirs(machine: Machine, plan: dict[str, PlanObject]) -> None:
    """Foreign tables, routes, rules, links, addresses and sysctls are the same to the byte after a plan has come and gone."""
    machine.add_foreign()
    before = machine.foreign_state()
    assert dict(machine.kernel.read({})) == {}
    converge(machine.kernel, plan, MARKER)
    converge(machine.kernel, {})
    assert dict(machine.kernel.read({})) == {}
    assert machine.kernel.marker() is None
    assert machine.foreign_state() == before


def test_sysctls_are_given_back(machine: Machine, plan: dict[str, PlanObject]) -> None:
    """A changed sysctl has its old value again after removal, also by a process that did not change it."""
    assert machine.sysctl("net/ipv4/ip_forward") == "0"
    converge(machine.kernel, plan)
    assert machine.sysctl("net/ipv4/ip_forward") == "1"
    converge(machine.restart(), {})
    assert machine.sysctl("net/ipv4/ip_forward") == "0"


@pytest.mark.parametrize("layer", ["sysctl", "link", "address", "wireguard", "nft", "rule", "route"])
def test_only_the_asked_layer_is_read(machine: Machine, plan: dict[str, PlanObject], layer: str) -> None:
    """A read of one layer holds that layer, whole, and nothing else."""
    converge(machine.kernel, plan)
    found = machine.kernel.read(plan, [layer])
    assert found.keys() == {key for key, item in plan.items() if item.layer == layer}


def test_marker_is_written_with_its_batch_and_removed(machine: Machine) -> None:
    """The marker survives on its own, is replaced whole, and goes when asked to."""
    assert machine.kernel.marker() is None
    machine.kernel.commit([], MARKER)
    assert machine.kernel.marker() == MARKER
    machine.kernel.commit([], Marker(3, 18, {}))
    assert machine.kernel.marker() == Marker(3, 18, {})
    machine.kernel.commit([], None)
    assert machine.kernel.marker() is None
    assert dict(machine.kernel.read({})) == {}


def test_public_key_the_planner_knows_is_no_state(machine: Machine, plan: dict[str, PlanObject]) -> None:
    """A device is the same whether or not the plan carries the host's own public key."""
    converge(machine.kernel, plan)
    known = {
        key: msgspec.structs.replace(item, public_key=machine.kernel.public_key()) if isinstance(item, WireguardLink) else item
        for key, item in plan.items()
    }
    assert differences(machine.kernel, known) == []


def test_capabilities_name_the_kernel(machine: Machine) -> None:
    """A report can say what the host runs on."""
    found = machine.kernel.capabilities()
    assert found.kernel
    assert found.nftables
    assert found.wireguard in ("kernel", "userspace", "none")


def test_no_handshake_without_a_far_end(machine: Machine, plan: dict[str, PlanObject]) -> None:
    """A tunnel that nobody answered has never shaken hands, and no more has a link that is not there or is none of WireGuard's."""
    links = (tunnel(machine.tag), f"mo.{machine.tag}1", "lo", "mt.gone")
    converge(machine.kernel, plan)
    assert [peer for link in links for peer in machine.kernel.peers(link) if peer.handshake_s] == []


def test_no_flows_on_an_idle_host(machine: Machine) -> None:
    """Connection tracking of an idle namespace is empty, and dropping nothing drops nothing."""
    assert list(machine.kernel.flows()) == []
    assert machine.kernel.drop_flows([]) == 0
