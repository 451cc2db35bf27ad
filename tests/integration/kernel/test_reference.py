"""The kernel as its own normaliser: three ways to ask it, one answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from schemas.host_objects import NftChain, NftElement, PlanObject
from schemas.nft import Match, Verdict
from services.kernel.nft import reference
from services.kernel.nft.loading import LOADING
from services.kernel.nft.reference import Reference
from services.runtime.errors import Permanent
from services.runtime.settings import NftEngineName
from tests.contract.kernel.gateway_plan import TABLE
from tests.contract.kernel.machines import LinuxMachine

pytestmark = [pytest.mark.privileged, pytest.mark.any_kernel]


def _refuse(*_arguments: object) -> list[object]:
    raise PermissionError


def _nft(plan: dict[str, PlanObject]) -> dict[str, PlanObject]:
    return {key: item for key, item in plan.items() if item.layer == "nft"}


@pytest.mark.parametrize("engine", [*LOADING])
def test_all_three_ways_give_the_same_normal_form(
    engine: NftEngineName, machine: LinuxMachine, plan: dict[str, PlanObject], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread's namespace, a user namespace and a dormant table list the wanted chains alike."""

    def ask() -> tuple[str, dict[str, object]]:
        found = Reference(LOADING[engine])
        return found.method, dict(found.of(_nft(plan)))

    _, first = machine._thread.submit(ask).result(60)
    monkeypatch.setattr(reference, "in_thread", _refuse)
    _, second = machine._thread.submit(ask).result(60)
    monkeypatch.setattr(reference, "in_user_namespace", _refuse)
    _, third = machine._thread.submit(ask).result(60)
    assert first == second == third


def test_the_reference_leaves_no_trace(machine: LinuxMachine, plan: dict[str, PlanObject], monkeypatch: pytest.MonkeyPatch) -> None:
    """No table in the host's namespace, no name under /run/netns, whichever way was taken."""
    before = sorted(Path("/run/netns").glob(f"*{machine.tag}*"))
    machine.kernel.reference(plan)
    monkeypatch.setattr(reference, "in_thread", _refuse)
    monkeypatch.setattr(reference, "in_user_namespace", _refuse)
    machine._thread.submit(lambda: Reference(LOADING["nfnetlink"]).of(_nft(plan))).result(60)
    assert sorted(Path("/run/netns").glob(f"*{machine.tag}*")) == before
    assert machine.run("nft list tables") == ""


def test_elements_cost_no_second_question(
    plan_of_one: dict[str, PlanObject], monkeypatch: pytest.MonkeyPatch, machine: LinuxMachine
) -> None:
    """Chains are asked for once; a thousand changed elements later nobody is asked again."""

    def work() -> int:
        asked = []
        real = reference.in_thread
        monkeypatch.setattr(reference, "in_thread", lambda loading, skeleton: asked.append(skeleton) or real(loading, skeleton))
        found = Reference(LOADING["nfnetlink"])
        for number in range(5):
            element = NftElement(TABLE, "hosts", f"10.70.1.{number}", "10.1.1.1")
            found.of({**plan_of_one, element.key: element})
        return len(asked)

    assert machine._thread.submit(work).result(60) == 1


@pytest.fixture
def plan_of_one(plan: dict[str, PlanObject]) -> dict[str, PlanObject]:
    return _nft(plan)


def test_chains_that_the_kernel_refuses_are_permanent(machine: LinuxMachine) -> None:
    """A wanted rule that names a set which the plan does not have can never be right."""
    chain = NftChain(TABLE, "c", ((Match("ip saddr", ("@nowhere",)), Verdict("accept")),))
    with pytest.raises(Permanent):
        machine.kernel.reference({chain.key: chain})
