"""The floor of every event: one message stored by JetStream and fetched by a waiting consumer, with nothing around it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import nats
from nats.js.client import JetStreamContext

from services.runtime.settings import read_credentials

_STREAM, _SUBJECT = "BENCH", "bench.roundtrip"


class RoundTrip:
    """A publisher and a pull consumer on one connection; made by ``open``."""

    def __init__(self, stream: JetStreamContext, consumer: JetStreamContext.PullSubscription) -> None:
        self._stream = stream
        self._consumer = consumer

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, url: str, credentials: Path) -> AsyncIterator[RoundTrip]:
        """Connect as a user that may make streams; the stream is stored in files, as meshmark's are, and removed at the end."""
        login = read_credentials(credentials)
        client = await nats.connect(url, user=login.user, password=login.password, inbox_prefix=f"_INBOX.{login.user}")
        try:
            stream = client.jetstream()
            await stream.add_stream(name=_STREAM, subjects=[_SUBJECT])
            yield cls(stream, await stream.pull_subscribe(_SUBJECT, durable="bench"))
            await stream.delete_stream(_STREAM)
        finally:
            await client.close()

    async def take_ms(self, payload: bytes) -> float:
        """Milliseconds from publishing to having fetched."""
        fetching = asyncio.create_task(self._fetch())
        await asyncio.sleep(0.005)  # the pull is waiting at the server by then, as a service's is
        began = time.perf_counter()
        await self._stream.publish(_SUBJECT, payload)
        return (await fetching - began) * 1e3

    async def _fetch(self) -> float:
        (message,) = await self._consumer.fetch(1, timeout=5)
        ended = time.perf_counter()
        await message.ack()
        return ended
