"""A network namespace with the real kernel behind it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas.host_objects import PlanObject
from tests.contract.kernel.gateway_plan import gateway_plan
from tests.contract.kernel.machines import LinuxMachine


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[LinuxMachine]:
    made = LinuxMachine(tmp_path)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LinuxMachine]:
    """A second host."""
    made = LinuxMachine(tmp_path_factory.mktemp("other"))
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def plan(machine: LinuxMachine) -> dict[str, PlanObject]:
    return gateway_plan(machine.tag)
