"""What all suites share: who may run privileged tests, what must not be left behind, and the closing line of a suite."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
import uuid
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests import closing
from tests.mounts import enter_with_own_run

# A busy machine is no failure: no example has to be done within a time. Nothing is kept: a guest cannot write, and each run stands alone.
hypothesis.settings.register_profile("meshmark", deadline=None, database=None)
hypothesis.settings.load_profile("meshmark")

SESSION_VARIABLE = "MESHMARK_TEST_SESSION"
SESSION = f"{SESSION_VARIABLE}={uuid.uuid4().hex}".encode()
NAMESPACE_PREFIX = "mm"
DAEMONS = ("nats-server", "wireguard-go")
SETTLE_S = 5.0  # what a test stopped may take this long to be gone
REAL_KERNEL = Path(__file__).parent / "real_kernel"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--suite", metavar="NAME", default="", help="close with the line 'NAME: passed=… failed=… …'")
    parser.addoption("--whole", action="store_true", help="real-kernel: every case of every test, six times as many")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput") and not missing_privilege():
        enter_with_own_run()
    config.stash[_SKIPPED] = []
    config.stash[_OF_WORKERS] = []
    config.stash[_STARTED] = time.monotonic()
    # Inherited by every process that a test starts: tells them from those of another run on this machine.
    os.environ[SESSION_VARIABLE] = SESSION.partition(b"=")[2].decode()
    config.stash[_BEFORE] = _left_behind()


# --- the suite that boots a kernel ------------------------------------------------------------------------------------


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if collection_path == REAL_KERNEL and not _boots(config) else None


def pytest_report_header(config: pytest.Config) -> str | None:
    return None if _boots(config) else "tests/real_kernel: left out, since it boots a machine; ./run test --suite real-kernel runs it"


def _boots(config: pytest.Config) -> bool:
    """Whether the suite was asked for, by its name or by a path of it."""
    named = ((config.invocation_params.dir / argument.partition("::")[0]).resolve() for argument in config.args)
    return config.getoption("--suite") == "real-kernel" or any(path.is_relative_to(REAL_KERNEL) for path in named)


# --- several workers --------------------------------------------------------------------------------------------------


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over what a worker complained of: its own exit status is nobody's."""
    node.config.stash[_OF_WORKERS] += node.workeroutput.get("complaints", ()) if hasattr(node, "workeroutput") else ()


# --- privileged tests -----------------------------------------------------------------------------------------------


@cache
def missing_privilege() -> str:
    """Why privileged tests cannot run here; empty when they can. Asked by doing: a network namespace is made and left."""
    if os.geteuid() != 0:
        return "not root"
    try:
        subprocess.run(["unshare", "--net", "--mount", "true"], check=True, capture_output=True, text=True)
    except FileNotFoundError:
        return "no unshare program"
    except subprocess.CalledProcessError as error:
        return f"no right to make a network namespace: {error.stderr.strip()}"
    return ""


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("privileged") and (reason := missing_privilege()):
        item.config.stash[_SKIPPED].append(item.nodeid)
        pytest.skip(f"needs root and network namespaces: {reason}")


# --- the end --------------------------------------------------------------------------------------------------------


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a session that left something behind, and, in CI, one that could not run what it is there to run."""
    complaints = list(session.config.stash[_OF_WORKERS])
    if left := _wait_until_gone(session.config.stash[_BEFORE]):
        complaints.append(f"left behind by these tests: {', '.join(sorted(left))}")
    skipped = session.config.stash[_SKIPPED]
    if skipped and os.environ.get("CI") == "true":
        complaints.append(f"{len(skipped)} privileged tests were skipped in CI ({missing_privilege()}), first {skipped[0]}")
    session.config.stash[_COMPLAINTS] = complaints
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["complaints"] = complaints
    if complaints and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    complaints = config.stash.get(_COMPLAINTS, [])
    for complaint in complaints:
        terminalreporter.write_line(f"ERROR: {complaint}", red=True, bold=True)
    if suite := config.getoption("--suite"):
        count = {name: len(terminalreporter.getreports(name)) for name in ("passed", "failed", "error", "skipped", "xfailed")}
        failed = count["failed"] + count["error"] + len(complaints)
        seconds = time.monotonic() - config.stash[_STARTED]
        outcome = f"failed={failed}"
        passed = f"passed={count['passed'] + count['xfailed']}"
        rest = f"skipped={count['skipped']} seconds={seconds:.1f}"
        reports = {name: _properties(terminalreporter.getreports(name)) for name in ("passed", "failed")}
        covered = closing.counted(suite, reports["passed"], reports["passed"] + reports["failed"])
        line = f"{covered} {outcome} {passed} {rest}" if covered else f"{passed} {outcome} {rest}"
        config.add_cleanup(lambda: print(f"{suite}: {line}"))  # noqa: T201 - after pytest's own closing line


def _properties(reports: Iterable[pytest.TestReport]) -> list[tuple[str, object]]:
    return [item for report in reports for item in report.user_properties]


def _wait_until_gone(before: frozenset[str]) -> frozenset[str]:
    until = time.monotonic() + SETTLE_S
    while (left := _left_behind() - before) and time.monotonic() < until:
        time.sleep(0.1)
    return left


def _left_behind() -> frozenset[str]:
    """Network namespaces and daemons that a test could have made, by name.

    In CI nothing else runs, and everything counts. Elsewhere a lab, another session or another worker of this one may run beside it:
    daemons count that inherited this session's mark, and namespaces that nobody else lives in.
    """
    alone = os.environ.get("CI") == "true" and "PYTEST_XDIST_WORKER" not in os.environ
    found, inhabited = set(), set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            ours = SESSION in process.joinpath("environ").read_bytes().split(b"\0")
            if not ours:
                inhabited.add(process.joinpath("ns/net").stat().st_ino)
            program = process.joinpath("comm").read_text().strip()
            if program in DAEMONS and (ours or alone):
                found.add(f"{program} (process {process.name})")
        except OSError:  # it ended meanwhile, or is another user's
            continue
    folder = Path("/run/netns")
    for entry in folder.iterdir() if folder.is_dir() else ():
        with contextlib.suppress(OSError):
            if entry.name.startswith(NAMESPACE_PREFIX) and (alone or entry.stat().st_ino not in inhabited):
                found.add(f"network namespace {entry.name}")
    return frozenset(found)


_SKIPPED = pytest.StashKey[list[str]]()
_STARTED = pytest.StashKey[float]()
_BEFORE = pytest.StashKey[frozenset[str]]()
_COMPLAINTS = pytest.StashKey[list[str]]()
_OF_WORKERS = pytest.StashKey[list[str]]()
