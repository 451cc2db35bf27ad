"""Parts of pure computing by themselves, timed by pyperf: messages encoded and read, plans compiled, digested and compared.

``benchmarks.micro`` says what each part is, and its floor: what the same bytes or objects cost at least. pyperf finds out how often a part
is to be repeated for a value, and takes some values in each of several processes, so that no process's luck with memory and hashes counts
alone. A part and its floor run one after the other, not in turns; the clock is processor time. No goals: no issue sets one.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pyperf

from benchmarks.result import Figure, Result, median, result, rounded
from services.runtime.errors import Transient

FLOOR = " floor"
"""How the name of a benchmark that is another one's floor ends."""
_PROCESSES, _VALUES = 5, 4
_OPTIONS = (f"--processes={_PROCESSES}", f"--values={_VALUES}", "--warmups=1", "--quiet", "--inherit-environ=PYTHONPYCACHEPREFIX")
_ROOT = Path(__file__).parent.parent.parent


def run(say: Callable[[str], None]) -> list[Result]:
    found = timed()
    say(f"{len(found)} benchmarks in {_PROCESSES} processes each")
    return summed_up(found)


def timed(options: Sequence[str] = _OPTIONS) -> dict[str, pyperf.Benchmark]:
    """pyperf's benchmarks by name; Transient when they could not be run."""
    with TemporaryDirectory(prefix="meshmark-bench-") as folder:
        file = Path(folder) / "micro.json"
        command = [sys.executable, "-m", "benchmarks.micro", *options, "--output", str(file)]
        done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            msg = f"pyperf ended with code {done.returncode}: {(done.stderr or done.stdout).strip()[-500:]}"
            raise Transient(msg)
        return {item.get_name(): item for item in pyperf.BenchmarkSuite.load(str(file)).get_benchmarks()}


def summed_up(found: Mapping[str, pyperf.Benchmark]) -> list[Result]:
    """A figure for each benchmark that is no floor."""
    return [_result(name, item, found.get(f"{name}{FLOOR}")) for name, item in found.items() if not name.endswith(FLOOR)]


def _result(name: str, item: pyperf.Benchmark, floor: pyperf.Benchmark | None) -> Result:
    details = {
        "pyperf": {
            "processes": sum(part.values != () for part in item.get_runs()),
            "repeated for a value": item.get_loops(),
            "mean, ms": rounded(item.mean() * 1e3),
            "standard deviation, ms": rounded(item.stdev() * 1e3),
        }
    }
    floor_ms = None if floor is None else median(_ms(floor))
    return result(f"micro-{name}", _ms(item), "ms", floor=floor_ms, details=dict(details))


def _ms(item: pyperf.Benchmark) -> list[float]:
    return [value * 1e3 for value in item.get_values()]


FIGURE = Figure("micro", "parts of pure computing by themselves, timed by pyperf", run)
