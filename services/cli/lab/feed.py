"""A board that is kept up to date from the broker, and the way to say something oneself."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import structlog

from schemas import codec, subjects
from schemas.topology import Topology
from services.cli.lab.board import FOLLOWED, LASTING, Board
from services.runtime.broker import Broker, Message
from services.runtime.errors import Transient, Waiting
from services.runtime.settings import BrokerSettings

_RESYNC_S = 10.0
_STREAMS_S = 0.2
_STREAM_NAMES = {subjects.STATE: "STATE", subjects.ALLOCATION: "ALLOCATION", subjects.PLAN: "PLAN", subjects.STATUS: "STATUS"}

log = structlog.get_logger(__name__)


class Feed:
    """What was said until now (`board`), and what is said from now on; made by ``open``."""

    def __init__(self, broker: Broker) -> None:
        self.board = Board()
        self._broker = broker
        self._told = asyncio.Condition()

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, url: str, service: str) -> AsyncIterator[Feed]:
        """Connect as the lab's anonymous user, the publisher; the body starts when the streams are there and have been read."""
        settings = BrokerSettings(url=url)
        async with Broker.connect(settings, service) as broker, contextlib.AsyncExitStack() as stack:
            feed = cls(broker)
            heard = [await stack.enter_async_context(broker.listen(subject)) for subject in FOLLOWED]
            await feed._wait_for_streams()
            async with asyncio.TaskGroup() as tasks:
                pumps = [tasks.create_task(feed._pump(messages), name="feed") for messages in heard]
                pumps.append(tasks.create_task(feed._resync(), name="resync"))
                try:
                    yield feed
                finally:
                    for pump in pumps:
                        pump.cancel()

    async def publish(self, item: Topology) -> None:
        await self._broker.publish(subjects.topology(item.kind, item.home, item.name), codec.encode(item))

    async def delete(self, item: Topology) -> None:
        await self._broker.publish(subjects.topology(item.kind, item.home, item.name), b"")

    async def until(self, condition: Callable[[Board], bool]) -> None:
        """Wait until the board is so. To be bounded by the caller's timeout."""
        async with self._told:
            await self._told.wait_for(lambda: condition(self.board))

    async def _wait_for_streams(self) -> None:
        """The planner makes the streams when it starts."""
        while True:
            try:
                await self._read()
            except (Waiting, Transient):
                await asyncio.sleep(_STREAMS_S)
            else:
                return

    async def _resync(self) -> None:
        """Read again now and then: a subscription forgets what came while the broker was away."""
        while True:
            await asyncio.sleep(_RESYNC_S)
            try:
                await self._read()
            except (Waiting, Transient) as error:
                log.info("cannot read the streams now", error=str(error))

    async def _read(self) -> None:
        for subject in LASTING:
            async for message in self._broker.replay(_STREAM_NAMES[subject.removesuffix(".>")], subject):
                await self._tell(message)

    async def _pump(self, messages: AsyncIterator[Message]) -> None:
        async for message in messages:
            await self._tell(message)

    async def _tell(self, message: Message) -> None:
        try:
            self.board.tell(message.subject, message.data)
        except codec.DecodeError as error:
            log.warning("not understood", subject=message.subject, error=str(error))
            return
        async with self._told:
            self._told.notify_all()
