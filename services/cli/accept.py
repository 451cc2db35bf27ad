"""``meshmark accept``: let a planner take away what it holds back."""

from __future__ import annotations

import asyncio
import sys
from datetime import UTC, datetime
from typing import Annotated

from cyclopts import App, Parameter
from rich.markup import escape

from schemas import codec, subjects
from schemas.status import Accept, Freeze
from services.cli import records
from services.cli.output import EXIT_ERROR, console, note, show_table
from services.cli.session import Nats
from services.runtime.errors import Permanent, Waiting

_ANSWER_S = 60.0

Yes = Annotated[bool, Parameter(name=["--yes", "-y"], negative=(), help="Do not ask")]
Token = Annotated[str | None, Parameter(help="Accept only if this is still what would go, as `meshmark status` showed it")]


def register(app: App) -> None:
    """Add the command to the application."""
    app.command(accept)


async def accept(*, yes: Yes = False, token: Token = None, nats: Nats | None = None) -> int:
    """Let the planner take away what it holds back: it is frozen while much would go at once, or after the broker's store was lost.

    Shows what would go and asks. Where that is a mistake, publish what is missing instead: the freeze then ends by itself.

    ```sh
    meshmark accept
    meshmark accept --yes --token 1f0c9a5b7d2e
    ```
    """
    way = nats or Nats()
    async with way.connect() as broker:
        freeze = await records.freeze(broker)
    if not freeze.is_on:
        console.print("nothing is held back")
        return 0
    if token not in (None, freeze.token):
        msg = f"what would go is not what {token} names any more, but {freeze.token}; look at it with: meshmark status"
        raise Permanent(msg)
    if not yes:
        show(freeze)
        if not await _agrees(freeze):
            note("nothing was accepted")
            return EXIT_ERROR
    # Connected anew: people take their time.
    async with way.connect() as broker:
        try:
            answer = await broker.request(subjects.ACCEPT, codec.encode(Accept(freeze.token)), _ANSWER_S)
        except Waiting as error:
            msg = "no planner answers; is it running?"
            raise Waiting(msg, "a planner") from error
    gone = codec.decode(answer, Freeze)
    console.print(f"accepted: {_units(gone)} on {_hosts(gone)} go")
    return 0


def summary(freeze: Freeze) -> str:
    """The freeze in one line, as markup."""
    since = datetime.fromtimestamp(freeze.since_s, UTC).isoformat(" ", "seconds").removesuffix("+00:00")
    what = f"{_units(freeze)} of {freeze.planned} on {_hosts(freeze)} would go"
    return f"[bold red]frozen[/] since {since} UTC: {what}; {escape(freeze.reason)}"


def show(freeze: Freeze) -> None:
    """Print what would go: a line, then a table of units."""
    console.print(summary(freeze))
    rows = [(escape(one.host), escape(one.unit), str(one.objects or "?"), str(one.kept)) for one in freeze.losses]
    show_table(("HOST", "UNIT", "OBJECTS", "LEFT"), rows)
    if freeze.count > len(rows):
        console.print(f"and {freeze.count - len(rows)} more units")


async def _agrees(freeze: Freeze) -> bool:
    if not sys.stdin.isatty():
        msg = f"nobody is there to be asked; accept with: meshmark accept --yes --token {freeze.token}"
        raise Permanent(msg)
    answer = await asyncio.to_thread(console.input, f"Let {_units(freeze)} go? (y/N) ")
    return answer.strip().lower() in ("y", "yes")


def _units(freeze: Freeze) -> str:
    return f"{freeze.count} unit{'' if freeze.count == 1 else 's'}"


def _hosts(freeze: Freeze) -> str:
    return f"{freeze.hosts} host{'' if freeze.hosts == 1 else 's'}"
