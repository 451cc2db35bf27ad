"""A broker and kernel events that are values in memory, for the loops of the services on a host."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from schemas import codec, subjects
from schemas.drift import DriftEvent
from schemas.plan import HostPlan, PlanDiff, diff_units
from schemas.snapshot import Chunks
from schemas.status import ApplyReport
from services.kernel.events import KernelEvent
from services.planner.state import HostId
from services.runtime.messages import Message

NODE = HostId("rome", "worker-1")


class StubBroker:
    """A broker that holds one snapshot, delivers what is put in, and keeps what is published.

    `away`, where it is given, holds up what is published until it is set. `plans` are done with when who consumes them asks for more.
    """

    def __init__(self, stop: asyncio.Event) -> None:
        self.stop = stop
        self.stored: dict[str, bytes] = {}
        self.plans: asyncio.Queue[Message] = asyncio.Queue()
        self.reports: asyncio.Queue[ApplyReport] = asyncio.Queue()
        self.keys: asyncio.Queue[Message] = asyncio.Queue()
        self.drift: asyncio.Queue[DriftEvent] = asyncio.Queue()
        self.away: asyncio.Event | None = None
        self.handlers: dict[str, Callable[[Message], Awaitable[bytes]]] = {}
        self.served = asyncio.Event()

    def write(self, plan: HostPlan, generation: int, epoch: int = 1, over: int = 0) -> None:
        """Store a snapshot, as the planner does before it announces a difference."""
        chunks = Chunks(plan)
        self.stored[subjects.snapshot(*NODE, "head")] = codec.encode(chunks.head(plan, epoch, generation, over))
        self.stored.update({subjects.snapshot(*NODE, str(number)): chunks.encoded(number) for number in range(len(chunks))})

    def announce(self, before: HostPlan, after: HostPlan, generation: int, epoch: int = 1, over: int = 0) -> None:
        diff = PlanDiff(after.cluster, after.host, epoch, generation, diff_units(before.units, after.units), over=over)
        self.plans.put_nowait(Message(subjects.plan(*NODE), codec.encode(diff), reply="ack", channel=Answered()))

    async def last(self, _: str, subject: str) -> Message | None:
        data = self.stored.get(subject)
        return Message(subject, data) if data is not None else None

    async def consume(self, *_: object, **__: object) -> AsyncIterator[Message]:
        while not self.stop.is_set():
            yield await self.plans.get()
            self.plans.task_done()

    async def serve(self, subject: str, handler: Callable[[Message], Awaitable[bytes]]) -> None:
        self.handlers[subject.rpartition(".")[2]] = handler
        if self.handlers.keys() >= {"repair", "diff"}:
            self.served.set()
        await self.stop.wait()

    async def publish_surely(self, subject: str, data: bytes, *, headers: object = None) -> None:
        if self.away is not None:
            await self.away.wait()
        if subject == subjects.status(*NODE):
            self.stored[subject] = data
            self.reports.put_nowait(codec.decode(data, ApplyReport))
        if subject == subjects.topology("PublicKey", *NODE):
            self.keys.put_nowait(Message(subject, data))
        if subject.startswith(f"{subjects.DRIFT}."):
            self.drift.put_nowait(codec.decode(data, DriftEvent))


class Answered:
    """Takes acknowledgements."""

    async def send(self, *_: object, **__: object) -> None: ...

    async def ask(self, subject: str, data: bytes, **_: object) -> Message:
        return Message(subject, data)


class StubEvents:
    """Kernel events as a test puts them in; one follows every change of the kernel, as with a real one."""

    queue: asyncio.Queue[KernelEvent]

    async def __aenter__(self) -> AsyncIterator[KernelEvent]:
        return self._events()

    async def __aexit__(self, *_: object) -> None: ...

    async def _events(self) -> AsyncIterator[KernelEvent]:
        while True:
            yield await self.queue.get()
