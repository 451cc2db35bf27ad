"""Pages that answer what others have hit name tests that exist, and every report and behaviour once."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent.parent
PAGES = {name: (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("reports", "encryption")}
PAGE = PAGES["reports"]
NAMED = re.compile(r"`([a-z_/]+\.py)::(test_[a-z0-9_]+)`")
REPORTS = {912, 1457, 1464, 1819, 1879, 2166, 2427, 2817, 2909, 2928, 3022, 3064, 3079, 3082, 3090, 3142, 3157} | {
    *(3268, 3286, 3299, 3300, 3310, 3316, 3355, 3357, 3359, 3363, 3373)
}


def names_in(file: Path) -> set[str]:
    """The functions that a file has by its syntax, so that nothing is imported and a skipped test counts."""
    if not file.exists():
        return set()
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
def test_every_test_that_a_page_names_is_there(page: str) -> None:
    """By file and name; a test that is renamed or removed takes its answer along."""
    named = NAMED.findall(page)
    assert named
    assert len(named) == page.count(".py::"), "each is written as `path::name`"
    assert [f"{path}::{name}" for path, name in named if name not in names_in(ROOT / "tests" / path)] == []


def test_every_row_has_an_answer() -> None:
    """A test beside it; and every report is there once."""
    lines = [line for line in PAGE.splitlines() if line.startswith("| ")]
    rows = [line.strip("| ").split(" | ") for line in lines if not line.startswith(("| report", "| hazard"))]
    assert [row[0] for row in rows if not NAMED.search(row[-1])] == []
    numbers = [int(number) for row in rows for number in re.findall(r"liqotech/liqo#(\d+)", row[0])]
    assert len(numbers) == len(set(numbers))
    assert set(numbers) == REPORTS


def test_every_behaviour_of_encryption_has_an_answer() -> None:
    """A test, or why it does not apply here; none of what was found is left out."""
    tested = PAGES["encryption"].partition("## What is tested")[2]
    rows = [line.strip("| ").split(" | ") for line in tested.splitlines() if line.startswith("| ")]
    answered = [row[0] for row in rows if NAMED.search(row[-1]) or row[-1].startswith("does not apply")]
    assert answered == [row[0] for row in rows if row[-1] != "here"]
    assert [int(number) for number in re.findall(r"^\| (\d+)\. ", tested, re.MULTILINE)] == list(range(1, 23))
    assert re.findall(r"^\| \(([a-z])\) ", tested, re.MULTILINE) == list("abcdef")
