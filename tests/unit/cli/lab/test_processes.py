"""Services that are started again when they end, and stopped when they are to."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from services.cli.lab.processes import Child, Command, ended
from services.cli.lab.state import identify


class Pids:
    """Whom a child has told about."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.fresh: asyncio.Queue[int] = asyncio.Queue()

    def __call__(self, service: str, pid: int | None) -> None:
        if pid is not None:
            self.seen.append(pid)
            self.fresh.put_nowait(pid)


def command(folder: Path, *argv: str) -> Command:
    return Command(name="service", argv=argv, environment=dict(os.environ), folder=folder, log=folder / "service.log")


async def test_a_killed_service_comes_back_and_a_stopped_one_does_not(tmp_path: Path):
    pids = Pids()
    child = Child(command(tmp_path, "sleep", "600"), pids)
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        tasks.create_task(child.run())
        first = await pids.fresh.get()
        os.kill(first, signal.SIGKILL)
        second = await pids.fresh.get()
        assert second != first
        assert child.ends == 1
        process = identify(second)
        await child.stop()
        assert not process.alive
    assert pids.seen == [first, second]


async def test_everything_a_service_prints_is_in_its_log(tmp_path: Path):
    pids = Pids()
    child = Child(command(tmp_path, "sh", "-c", "echo out; echo err >&2"), pids)
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        tasks.create_task(child.run())
        await pids.fresh.get()
        await pids.fresh.get()  # the first one has ended, so that all its words are there
        await child.stop()
    assert (tmp_path / "service.log").read_text().split()[:2] == ["out", "err"]


async def test_a_process_that_is_gone_has_ended(tmp_path: Path):
    process = await asyncio.create_subprocess_exec("true")
    async with asyncio.timeout(10):
        await ended(process.pid)
    assert await process.wait() == 0
    await ended(process.pid)
