"""The kernel's messages about one packet, put together to its passage through one network stack. Pure: time comes in with the messages.

A passage begins where a rule of the trace table found the packet, and ends where it left, was dropped, or nothing more is said of it for
a while. Trace ids recur, so that one that begins again is another packet. What others trace without our rules is nobody's passage.

Only the trace table's own chains say where a packet is: of a foreign chain the kernel does not tell at which hook it is.
"""

from __future__ import annotations

from msgspec import Struct

from schemas.host_objects import TRACE_TABLE
from services.kernel.headers import Packet, packet
from services.kernel.nftrace import TraceEvent, Tracked

_BEGINS = ("arriving", "leaving")
_LAST = "left"
_CHAINS = ("arriving", "entering", "passing", "leaving", "left")
IDLE_S = 0.1
"""A packet is in one stack for microseconds; the messages of a busy host may come late, but all are late then."""
_OPEN_MAX = 4096


class Sighting(Struct, frozen=True):
    """A packet as one of the trace table's chains saw it. `at_s` is Unix time; `iif` and `oif` are numbers of links, 0 for none."""

    chain: str
    at_s: float
    packet: Packet
    iif: int
    oif: int
    mark: int


class Passage(Struct):
    """One packet's way. `drop` is the message that ended it, and `dropped` how the packet was then.

    `data` are its first bytes where it was shown as well, which only overlay packets are.
    """

    id: int
    at_s: float
    sightings: list[Sighting]
    tracked: Tracked | None = None
    drop: TraceEvent | None = None
    dropped: Sighting | None = None
    last: Sighting | None = None
    data: bytes = b""


class Passages:
    """Passages that are under way. Bounded: with more, the oldest end."""

    def __init__(self) -> None:
        self._open: dict[int, Passage] = {}

    def __bool__(self) -> bool:
        return bool(self._open)

    def hear(self, event: TraceEvent, now_s: float, data: bytes = b"") -> list[Passage]:
        """Take a message in, with the packet's first bytes where it was shown; returns the passages that it ended, in their order."""
        ended: list[Passage] = []
        is_ours = event.table == TRACE_TABLE
        if is_ours and event.chain in _BEGINS and event.kind == "rule" and event.network:
            if (before := self._open.pop(event.id, None)) is not None:
                ended.append(before)
            self._open[event.id] = Passage(event.id, now_s, [], data=data)
        passage = self._open.get(event.id)
        if passage is None:
            return ended
        _add(passage, event, now_s)
        if event.verdict == "drop" or (is_ours and event.chain == _LAST):
            ended.append(self._open.pop(event.id))
        elif len(self._open) > _OPEN_MAX:
            ended.append(self._open.pop(next(iter(self._open))))
        return ended

    def idle(self, now_s: float) -> list[Passage]:
        """End those of which nothing was heard for a while."""
        over = [key for key, passage in self._open.items() if now_s - passage.at_s > IDLE_S]
        return [self._open.pop(key) for key in over]


def _add(passage: Passage, event: TraceEvent, now_s: float) -> None:
    passage.at_s = now_s
    if event.tracked is not None:
        passage.tracked = event.tracked
    seen = packet(event.network, event.transport)
    if seen is not None:
        passage.last = Sighting(event.chain, now_s, seen, event.iif, event.oif, event.mark)
        if event.table == TRACE_TABLE and event.chain in _CHAINS:
            passage.sightings.append(passage.last)
    if event.verdict == "drop":
        passage.drop, passage.dropped = event, passage.last
