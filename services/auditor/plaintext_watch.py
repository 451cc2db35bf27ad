"""The plaintext audit's loop: packets that the kernel shows, and what its rules count, in; alerts and metrics out."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Protocol, TypeVar

import structlog

from schemas.drift import ClearPacket, DriftEvent, Tunnel
from schemas.encryption import Point, logged
from schemas.plan import digest_of, unit_tag
from services.auditor.plaintext import HOLD_S, Alerts, Watched, watched
from services.auditor.totals import Totals
from services.kernel.headers import ICMP, ICMPV6, SCTP, TCP, UDP, Packet
from services.kernel.nflog import NflogSource, Shown, inner_of, packet_of
from services.kernel.port import Kernel
from services.runtime import tasks
from services.runtime.errors import MeshmarkError
from services.runtime.plans import Update
from services.runtime.service import Context

_log = structlog.get_logger()

T = TypeVar("T")

_ROUND_S = 1.0
_LISTEN_AGAIN_S = 5.0
_AFTER_S = 0.01
"""Two clocks are not read in the same moment."""
_PROTOCOLS = {ICMP: "icmp", TCP: "tcp", UDP: "udp", ICMPV6: "icmpv6", SCTP: "sctp"}


class InThread(Protocol):
    """Runs what asks the kernel in the kernel's thread."""

    async def __call__(self, work: Callable[[], T], /) -> T: ...


class PlaintextWatch:
    """Watches one host's uplink for packets in clear. `tell` has events published."""

    def __init__(self, context: Context, kernel: Kernel, in_thread: InThread, tell: Callable[[list[DriftEvent]], None]) -> None:
        self._context = context
        self._kernel = kernel
        self._in_thread = in_thread
        self._tell = tell
        self._alerts = Alerts(*context.settings.require_host())
        self._totals = Totals()
        self._current: tuple[Update, Watched] | None = None
        self._looked = ""
        """The table whose counts are known."""
        self._wake, self._regrouped = asyncio.Event(), asyncio.Event()

    def follow(self, update: Update) -> None:
        """Go by this plan from now on."""
        found = watched(update.plan)
        before, self._current = self._group(), (update, found) if found is not None else None
        self._alerts.follow(update.plan, found, update.generation, time.time())
        if self._group() != before:
            self._regrouped.set()

    async def run(self) -> None:
        """Watch until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._listen(), name="nflog")
            group.create_task(self._rounds(), name="counters")

    # Packets -------------------------------------------------------------------------------------------------------------------------

    def _group(self) -> int | None:
        return self._current[1].group if self._current is not None else None

    async def _listen(self) -> None:
        """Hear the group that the plan names; one that somebody else hears is asked for again and again."""
        while True:
            group = self._group()
            self._regrouped.clear()
            if group is None:
                await self._regrouped.wait()
                continue
            try:
                async with NflogSource(group) as source:
                    self._say(self._alerts.unheard("", time.time()))
                    await _first_of(self._hear(source), self._regrouped.wait())
            except MeshmarkError as error:
                _log.warning("nflog_unheard", error=str(error))
                self._say(self._alerts.unheard(str(error), time.time()))
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._regrouped.wait(), _LISTEN_AGAIN_S)

    async def _hear(self, source: NflogSource) -> None:
        metrics = self._context.metrics
        async for item in source:
            metrics.plaintext_lost.inc(item.lost)
            point = logged(item.prefix)
            outer = packet_of(item.data)
            if point is None or outer is None or self._current is None:
                continue
            metrics.plaintext_shown.labels(point.direction, point.traffic).inc()
            far = outer.destination if point.direction == "out" else outer.source
            if self._alerts.saw(point, clear_packet(point, item, outer, self._current[1]), far, time.time()):
                asyncio.get_running_loop().call_later(HOLD_S + _AFTER_S, self._wake.set)

    # Counts and alerts ---------------------------------------------------------------------------------------------------------------

    async def _rounds(self) -> None:
        next_s = time.monotonic()
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), max(0.0, next_s - time.monotonic()))
            self._wake.clear()
            try:
                if time.monotonic() >= next_s:
                    next_s = time.monotonic() + _ROUND_S
                    await self._count()
                settled = await self._is_settled()
            except MeshmarkError as error:
                _log.warning("unreadable", layers=("plaintext",), error=str(error))
                continue
            self._say(self._alerts.due(time.time(), settled=settled))

    async def _count(self) -> None:
        if self._current is None:
            return
        table = self._current[1].table
        deltas = self._totals.take(await self._in_thread(lambda: self._kernel.counted(table)))
        for point, count in deltas.items():
            labels = (point.name, point.state, point.direction, point.traffic)
            self._context.metrics.encryption_packets.labels(*labels).inc(count.packets)
            self._context.metrics.encryption_bytes.labels(*labels).inc(count.bytes)
        if self._looked == table:  # the first counts are of before this auditor
            self._alerts.counted({point: count.packets for point, count in deltas.items()}, time.time())
        self._looked = table

    async def _is_settled(self) -> bool:
        """Whether the kernel says that it holds the plan of the unit; asked only when an alert may depend on it."""
        if self._current is None or not self._alerts.pending:
            return True
        update, found = self._current
        marker = await self._in_thread(self._kernel.marker)
        return marker is not None and marker.units.get(unit_tag(found.unit)) == digest_of(update.plan.units[found.unit])

    def _say(self, events: Iterable[DriftEvent]) -> None:
        found = list(events)
        if found:
            self._tell(found)
        self._context.metrics.drift_open.labels("plaintext").set(self._alerts.open)


async def _first_of(*works: Coroutine[Any, Any, object]) -> None:
    """Run until one of them ends."""
    begun = [asyncio.create_task(work) for work in works]
    try:
        done, _ = await asyncio.wait(begun, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        await tasks.end(begun)


def clear_packet(point: Point, item: Shown, outer: Packet, by: Watched) -> ClearPacket:
    """A packet that was shown as alerts tell it: of an overlay's, the inner one."""
    carried = inner_of(outer, by.overlay) if point.traffic == "overlay" else None
    header, packet = carried if carried is not None else (None, outer)
    number = packet.protocol
    return ClearPacket(
        point.direction,
        point.traffic,
        _PROTOCOLS.get(number, str(number)) if number is not None else "unknown",
        packet.source,
        packet.destination,
        packet.source_port,
        packet.destination_port,
        packet.length,
        _link(item.oif or item.iif),
        by.dropped,
        Tunnel(header.protocol, outer.source, outer.destination, header.vni) if header is not None else None,
    )


def _link(index: int) -> str:
    try:
        return socket.if_indextoname(index) if index else ""
    except OSError:  # gone since
        return ""
