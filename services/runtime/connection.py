"""One connection to NATS, with nats-py's failure modes handled in one place.

nats-py 2.16 loses cancellations in ``request`` on Python 3.11, dies when ``flush`` is cancelled, closes for good
after an oversized message, tells nobody but a callback that a permission is missing, and drains for 30 s. So this class:
asks through an inbox of its own and waits with ``asyncio.timeout``; shields every flush; measures before it sends; routes denials to who
asked; unsubscribes before it drains; and says by `closed` when the connection is lost, so that the process can end.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
from collections.abc import AsyncIterator, Mapping

import nats
import nats.errors
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from services.runtime import accounts, errormap
from services.runtime.errors import MeshmarkError, OutcomeUnknown, Permanent, Transient
from services.runtime.messages import Message, delivered
from services.runtime.metrics import Metrics
from services.runtime.settings import BrokerSettings

_HEADER_SLACK_BYTES = 1024
"""Room for headers that the server adds when it hands a stored message out again."""
_DENIED = re.compile(r'permissions violation for (publish|subscription) to "([^"]+)"')
_REFUSED = "authorization violation"
_CLOSE_S = 5.0

log = structlog.get_logger(__name__)


class Inbox:
    """Messages of one subscription, in order. `get` ends early with Transient when the connection came back: what was asked is lost."""

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self.asks = ""
        """The subject that this inbox's owner publishes requests to; a denial of it is delivered here."""
        self._queue: asyncio.Queue[Message | MeshmarkError] = asyncio.Queue()

    def put(self, item: Message | MeshmarkError) -> None:
        self._queue.put_nowait(item)

    async def get(self, timeout_s: float | None = None) -> Message:
        """The next message. Raises TimeoutError after `timeout_s`, or the error that ended the wait."""
        async with asyncio.timeout(timeout_s):
            item = await self._queue.get()
        if isinstance(item, MeshmarkError):
            raise item
        return item


class _TolerantClient(Client):
    """nats-py decodes subjects strictly, in its read loop: one message with other bytes ends the connection, at each redelivery again."""

    def _build_message(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: dict[str, str] | None) -> Msg:
        readable = subject.decode(errors="backslashreplace").encode()
        built: Msg = super()._build_message(sid, readable, reply, data, headers)
        return built


