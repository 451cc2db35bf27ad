"""``meshmark status`` and ``meshmark drift``: what hosts say about themselves."""

from __future__ import annotations

import time
from datetime import UTC, datetime

from cyclopts import App
from rich.markup import escape

from schemas import codec, subjects
from schemas.drift import DriftEvent
from schemas.plan import SnapshotHead
from schemas.status import ApplyReport
from services.cli.output import EXIT_DIFFERENT, Format, console, default_format, emit, emit_line, show_table
from services.cli.session import Nats
from services.runtime.broker import Broker

_COLOURS = {"applied": "green", "waiting": "yellow", "degraded": "red", "behind": "yellow", "silent": "red"}
_DRIFT_COLOURS = {"raised": "red", "changed": "red", "contested": "magenta", "resolved": "green", "unknown": "yellow"}


def register(app: App) -> None:
    """Add the commands to the application."""
    app.command(status)
    app.command(drift)


async def status(host: str | None = None, *, output: Format | None = None, nats: Nats | None = None) -> int:
    """Show what each host holds of its plan, or all about one HOST, as ``status rome/gw``.

    The exit code is 2 unless every host holds its newest plan.
    """
    form = default_format(output)
    async with (nats or Nats()).connect() as broker:
        wanted = await _wanted(broker)
        reports = await _reports(broker)
    names = [name for name in sorted(wanted.keys() | reports.keys()) if host in (None, name)]
    if form == "table":
        show_table(
            ("HOST", "STATE", "HELD", "WANTED", "WIREGUARD", "WHAT"), [_row(name, reports.get(name), wanted.get(name)) for name in names]
        )
    else:
        emit([reports[name] for name in names if name in reports], form)
    good = all(_state(reports.get(name), wanted.get(name)) == "applied" for name in names)
    return 0 if good and (names or host is None) else EXIT_DIFFERENT


async def drift(*, watch: bool = False, output: Format | None = None, nats: Nats | None = None) -> int:
    """Show the differences between plans and kernels that are open now; with --watch, follow them as they come and go.

    The exit code is 2 when a difference is open.
    """
    form = default_format(output)
    async with (nats or Nats()).connect() as broker, broker.listen(f"{subjects.DRIFT}.>") as live:
        found = await _open_drift(broker)
        if form == "table":
            for event in found:
                _print_event(event)
        elif not watch:
            emit(found, form)
        if not watch:
            if form == "table" and not found:
                console.print("[green]no drift[/]")
            return EXIT_DIFFERENT if found else 0
        async for message in live:
            event = codec.decode(message.data, DriftEvent)
            if form == "table":
                _print_event(event)
            else:
                emit_line(event)
    return 0


async def _wanted(broker: Broker) -> dict[str, SnapshotHead]:
    found = {}
    async for message in broker.replay("SNAPSHOT", f"{subjects.SNAPSHOT}.*.*.head"):
        head = codec.decode(message.data, SnapshotHead)
        found[f"{head.cluster}/{head.host}"] = head
    return found


async def _reports(broker: Broker) -> dict[str, ApplyReport]:
    found = {}
    async for message in broker.replay("STATUS", f"{subjects.STATUS}.>"):
        report = codec.decode(message.data, ApplyReport)
        found[f"{report.cluster}/{report.host}"] = report
    return found


async def _open_drift(broker: Broker) -> list[DriftEvent]:
    found: dict[tuple[str, str, str], DriftEvent] = {}
    async for message in broker.replay("DRIFT", f"{subjects.DRIFT}.>"):
        event = codec.decode(message.data, DriftEvent)
        found.pop((event.cluster, event.host, event.key), None)
        if event.state != "resolved":
            found[event.cluster, event.host, event.key] = event
    return list(found.values())


def _state(report: ApplyReport | None, head: SnapshotHead | None) -> str:
    if report is None:
        return "silent"
    if head is not None and report.generation < head.generation:
        return "behind"
    return report.outcome


def _row(name: str, report: ApplyReport | None, head: SnapshotHead | None) -> tuple[str, ...]:
    state = _state(report, head)
    wanted = str(head.generation) if head else "-"
    if report is None:
        return (name, _coloured(state), "-", wanted, "-", "no report yet")
    errors = "; ".join(f"{unit.unit}: {unit.error}" for unit in report.units if unit.error)
    return (
        name,
        _coloured(state),
        str(report.generation),
        wanted,
        report.capabilities.wireguard,
        escape(errors or f"{len(report.units)} units"),
    )


def _coloured(state: str) -> str:
    return f"[{_COLOURS[state]}]{state}[/]"


def _print_event(event: DriftEvent) -> None:
    when = datetime.fromtimestamp(event.at_s or time.time(), UTC).strftime("%H:%M:%S")
    by = f" by {event.suspect.name or 'process'} ({event.suspect.pid})" if event.suspect else ""
    what = f"{event.cluster}/{event.host} {event.layer} {event.key}{by}"
    console.print(f"{when} [{_DRIFT_COLOURS[event.state]}]{event.state:9}[/] {escape(what)}")
    for label, text in (("wanted", event.wanted), ("found", event.found)):
        if text and event.state != "resolved":
            console.print(f"         [dim]{label}: {escape(text)}[/]")
