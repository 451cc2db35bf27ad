"""The two engines are each other's oracle: any plan, and any step from one to the next, is the same in the kernel by either."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from schemas.firewall import FirewallConfiguration
from schemas.host_objects import NftTable, PlanObject
from services.kernel.transaction import Marker
from tests.contract.kernel.engine_pair import Pair
from tests.contract.kernel.firewall_host import seed
from tests.contract.kernel.gateway_plan import gateway_plan
from tests.contract.kernel.test_batches import BASE, STEPS
from tests.emulated import examples
from tests.firewalls import compiled, configurations
from tests.nft_objects import nft_plans
from tests.topologies import settled_plans, two_clusters

pytestmark = pytest.mark.privileged


@pytest.fixture(scope="module")
def shared() -> Iterator[Pair]:
    made = Pair()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def pair(shared: Pair) -> Iterator[Pair]:
    """Both sides empty; at the end nothing was passed on to libnftables."""
    before = shared.by_library
    shared.reset()
    yield shared
    assert shared.by_library == before


def nft_of(objects: dict[str, PlanObject]) -> dict[str, PlanObject]:
    return {key: item for key, item in objects.items() if item.layer == "nft"}


def test_a_plan_with_every_kind_of_statement(pair: Pair) -> None:
    """From nothing, again, and away."""
    plan = nft_of(gateway_plan("x"))
    pair.hold(plan, Marker(3, 4, {"ab": "cd", "ef": "01"}))
    pair.hold(plan, Marker(3, 5, {"ab": "cd"}))
    pair.hold({})


@pytest.mark.parametrize("name", STEPS)
def test_any_step(pair: Pair, name: str) -> None:
    """And back."""
    pair.hold(BASE)
    pair.hold(STEPS[name], Marker(1, 1, {}))
    pair.hold(BASE)


@pytest.mark.parametrize("host", [*settled_plans(two_clusters())], ids=str)
def test_what_the_planner_plans(pair: Pair, host) -> None:
    """For every host of the example."""
    pair.hold(nft_of(settled_plans(two_clusters())[host].objects()))


def test_the_seeds_rules(pair: Pair) -> None:
    """All tables of traffic marking by hand."""
    pair.hold({key: found for item in seed().values() for key, found in compiled(item).items()})


BY_CHANCE = settings(
    max_examples=examples(30),
    deadline=None,
    phases=[Phase.generate],  # what fails is told as it was found: to make it smaller in two kernels takes minutes
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


def walk(pair: Pair, plans: list[dict[str, PlanObject]]) -> None:
    """From nothing through all plans, each as a difference from the one before, and back."""
    before = pair.by_library
    try:
        for plan in plans:
            pair.hold(plan)
        pair.hold({key: found for key, found in pair.held.items() if isinstance(found, NftTable)})
        pair.hold({})
    except BaseException:
        pair.reset()
        raise
    assert pair.by_library == before


@BY_CHANCE
@given(items=st.lists(configurations(), min_size=1, max_size=3))
def test_any_published_firewall(shared: Pair, items: list[FirewallConfiguration]) -> None:
    """All that admission lets through."""
    walk(shared, [compiled(item) for item in items])


@BY_CHANCE
@given(plans=st.lists(nft_plans(), min_size=1, max_size=3))
def test_any_objects(shared: Pair, plans: list[dict[str, PlanObject]]) -> None:
    """Sets and maps of all types with their elements, and rules of all statements."""
    walk(shared, plans)
