"""A node's unit of its cluster's mesh on kernels: it loads, lists as its reference, changes into every other form, and leaves nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from schemas import codec
from schemas.host_objects import GeneveLink
from schemas.plan import Entry, HostPlan
from schemas.topology import WireguardSettings
from schemas.values import Name
from services.applier.core import Applier
from services.kernel.transaction import repairs
from services.planner.state import HostId
from tests.contract.kernel.machines import FakeMachine, LinuxMachine, Machine
from tests.topologies import encrypting, settled_plans

FORMS: dict[str, dict[str, object]] = {
    "native": {},
    "enforced": {"strict": "enforce"},
    "nodes": {"strict": "enforce", "wireguard": WireguardSettings(nodes=True, keepalive_seconds=25)},
    "overlay": {"routing": "overlay", "strict": "enforce"},
    "overlay and nodes": {"routing": "overlay", "strict": "audit", "wireguard": WireguardSettings(nodes=True, port=51900)},
    "geneve": {"routing": "overlay", "overlay": "geneve", "strict": "off"},
    "overlay in clear": {"routing": "overlay", "encryption": "none", "strict": "off"},
    "nothing": {"encryption": "none", "strict": "off"},
}


@pytest.fixture(params=["fake", pytest.param("linux", marks=pytest.mark.privileged)])
def machine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    made = FakeMachine() if request.param == "fake" else LinuxMachine(tmp_path_factory.mktemp("state"))
    try:
        yield made
    finally:
        made.close()


def plan(machine: Machine, name: str = "worker-1", **changes: object) -> HostPlan:
    """The node's plan, with a device name that no other run has: WireGuard's sockets are in one folder for all namespaces."""
    units = {
        unit: {entry.key: entry for entry in (_renamed(machine, entry) for entry in entries.values())}
        for unit, entries in settled_plans(encrypting(**changes))[HostId("rome", name)].units.items()
    }
    return HostPlan(Name("rome"), Name(name), units)


def _renamed(machine: Machine, entry: Entry) -> Entry:
    own = codec.encode(entry).replace(b'"me.0"', f'"me.{machine.tag}"'.encode())
    return codec.decode(own.replace(b"/me.0/", f"/me.{machine.tag}/".encode()), Entry)


def differences(machine: Machine, wanted: HostPlan) -> list[str]:
    objects = wanted.objects()
    found = repairs(objects, machine.kernel.reference(objects), machine.kernel.read(objects))
    return [f"{change.key}: {change.old} for {change.new}" for change in found]


@pytest.mark.parametrize("form", FORMS)
def test_each_form_loads_and_goes(machine: Machine, form: str) -> None:
    """What the kernel holds after one turn is what was planned, and after the next one, nothing."""
    wanted = plan(machine, **FORMS[form])
    if any(isinstance(item, GeneveLink) for item in wanted.objects().values()) and not machine.has_geneve:
        pytest.skip("this kernel has no Geneve")
    applier = Applier(machine.kernel, lambda: 0.0)
    report = applier.apply(wanted, 1, 1)
    assert {unit.unit: (unit.outcome, unit.error) for unit in report.units} == dict.fromkeys(wanted.units, ("applied", ""))
    assert differences(machine, wanted) == []
    applier.apply(HostPlan(wanted.cluster, wanted.host, {}), 1, 2)
    assert machine.kernel.read({}).keys() == set()


def test_a_live_node_changes_from_any_form_into_the_next(machine: Machine) -> None:
    """Modes are switched, peers, keys and pods come and go: each by a difference, and nothing is left of the form before."""
    applier = Applier(machine.kernel, lambda: 0.0)
    forms = [fields for form, fields in FORMS.items() if form != "geneve" or machine.has_geneve]
    plans = [plan(machine, **fields) for fields in (*forms, *reversed(forms), *forms[::2], *forms[1::2])]
    plans += [plan(machine, name) for name in ("worker-2", "worker-3", "worker-1")]
    for generation, wanted in enumerate(plans, 1):
        report = applier.apply(wanted, 1, generation)
        assert [unit.error for unit in report.units if unit.outcome != "applied"] == []
        assert differences(machine, wanted) == []
        assert machine.kernel.read({}).keys() <= wanted.objects().keys()
