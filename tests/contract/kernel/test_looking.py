"""What any kernel shows a process that only looks: the same objects, no private key, and every link of the host."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from schemas.host_objects import PlanObject, WireguardLink
from services.kernel.fake import FakeHost
from services.kernel.transaction import Listed
from tests.contract.kernel.gateway_plan import PEERS
from tests.contract.kernel.machines import Machine, converge

pytestmark = pytest.mark.any_kernel


def test_who_only_looks_sees_the_plan_with_public_keys(machine: Machine, plan: dict[str, PlanObject]) -> None:
    """A host that holds the plan shows it without difference, where the plan knows the host's key; nothing of the host's is needed."""
    converge(machine.kernel, plan)
    public = machine.kernel.public_key()
    wanted = {key: replace(item, public_key=public) if isinstance(item, WireguardLink) else item for key, item in plan.items()}
    looking = machine.looking()
    try:
        assert looking.read(wanted) == looking.reference(wanted)
        assert {key: item for key, item in looking.reference(plan).items() if isinstance(item, WireguardLink)} == {
            key: item for key, item in plan.items() if isinstance(item, WireguardLink)
        }, "a key that the plan does not know stays unknown"
    finally:
        looking.close()


def test_another_private_key_is_seen_by_its_public_half(machine: Machine, plan: dict[str, PlanObject]) -> None:
    """Who looks tells a device's key by what it shows the world."""

    def change(host: FakeHost, tag: str) -> None:
        host.objects[f"link mt.{tag}0"] = replace(host.objects[f"link mt.{tag}0"], public_key=PEERS[1])  # type: ignore[type-var]

    converge(machine.kernel, plan)
    machine.tamper("echo AgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgI= | wg set {t}0 private-key /dev/stdin", change)
    looking = machine.looking()
    try:
        held = looking.read(plan, ("link",))[f"link mt.{machine.tag}0"]
        assert isinstance(held, WireguardLink)
        assert held.public_key == PEERS[1]
    finally:
        looking.close()


def test_all_links_are_known_by_name_and_state(machine: Machine, plan: dict[str, PlanObject]) -> None:
    """Ours and others', up and down."""

    def down(host: FakeHost, tag: str) -> None:
        host.objects[f"link mo.{tag}1"] = Listed("link", f"link mo.{tag}1", "down")

    machine.add_foreign()
    converge(machine.kernel, plan)
    machine.tamper("ip link set {o}1 down", down)
    found = machine.kernel.links()
    assert {name: found[name] for name in ("lo", "foreign0")} == {"lo": True, "foreign0": True}
    assert (found[f"mo.{machine.tag}1"], found[f"mo.{machine.tag}2"], found[f"mt.{machine.tag}0"]) == (False, True, True)
    assert "eth9" not in found
