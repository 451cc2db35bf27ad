"""How long a whole mesh takes to start: ``meshmark lab up`` with the example, until every host holds its plan and every probe passes.

The command comes back when it has seen a packet through between every two pods; ``lab check`` then probes again, from a new process, and
its time is told apart. Floor: the same namespaces, links, addresses and routes made by the same code, without any service.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks import lab
from benchmarks.result import Figure, Result, median, result, rounded
from services.cli.files import load
from services.cli.lab.layout import layout
from services.cli.lab.wiring import Wiring
from services.runtime.errors import Transient

_RUNS = 5
_COMMAND = (sys.executable, "-m", "services.cli.main", "lab")
_ROOT = Path(__file__).parent.parent.parent
_MARKS = {
    "nats-server listens": "the broker listens",
    "published": "the planner has made the streams, the topology is published",
    "every host holds": "every host holds its plan",
    "ready": "every probe has passed",
}
"""What the command says on its way, and what that means."""


def run(say: Callable[[str], None]) -> list[Result]:
    _start_s()  # not counted: it compiles modules, and brings files into memory
    starts, checks, floors = [], [], []
    marks: dict[str, list[float]] = {}
    for number in range(1, _RUNS + 1):
        floors.append(_wire_s())
        start, check, seen = _start_s()
        starts.append(start)
        checks.append(check)
        for words, at_s in seen.items():
            marks.setdefault(words, []).append(at_s)
        say(f"run {number}: {start:.1f} s, wiring alone {floors[-1]:.1f} s")
    return [
        result(
            "lab-start",
            starts,
            "s",
            floor=median(floors),
            details={
                "reached_after_s": {words: rounded(median(samples), 3) for words, samples in marks.items()},
                "check_from_a_new_process_s": rounded(median(checks), 3),
                "all_runs_s": [rounded(start, 3) for start in starts],
            },
        )
    ]


def _start_s() -> tuple[float, float, dict[str, float]]:
    """Seconds until the lab is ready, seconds of a check after that, and when each mark was passed."""
    with TemporaryDirectory(prefix="meshmark-bench-") as folder:
        state = ("--state", f"{folder}/lab")
        began = time.perf_counter()
        try:
            seen = _up([*_COMMAND, "up", "-f", str(lab.EXAMPLE), *state, "--detach"], began)
            start_s = time.perf_counter() - began
            began = time.perf_counter()
            _must([*_COMMAND, "check", *state])
            return start_s, time.perf_counter() - began, seen
        finally:
            _must([*_COMMAND, "down", *state])


def _up(command: Sequence[str], began: float) -> dict[str, float]:
    seen: dict[str, float] = {}
    lines = []
    with subprocess.Popen(command, cwd=_ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)
            words = line.removeprefix("lab: ")
            for start, meaning in _MARKS.items():
                if line != words and words.startswith(start):
                    seen.setdefault(meaning, time.perf_counter() - began)
    if process.returncode:
        msg = f"the lab did not come up: {''.join(lines[-3:]).strip()}"
        raise Transient(msg)
    return seen


def _must(command: Sequence[str]) -> None:
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        msg = f"{' '.join(command[2:])} failed: {(done.stderr or done.stdout).strip()[-500:]}"
        raise Transient(msg)


def _wire_s() -> float:
    """Seconds to make the lab's hosts and pods alone."""
    with lab.claimed():
        wanted = layout(load([lab.EXAMPLE]))
        began = time.perf_counter()
        wiring = Wiring()
        wiring.make_underlay()
        wiring.turn_into(wanted)
        return time.perf_counter() - began


FIGURE = Figure("lab-start", f"the whole lab of the example, from the command to every probe passed, {_RUNS} times", run, needs_root=True)
