"""What the command prints: tables and colour for people on a terminal, JSON or YAML for programs; errors in one line on stderr."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Annotated, Literal

import yaml
from cyclopts import Parameter
from rich.console import Console
from rich.table import Table
from rich.text import Text

from schemas import codec

Format = Literal["table", "json", "yaml"]
Output = Annotated[Format | None, Parameter(alias="-o", help="Default: a table on a terminal, JSON elsewhere")]

EXIT_ERROR = 1
EXIT_DIFFERENT = 2
EXIT_NOTHING = 3
"""Nothing was seen that could be judged."""
_UNFOLDED = 10_000
_LINE_MAX = 2000
_SHOWN = 300


class _Printer(Console):
    """A console that leaves it to `main` to end the command when nobody reads any more, as a write to the standard output does."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


console = _Printer(highlight=False, soft_wrap=True)
errors = Console(stderr=True, highlight=False, soft_wrap=True)


def default_format(given: Format | None) -> Format:
    """The format asked for; else a table on a terminal and JSON elsewhere."""
    return given or ("table" if sys.stdout.isatty() else "json")


def emit(value: object, form: Format) -> None:
    """Print one document as JSON or YAML."""
    data = codec.to_builtins(value)
    if form == "yaml":
        sys.stdout.write(yaml.safe_dump(data, sort_keys=False, allow_unicode=True))
    else:
        sys.stdout.write(json.dumps(data, indent=2, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def emit_line(value: object) -> None:
    """Print one value as one line of JSON, at once: for what goes on and on."""
    sys.stdout.write(codec.encode(value).decode() + "\n")
    sys.stdout.flush()


def show_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table; cells may hold rich markup.

    What is too wide for the terminal is folded, but for hosts' names. Into a pipe or a file a row is a line, unless COLUMNS says how wide.
    """
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column == "HOST")
    for row in rows:
        table.add_row(*row)
    if console.is_terminal or "COLUMNS" in os.environ:
        console.print(table)
        return
    wide = Console(highlight=False, width=_UNFOLDED)
    with wide.capture() as printed:
        wide.print(table)
    sys.stdout.write(re.sub(" +$", "", printed.get(), flags=re.MULTILINE))


def fail(text: str) -> None:
    """Print an error: one line that says what to do."""
    errors.print(Text.assemble(("error:", "bold red"), " ", line(text)))


def system_words(error: BaseException) -> str:
    """What the system says is wrong, and with which file."""
    return f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)


def utc(at_s: float) -> str:
    """A Unix time, for people."""
    return f"{datetime.fromtimestamp(at_s, UTC).isoformat(' ', 'seconds').removesuffix('+00:00')} UTC"


def note(text: str) -> None:
    """Print something beside the result, to stderr."""
    errors.print(Text(line(text), "dim"))


def line(text: str) -> str:
    """`text` in one line that can be read: of one that repeats megabytes of somebody's input, its ends."""
    words = " ".join(text.split())
    return words if len(words) <= _LINE_MAX else f"{words[:_SHOWN]} … ({len(words)} characters) … {words[-_SHOWN:]}"
