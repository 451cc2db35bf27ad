"""Results as text: a table for people, JSON to keep, a comparison with an earlier run. Pure but for reading the file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from benchmarks.machine import Machine
from benchmarks.result import Result, ratio


class Document(Struct, frozen=True):
    """One run, as it is kept: where, when (ISO 8601, UTC), what came out, and the figures that could not be measured, with the reason."""

    started: str
    machine: Machine
    results: tuple[Result, ...]
    failed: dict[str, str] = {}


def table(results: Iterable[Result]) -> str:
    """One line per figure, with the details that are numbers below it."""
    rows: list[tuple[str, ...]] = [("figure", "median", "floor", "ratio", "peer", "ratio", "quartiles", "p99", "n", "goal")]
    rows += [_row(item) for item in results]
    return _aligned(rows)


def details(item: Result) -> str:
    """The details of a figure, one line each; nested ones on one line."""
    return "\n".join(f"    {name}: {_flat(value)}" for name, value in item.details.items())


def comparison(now: Sequence[Result], before: Sequence[Result]) -> str:
    """Each figure's median over the earlier one's; what only one of the runs has is said."""
    earlier = {item.name: item for item in before}
    rows: list[tuple[str, ...]] = [("figure", "before", "now", "ratio")]
    for item in now:
        old = earlier.get(item.name)
        if old is None or old.unit != item.unit:
            rows.append((item.name, "-", _amount(item.median, item.unit), "new"))
        else:
            rows.append((item.name, _amount(old.median, old.unit), _amount(item.median, item.unit), _times(ratio(item.median, old.median))))
    gone = earlier.keys() - {item.name for item in now}
    rows += [(name, _amount(earlier[name].median, earlier[name].unit), "-", "not run") for name in sorted(gone)]
    return _aligned(rows)


def closing(results: Sequence[Result], failed: Sequence[str], seconds: float) -> str:
    """The one line that a script may read."""
    count = {verdict: sum(item.met is verdict for item in results) for verdict in (True, False, None)}
    words = f"figures={len(results)} met={count[True]} missed={count[False]} without-goal={count[None]} failed={len(failed)}"
    return f"bench: {words} seconds={seconds:.1f}"


def line(item: Result) -> str:
    """One figure as one line of JSON."""
    return msgspec.json.encode(item).decode()


def write(document: Document, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")


def read(file: Path) -> Document:
    """An earlier run's document; OSError or msgspec.MsgspecError when there is none."""
    return msgspec.json.decode(file.read_bytes(), type=Document)


def _row(item: Result) -> tuple[str, ...]:
    unit, found = item.unit, item.spread
    goal = "-" if item.goal is None else f"≤ {_amount(item.goal, unit)} {'met' if item.met else 'MISSED'}"
    return (
        item.name,
        _amount(item.median, unit),
        _amount(item.floor, unit),
        _times(item.ratio_floor),
        _amount(item.peer, unit),
        _times(item.ratio_peer),
        f"{found.low:g} to {found.high:g}",
        _amount(found.p99, unit),
        str(found.count),
        goal,
    )


def _amount(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:g} {unit}"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}x"


def _flat(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_flat(part)}" for name, part in value.items())
    return f"{value:g}" if isinstance(value, float) else str(value)


def _aligned(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
