"""The loop that reads what the kernel tells and shows of traced packets, over sources in memory."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, Self

import pytest
from structlog.testing import capture_logs

from schemas import codec
from schemas.flow import FlowMessage
from schemas.host_objects import TRACE_GROUP, TRACE_PREFIX
from services.auditor.trace import watch
from services.auditor.trace.watch import TraceWatch
from services.kernel.nflog import Shown
from services.kernel.tracing import Heard
from services.runtime.errors import Conflict, MeshmarkError, Transient
from services.runtime.metrics import Metrics

LIMIT_S = 5.0


class Telling:
    """What the kernel tells, as it is put in."""

    def __init__(self) -> None:
        self.heards: asyncio.Queue[Heard] = asyncio.Queue()
        self.asked = asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def heard(self, _: float | None) -> Heard:
        self.asked.set()
        found = await self.heards.get()
        self.asked.clear()
        return found

    async def taken(self, found: Heard) -> None:
        """Tell this, and wait until it was worked off."""
        self.heards.put_nowait(found)
        await asyncio.sleep(0)
        await self.asked.wait()


class Showing:
    """A group that can be listened to once what is in the way is used up."""

    def __init__(self, refusals: list[MeshmarkError]) -> None:
        self._refusals = refusals
        self.items: list[Shown] = []
        self.groups: list[int] = []
        self.listens = asyncio.Event()

    def __call__(self, group: int, **_: object) -> Self:
        self.groups.append(group)
        return self

    async def __aenter__(self) -> Self:
        if self._refusals:
            raise self._refusals.pop(0)
        self.listens.set()
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    def taken(self) -> list[Shown]:
        found, self.items = self.items, []
        return found


async def test_what_was_lost_of_what_is_shown_is_counted_and_whoever_is_in_the_way_is_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace goes on without, and listens again when it can."""
    monkeypatch.setattr(watch, "_LISTEN_AGAIN_S", 0.01)
    taken = Conflict("NFLOG group 5188 has another listener")
    telling, showing, metrics = Telling(), Showing([taken, taken, Transient("no NFLOG")]), Metrics()
    monkeypatch.setattr(watch, "TraceSource", lambda: telling)
    monkeypatch.setattr(watch, "NflogSource", showing)
    said: list[FlowMessage] = []

    async def tell(_: str, data: bytes) -> None:
        said.append(codec.decode(data, FlowMessage))

    broker: Any = SimpleNamespace(tell=tell)
    with capture_logs() as logged:
        running = asyncio.create_task(TraceWatch(broker, metrics, "rome", "worker-1").run())
        try:
            async with asyncio.timeout(LIMIT_S):
                await telling.taken(Heard((), overruns=1))
                await showing.listens.wait()
                showing.items = [Shown(TRACE_PREFIX, b"", lost=3), Shown(TRACE_PREFIX, b"", lost=2)]
                await telling.taken(Heard(()))
        finally:
            running.cancel()
    assert [line["error"] for line in logged] == [str(taken), "no NFLOG"]
    assert showing.groups == [TRACE_GROUP] * 4
    assert [message.lost_events.source for message in said if message.lost_events] == ["KERNEL_TRACE_BUFFER"]
    lost = {by: metrics.registry.get_sample_value("meshmark_trace_lost_total", {"by": by}) for by in ("kernel", "shown")}
    assert lost == {"kernel": 1, "shown": 5}
