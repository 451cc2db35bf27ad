"""Overlay packets as the kernel showed them whole, joined to what it told of the same packets while it traced them. Pure: time comes in.

What the kernel tells of a traced packet ends before what an overlay's packet carries. The rule that begins to tell of one shows it by NFLOG
as well, and a message of such a rule says ``accept``, which no other rule of the trace table does (``services.kernel.trace_rules``): for
each such message there is one packet shown, with the same first bytes, in the same chain, and it was shown before. So whoever reads what is
told, and then what is shown, has both. Packets whose first bytes are alike keep their order.

Where anything was lost, that order means nothing: for a while no packet is joined, rather than a wrong one. Failure modes: what is shown
and never told of is given up after some seconds; of more than can be held, those of the oldest first bytes are given up together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from schemas.host_objects import TRACE_PREFIX, TRACE_TABLE
from services.kernel.nflog import Shown
from services.kernel.nftrace import TraceEvent

_TRANSPORT_BYTES = 20
"""So many of its bytes behind the network header are in what is told."""
_IPV4, _IPV4_WORDS, _WORD, _IPV6_BYTES = 4, 0x0F, 4, 40
_HELD_MAX = 4096
_HELD_S = 5.0
_UNSURE_S = 1.0
"""What was under way when something was lost has been told of by then."""

_Key = tuple[str, bytes]


class Inners:
    """Packets that were shown and not told of yet. Bounded in number and age."""

    def __init__(self) -> None:
        self._held: dict[_Key, deque[tuple[float, bytes]]] = {}
        self._count = 0
        self._unsure_until_s = 0.0

    def show(self, packets: Iterable[Shown], now_s: float) -> int:
        """Take in what was shown, in its order; returns how many packets were lost before any of them. What others show is nobody's."""
        lost = 0
        for item in packets:
            lost += item.lost
            if item.lost:
                self.lose(now_s)
            if item.prefix == TRACE_PREFIX and now_s >= self._unsure_until_s:
                self._hold(("arriving" if item.iif else "leaving", _first(item.data)), item.data, now_s)
        self._forget(now_s - _HELD_S)
        return lost

    def lose(self, now_s: float) -> None:
        """Something was lost, of what is shown or of what is told: give up all that waits, and for a while all that comes."""
        self._held.clear()
        self._count = 0
        self._unsure_until_s = now_s + _UNSURE_S

    def of(self, event: TraceEvent) -> bytes:
        """The first bytes of the packet whose passage this message begins, more of them than it has; empty where they were not shown."""
        if event.table != TRACE_TABLE or event.kind != "rule" or event.verdict != "accept" or not event.network:
            return b""
        key = event.chain, _first(event.network[: _header_bytes(event.network)] + event.transport)
        waiting = self._held.get(key)
        if waiting is None:
            return b""
        _, data = waiting.popleft()
        self._count -= 1
        if not waiting:
            del self._held[key]
        return data

    def _hold(self, key: _Key, data: bytes, now_s: float) -> None:
        self._held.setdefault(key, deque()).append((now_s, data))
        self._count += 1
        if self._count > _HELD_MAX:
            self._drop(next(iter(self._held)))

    def _forget(self, before_s: float) -> None:
        """Give up what has waited for too long, and with it what came after it and looks alike."""
        for key in [key for key, waiting in self._held.items() if waiting[0][0] < before_s]:
            self._drop(key)

    def _drop(self, key: _Key) -> None:
        self._count -= len(self._held.pop(key))


def _first(data: bytes) -> bytes:
    """As much of a packet as is told."""
    return data[: _header_bytes(data) + _TRANSPORT_BYTES]


def _header_bytes(data: bytes) -> int:
    """The length of the network header."""
    if not data:
        return 0
    return _WORD * (data[0] & _IPV4_WORDS) if data[0] >> 4 == _IPV4 else _IPV6_BYTES
