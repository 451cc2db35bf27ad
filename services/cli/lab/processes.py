"""Child processes that are started again when they end, with all their output in a log file."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import structlog
from msgspec import Struct

_FIRST_DELAY_S = 0.2
_LAST_DELAY_S = 5.0
_STEADY_S = 30.0
"""A process that ran this long is no crash loop: its next start comes as soon as its first one did."""
_STOP_S = 6.0

log = structlog.get_logger(__name__)


class Command(Struct, frozen=True):
    """How to start a service: its name, arguments, whole environment, working folder and log file."""

    name: str
    argv: Sequence[str]
    environment: Mapping[str, str]
    folder: Path
    log: Path


class Child:
    """One service process and its successors. `run` is a task's life; `stop` ends it and comes back when the process is gone."""

    def __init__(self, command: Command, changed: Callable[[str, int | None], None]) -> None:
        """`changed` is told the pid of each process that starts, and None when one has ended."""
        self.command = command
        self.ends = 0
        """How often the process has ended by itself."""
        self._changed = changed
        self._stop = asyncio.Event()
        self._ended = asyncio.Event()

    async def run(self) -> None:
        """Keep the service running until it is to stop."""
        delay_s = _FIRST_DELAY_S
        try:
            while not self._stop.is_set():
                started = time.monotonic()
                code = await self._run_once()
                if self._stop.is_set():
                    break
                self.ends += 1
                delay_s = _FIRST_DELAY_S if time.monotonic() - started > _STEADY_S else min(2 * delay_s, _LAST_DELAY_S)
                log.warning("service ended, starting it again", service=self.command.name, code=code, delay_s=delay_s)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), delay_s)
        finally:
            self._ended.set()

    async def stop(self) -> None:
        """Ask the process to end, kill it when it does not, and wait for both it and `run`."""
        self._stop.set()
        await self._ended.wait()

    async def _run_once(self) -> int:
        command = self.command
        with command.log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *command.argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=command.folder,
                env=command.environment,
                # Ctrl-C goes to the supervisor alone, which then stops its children in the right order.
                start_new_session=True,
            )
        self._changed(command.name, process.pid)
        try:
            return await self._wait(process)
        finally:
            self._changed(command.name, None)

    async def _wait(self, process: asyncio.subprocess.Process) -> int:
        """The exit code; from the moment of `stop` (or of a cancellation) on, the process has a few seconds to end."""
        ended = asyncio.ensure_future(process.wait())
        stop = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait((ended, stop), return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                _signal(process, signal.SIGTERM)
                await asyncio.wait((ended,), timeout=_STOP_S)
            if not ended.done():
                log.warning("service does not end, killing it", service=self.command.name)
        finally:
            stop.cancel()
            _signal(process, signal.SIGKILL)
        return await ended


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)


async def ended(pid: int) -> None:
    """Wait until this process has ended."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    gone = asyncio.Event()
    loop.add_reader(handle, gone.set)
    try:
        await gone.wait()
    finally:
        loop.remove_reader(handle)
        os.close(handle)
