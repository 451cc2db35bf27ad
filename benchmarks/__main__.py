"""``python -m benchmarks``: run figures, print them, keep them; or plot what was kept.

The exit code is 0 when every figure could be measured, whether its goal was met or not; 1 when one could not; 2 for a wrong argument.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import structlog

from benchmarks import machine, plots, report
from benchmarks.figures import FIGURES
from benchmarks.report import Document
from benchmarks.result import Figure, Result

_ROOT = Path(__file__).parent.parent


def main() -> int:
    arguments = _parser().parse_args()
    if arguments.plots:
        for file in plots.write([report.read(kept) for kept in arguments.plots], _ROOT / "docs"):
            _say(f"wrote {file.relative_to(_ROOT)}")
        return 0
    # What services would log into a terminal is not what was asked for.
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    _keep_bytecode()
    # Asked to end, end as after Ctrl-C: figures take down what they made.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    figures = _chosen(arguments.only)
    before = report.read(arguments.compare) if arguments.compare else None
    started, began = datetime.now(UTC), time.monotonic()
    here = machine.describe()
    _say(f"{here.cpu}, {here.cores} cores, {here.kernel}, load {here.load:g}")
    results, failed = _measure(figures, as_json=arguments.output == "json")
    here = msgspec.structs.replace(here, load_after=os.getloadavg()[0])
    document = Document(started.isoformat(timespec="seconds"), here, tuple(results), failed)
    file = arguments.json or _ROOT / ".cache" / "bench" / f"{started:%Y%m%dT%H%M%SZ}.json"
    report.write(document, file)
    _say(f"kept in {file}")
    out = sys.stderr if arguments.output == "json" else sys.stdout
    if arguments.output != "json":
        print(report.table(results))
    if before is not None:
        print(f"\ncompared with {arguments.compare} of {before.started}:\n{report.comparison(results, before.results)}", file=out)
    for name, reason in failed.items():
        print(f"bench: {name} could not be measured: {reason}", file=sys.stderr)
    print(report.closing(results, list(failed), time.monotonic() - began), file=out)
    return 1 if failed else 0


def _measure(figures: Sequence[Figure], *, as_json: bool) -> tuple[list[Result], dict[str, str]]:
    results: list[Result] = []
    failed: dict[str, str] = {}
    for figure in figures:
        _say(f"{figure.name}: {figure.about}")
        if figure.needs_root and os.geteuid() != 0:
            failed[figure.name] = "it makes network namespaces; run it as root"
            continue
        try:
            found = figure.run(lambda text, name=figure.name: _say(f"{name}: {text}"))  # type: ignore[misc]
        except Exception as error:  # noqa: BLE001 - told, counted, and the exit code; the other figures go on
            traceback.print_exc()
            failed[figure.name] = f"{type(error).__name__}: {error}"
            continue
        for item in found:
            print(report.line(item) if as_json else f"{report.table([item])}\n{report.details(item)}\n", flush=True)
        results += found
    return results, failed


def _keep_bytecode() -> None:
    """Let the services that figures start find their modules compiled, as an installation has them, also where the caller forbids it.

    Without that, every process compiles every module anew, which doubles the processor time of a start.
    """
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ.setdefault("PYTHONPYCACHEPREFIX", str(_ROOT / ".cache" / "bytecode"))


def _chosen(names: Sequence[str]) -> list[Figure]:
    """The figures with these names, in the order of the registry; all when none is named."""
    known = {figure.name for figure in FIGURES}
    if unknown := [name for name in names if name not in known]:
        _parser().error(f"there is no figure {unknown[0]!r}; the figures are {', '.join(sorted(known))}")
    return [figure for figure in FIGURES if not names or figure.name in names]


def _parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="bench", description="Measure meshmark beside floors and peers; docs/benchmarks.md explains.")
    names = ", ".join(figure.name for figure in FIGURES)
    found.add_argument("--only", nargs="+", default=[], metavar="NAME", help=f"figures to run: {names}")
    found.add_argument("--output", choices=("table", "json"), default="table", help="a table, or one line of JSON per figure")
    found.add_argument("--json", type=Path, metavar="FILE", help="where to keep the whole run (default: .cache/bench/<date>.json)")
    found.add_argument("--compare", type=_document, metavar="FILE", help="print the ratio to an earlier run that was kept")
    words = "measure nothing: plot runs that were kept into docs/, and show them in docs/benchmarks.md"
    found.add_argument("--plots", type=_document, nargs="+", metavar="FILE", help=words)
    return found


def _document(text: str) -> Path:
    try:
        report.read(Path(text))
    except (OSError, msgspec.MsgspecError) as error:
        msg = f"{text} is no kept run: {error}"
        raise argparse.ArgumentTypeError(msg) from None
    return Path(text)


def _say(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
