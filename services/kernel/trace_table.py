"""The table by whose rules the kernel tells of traced flows, beside any plan.

Owns a netlink socket, and the table by that: the kernel takes it away when the socket is closed, however its process ends, and lets nobody
else change it. It is there only while a flow is traced, since a packet pays for chains though they are empty. Whoever traces a flow already
keeps the longest time that was asked for. A kernel that refuses rules which show packets (``nfnetlink_log``) gets others, until the table
is made anew. Fails with Conflict when too many flows are traced, else as transactions do.
"""

from __future__ import annotations

import errno
import itertools
import os

from msgspec.structs import replace

from schemas.commands import TraceFlow
from schemas.host_objects import TRACE_TABLE
from services.kernel.netlink import NetlinkError
from services.kernel.nfnetlink import elements, wire
from services.kernel.nfnetlink.batch import Batch
from services.kernel.nfnetlink.engine import mapped
from services.kernel.nfnetlink.exchange import FIRST, Exchange
from services.kernel.nfnetlink.rules import Encoders
from services.kernel.nfnetlink.sets import header_of
from services.kernel.nfnetlink.wire import Message
from services.kernel.nft.steps import Step
from services.kernel.nftread.dumps import OWNED
from services.kernel.trace_rules import BEGINNING, SESSIONS_MAX, Session, chains
from services.runtime.errors import Conflict, MeshmarkError


class TraceTable:
    """The table, and what is traced by it: each flow with when that ends, in seconds of any one clock. One thread at a time."""

    def __init__(self) -> None:
        self._exchange: Exchange | None = None
        self._encoders = Encoders()
        self._numbers = itertools.count(1)
        self._until_s: dict[Session, float] = {}
        self._shows = True

    def trace(self, wish: TraceFlow, now_s: float) -> bool:
        """Have the kernel tell of a flow from now on, for so long as is wished. False where it cannot show what overlay packets carry."""
        live = self._live(now_s)
        same = next((session for session in live if _is_same(session.wish, wish)), None)
        if same is not None and live[same] >= now_s + wish.seconds and self._exchange is not None:
            return self._shows or not wish.overlay_ports
        if same is not None:
            del live[same]
        if len(live) >= SESSIONS_MAX:
            msg = f"{SESSIONS_MAX} flows are traced here already; wait for one to end"
            raise Conflict(msg)
        self._become({**live, Session(next(self._numbers), wish): now_s + wish.seconds}, now_s)
        return self._shows or not wish.overlay_ports

    def forget(self, now_s: float) -> float | None:
        """End what is over; returns in how many seconds the next one ends, None when nothing is traced any more."""
        live = self._live(now_s)
        if len(live) < len(self._until_s):
            self._become(live, now_s)
        return min(live.values()) - now_s if live else None

    def close(self) -> None:
        """End all of it."""
        self._until_s = {}
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None

    def _live(self, now_s: float) -> dict[Session, float]:
        return {session: until_s for session, until_s in self._until_s.items() if until_s > now_s}

    def _become(self, live: dict[Session, float], now_s: float) -> None:
        """Trace these from now on. A table that somebody has done something to is made anew, once."""
        if not live:
            self.close()
            return
        if self._exchange is not None:
            try:
                self._write(self._exchange, live, now_s)
            except MeshmarkError:
                self.close()
            else:
                return
        self._until_s, self._shows = {}, True
        try:
            self._exchange = self._made(live, now_s)
        except MeshmarkError:
            if not any(session.wish.overlay_ports for session in live):
                raise
            # Without NFLOG the kernel refuses the rules that show; whatever else it is, it refuses the others as well.
            self._shows = False
            self._exchange = self._made(live, now_s)

    def _made(self, live: dict[Session, float], now_s: float) -> Exchange:
        """The table, made anew."""
        exchange = Exchange()
        try:
            _own(exchange)
            self._write(exchange, live, now_s)
        except BaseException:
            exchange.close()
            raise
        return exchange

    def _write(self, exchange: Exchange, live: dict[Session, float], now_s: float) -> None:
        """Bring the table to these sessions in one transaction: a packet meets the rules of before or of after."""
        new, gone = [each for each in live if each not in self._until_s], [each for each in self._until_s if each not in live]
        wanted, sets = chains(list(live), shows=self._shows), [item for session in new for item in session.sets()]
        steps = [Step("add", "chain", TRACE_TABLE, chain.name, chain) for chain in (() if self._until_s else wanted)]
        steps += [Step("add", "set", TRACE_TABLE, item.name, item) for item in sets]
        steps += [Step("flush", "rules", TRACE_TABLE, name) for name, _ in BEGINNING]
        steps += [Step("add", "rules", TRACE_TABLE, chain.name, chain) for chain in wanted if chain.rules]
        steps += [Step("delete", "set", TRACE_TABLE, item.name) for session in gone for item in session.sets()]
        made = Batch(steps, self._encoders, lambda _, name: next(header_of(item) for item in sets if item.name == name))
        messages = list(made.messages)
        for session in new:
            seconds = max(1, round(live[session] - now_s))
            for item in session.sets():
                items = elements.lent(header_of(item), [each for each in session.elements() if each.set == item.name], seconds)
                messages += elements.messages(Message.NEW_ELEMENTS, (TRACE_TABLE, item.name), items, FIRST + len(messages))
        _send(exchange, messages)
        self._until_s = live


def _own(exchange: Exchange) -> None:
    """Make the table this socket's; one of the name that is nobody's makes room."""
    name = wire.text(wire.TABLE_NAME, TRACE_TABLE)
    flags = (wire.be32(wire.TABLE_FLAGS, each) for each in (0, OWNED))
    add, again = (wire.request(Message.NEW_TABLE, wire.CREATE, FIRST + 2 * place, name, each) for place, each in enumerate(flags))
    _send(exchange, [add, wire.request(Message.DEL_TABLE, 0, FIRST + 1, name), again])


def _send(exchange: Exchange, messages: list[bytes]) -> None:
    try:
        outcome = exchange.send(messages, None)
    except NetlinkError as error:
        raise mapped(error.errno or errno.EIO, f"nft: cannot trace: {error.strerror}") from error
    if outcome.refusals:
        refusal = min(outcome.refusals)
        raise mapped(refusal.number, f"nft: cannot trace: {os.strerror(refusal.number)}")


def _is_same(one: TraceFlow, other: TraceFlow) -> bool:
    return replace(one, seconds=other.seconds) == other
