"""Elements that the kernel is lent for a while: beside any plan, and no difference to it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from schemas.host_objects import TRACE_TABLE, NftElement
from services.kernel.transaction import Change
from services.planner.compile import trace
from services.runtime.errors import Conflict
from services.runtime.settings import NftEngineName
from tests.contract.kernel.machines import OVER_BOTH_ENGINES, LinuxMachine, Machine, converge, differences
from tests.topologies import cluster, node

PLAN = {item.key: item for item in trace.objects(cluster("rome"), node("worker-1", 1))}
LENT = [NftElement(TRACE_TABLE, "flows", "10.200.1.10"), NftElement(TRACE_TABLE, "ports", "51871")]


@OVER_BOTH_ENGINES
def test_what_is_lent_is_no_difference(machine: Machine) -> None:
    """Neither while it is there, nor when it is lent again, and the plan goes with it."""
    converge(machine.kernel, PLAN)
    machine.kernel.lend(LENT, 60)
    machine.kernel.lend(LENT, 30)
    assert differences(machine.kernel, PLAN) == []
    assert dict(machine.kernel.read(PLAN)) == dict(machine.kernel.reference(PLAN))
    converge(machine.kernel, {})
    assert dict(machine.kernel.read({})) == {}


@OVER_BOTH_ENGINES
def test_nothing_is_lent_where_no_set_takes_it(machine: Machine) -> None:
    """Without the table, and into a set whose elements are a plan's."""
    with pytest.raises(Conflict):
        machine.kernel.lend(LENT, 60)
    machine.kernel.commit([Change(None, item) for item in PLAN.values()], None)
    with pytest.raises(Conflict):
        machine.kernel.lend([*LENT, NftElement(TRACE_TABLE, "nothing", "10.0.0.1")], 60)
    assert differences(machine.kernel, PLAN) == []


@pytest.mark.privileged
@pytest.mark.parametrize("engine", ["nfnetlink", "libnftables"])
def test_the_kernel_takes_back_what_it_was_lent(tmp_path: Path, engine: NftEngineName) -> None:
    """By itself, after the longest time that was asked for, and whoever lent it is gone by then."""
    machine = LinuxMachine(tmp_path, engine)
    try:
        converge(machine.kernel, PLAN)
        machine.kernel.lend(LENT, 1)
        machine.kernel.lend(LENT, 2)
        machine.restart()
        end = time.monotonic() + 20
        while "expires" in machine.run(f"nft list table inet {TRACE_TABLE}"):
            assert time.monotonic() < end
            time.sleep(0.05)
    finally:
        machine.close()


@pytest.mark.privileged
@pytest.mark.parametrize("engine", ["nfnetlink", "libnftables"])
def test_who_asks_for_less_takes_nothing_from_who_asked_for_more(tmp_path: Path, engine: NftEngineName) -> None:
    """Two traces may be of one address."""
    machine = LinuxMachine(tmp_path, engine)
    try:
        converge(machine.kernel, PLAN)
        machine.kernel.lend(LENT, 600)
        machine.kernel.lend(LENT, 1)
        assert machine.run(f"nft list set inet {TRACE_TABLE} flows").count("timeout 10m") == 1
        machine.kernel.lend(LENT, 900)
        assert machine.run(f"nft list set inet {TRACE_TABLE} flows").count("timeout 15m") == 1
    finally:
        machine.close()
