"""The loop that reads what the kernel tells and shows of traced packets, over sources in memory."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, Self

import pytest
from structlog.testing import capture_logs

from schemas import codec
from schemas.flow import FlowMessage, LostEvents
from schemas.host_objects import TRACE_GROUP, TRACE_PREFIX, TRACE_TABLE
from services.auditor.trace import watch
from services.auditor.trace.watch import TraceWatch
from services.kernel.nflog import Shown
from services.kernel.nftrace import TraceEvent
from services.kernel.tracing import Heard
from services.runtime import tasks
from services.runtime.errors import Conflict, MeshmarkError, Transient
from services.runtime.metrics import Metrics
from tests.unit.auditor.trace.test_inners import UDP_HEAD, network

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


class Watching:
    """A watch that runs over these sources, and what it published."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *refusals: MeshmarkError) -> None:
        monkeypatch.setattr(watch, "_LISTEN_AGAIN_S", 0.01)
        self.telling, self.showing, self.metrics = Telling(), Showing(list(refusals)), Metrics()
        monkeypatch.setattr(watch, "TraceSource", lambda: self.telling)
        monkeypatch.setattr(watch, "NflogSource", self.showing)
        self.said: list[FlowMessage] = []
        self.is_away = False

    async def tell(self, _: str, data: bytes) -> None:
        if self.is_away:
            msg = "the broker is away"
            raise Transient(msg)
        self.said.append(codec.decode(data, FlowMessage))

    def lost(self, *by: str) -> list[float | None]:
        return [self.metrics.registry.get_sample_value("meshmark_trace_lost_total", {"by": one}) for one in by]

    @contextlib.asynccontextmanager
    async def runs(self) -> AsyncIterator[None]:
        broker: Any = SimpleNamespace(tell=self.tell)
        running = asyncio.create_task(TraceWatch(broker, self.metrics, "rome", "worker-1").run())
        try:
            async with asyncio.timeout(LIMIT_S):
                yield
        finally:
            await tasks.end([running])


async def test_what_was_lost_of_what_is_shown_is_counted_and_whoever_is_in_the_way_is_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace goes on without, and listens again when it can."""
    taken = Conflict("NFLOG group 5188 has another listener")
    made = Watching(monkeypatch, taken, taken, Transient("no NFLOG"))
    with capture_logs() as logged:
        async with made.runs():
            await made.telling.taken(Heard((), overruns=1))
            await made.showing.listens.wait()
            made.showing.items = [Shown(TRACE_PREFIX, b"", lost=3), Shown(TRACE_PREFIX, b"", lost=2)]
            await made.telling.taken(Heard(()))
    assert [line["error"] for line in logged] == [str(taken), "no NFLOG"]
    assert made.showing.groups == [TRACE_GROUP] * 4
    assert [message.lost_events.source for message in made.said if message.lost_events] == ["PERF_EVENT_RING_BUFFER"]
    assert made.lost("kernel", "shown") == [1, 5]


async def test_events_that_came_too_fast_are_said_with_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """And so that somebody hears it: what the broker does not take is counted."""
    made = Watching(monkeypatch)
    with capture_logs():
        async with made.runs():
            await made.telling.taken(Heard((), dropped=4))
            made.is_away = True
            await made.telling.taken(Heard((), overruns=2, dropped=3))
            made.is_away = False
            await made.telling.taken(Heard(()))
    assert [message.lost_events for message in made.said] == [LostEvents("OBSERVER_EVENTS_QUEUE", 4)]
    assert [message.node_name for message in made.said] == ["rome/worker-1"]
    assert made.lost("kernel", "queue", "broker") == [2, 7, 2]


OUTER = network() + UDP_HEAD + bytes(60)
TRACED = TraceEvent(7, 1, TRACE_TABLE, "arriving", "rule", "accept", iif=1, network=OUTER[:40], transport=OUTER[20:40])


@pytest.mark.parametrize("heard, is_joined", [(Heard(()), True), (Heard((), overruns=1), False), (Heard((), dropped=1), False)])
async def test_what_was_shown_before_a_loss_is_no_later_packets(monkeypatch: pytest.MonkeyPatch, heard: Heard, is_joined: bool) -> None:
    """Of what was told meanwhile, somebody else's looks alike."""
    made, joined = Watching(monkeypatch), []
    monkeypatch.setattr(watch.Passages, "hear", lambda _, event, at_s, data: joined.append(bool(data)) or [])
    async with made.runs():
        await made.showing.listens.wait()
        made.showing.items = [Shown(TRACE_PREFIX, OUTER, 2, 0)]
        await made.telling.taken(heard)
        await made.telling.taken(Heard(((1.0, TRACED),)))
    assert joined == [is_joined]
