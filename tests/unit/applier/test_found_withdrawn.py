"""An applier that comes back in the middle of a change of keys: what it finds withdrawn is what somebody has withdrawn, and no step."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest

from schemas.host_objects import PlanObject
from schemas.plan import HostPlan
from schemas.topology import Topology
from schemas.withdrawals import without
from services.applier.health import found_withdrawn
from services.planner.state import HostId
from tests.topologies import dual_stack
from tests.unit.planner.test_tunnel_rotation import ENDS, Joined, hops

Step = tuple[HostPlan, HostPlan]


def every_step(turning: HostId, tunnels: int, items: list[Topology]) -> list[Step]:
    """What either end held before each step of a change of keys, and what its plan is then."""
    joined, found = Joined(items=items), list[Step]()
    before = dict(joined.plans)
    joined.rotate(turning)
    for _ in range(60):
        joined.step()
        found += [(before[end], joined.plans[end]) for end in ENDS if joined.plans[end] is not before[end]]
        before = dict(joined.plans)
        if joined.stage(turning) == "done":
            break
    assert len([1 for old, new in found if hops(old) != hops(new)]) == 2 * (tunnels + 1)
    return found


def both_families(tunnels: int) -> list[Topology]:
    return dual_stack(Peering_rome_rome_milan={"tunnels": tunnels})


@pytest.fixture(params=[2, 3, 4])
def tunnels(request: pytest.FixtureRequest) -> int:
    count: int = request.param
    return count


@pytest.fixture(params=ENDS, ids=str)
def steps(request: pytest.FixtureRequest, tunnels: int) -> list[Step]:
    return every_step(request.param, tunnels, both_families(tunnels))


def held(plan: HostPlan, *dead: str) -> Mapping[str, PlanObject]:
    """What a kernel holds of a plan while these tunnels are withdrawn."""
    return without(plan.objects(), dead)


def test_a_step_that_it_missed_is_no_withdrawal(steps: list[Step]) -> None:
    """Killed before a step and there again after it, either end finds the routes of the step before, and all tunnels in use."""
    for old, new in steps:
        assert found_withdrawn(new.objects(), held(old)) == frozenset(), (hops(old), hops(new))
        assert found_withdrawn(new.objects(), held(new)) == frozenset()


def test_what_was_withdrawn_is_found_beside_a_step(steps: list[Step]) -> None:
    """A tunnel that was taken out of the routes before the step stays out where the plan leads packets by it, before and after."""
    for old, new in steps:
        for dead in {*hops(old)} & {*hops(new)}:
            found = found_withdrawn(new.objects(), held(old, dead))
            # Where packets are led otherwise as well, nothing tells which of two links took the place of another.
            others = {*hops(new)} - {*hops(old)}
            assert found - others == {dead}, (hops(old), hops(new))


def test_several_that_were_withdrawn_are_found_as_well(steps: list[Step]) -> None:
    """Each of those that are dead stays out, while one is left that is not."""
    for old, new in steps:
        for dead in itertools.combinations({*hops(old)} & {*hops(new)}, 2):
            if len(hops(old)) > len(dead):
                assert found_withdrawn(new.objects(), held(old, *dead)) >= {*dead}
