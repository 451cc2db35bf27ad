"""The registry, and the pure parts of the figures."""

from __future__ import annotations

import pytest

from benchmarks import topologies
from benchmarks.figures import FIGURES
from benchmarks.figures.event_to_kernel import Event
from benchmarks.figures.memory import parse_sizes
from benchmarks.figures.rules_per_gateway import compiled, count
from schemas.plan import Cause, PlanDiff
from schemas.status import ApplyReport, Timings
from schemas.values import Name
from services.planner.core import Core, Said


def test_names_of_figures_are_unique():
    names = [figure.name for figure in FIGURES]
    assert len(set(names)) == len(names)


def test_topologies_are_ones_that_a_planner_admits():
    """A benchmark of what nobody could publish would be none."""
    items = [*topologies.mesh(3, 2, node_length=26), *topologies.pods(3, 4, node_length=26, roaming=5)]
    core = Core()
    from schemas import codec

    outcome = core.hear([Said((item.kind.lower(), item.home, item.name), codec.encode(item), n) for n, item in enumerate(items, 1)])
    assert not outcome.refused
    assert not outcome.unreadable
    assert len(outcome.admitted) == len(items)


def test_roaming_pods_are_the_ones_that_have_host_routes():
    sizes = []
    for roaming in (0, 5):
        objects = [*topologies.mesh(3, 2, node_length=26), *topologies.pods(3, 4, node_length=26, roaming=roaming)]
        core = topologies.planner(objects, 2)
        (plan,) = [step.plan for step in core.steps() if step.host == topologies.GATEWAY]
        sizes.append(count(plan)["routes"])
    assert sizes[1] - sizes[0] == 5


def test_policy_rules_are_counted_alike_at_every_size():
    small, large = count(compiled("per-node", 1, 2)), count(compiled("per-node", 8, 60))
    assert small["policy_rules"] == large["policy_rules"] > 0
    assert small["nft_rules"] == large["nft_rules"] > 0
    assert large["routes"] > small["routes"]


def test_the_stages_of_an_event_add_up_to_its_whole_time():
    diff = PlanDiff(
        Name("rome"), Name("gateway"), 1, 7, causes=(Cause("Endpoint/rome/a", 9, 100.001),), admitted_s=100.004, planned_s=100.009
    )
    timings = Timings(100.012, 100.013, 100.018, 100.020, 100.021)
    event = Event(100.0, 100.002, 100.019, diff, ApplyReport(Name("rome"), Name("gateway"), 1, 7, (), timings=timings))
    stages = event.stages_ms()
    assert event.total_ms == pytest.approx(19)
    assert sum(list(stages.values())[:-1]) == pytest.approx(event.total_ms)
    assert next(iter(stages)) == "published → stored"
    assert list(stages)[-1] == "route in the kernel → reported"


def test_resident_and_proportional_sizes_are_read_in_mebibytes():
    text = "5580-7ffe ---p 00000000 00:00 0 [rollup]\nRss:           51200 kB\nPss:           10240 kB\nPss_Anon: 1 kB\n"
    assert parse_sizes(text) == (50.0, 10.0)
