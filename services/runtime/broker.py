"""The one NATS adapter: what services ask of the broker, in the words of streams, messages and commands.

Below it: ``connection`` (one connection and how it fails), ``jetstream`` (API calls and reads), ``consumer`` (durable pulls),
``errormap`` (errors). Every error is one of ``services.runtime.errors``.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple
from uuid import uuid4

import structlog

from services.runtime import consumer, events, jetstream
from services.runtime.connection import Connection, Inbox
from services.runtime.consumer import ConsumerSpec
from services.runtime.errors import MeshmarkError, OutcomeUnknown, Permanent, Transient, Waiting
from services.runtime.jetstream import ApiError, StreamInfo
from services.runtime.messages import Message
from services.runtime.metrics import Metrics
from services.runtime.settings import BrokerSettings
from services.runtime.streams import STREAMS

__all__ = ["ERROR_HEADER", "MAX_BATCH", "BatchMessage", "Broker", "BrokerSettings", "ConsumerSpec", "Message", "StreamInfo"]

ERROR_HEADER = "Meshmark-Error"
"""Header of a reply that is no answer but the reason why there is none."""
MAX_BATCH = 1000
"""Most messages in one atomic batch (ADR-50)."""
_EXPECT = "Nats-Expected-Last-Subject-Sequence"
_MESSAGE_ID = "Nats-Msg-Id"
_NO_RESPONDERS = "503"
_AGAIN_S = 0.5

log = structlog.get_logger(__name__)


class BatchMessage(NamedTuple):
    """One message of an atomic batch. `expect` is as for ``Broker.publish``."""

    subject: str
    data: bytes
    expect: int | None = None


class Broker:
    """A connected broker; made by ``connect``. `stop`, once set, ends every loop here; `closed` is set when NATS is lost for good."""

    def __init__(self, connection: Connection, metrics: Metrics, stop: asyncio.Event) -> None:
        self.stop = stop
        self.metrics = metrics
        self._connection = connection

    @classmethod
    @contextlib.asynccontextmanager
    async def connect(
        cls, settings: BrokerSettings, service: str, *, metrics: Metrics | None = None, stop: asyncio.Event | None = None
    ) -> AsyncIterator[Broker]:
        """Connect as `service`. Leaving sets `stop` and closes in at most about 6 s."""
        measured = metrics or Metrics()
        connection = Connection(settings, service, measured)
        await connection.open()
        broker = cls(connection, measured, stop or asyncio.Event())
        try:
            yield broker
        finally:
            broker.stop.set()
            await connection.close()

    @property
    def closed(self) -> asyncio.Event:
        """Set when the connection is lost and will not come back; ``lost_reason`` says why."""
        return self._connection.closed

    @property
    def lost_reason(self) -> str:
        return self._connection.reason

    @property
    def connected(self) -> bool:
        return self._connection.connected

    @property
    def max_payload_bytes(self) -> int:
        """Most bytes that one message may have, headers included."""
        return self._connection.max_payload_bytes

    async def publish(
        self,
        subject: str,
        data: bytes,
        *,
        expect: int | None = None,
        message_id: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> int:
        """Store one message and return its sequence in the stream.

        `expect` is the sequence of the subject's last message, 0 for none: Conflict when it is not. A `message_id` seen within two
        minutes is not stored again. Permanent when it is too large or not allowed, Waiting when no stream takes the subject,
        OutcomeUnknown when the answer was lost, Transient when it was never sent.
        """
        wanted = self._headers(subject, headers)
        if expect is not None:
            wanted[_EXPECT] = str(expect)
        if message_id is not None:
            wanted[_MESSAGE_ID] = message_id
        return await self._store(subject, data, wanted)

    async def publish_surely(self, subject: str, data: bytes, *, headers: Mapping[str, str] | None = None) -> None:
        """Store one message, however long the broker is away; gives up only when `stop` is set. Permanent and Conflict are raised.

        The message has an id, so that an answer that got lost does not store it twice.
        """
        message_id = uuid4().hex
        while not self.stop.is_set():
            try:
                await self.publish(subject, data, message_id=message_id, headers=headers)
            except (Transient, OutcomeUnknown, Waiting) as error:
                log.warning("publish_waits", subject=subject, error=str(error))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_AGAIN_S):
                        await self.stop.wait()
            else:
                return

    async def publish_batch(self, messages: Sequence[BatchMessage | tuple[str, bytes]]) -> int:
        """Store all of these messages in one stream, or none of them; returns the last one's sequence. 1 to 1000 messages.

        Raises as ``publish`` does. Source: ADR-50. Only the last message, which commits, is answered; what is wrong with an
        earlier one shows there.
        """
        if not 0 < len(messages) <= MAX_BATCH:
            msg = f"a batch has 1 to {MAX_BATCH} messages, not {len(messages)}; split it"
            raise Permanent(msg)
        if len(messages) == 1:
            one = BatchMessage(*messages[0])
            return await self.publish(one.subject, one.data, expect=one.expect)
        batch = uuid4().hex
        *before, commit = (BatchMessage(*message) for message in messages)
        for number, message in enumerate(before, 1):
            await self._connection.send(message.subject, message.data, headers=self._batch_headers(message, batch, number))
        headers = {**self._batch_headers(commit, batch, len(messages)), "Nats-Batch-Commit": "1"}
        return await self._store(commit.subject, commit.data, headers)

    async def consume(self, spec: ConsumerSpec, *, create: bool = True) -> AsyncGenerator[Message, None]:
        """Messages of a durable consumer, in order, until `stop` is set; goes on after the broker was away.

        With `max_ack_pending` 1 the next message comes when this one is acknowledged. `create` false binds only: for host
        users, whose consumers a planner makes. Raises Permanent when it is not allowed or the connection is lost for good.
        """
        reader = consumer.Reader(self._connection, spec, self.stop, self.metrics, create=create)
        async with contextlib.aclosing(reader.messages()) as messages:
            async for message in messages:
                yield message

    async def ensure_consumer(self, spec: ConsumerSpec) -> None:
        """Make a durable consumer, or bring one up to date; doing it twice is fine."""
        await consumer.ensure(self._connection, spec)

    async def ensure_streams(self, replicas: int = 1) -> None:
        """Make all streams be as ``streams.STREAMS`` says. `replicas` counts for new ones only."""
        for spec in STREAMS:
            await jetstream.ensure_stream(self._connection, spec, replicas)

    async def stream_info(self, stream: str) -> StreamInfo:
        """The stream's incarnation and extent."""
        return await jetstream.stream_info(self._connection, stream)

    async def last(self, stream: str, subject: str) -> Message | None:
        """The newest message on `subject`, None when there is none."""
        return await jetstream.last(self._connection, stream, subject)

    async def replay(self, stream: str, filter_subject: str, *, last_per_subject: bool = False) -> AsyncGenerator[Message, None]:
        """All messages that match, in order; ends when the stream's leader has no more. Raises Transient rather than end early.

        With `last_per_subject` only the newest of each subject, after all have been read.
        """
        newest: dict[str, Message] = {}
        async with contextlib.aclosing(jetstream.replay(self._connection, stream, filter_subject)) as messages:
            async for message in messages:
                if last_per_subject:
                    newest[message.subject] = message
                else:
                    yield message
        for message in sorted(newest.values(), key=lambda one: one.sequence):
            yield message

    @contextlib.asynccontextmanager
    async def listen(self, subject: str) -> AsyncIterator[AsyncIterator[Message]]:
        """A core subscription, in force when the body starts: what comes after that is not missed while the connection lasts."""
        async with self._connection.inbox(subject) as inbox:
            yield self._until_stop(inbox)

    async def tell(self, subject: str, data: bytes) -> None:
        """Say something to whoever listens now; nothing keeps it. Transient without a connection, Permanent when it is too large."""
        await self._connection.send(subject, data, headers=self._headers(subject, None))

    async def request(self, subject: str, data: bytes, timeout_s: float = 5.0) -> bytes:
        """Ask a service and return its answer.

        Waiting when nobody serves the subject, OutcomeUnknown when no answer came in time, Permanent with the service's own
        text when it refuses.
        """
        answer = await self._connection.ask(subject, data, timeout_s=timeout_s, headers=self._headers(subject, None))
        if answer.status == _NO_RESPONDERS:
            msg = f"nobody serves {subject}; is the service running there, and are the cluster and host names right?"
            raise Waiting(msg, f"a service on {subject}")
        if ERROR_HEADER in answer.headers:
            raise Permanent(answer.headers[ERROR_HEADER])
        return answer.data

    async def serve(self, subject: str, handler: Callable[[Message], Awaitable[bytes]]) -> None:
        """Answer requests on `subject`, one after the other, until `stop` is set. Errors of the tree are sent back as text."""
        async with self.listen(subject) as requests:
            async for message in requests:
                headers = {events.TRACEPARENT: events.child(message.headers.get(events.TRACEPARENT))}
                try:
                    answer = await handler(message)
                except MeshmarkError as error:
                    log.info("request_refused", subject=message.subject, error=str(error))
                    answer, headers[ERROR_HEADER] = b"", str(error).replace("\r", " ").replace("\n", " ")
                if message.reply:
                    await self._answer(message, answer, headers)

    async def _answer(self, message: Message, answer: bytes, headers: dict[str, str]) -> None:
        try:
            await self._connection.send(message.reply, answer, headers=headers)
        except Transient as error:
            log.warning("answer_lost", subject=message.subject, error=str(error))
        except Permanent as error:
            if self.closed.is_set():
                raise
            # Too large, most likely: whoever asked shall hear that instead of nothing.
            await self._connection.send(message.reply, b"", headers={**headers, ERROR_HEADER: str(error)})

    async def _until_stop(self, inbox: Inbox) -> AsyncGenerator[Message, None]:
        while not self.stop.is_set():
            getting = asyncio.ensure_future(inbox.get())
            stopping = asyncio.ensure_future(self.stop.wait())
            try:
                await asyncio.wait({getting, stopping}, return_when=asyncio.FIRST_COMPLETED)
                if not getting.done():
                    return
                message = getting.result()
            except Transient:
                continue  # reconnected; nats-py has subscribed again by then
            finally:
                getting.cancel()
                stopping.cancel()
            yield message

    async def _store(self, subject: str, data: bytes, headers: Mapping[str, str]) -> int:
        answer = await jetstream.settled_ask(self._connection, subject, data, headers)
        try:
            return int(jetstream.result(answer)["seq"])
        except ApiError as error:
            msg = f"publishing on {subject}"
            raise error.mapped(msg) from error

    def _batch_headers(self, message: BatchMessage, batch: str, number: int) -> dict[str, str]:
        headers = {**self._headers(message.subject, None), "Nats-Batch-Id": batch, "Nats-Batch-Sequence": str(number)}
        return headers if message.expect is None else {**headers, _EXPECT: str(message.expect)}

    def _headers(self, subject: str, headers: Mapping[str, str] | None) -> dict[str, str]:
        source = f"/meshmark/{self._connection.service}"
        return events.complete(headers or {}, source=source, type=f"meshmark.{subject.split('.')[1] if '.' in subject else subject}")
