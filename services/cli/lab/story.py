"""How the guided lab speaks: headings, plain words, what the kernel shows, and checks that are counted."""

from __future__ import annotations

import asyncio
import textwrap
import time
from collections.abc import Callable, Iterable

from rich.console import Console
from rich.markup import escape

from schemas.drift import DriftEvent
from services.cli.lab.probe import Check
from services.runtime.errors import MeshmarkError

_WIDTH = 100
_POLL_S = 0.1


class Story:
    """Tells on a console what happens, and keeps every check that was made."""

    def __init__(self, console: Console) -> None:
        self.checks: list[Check] = []
        self._console = console
        self._chapter = 0
        self._started = time.monotonic()

    @property
    def ok(self) -> bool:
        return bool(self.checks) and all(check.ok for check in self.checks)

    def chapter(self, title: str, *words: str) -> None:
        """A new part of the story: what comes, and why."""
        self._chapter += 1
        self._console.print(
            f"\n[bold cyan]{self._chapter}. {escape(title)}[/] [dim]{time.monotonic() - self._started:.0f} s[/]", highlight=False
        )
        for paragraph in words:
            self._console.print(textwrap.fill(paragraph, min(_WIDTH, self._console.width - 1)), markup=False, highlight=False)

    def show(self, lines: Iterable[str]) -> None:
        """What a command prints, set apart."""
        for line in lines:
            self._console.print(f"    {line}", style="dim", markup=False, highlight=False, soft_wrap=True)

    def command(self, text: str) -> None:
        self._console.print(f"  [bold]$ {escape(text)}[/]", highlight=False, soft_wrap=True)

    def event(self, event: DriftEvent) -> None:
        """A drift event as it came in."""
        colour = "yellow" if event.state == "raised" else "green" if event.state == "resolved" else "magenta"
        by = f", changed by {event.suspect.name or 'process'} ({event.suspect.pid})" if event.suspect else ""
        text = f"{event.cluster}/{event.host} {event.layer}: {event.key}{by}"
        self._console.print(f"  [{colour}]● {event.state}[/] {escape(text)}", highlight=False, soft_wrap=True)

    def check(self, name: str, ok: bool, detail: str = "") -> None:  # noqa: FBT001 - a check is exactly that
        self.add([Check(name, ok, detail)])

    def add(self, checks: Iterable[Check]) -> None:
        for check in checks:
            self.checks.append(check)
            mark = "[green]✓[/]" if check.ok else "[bold red]✗[/]"
            detail = f" [dim]{escape(check.detail)}[/]" if check.detail else ""
            self._console.print(f"  {mark} {escape(check.name)}{detail}", highlight=False, soft_wrap=True)

    async def eventually(self, name: str, holds: Callable[[], object], timeout_s: float, detail: Callable[[], object] = str) -> bool:
        """Check that `holds` becomes true in time; the kernel sends no event for most of what is asked here."""
        deadline = time.monotonic() + timeout_s
        started, ok = time.monotonic(), False
        trouble = ""
        while True:
            try:
                ok, trouble = bool(await asyncio.to_thread(holds)), ""
            except MeshmarkError as error:
                trouble = str(error)
            if ok or time.monotonic() > deadline:
                break
            await asyncio.sleep(_POLL_S)
        seen = str(detail())
        words = [seen, trouble, f"after {time.monotonic() - started:.1f} s"]
        self.check(name, ok, ", ".join(word for word in words if word))
        return ok

    def end(self) -> None:
        failed = [check for check in self.checks if not check.ok]
        spent = f"{time.monotonic() - self._started:.0f} s"
        if failed:
            self._console.print(f"\n[bold red]{len(failed)} of {len(self.checks)} checks failed[/] [dim]{spent}[/]", highlight=False)
            for check in failed:
                self._console.print(f"  [red]✗[/] {escape(check.name)} [dim]{escape(check.detail)}[/]", highlight=False, soft_wrap=True)
        else:
            self._console.print(f"\n[bold green]all {len(self.checks)} checks hold[/] [dim]{spent}[/]", highlight=False)
