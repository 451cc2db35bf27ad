"""The contract suite's two kernels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas.host_objects import PlanObject
from tests.contract.kernel.gateway_plan import gateway_plan
from tests.contract.kernel.machines import FakeMachine, LinuxMachine, Machine


@pytest.fixture(params=["fake", pytest.param("linux", marks=pytest.mark.privileged)])
def machine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Machine]:
    """An empty machine; a test that is given it runs once over the fake and once over a real network namespace.

    A test that depends on the engine that writes nftables objects asks for `OVER_BOTH_ENGINES`.
    """
    engine = "libnftables" if request.param == "libnftables" else "nfnetlink"
    made = FakeMachine() if request.param == "fake" else LinuxMachine(tmp_path, engine)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def plan(machine: Machine) -> dict[str, PlanObject]:
    return gateway_plan(machine.tag)
