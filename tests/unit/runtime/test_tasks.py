"""The end of tasks."""

from __future__ import annotations

import asyncio

from services.runtime import tasks


async def test_tasks_have_ended_however_they_do() -> None:
    """One that takes its time over it, one that fails at it, one that has ended already; nothing is raised here."""
    done: list[str] = []

    async def slow() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)
            done.append("slow")

    async def failing() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            raise ValueError

    async def over() -> None:
        done.append("over")

    running = {asyncio.create_task(each()) for each in (slow, failing, over)}
    await asyncio.sleep(0)
    await tasks.end(task for task in running)
    assert all(task.done() for task in running)
    assert sorted(done) == ["over", "slow"]


async def test_tasks_that_leave_their_set_as_they_end_are_waited_for() -> None:
    """As those of connections do."""
    running = {asyncio.create_task(asyncio.sleep(60)) for _ in range(3)}
    for task in tuple(running):
        task.add_done_callback(running.discard)
    await tasks.end(running)
    assert running == set()
