"""A node's unit of its cluster's mesh on kernels: it loads, lists as its reference, changes into every other form, and leaves nothing."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, permutations

import pytest

from schemas import codec
from schemas.host_objects import GeneveLink, LinkAddress
from schemas.plan import Entry, HostPlan
from schemas.topology import EgressPolicy, WireguardSettings
from schemas.values import Address, Name, Prefix
from services.applier.core import Applier
from services.kernel.transaction import repairs
from services.planner.state import HostId
from tests.contract.kernel.machines import FakeMachine, LinuxMachine, Machine
from tests.hosts import NO_GENEVE
from tests.topologies import encrypting, settled_plans

FORMS: dict[str, dict[str, object]] = {
    "native": {},
    "enforced": {"strict": "enforce"},
    "nodes": {"strict": "enforce", "wireguard": WireguardSettings(nodes=True, keepalive_seconds=25)},
    "overlay": {"routing": "overlay", "strict": "enforce"},
    "overlay and nodes": {"routing": "overlay", "strict": "audit", "wireguard": WireguardSettings(nodes=True, port=51900)},
    "geneve": {"routing": "overlay", "overlay": "geneve", "strict": "off"},
    "overlay in clear": {"routing": "overlay", "encryption": "none", "strict": "off"},
    "egress": {"egress": True},
    "egress by an overlay": {"egress": True, "routing": "overlay", "strict": "off"},
    "egress by geneve": {"egress": True, "overlay": "geneve"},
    "egress in clear": {"egress": True, "encryption": "none", "strict": "off"},
    "nothing": {"encryption": "none", "strict": "off"},
}


STEPS = list(pairwise([*FORMS, *list(FORMS)[:1]]))
"""Each form once before and once after another."""


@pytest.fixture(params=["fake", pytest.param("linux", marks=pytest.mark.privileged)])
def machine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    made = FakeMachine() if request.param == "fake" else LinuxMachine(tmp_path_factory.mktemp("state"))
    try:
        hold_underlay(made)
        yield made
    finally:
        made.close()


def hold_underlay(machine: Machine) -> None:
    """The node's own addresses, which are nothing of ours."""
    own = [LinkAddress("lo", Address(each), length) for each, length in (("172.18.0.11", 32), ("2001:db8:18::11", 128))]
    commands = "; ".join(f"ip address add {item.address}/{item.length} dev lo" for item in own)
    machine.tamper(commands, lambda host, _: host.foreign.update({item.key: item for item in own}))


EGRESS = (
    # One whose pods the node leads elsewhere, and one whose pods it lets out, both with and without destinations.
    EgressPolicy(
        name=Name("led"), cluster=Name("rome"), pods=(Prefix("10.200.1.0/24"), Prefix("fd00:200:0:1::/64")), node=Name("worker-2")
    ),
    EgressPolicy(name=Name("let.out"), cluster=Name("rome"), pods=(Prefix("10.200.2.0/24"),), node=Name("worker-1")),
    EgressPolicy(
        name=Name("some"),
        cluster=Name("rome"),
        pods=(Prefix("10.200.3.10/32"), Prefix("fd00:200:0:3::10/128")),
        node=Name("worker-1"),
        addresses=(Address("192.0.2.9"),),
        destinations=(Prefix("198.51.100.0/24"), Prefix("2001:db8:77::/48")),
    ),
    EgressPolicy(
        name=Name("there"),
        cluster=Name("rome"),
        pods=(Prefix("10.200.3.11/32"),),
        node=Name("worker-2"),
        destinations=(Prefix("198.51.100.0/24"),),
    ),
)


def plan(machine: Machine, name: str = "worker-1", *, egress: bool = False, **changes: object) -> HostPlan:
    """The node's plan, with a device name that no other run has: WireGuard's sockets are in one folder for all namespaces."""
    units = {
        unit: {entry.key: entry for entry in (_renamed(machine, entry) for entry in entries.values())}
        for unit, entries in settled_plans([*encrypting(**changes), *(EGRESS if egress else ())])[HostId("rome", name)].units.items()
    }
    return HostPlan(Name("rome"), Name(name), units)


def _renamed(machine: Machine, entry: Entry) -> Entry:
    own = codec.encode(entry).replace(b'"me.0"', f'"me.{machine.tag}"'.encode())
    return codec.decode(own.replace(b"/me.0/", f"/me.{machine.tag}/".encode()), Entry)


def differences(machine: Machine, wanted: HostPlan) -> list[str]:
    objects = wanted.objects()
    found = repairs(objects, machine.kernel.reference(objects), machine.kernel.read(objects))
    return [f"{change.key}: {change.old} for {change.new}" for change in found]


@pytest.mark.parametrize("before,after", STEPS, ids=" to ".join)
def test_each_form_becomes_the_next_and_goes(machine: Machine, before: str, after: str) -> None:
    """A live node's kernel holds what is planned and nothing of the form before, by one turn from it; and after the next one, nothing."""
    plans = [plan(machine, **FORMS[form]) for form in (before, after)]
    if any(isinstance(item, GeneveLink) for wanted in plans for item in wanted.objects().values()) and not machine.has_geneve:
        pytest.skip(NO_GENEVE)
    applier = Applier(machine.kernel, lambda: 0.0)
    for generation, wanted in enumerate(plans, 1):
        report = applier.apply(wanted, 1, generation)
        assert {unit.unit: unit.error for unit in report.units if unit.outcome != "applied"} == {}
    assert differences(machine, plans[1]) == []
    assert machine.kernel.read({}).keys() <= plans[1].objects().keys()
    applier.apply(HostPlan(Name("rome"), Name("worker-1"), {}), 1, 3)
    assert machine.kernel.read({}).keys() == set()


def test_a_node_in_memory_changes_from_any_form_into_any_other() -> None:
    """Whatever it was before: every pair of forms, in one row of turns."""
    machine = FakeMachine()
    hold_underlay(machine)
    applier = Applier(machine.kernel, lambda: 0.0)
    for generation, form in enumerate(form for pair in permutations(FORMS, 2) for form in pair):
        wanted = plan(machine, **FORMS[form])
        assert applier.apply(wanted, 1, generation).outcome == "applied"
        assert differences(machine, wanted) == []
