"""``meshmark drift``: the differences between plans and kernels, as auditors tell them."""

from __future__ import annotations

import shlex
import time
from datetime import UTC, datetime
from typing import Annotated

from cyclopts import App, Parameter
from rich.markup import escape

from schemas import codec, subjects
from schemas.drift import PLAINTEXT, DriftEvent
from services.cli import records
from services.cli.output import EXIT_DIFFERENT, Output, console, default_format, emit, emit_line
from services.cli.session import Nats

_COLOURS = {"raised": "red", "changed": "red", "contested": "magenta", "resolved": "green", "unknown": "yellow"}

Watch = Annotated[bool, Parameter(negative=(), help="Go on: print events as they come, in JSON one to a line")]


def register(app: App) -> None:
    """Add the command to the application."""
    app.command(drift)


async def drift(*, watch: Watch = False, output: Output = None, nats: Nats | None = None) -> int:
    """Show the differences between plans and kernels that are open now; with --watch, follow them as they come and go.

    Each line has the layer, and the key in quotes, as `meshmark explain` takes it; an alert about packets in clear (layer *plaintext*) has
    no object to explain, and says itself which topology objects are behind it. What somebody makes again and again is *contested*, and
    repaired later and later.

    The exit code is 2 when a difference is open.

    ```sh
    meshmark drift
    meshmark drift --watch
    meshmark drift --watch --output json | jq .key
    ```
    """
    form = default_format(output)
    async with (nats or Nats()).connect() as broker, broker.listen(f"{subjects.DRIFT}.>") as live:
        found = await records.open_drift(broker)
        if not watch:
            if form != "table":
                emit(found, form)
            elif not found:
                console.print("[green]no drift[/]")
            else:
                for event in found:
                    _print_event(event)
            return EXIT_DIFFERENT if found else 0
        tell = _print_event if form == "table" else emit_line
        for event in found:
            tell(event)
        async for message in live:
            tell(codec.decode(message.data, DriftEvent))
    return 0


def contest(event: DriftEvent) -> str:
    """What to say of a contested difference: how often it was made, and when it is repaired next, if it is."""
    repair = f", next repair at {_time(event.next_repair_s)} UTC" if event.next_repair_s else ""
    return f"contested: {event.key}, made {event.count} times within a minute{repair}"


def _time(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%H:%M:%S")


def _print_event(event: DriftEvent) -> None:
    by = f"  by {event.suspect.name or 'process'} ({event.suspect.pid})" if event.suspect else ""
    what = f"{event.cluster}/{event.host}  {event.layer}: {shlex.quote(event.key)}{by}"
    console.print(f"{_time(event.at_s or time.time())} [{_COLOURS[event.state]}]{event.state:9}[/] {escape(what)}")
    if event.state == "contested":
        console.print(f"         {escape(contest(event))}")
    if event.layer == PLAINTEXT and event.because and event.state != "resolved":
        console.print(f"         [dim]because: {escape(', '.join(event.because))}[/]")
    for label, text in (("wanted", event.wanted), ("found", event.found)):
        if text and event.state != "resolved":
            console.print(f"         [dim]{label}: {escape(text)}[/]")
