"""The plugin of the pytest that runs inside the guest: one line of JSON for each test, on disk before the next one begins."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

RESULTS_VARIABLE = "MESHMARK_GUEST_RESULTS"
"""Names the file to write to; where it is set, this is the guest."""
STARTED = "started"


class Reporter:
    """Writes what comes of tests. A test that fails in its teardown has failed."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._worst: pytest.TestReport | None = None
        self._seconds = 0.0

    def pytest_collection_finish(self) -> None:
        self._write("", STARTED)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._worst, self._seconds = None, 0.0
        self._write(nodeid, STARTED)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds += report.duration
        if self._worst is None or report.failed or (report.skipped and not self._worst.failed):
            self._worst = report
        if report.when == "teardown":
            self._write(report.nodeid, self._worst.outcome, _why(self._worst), round(self._seconds, 2))

    def _write(self, item: str, outcome: str, text: str = "", seconds: float = 0.0) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"id": item, "outcome": outcome, "text": text, "seconds": seconds}) + "\n")


def _why(report: pytest.TestReport) -> str:
    if report.skipped and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    sections = "".join(f"\n--- {title} ---\n{content}" for title, content in report.sections) if report.failed else ""
    return f"{report.longreprtext}{sections}" if not report.passed else ""


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Reporter(Path(os.environ[RESULTS_VARIABLE])))
