"""Plots of kept runs: every figure that a plot names is in it, and the page shows what there is."""

from __future__ import annotations

import math
import re

import pytest

from benchmarks.chart import Bar, Row, chart
from benchmarks.plots import PLOTS, merged, page, plots, write
from benchmarks.report import Document
from benchmarks.result import result
from tests.unit.benchmarks.test_report import machine

PAGE = "# Benchmarks\n\n<!-- plots: written by `./run bench --plots` -->\nold\n<!-- end of the plots -->\n\n## More\n"


def run(*figures):
    return Document("2026-11-30T12:00:00+00:00", machine(), figures)


FULL = result("nft-full-10000", [60.0], "ms", floor=36.0, peer=400.0, goal=65.0)
MEMORY = result("memory-applier", [50.0], "MiB", floor=40.0)


def lengths(svg: str) -> list[float]:
    """Of the bars, which are as high as each other."""
    return [float(width) for width in re.findall(r'width="([0-9.]+)" height="8"', svg)]


def test_lengths_are_logarithms() -> None:
    """Ten times as much is as much longer each time; nothing is nearly no length."""
    svg = chart("a < b", [Row("x", tuple(Bar(value, str(value), "red") for value in (0.0, 1.0, 10.0, 100.0)), 5.0)], [("ours", "red")])
    nothing, one, ten, hundred = lengths(svg)
    assert nothing == 1
    assert math.isclose(hundred - ten, ten - one, abs_tol=0.2)


def test_each_kind_of_figure_has_its_plot() -> None:
    found = plots([FULL, MEMORY])
    assert found.keys() == {"nft-reading.svg", "memory.svg"}
    assert "nft-full-10000" in found["nft-reading.svg"]
    assert len(lengths(found["nft-reading.svg"])) == 3
    assert len({plot.name for plot in PLOTS}) == len(PLOTS)


def test_the_last_run_of_a_figure_counts() -> None:
    again = result("nft-full-10000", [50.0], "ms")
    assert merged([run(FULL, MEMORY), run(again)]) == [again, MEMORY]


def test_the_page_shows_what_there_is_and_keeps_the_rest() -> None:
    """Written again, it is the same."""
    once = page(PAGE, "plots", [run(FULL)])
    assert re.findall(r"\]\((.*)\)", once) == ["plots/nft-reading.svg"]
    assert once.startswith("# Benchmarks\n\n<!--")
    assert once.endswith("-->\n\n## More\n")
    assert "old" not in once
    assert page(once, "plots", [run(FULL)]) == once
    with pytest.raises(ValueError, match="end of the plots"):
        page("# Nothing", "plots", [run(FULL)])


def test_files_of_an_earlier_run_go(tmp_path) -> None:
    (tmp_path / "plots").mkdir()
    (tmp_path / "plots" / "memory.svg").write_text("old")
    (tmp_path / "benchmarks.md").write_text(PAGE)
    assert [file.name for file in write([run(FULL)], tmp_path)] == ["nft-reading.svg", "benchmarks.md"]
    assert [file.name for file in (tmp_path / "plots").iterdir()] == ["nft-reading.svg"]
