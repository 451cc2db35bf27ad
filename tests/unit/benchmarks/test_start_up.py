"""What is floor and what is meshmark's own when a service starts, and how starts are summed up."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.figures.start_up import Round, Start, as_deployed, others_modules, summed_up
from services.cli.lab.processes import Command


def test_the_floor_imports_what_is_neither_pythons_nor_ours() -> None:
    """Other lines of a service's log are none of its business."""
    lines = [
        "import time: self [us] | cumulative | imported package",
        "import time:       115 |        115 |     msgspec._core",
        "import time:       230 |        345 |   msgspec",
        "import time:       100 |        100 |   json.decoder",
        '{"event": "connecting", "url": "nats://a|b"}',
        "import time:        12 |        457 | services.applier.service",
        "import time:        12 |         12 | schemas",
    ]
    assert others_modules(lines) == ("msgspec._core", "msgspec")


def test_a_start_is_beside_the_floor_of_its_own_round() -> None:
    """Of two rounds, one of them on a machine that is busy with something else, both are twice their floor."""
    rounds = [Round(0.01, 0.2, Start(0.3, 0.4, 0.35)), Round(0.02, 0.4, Start(0.7, 0.8, 0.37))]
    found = summed_up("applier", rounds, 300)
    assert (found.name, found.unit, found.median, found.floor) == ("startup-applier", "s", pytest.approx(0.6), pytest.approx(0.3))
    assert (found.goal, found.met, found.spread.count) == (0.7, True, 2)
    assert found.details["over the floor, same round"] == {"median": 2.0, "from": 2.0, "to": 2.0}
    assert list(found.details["reached after, s"].values()) == [0.015, 0.3, 0.5, 0.6]
    assert found.details["modules of others"] == 300


def test_a_start_slower_than_the_goal_misses_it() -> None:
    assert summed_up("auditor", [Round(0.01, 0.2, Start(0.7, 0.71, 0.5))], 1).met is False


def test_a_service_is_started_by_the_program_that_an_installation_has() -> None:
    command = Command(
        "auditor.rome.node", ["ip", "netns", "exec", "mm.rome.node", sys.executable, "-m", "x", "auditor"], {}, Path(), Path()
    )
    program, role = as_deployed(command).argv
    assert (Path(program).name, role) == ("meshmark", "auditor")
    assert Path(program).exists()
