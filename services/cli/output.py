"""What the command prints: tables and colour for people on a terminal, JSON or YAML for programs; errors in one line on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Literal

import yaml
from rich.console import Console
from rich.table import Table

from schemas import codec

Format = Literal["table", "json", "yaml"]

EXIT_ERROR = 1
EXIT_DIFFERENT = 2

console = Console(highlight=False, soft_wrap=True)
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
    """Print a table; cells may hold rich markup."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def fail(text: str) -> None:
    """Print an error: one line that says what to do."""
    errors.print(f"[bold red]error:[/] {_plain(text)}")


def note(text: str) -> None:
    """Print something beside the result, to stderr."""
    errors.print(f"[dim]{_plain(text)}[/]")


def _plain(text: str) -> str:
    return text.replace("[", "\\[")
