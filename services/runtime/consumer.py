"""Durable pull consumers: made idempotently, read for ever.

How it fails, and what is done: a pull that is lost by a server restart goes silent, which missing heartbeats
show, and it is asked again (nats-py's own fetch waits for its whole timeout; #504, #933); a reconnect asks again at once; a
consumer that is not there yet is waited for; a missing permission ends the reading with Permanent.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator

import structlog
from msgspec import Struct

from services.runtime import jetstream
from services.runtime.connection import Connection, Inbox
from services.runtime.errors import OutcomeUnknown, Transient, Waiting
from services.runtime.jetstream import API, ApiError
from services.runtime.messages import Message
from services.runtime.metrics import Metrics

_NANOSECONDS = 10**9
_EXPIRES_S = 10.0
_HEARTBEAT_S = 1.0
_SILENCE_S = 2.5
_RETRY_S = 0.5
_MAX_BATCH = 256
_HEARTBEAT, _NO_MESSAGES, _EXPIRED = "100", "404", "408"

log = structlog.get_logger(__name__)


class ConsumerSpec(Struct, frozen=True):
    """A durable pull consumer. `ack_wait_s` is how long a message may be worked on before it is delivered again."""

    stream: str
    durable: str
    filter_subject: str | None = None
    max_ack_pending: int = 1
    max_deliver: int = 5
    ack_wait_s: float = 30.0

    def configuration(self) -> dict[str, object]:
        """As the JetStream API takes it. No back-off: it would override the acknowledgement time and ignore naks."""
        found: dict[str, object] = {
            "name": self.durable,
            "durable_name": self.durable,
            "ack_policy": "explicit",
            "deliver_policy": "all",
            "replay_policy": "instant",
            "max_ack_pending": self.max_ack_pending,
            "max_deliver": self.max_deliver,
            "ack_wait": int(self.ack_wait_s * _NANOSECONDS),
        }
        if self.filter_subject is not None:
            found["filter_subject"] = self.filter_subject
        return found


async def ensure(connection: Connection, spec: ConsumerSpec) -> None:
    """Make the consumer be as `spec` says. One that exists keeps its place in the stream; where it began cannot be changed."""
    verb = f"CONSUMER.CREATE.{spec.stream}.{spec.durable}"
    if spec.filter_subject is not None:
        verb = f"{verb}.{spec.filter_subject}"
    try:
        await jetstream.call(connection, verb, {"stream_name": spec.stream, "config": spec.configuration()})
    except ApiError as error:
        msg = f"consumer {spec.durable} of {spec.stream}"
        raise error.mapped(msg) from error


class Reader:
    """Reads one durable consumer until `stop` is set. With `create` it makes the consumer, and makes it again when somebody deletes it."""

    def __init__(self, connection: Connection, spec: ConsumerSpec, stop: asyncio.Event, metrics: Metrics, *, create: bool) -> None:
        self._connection = connection
        self._spec = spec
        self._stop = stop
        self._metrics = metrics
        self._create = create
        self._next = f"{API}.CONSUMER.MSG.NEXT.{spec.stream}.{spec.durable}"
        self._batch = min(spec.max_ack_pending, _MAX_BATCH)
        self._pulls = 0

    async def messages(self) -> AsyncGenerator[Message, None]:
        """Messages in order. Raises Permanent when the consumer may not be read or the connection is lost for good."""
        await self._ensure()
        async with self._connection.inbox(asks=self._next) as inbox:
            while not self._stop.is_set():
                try:
                    async with contextlib.aclosing(self._pull(inbox)) as pull:
                        async for message in pull:
                            yield message
                except (Transient, OutcomeUnknown) as error:
                    log.debug("pull_again", stream=self._spec.stream, consumer=self._spec.durable, why=str(error))
                except Waiting as error:
                    log.info("pull_waits", stream=self._spec.stream, consumer=self._spec.durable, waiting_for=error.waiting_for)
                    await self._pause()
                    await self._ensure()

    async def _ensure(self) -> None:
        while self._create and not self._stop.is_set():
            try:
                await ensure(self._connection, self._spec)
            except (Transient, OutcomeUnknown, Waiting) as error:
                log.info("consumer_waits", stream=self._spec.stream, consumer=self._spec.durable, why=str(error))
                await self._pause()
            else:
                return

    async def _pull(self, inbox: Inbox) -> AsyncGenerator[Message, None]:
        """One pull request until it is used up, has expired, or went silent."""
        self._pulls += 1
        # Each pull has a reply subject of its own: a late status of an earlier one must not end this one.
        reply = f"{inbox.subject}.{self._pulls}"
        times = {"expires": int(_EXPIRES_S * _NANOSECONDS), "idle_heartbeat": int(_HEARTBEAT_S * _NANOSECONDS)}
        await self._connection.send(self._next, json.dumps({"batch": self._batch, **times}).encode(), reply=reply)
        left = self._batch
        while left > 0:
            message = await self._receive(inbox)
            if message is None:
                return
            self._metrics.nats_last_fetch_timestamp.labels(self._spec.stream).set(time.time())
            if not message.status:
                left -= 1
                yield message
            elif message.subject == reply and self._ended(message):
                return

    async def _receive(self, inbox: Inbox) -> Message | None:
        """The next message, None when the reader is to stop; Transient when the pull went silent."""
        getting = asyncio.ensure_future(inbox.get())
        stopping = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({getting, stopping}, timeout=_SILENCE_S, return_when=asyncio.FIRST_COMPLETED)
            if getting.done():
                return getting.result()
            if self._stop.is_set():
                return None
        finally:
            getting.cancel()
            stopping.cancel()
        self._metrics.nats_stalled.labels(self._spec.stream).inc()
        msg = f"no heartbeat within {_SILENCE_S:g} s"
        raise Transient(msg)

    def _ended(self, message: Message) -> bool:
        if message.status == _HEARTBEAT:
            return False
        if message.status in (_NO_MESSAGES, _EXPIRED):
            return True
        # 409 (deleted, leader changed, server going down) and 503 (nobody there): not now, and maybe not there.
        text = f"{message.status} {message.headers.get('Description', '')}".strip()
        raise Waiting(text, f"consumer {self._spec.durable} of {self._spec.stream}")

    async def _pause(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_RETRY_S):
                await self._stop.wait()
