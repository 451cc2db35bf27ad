"""What is not looked at again, and everything that makes it be looked at."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from schemas.drift import DriftLayer
from schemas.host_objects import PolicyRule, Route
from schemas.plan import HostPlan
from schemas.values import Prefix
from services.applier.core import Applier
from services.auditor.unchanged import Unchanged
from services.kernel.fake import FakeHost, FakeKernel
from tests.topologies import keys, settled_plans, two_clusters
from tests.unit.stubs import NODE

PLAN = settled_plans([*two_clusters(), *keys()])[NODE]
LAYERS: tuple[DriftLayer, ...] = ("nft", "rule", "route")
"""Those that have fingerprints."""
ROUTE = Route(7009, Prefix("10.77.0.0/16"), "blackhole")


class Host:
    """A host that holds the plan, and what its auditor remembers."""

    def __init__(self) -> None:
        self.host = FakeHost()
        self.applier = Applier(FakeKernel(self.host), lambda: 0.0)
        self.applier.apply(PLAN, 1, 1)
        self.kernel = FakeKernel(self.host)
        self.unchanged = Unchanged(self.kernel)

    def look(self, *differing: DriftLayer, layers: tuple[DriftLayer, ...] = LAYERS, during: Callable[[], object] = lambda: None) -> None:
        marker = self.kernel.marker()
        during()
        self.kernel.read({}, layers)
        self.unchanged.note(self.unchanged.states(layers, PLAN, (), marker), differing)

    def left(self, plan: HostPlan = PLAN, withdrawn: tuple[str, ...] = ()) -> tuple[DriftLayer, ...]:
        return self.unchanged.left(LAYERS, plan, withdrawn)


def test_what_was_clean_and_is_the_same_is_not_looked_at() -> None:
    """Nothing before the first look, everything after it; a layer with a difference each time."""
    host = Host()
    assert host.left() == LAYERS
    host.look()
    assert host.left() == ()
    host.look("rule")
    assert host.left() == ("rule",)
    host.look(layers=("rule",))
    assert host.left() == ()


@pytest.mark.parametrize("item", [ROUTE, PolicyRule(977, 7009)], ids=["route", "rule"])
def test_a_layer_that_changed_is_looked_at(item: Route | PolicyRule) -> None:
    """It alone; and what is as it was at a clean look needs none."""
    host = Host()
    host.look()
    host.host.objects[item.key] = item
    assert host.left() == (item.layer,)
    del host.host.objects[item.key]
    assert host.left() == ()


def test_another_plan_marker_or_withdrawal_makes_everything_be_looked_at() -> None:
    """An equal plan, too: it is another generation, and may come with another marker."""
    host = Host()
    host.look()
    assert host.left(HostPlan(PLAN.cluster, PLAN.host, dict(PLAN.units))) == LAYERS
    assert host.left(withdrawn=("mt.1",)) == LAYERS
    host.applier.apply(PLAN, 1, 2)
    assert host.left() == LAYERS
    host.look()
    assert host.left() == ()
    host.host.marker = None
    assert host.left() == LAYERS
    host.look()
    assert host.left() == LAYERS, "without a marker, what the applier says counts, and that is not looked at here"


def test_what_came_back_after_it_was_gone_while_somebody_looked_is_seen() -> None:
    """What a look before it had been told is there is not what the look compared."""
    host = Host()
    host.host.objects[ROUTE.key] = ROUTE
    assert host.left() == LAYERS
    host.look(during=lambda: host.host.objects.pop(ROUTE.key))
    host.host.objects[ROUTE.key] = ROUTE
    assert host.left() == ("route",)


def test_a_layer_without_a_fingerprint_is_looked_at_each_time() -> None:
    """As links are: nothing short says what they are."""
    host = Host()
    host.look(layers=("rule", "link"))
    assert host.unchanged.left(("rule", "link"), PLAN, ()) == ("link",)
