"""What a run prints and keeps: tables that line up, JSON that comes back as it was, comparisons that hide nothing."""

from __future__ import annotations

import json

import msgspec
import pytest

from benchmarks import report
from benchmarks.machine import Machine
from benchmarks.report import Document
from benchmarks.result import result

FIELDS = {"name", "median", "unit", "peer", "floor", "ratio_peer", "ratio_floor", "goal", "met"}


def machine() -> Machine:
    return Machine("a processor", 2, 4096, "6.1", "3.11", "nftables v1", "nats-server: v2", {"msgspec": "1"}, "abc", 0.1)


def some():
    return [
        result("event", [10.0, 12.0, 14.0], "ms", floor=3.0, details={"stages_ms": {"stored": 0.51, "planned": 9.0}}),
        result("memory", [50.0], "MiB", floor=40.0, goal=45.0),
    ]


def test_a_figure_is_one_line_of_json_with_the_promised_fields():
    line = report.line(some()[0])
    assert "\n" not in line
    found = json.loads(line)
    assert found.keys() >= FIELDS
    assert found["peer"] is None
    assert found["ratio_floor"] == 4.0


def test_columns_line_up():
    lines = report.table(some()).splitlines()
    assert len(lines) == 3
    assert {line.index(word) for line, word in zip(lines, ("median", "12 ms", "50 MiB"), strict=True)} == {lines[0].index("median")}


def test_a_missed_goal_is_said():
    assert "MISSED" in report.table(some())


def test_details_are_one_line_each():
    assert report.details(some()[0]) == "    stages_ms: stored 0.51, planned 9"


def test_a_document_comes_back_as_it_was_written(tmp_path):
    document = Document("2026-11-30T12:00:00+00:00", machine(), tuple(some()), {"lab-start": "not root"})
    report.write(document, tmp_path / "new" / "run.json")
    assert report.read(tmp_path / "new" / "run.json") == document


def test_what_is_no_document_is_refused(tmp_path):
    (tmp_path / "run.json").write_text("[]")
    with pytest.raises(msgspec.MsgspecError):
        report.read(tmp_path / "run.json")


def test_a_comparison_gives_the_ratio_and_says_what_is_new_or_not_run():
    before = [result("event", [6.0], "ms"), result("gone", [1.0], "s")]
    found = {words[0]: words for words in (line.split("  ") for line in report.comparison(some(), before).splitlines()[1:])}
    assert found["event"][-1].strip() == "2x"
    assert found["memory"][-1].strip() == "new"
    assert found["gone"][-1].strip() == "not run"


def test_a_unit_that_changed_is_not_compared():
    assert "new" in report.comparison([result("event", [6.0], "ms")], [result("event", [6.0], "s")])


def test_the_closing_line_counts_verdicts():
    assert report.closing(some(), ["lab-start"], 3.21) == "bench: figures=2 met=0 missed=1 without-goal=1 failed=1 seconds=3.2"
