"""A received message, and what its receiver may say about it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from datetime import datetime
from typing import Protocol

from msgspec import Struct, field

from services.runtime.errors import OutcomeUnknown, Permanent, Transient

_ACK_TIMEOUT_S = 5.0
_STATUS = "Status"
_V1_TOKENS, _V2_TOKENS = 9, 11
_STORE_HEADERS = frozenset(
    ("Nats-Stream", "Nats-Subject", "Nats-Sequence", "Nats-Time-Stamp", "Nats-Num-Pending", "Nats-Last-Sequence", "Nats-UpTo-Sequence")
)


class Channel(Protocol):
    """Where a message's answers go: the connection that it came by."""

    async def send(self, subject: str, data: bytes, *, reply: str = "", headers: Mapping[str, str] | None = None) -> None: ...

    async def ask(self, subject: str, data: bytes, *, timeout_s: float, headers: Mapping[str, str] | None = None) -> Message: ...


class Message(Struct, frozen=True):
    """One message. `sequence` and `stored_s` (Unix time) are the stream's, 0 for a message that no stream delivered.

    `deliveries` counts from 1 for a message from a consumer. Exactly one of `ack`, `nak` and `term` ends it; they are for such
    messages only.
    """

    subject: str
    data: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    sequence: int = 0
    stored_s: float = 0.0
    deliveries: int = 0
    reply: str = ""
    channel: Channel | None = None

    @property
    def status(self) -> str:
        """The server's status code when this is no message but a word about the request (``404``, ``408``, ``503``), else empty."""
        return "" if self.data else self.headers.get(_STATUS, "")

    async def ack(self) -> None:
        """Say that the message is handled, and wait until the server knows. Raises OutcomeUnknown when no answer came within 5 s."""
        await self._answers().ask(self.reply, b"+ACK", timeout_s=_ACK_TIMEOUT_S)

    async def settle(self) -> None:
        """Acknowledge, where handling the message again would do no harm: an answer that got lost is no error then."""
        with contextlib.suppress(OutcomeUnknown, Transient):
            await self.ack()

    async def nak(self, delay_s: float = 0.0) -> None:
        """Ask for redelivery after `delay_s` seconds."""
        delay = f" {json.dumps({'delay': int(delay_s * 1e9)})}" if delay_s > 0 else ""
        await self._answers().send(self.reply, f"-NAK{delay}".encode())

    async def term(self, reason: str = "") -> None:
        """Say that the message will never be handled. The server publishes an advisory with `reason`, which DEADLETTER keeps."""
        await self._answers().send(self.reply, f"+TERM {reason}".strip().replace("\n", " ").encode())

    def _answers(self) -> Channel:
        if self.channel is None or not self.reply:
            msg = f"the message on {self.subject} did not come from a consumer; there is nothing to acknowledge"
            raise Permanent(msg)
        return self.channel


def delivered(subject: str, data: bytes, headers: Mapping[str, str], reply: str, channel: Channel) -> Message:
    """A message from a consumer: place, time and count are in its reply subject (``$JS.ACK.…``, ADR-15)."""
    words = reply.split(".")
    if words[:2] != ["$JS", "ACK"] or len(words) < _V1_TOKENS:
        return Message(subject, data, headers, reply=reply, channel=channel)
    # The newer form has the domain and the account's hash before the stream.
    rest = words[4:] if len(words) >= _V2_TOKENS else words[2:]
    return Message(subject, data, headers, int(rest[3]), int(rest[5]) / 1e9, int(rest[2]), reply, channel)


def stored(message: Message) -> Message:
    """A message that a direct get returned: place and time are in headers that the server added (ADR-31)."""
    own = {key: value for key, value in message.headers.items() if key not in _STORE_HEADERS}
    return Message(
        message.headers.get("Nats-Subject", message.subject),
        message.data,
        own,
        int(message.headers.get("Nats-Sequence", "0")),
        unix_time(message.headers.get("Nats-Time-Stamp", "")),
    )


def unix_time(text: str) -> float:
    """Seconds since 1970 of an RFC 3339 time with any number of digits, as Go prints it; 0 for an empty text."""
    if not text:
        return 0.0
    whole, _, fraction = text.removesuffix("Z").partition(".")
    return datetime.fromisoformat(f"{whole}+00:00").timestamp() + float(f"0.{fraction or 0}")
