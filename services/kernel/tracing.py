"""Where traced packets are heard of: the kernel's multicast group for them, and the text of a rule that dropped one.

Owns a socket in the network namespace of the thread that enters it. What nobody takes in time is dropped, by the kernel when its buffer
is full or here when the queue is, and that is said. Nothing comes while no rule has ``meta nftrace`` set.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections import deque
from itertools import islice
from types import TracebackType
from typing import Self

from msgspec import Struct

from services.kernel.listening import datagrams, listening
from services.kernel.netlink import (
    NETLINK_NETFILTER,
    NetlinkSocket,
    attribute,
    attributes,
    text_attribute,
)
from services.kernel.nftrace import GROUP, TraceEvent, trace_events
from services.kernel.nftread.counted import comment_of

_BUFFER_BYTES = 32 << 20
_DATAGRAM_BYTES = 1 << 16
_QUEUE = 20_000
_APART_S = 1e-6
_AT_ONCE = 256
"""Datagrams that are read before others get their turn."""
_GET_RULE = 10 << 8 | 7  # NFNL_SUBSYS_NFTABLES, NFT_MSG_GETRULE
_RULE_TABLE, _RULE_CHAIN, _RULE_HANDLE, _RULE_USERDATA = 1, 2, 3, 7
_NFGEN_BYTES = 4


class Heard(Struct, frozen=True):
    """What was heard since the last time, and what was lost before that.

    `events` are in the kernel's order, with when they came: Unix time, each later than the one before.
    `overruns` counts how often the kernel's buffer was full, and `dropped` the events that did not fit the queue here.
    """

    events: tuple[tuple[float, TraceEvent], ...]
    overruns: int = 0
    dropped: int = 0


class TraceSource:
    """Traced packets, open inside ``async with``. `queue` bounds what may wait to be taken."""

    def __init__(self, buffer_bytes: int = _BUFFER_BYTES, queue: int = _QUEUE) -> None:
        self._buffer_bytes = buffer_bytes
        self._limit = queue
        self._waiting: deque[tuple[float, TraceEvent]] = deque()
        self._overruns = 0
        self._dropped = 0
        self._last_s = 0.0
        self._arrived = asyncio.Event()
        self._socket: socket.socket | None = None

    async def __aenter__(self) -> Self:
        self._socket = listening(NETLINK_NETFILTER, (GROUP,), self._buffer_bytes)
        asyncio.get_running_loop().add_reader(self._socket, self._drain, self._socket)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
            self._socket = None

    async def heard(self, timeout_s: float | None = None) -> Heard:
        """What has come; waits for something to come, at most so long, and is then empty."""
        if not self._waiting and not self._overruns:
            self._arrived.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._arrived.wait()
        found = Heard(tuple(self._waiting), self._overruns, self._dropped)
        self._waiting.clear()
        self._overruns = self._dropped = 0
        return found

    def _drain(self, listener: socket.socket) -> None:
        for data in islice(datagrams(listener, _DATAGRAM_BYTES), _AT_ONCE):
            if data is None:
                self._overruns += 1
                continue
            found = list(trace_events(data))
            room = max(0, self._limit - len(self._waiting))
            self._dropped += len(found[room:])
            for event in found[:room]:
                self._last_s = max(time.time(), self._last_s + _APART_S)
                self._waiting.append((self._last_s, event))
        if self._waiting or self._overruns:
            self._arrived.set()


def rule_comment(family: int, table: str, chain: str, handle: int) -> str:
    """A rule's comment as it is now; empty when it has none, or is gone."""
    asked = text_attribute(_RULE_TABLE, table) + text_attribute(_RULE_CHAIN, chain) + attribute(_RULE_HANDLE, handle.to_bytes(8))
    try:
        with contextlib.closing(NetlinkSocket(NETLINK_NETFILTER)) as opened:
            [body] = opened.ask(_GET_RULE, bytes((family, 0, 0, 0)) + asked)
    except (OSError, ValueError):
        return ""
    return comment_of(attributes(body, _NFGEN_BYTES).get(_RULE_USERDATA, b""))
