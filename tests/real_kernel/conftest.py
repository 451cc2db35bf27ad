"""Which tests run in the guest, and the guest that they share."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache

import pytest

from tests.real_kernel.guest import INSIDE, ROOT, Guest, sample
from tests.real_kernel.report import RESULTS_VARIABLE

RUN_INSIDE = (
    *("tests/contract/kernel", "tests/integration/kernel", "tests/integration/applier", "tests/integration/mesh", "tests/encryption"),
    *("tests/trace", INSIDE),
)
"""Tests that need a real kernel and no processes besides: run where they stand; of a suite for fake and real, only the real half."""
IS_GUEST = RESULTS_VARIABLE in os.environ


def pytest_ignore_collect(collection_path: os.PathLike[str]) -> bool | None:
    """Tests of the folder `inside` are for the guest alone, and the guest is started by none but the machine outside."""
    is_inside = str(collection_path).startswith(str(ROOT / INSIDE))
    return None if is_inside == IS_GUEST else True


@cache
def inner_tests(marked: str) -> list[str]:
    """Node ids of what may run in the guest and is marked like this, as pytest itself finds them."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", marked, "-p", "no:cacheprovider", *RUN_INSIDE]
    environment = {**os.environ, RESULTS_VARIABLE: "collect"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # the guest, which can write nothing here, is to find all of it compiled
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    found = [line for line in done.stdout.splitlines() if "::" in line]
    if done.returncode or not found:
        pytest.fail(f"the tests of the guest cannot be collected:\n{done.stdout}{done.stderr}", pytrace=False)
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "inner" in metafunc.fixturenames:
        whole = metafunc.config.getoption("--whole")
        items = inner_tests("privileged") if whole else sample(inner_tests("privileged and not any_kernel"))
        metafunc.parametrize("inner", [pytest.param(item, id=item.removeprefix("tests/")) for item in items])


@pytest.fixture(scope="session")
def guest(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guest]:
    """The one guest of the session, which runs what was selected outside."""
    callspecs = [item.callspec for item in request.session.items if hasattr(item, "callspec")]
    items = [spec.params["inner"] for spec in callspecs if "inner" in spec.params]
    made = Guest(tmp_path_factory.mktemp("guest"), items)
    try:
        made.start()
        yield made
    finally:
        made.end()
