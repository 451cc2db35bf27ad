"""Parts do what they are said to do, and pyperf's values become figures."""

from __future__ import annotations

import pyperf
import pytest

from benchmarks.figures.micro import FLOOR, summed_up
from benchmarks.kept_dump import KeptDumps, answers_of
from benchmarks.micro import PARTS, Part, prepared, timed, trace_message, walk
from schemas.host_objects import NftChain
from schemas.plan import HostPlan, SummedUnit
from services.kernel.netlink import attribute, message
from services.kernel.nftrace import trace_events
from services.kernel.nftread.reading import Reading


def benchmark(name: str, *runs: tuple[float, ...]) -> pyperf.Benchmark:
    """With these values, seconds, by process."""
    made = [pyperf.Run(values, metadata={"name": name, "loops": 8}, collect_metadata=False) for values in runs]
    return pyperf.Benchmark(made)


def test_a_benchmark_becomes_a_figure_beside_its_floor() -> None:
    """In milliseconds, over the values of all processes; a floor is no figure of its own."""
    found = summed_up({"read": benchmark("read", (0.01, 0.03), (0.02, 0.04)), f"read{FLOOR}": benchmark("read floor", (0.005,) * 2)})
    [item] = found
    assert (item.name, item.unit, item.median, item.floor, item.ratio_floor) == ("micro-read", "ms", 25.0, 5.0, 5.0)
    assert (item.spread.count, item.spread.maximum, item.goal) == (4, 40.0, None)
    assert item.details["pyperf"] == {"processes": 2, "repeated for a value": 8, "mean, ms": 25.0, "standard deviation, ms": 12.91}


def test_a_benchmark_without_a_floor_is_beside_none() -> None:
    [item] = summed_up({"compile": benchmark("compile", (0.01, 0.01))})
    assert (item.floor, item.ratio_floor) == (None, None)


def test_names_of_parts_are_unique():
    assert len({part.name for part in PARTS}) == len(PARTS)


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_each_part_runs_and_has_the_floor_that_it_says(part):
    work, floor = part.prepare()
    assert work()
    assert (floor is not None) == part.has_floor
    if floor is not None:
        assert floor() is not None


def test_a_part_is_prepared_once_and_repeated_as_often_as_it_is_asked() -> None:
    """What it takes to prepare is in no value."""
    made: list[str] = []
    part = Part("some", lambda: (made.append("prepared") or (lambda: made.append("work")), lambda: made.append("floor")))  # type: ignore[func-returns-value]
    assert timed(3, part, 0) >= 0
    timed(1, part, 1)
    assert made == ["prepared", "work", "work", "work", "floor"]
    prepared.cache_clear()


def test_a_walk_sees_each_attribute_but_not_those_inside() -> None:
    """Over all messages of all datagrams."""
    inner = attribute(1, attribute(2, b"abcde"))
    one = message(0x0A06, bytes(4) + inner + attribute(3, b"x"), 0)
    assert walk([one + one, one]) == 6


def test_traces_are_such_as_a_kernel_tells() -> None:
    """Every fourth begins a chain, with headers and the connection; the others have the mark."""
    events = [event for number in range(8) for event in trace_events(trace_message(number))]
    assert len(events) == 8
    assert [bool(event.network and event.transport and event.tracked) for event in events] == [True, False, False, False] * 2
    assert {event.mark for event in events} == {0, 0x1000}
    assert {(event.kind, event.verdict, event.table) for event in events} == {("rule", "continue", "meshmark.trace")}


def test_a_kept_dump_has_all_objects_and_rules(large_plan):
    objects = large_plan.objects()
    found = Reading(KeptDumps(answers_of(objects)), remembers=False).read(objects)
    assert found.keys() == objects.keys()
    chains = [item for item in objects.values() if isinstance(item, NftChain)]
    assert [len(found[chain.key].rules) for chain in chains] == [len(chain.rules) for chain in chains]
    assert all(found[key] == item for key, item in objects.items() if not isinstance(item, NftChain))


@pytest.fixture
def large_plan() -> HostPlan:
    """With so many rules that a reader asks chain by chain."""
    from benchmarks.figures.nft_reading import plan

    found = plan(5_000)
    assert isinstance(next(iter(found.units.values())), SummedUnit)
    return found
