"""A broker in memory for commands: streams that a test fills, answers that it gives, and messages that follow a publication."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from schemas import codec, snapshot, subjects
from schemas.plan import HostPlan
from schemas.status import ApplyReport
from schemas.topology import Topology
from services.runtime.errors import Waiting
from services.runtime.messages import Message
from services.runtime.streams import STREAMS


def matches(pattern: str, subject: str) -> bool:
    """As NATS matches: ``*`` is one token, a last ``>`` is one or more."""
    wanted, found = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        wanted, found = wanted[:-1], found[: len(wanted) - 1] if len(found) >= len(wanted) else []
    return len(wanted) == len(found) and all(one in ("*", other) for one, other in zip(wanted, found, strict=True))


class StubBroker:
    """Stands in for both the connection and the way to it (``Nats``)."""

    def __init__(self) -> None:
        self.messages: dict[str, Message] = {}
        self.answers: dict[str, bytes] = {}
        self.published: list[Message] = []
        self.asked: list[Message] = []
        self.follow: Callable[[Message], list[Message]] = lambda _: []
        self._listeners: list[tuple[str, asyncio.Queue[Message]]] = []

    @contextlib.asynccontextmanager
    async def connect(self) -> AsyncIterator[StubBroker]:
        yield self

    # What tests say ----------------------------------------------------------------------------------------------------------------------

    def put(self, subject: str, data: bytes, stored_s: float = 0.0) -> None:
        self.messages[subject] = Message(subject, data, sequence=len(self.messages) + 1, stored_s=stored_s)

    def admit(self, *items: Topology) -> None:
        for item in items:
            self.put(subjects.state(item.kind, item.home, item.name), codec.encode(item))

    def publish_plan(self, plan: HostPlan, generation: int = 1) -> None:
        chunks = snapshot.Chunks(plan)
        self.put(subjects.snapshot(plan.cluster, plan.host, "head"), codec.encode(chunks.head(plan, 1, generation)))
        for number in range(len(chunks)):
            self.put(subjects.snapshot(plan.cluster, plan.host, str(number)), chunks.encoded(number))

    def report(self, report: ApplyReport) -> None:
        self.put(subjects.status(report.cluster, report.host), codec.encode(report))

    # What commands ask -------------------------------------------------------------------------------------------------------------------

    async def replay(self, stream: str, filter_subject: str) -> AsyncIterator[Message]:
        (spec,) = [one for one in STREAMS if one.name == stream]
        assert any(filter_subject.startswith(subject.removesuffix(">")) for subject in spec.subjects)
        for message in list(self.messages.values()):
            if matches(filter_subject, message.subject):
                yield message

    async def last(self, stream: str, subject: str) -> Message | None:
        return self.messages.get(subject)

    async def request(self, subject: str, data: bytes, timeout_s: float = 5.0) -> bytes:
        message = Message(subject, data)
        self.asked.append(message)
        if subject not in self.answers:
            msg = f"nobody serves {subject}"
            raise Waiting(msg, "a service")
        self._tell(self.follow(message))
        return self.answers[subject]

    def _tell(self, messages: list[Message]) -> None:
        for following in messages:
            for pattern, queue in self._listeners:
                if matches(pattern, following.subject):
                    queue.put_nowait(following)

    async def publish(self, subject: str, data: bytes) -> int:
        message = Message(subject, data, sequence=len(self.published) + 1)
        self.published.append(message)
        self._tell(self.follow(message))
        return message.sequence

    @contextlib.asynccontextmanager
    async def listen(self, subject: str) -> AsyncIterator[AsyncIterator[Message]]:
        queue: asyncio.Queue[Message] = asyncio.Queue()
        self._listeners.append((subject, queue))

        async def messages() -> AsyncIterator[Message]:
            while True:
                yield await queue.get()

        yield messages()