class Connection:
    """One NATS connection; made by ``open``. `closed` is set when it is lost for good, `reason` then says why."""

    def __init__(self, settings: BrokerSettings, service: str, metrics: Metrics) -> None:
        self.settings = settings
        self.service = service
        self.closed = asyncio.Event()
        self.reason = ""
        self._metrics = metrics
        self._client = _TolerantClient()
        self._closing = False
        self._opened = False
        self._last_error = ""
        self._up = asyncio.Event()
        self._doom: asyncio.TimerHandle | None = None
        self._waits: dict[str, tuple[str, asyncio.Future[Message]]] = {}
        self._inboxes: dict[Inbox, Subscription] = {}
        self._replies = ""
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Connect; Transient when no server answers in `connect_s`, Permanent when the login is refused."""
        doing = f"connecting to {self.settings.url}"
        try:
            async with asyncio.timeout(self.settings.connect_s):
                await self._login()
        except (OSError, nats.errors.Error) as error:  # TimeoutError is an OSError
            with contextlib.suppress(nats.errors.Error, OSError):
                await self._client.close()
            if isinstance(error, TimeoutError):
                msg = f"{doing}: {self._last_error or 'no answer'} for {self.settings.connect_s:g} s; is the server running there?"
                raise Transient(msg, 1.0) from error
            raise errormap.from_client(error, doing) from error
        # Only now: with reconnects allowed, nats-py would try a refused login for ever.
        self._client.options["allow_reconnect"] = True
        await self._ready()

    async def _login(self) -> None:
        wanted = self.settings
        login = {"user": wanted.user, "password": wanted.password} if wanted.user else {}
        await self._client.connect(
            wanted.url,
            name=f"meshmark-{self.service}",
            inbox_prefix=wanted.inbox_prefix or accounts.inbox_prefix(wanted.user),
            allow_reconnect=False,
            connect_timeout=2,
            # The default of 120 s leaves a dead read loop unnoticed for minutes.
            ping_interval=wanted.ping_s,
            drain_timeout=int(_CLOSE_S),
            max_reconnect_attempts=-1,
            reconnect_time_wait=wanted.reconnect_wait_s,  # type: ignore[arg-type]  # a float is fine, it goes to sleep()
            error_cb=self._on_error,
            disconnected_cb=self._on_disconnect,
            reconnected_cb=self._on_reconnect,
            closed_cb=self._on_close,
            **login,  # type: ignore[arg-type]  # two of the many keyword arguments
        )

    async def _ready(self) -> None:
        prefix = self._client.new_inbox()
        await self._client.subscribe(f"{prefix}.*", cb=self._on_reply)
        self._replies = prefix
        self._opened = True
        self._up.set()
        self._metrics.nats_connected.set(1)

    @property
    def connected(self) -> bool:
        return self._up.is_set() and not self.closed.is_set()

    @property
    def max_payload_bytes(self) -> int:
        """The largest headers and payload, together, that may be published."""
        return self._client.max_payload - _HEADER_SLACK_BYTES

    async def send(self, subject: str, data: bytes, *, reply: str = "", headers: Mapping[str, str] | None = None) -> None:
        """Publish without an answer. Raises Permanent before anything is sent when it is too large."""
        self._measure(subject, data, headers)
        await self._connected(f"publishing on {subject}", self.settings.request_s)
        try:
            await self._client.publish(subject, data, reply=reply, headers=dict(headers) if headers else None)
        except (nats.errors.Error, OSError) as error:
            raise errormap.from_client(error, f"publishing on {subject}") from error

    async def ask(self, subject: str, data: bytes, *, timeout_s: float, headers: Mapping[str, str] | None = None) -> Message:
        """Send a request and wait for its one answer, which may be a status message.

        Raises Transient when it was never sent, OutcomeUnknown when it was and no answer came, Permanent when it is not allowed.
        """
        self._measure(subject, data, headers)
        await self._connected(f"asking {subject}", timeout_s)
        token = secrets.token_hex(8)
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._waits[token] = (subject.lower(), future)
        try:
            await self.send(subject, data, reply=f"{self._replies}.{token}", headers=headers)
            # Not nats-py's request(): its wait_for loses cancellations on Python 3.11 (cpython #86296).
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError as error:
            raise errormap.from_client(error, f"asking {subject}", sent=True) from error
        finally:
            del self._waits[token]

    @contextlib.asynccontextmanager
    async def inbox(self, subject: str = "", *, asks: str = "") -> AsyncIterator[Inbox]:
        """A subscription to `subject`, or to a fresh inbox and all below it, known to the server when the body starts."""
        own = subject or self._client.new_inbox()
        inbox = Inbox(own)
        inbox.asks = asks.lower()

        async def take(msg: Msg) -> None:
            inbox.put(self._message(msg))

        try:
            subscription = await self._client.subscribe(subject or f"{own}.*", cb=take)
        except (nats.errors.Error, OSError) as error:
            raise errormap.from_client(error, f"subscribing to {own}") from error
        self._inboxes[inbox] = subscription
        try:
            await self.flush()
            yield inbox
        finally:
            del self._inboxes[inbox]
            await self._unsubscribe(subscription)

    async def flush(self) -> None:
        """Wait until the server has seen all that was sent. Never cancelled inside: a cancelled flush kills nats-py's read loop."""
        if not self.connected:
            return
        task = asyncio.create_task(self._client.flush(timeout=int(_CLOSE_S)), name="nats-flush")
        self._keep(task)
        try:
            await asyncio.shield(task)
        except (nats.errors.Error, OSError) as error:
            raise errormap.from_client(error, "waiting for the broker") from error

    async def close(self) -> None:
        """Unsubscribe, drain, close, in at most about 5 s. In another order nats-py burns its whole drain timeout."""
        self._closing = True
        if self._doom is not None:
            self._doom.cancel()
        for subscription in self._inboxes.values():
            await self._unsubscribe(subscription)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_CLOSE_S)
        ending = self._client.drain() if self._client.is_connected else self._client.close()
        task = asyncio.create_task(ending, name="nats-close")
        done, _ = await asyncio.wait({task}, timeout=_CLOSE_S + 1)
        if task in done and task.exception() is not None:
            log.debug("close_failed", error=str(task.exception()))
            await self._client.close()
        self._metrics.nats_connected.set(0)

    async def _connected(self, doing: str, timeout_s: float) -> None:
        # nats-py would keep it and send it at some later time, when the caller has long given up.
        if self._up.is_set() and not self.closed.is_set():
            return
        if self.closed.is_set() or self._closing:
            msg = f"{doing}: the connection to the broker is closed ({self.reason or 'shutting down'})"
            raise Permanent(msg)
        try:
            async with asyncio.timeout(timeout_s):
                await self._up.wait()
        except TimeoutError as error:
            msg = f"{doing}: not connected to {self.settings.url}"
            raise Transient(msg, 1.0) from error

    def _measure(self, subject: str, data: bytes, headers: Mapping[str, str] | None) -> None:
        # The server closes the connection on the spot, and nats-py then never reconnects (nats.py #888).
        size = len(data) + sum(len(key.encode()) + len(value.encode()) + 4 for key, value in (headers or {}).items())
        if size > self.max_payload_bytes:
            msg = f"{subject}: {size} bytes with headers, the broker takes {self.max_payload_bytes}; make it smaller or split it"
            raise Permanent(msg)

    def _message(self, msg: Msg) -> Message:
        # Status and description have keys of an enum type; all become plain text here.
        headers = {str(getattr(key, "value", key)): value for key, value in (msg.headers or {}).items()}
        return delivered(msg.subject, msg.data, headers, msg.reply, self)

    async def _unsubscribe(self, subscription: Subscription) -> None:
        with contextlib.suppress(nats.errors.Error, OSError):
            await subscription.unsubscribe()

    def _keep(self, task: asyncio.Task[None]) -> None:
        """Hold on to a task that must end by itself, whoever waits for it or not."""
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # seen, also when nobody waits any more

    async def _on_reply(self, msg: Msg) -> None:
        _, future = self._waits.get(msg.subject.rpartition(".")[2], ("", None))
        if future is not None and not future.done():
            future.set_result(self._message(msg))

    async def _on_error(self, error: Exception) -> None:
        self._last_error = str(error) or type(error).__name__
        denied = _DENIED.search(self._last_error.lower())
        if denied:
            self._deny(denied[1], denied[2])
        elif self._opened and not self._closing and _REFUSED in self._last_error.lower():
            # The user was taken out. nats-py would try again for ever, with a socket leaked each time.
            self._lose(self._last_error)
            self._keep(asyncio.create_task(self._client.close(), name="nats-close"))
        elif isinstance(error, nats.errors.SlowConsumerError):
            self._metrics.nats_slow.inc()
            log.warning("slow_consumer", subject=error.subject)
        else:
            log.debug("nats_error", error=self._last_error)

    def _deny(self, operation: str, subject: str) -> None:
        """Fail whoever asked: the server tells the connection, not the request, which would else run into its timeout."""
        self._metrics.nats_denied.labels(operation).inc()
        log.warning("denied", operation=operation, subject=subject, user=self.settings.user or "anonymous")
        who = self.settings.user or "a client without credentials"
        refusal = Permanent(f"{who} has no permission for {operation} on {subject}; are cluster and host those of the credentials?")
        for asked, future in self._waits.values():
            if asked == subject and not future.done():
                future.set_exception(refusal)
        for inbox in self._inboxes:
            if subject in (inbox.asks, inbox.subject.lower(), f"{inbox.subject.lower()}.*"):
                inbox.put(refusal)

    async def _on_disconnect(self) -> None:
        self._up.clear()
        self._metrics.nats_connected.set(0)
        if self._closing or not self._opened:
            return
        log.warning("broker_disconnected", url=self.settings.url)
        for asked, future in self._waits.values():
            if not future.done():
                future.set_exception(OutcomeUnknown(f"asking {asked}: the connection broke before the answer came"))
        if self._doom is None and self.settings.lost_after_s > 0:
            text = f"no broker for {self.settings.lost_after_s:g} s"
            self._doom = asyncio.get_running_loop().call_later(self.settings.lost_after_s, self._lose, text)

    async def _on_reconnect(self) -> None:
        if self._doom is not None:
            self._doom.cancel()
            self._doom = None
        self._up.set()
        self._metrics.nats_connected.set(1)
        self._metrics.nats_reconnects.inc()
        log.info("broker_reconnected", url=self.settings.url)
        for inbox in self._inboxes:
            inbox.put(Transient("the connection broke and came back", 0.0))

    async def _on_close(self) -> None:
        if self._opened and not self._closing:
            # Any unknown -ERR of the server, or a login that is refused on reconnect, ends here; nats-py never comes back from it.
            self._lose(str(self._client.last_error or "closed by the broker"))

    def _lose(self, reason: str) -> None:
        if self.closed.is_set():
            return
        self.reason = reason
        self.closed.set()
        self._up.set()  # wakes who waits for the connection; `closed` tells them the rest
        for _, future in self._waits.values():
            if not future.done():
                future.set_exception(OutcomeUnknown(f"the connection to the broker is lost: {reason}"))
        for inbox in self._inboxes:
            inbox.put(Permanent(f"the connection to the broker is lost: {reason}"))
        log.error("broker_lost", reason=reason)
