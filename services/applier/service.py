"""The applier's loop: plans and kernel events in; turns and reports out. One per host.

One task follows the plan, one takes commands, one listens to the kernel for what waiting units wait for, one watches the tunnels; all of
them only note what is wanted and wake the one task that makes turns. A plan is acknowledged when it is received, because the snapshot is
its durable form: a kill at any instant is followed by a turn against the kernel, which changes nothing that is right already.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import structlog
from msgspec import Struct

from schemas import codec, subjects
from schemas.commands import Repair, Rotate, Settled
from schemas.in_use import InUse
from schemas.plan import HostPlan
from schemas.status import ApplyReport
from schemas.values import Name
from services.applier import keys
from services.applier.core import Applier
from services.applier.in_use import InUseWatch
from services.applier.newcomers import NewcomerWatch
from services.applier.peers import PeerWatch
from services.applier.reports import Reporter
from services.applier.tracing import Traces
from services.applier.watch import TunnelWatch
from services.kernel.events import EventSource
from services.kernel.linux import LinuxKernel
from services.kernel.port import Kernel
from services.kernel.survey.in_use import Look
from services.runtime import neighbour
from services.runtime.broker import Broker
from services.runtime.errors import Conflict, MeshmarkError, OutcomeUnknown, Transient, Waiting
from services.runtime.plans import Update, follow_plan
from services.runtime.retries import backoff_s
from services.runtime.service import Context

_log = structlog.get_logger()

T = TypeVar("T")

_ECHO_S = 0.1
"""Kernel events this soon after a turn are taken for the turn's own."""
_DIFFERENCES_MAX = 500
_WAKING_LAYERS = frozenset(("link", "address", "route", "all"))
_TAKING_LAYERS = frozenset(("link", "rule", "route", "all"))


class _Request(Struct, frozen=True):
    """A repair that somebody asked for, and where the report goes."""

    repair: Repair
    answer: asyncio.Future[ApplyReport]


class ApplierService:
    """One host's applier process. `look` says what others use on this host; it runs in a thread of its own."""

    def __init__(self, context: Context, kernel: Kernel, look: Callable[[], InUse]) -> None:
        self._context = context
        self._broker: Broker = context.broker
        self._cluster, self._host = context.settings.require_host()
        self._kernel = kernel
        self._applier = Applier(kernel, time.time)
        # One thread for the kernel: its sockets are not for sharing, and no two turns may overlap.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kernel")
        self._current: Update | None = None
        self._seen: tuple[int, int] | None = None
        """Epoch and generation of what is held: the last plan's, or after a restart the kernel's own word."""
        self._measured: tuple[int, int] = (0, 0)
        self._received_s = 0.0
        self._requests: list[_Request] = []
        self._wake = asyncio.Event()
        self._due_s: float | None = None
        self._attempts = 0
        self._turn_ended_s = 0.0
        self._turns_made = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._watch = TunnelWatch(
            context.metrics, lambda links: self._in_thread(lambda: self._applier.handshakes(links)), self._tunnels_changed
        )
        self._reporter = Reporter(context, lambda: self._in_thread(kernel.keys), lambda: self._in_thread(self._applier.uses_key))
        self._peers = PeerWatch(
            context.metrics,
            lambda links: self._in_thread(lambda: self._applier.peers(links)),
            self._tunnels_changed,
            self._reporter.note_peers,
        )
        self._traces = Traces(kernel, self._in_thread)
        self._newcomers = NewcomerWatch(
            lambda links: self._in_thread(lambda: self._applier.peers(links)),
            lambda link, keys: self._in_thread(lambda: self._applier.greet(link, keys)),
        )
        self._in_use = InUseWatch(look, self._idle, lambda: self._turns_made, self._reporter.note)

    async def run(self) -> None:
        """Serve until told to stop. Raises Conflict when another applier serves this network namespace."""
        handlers: dict[str, neighbour.Handler] = {"repair": self._repair, "settle": self._settle}
        with self._thread:
            await self._recall()
            async with neighbour.serving(handlers), asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._follow(), name="plan"),
                    group.create_task(self._serve("repair", self._repair), name="repair"),
                    group.create_task(self._serve("diff", self._diff), name="diff"),
                    group.create_task(self._serve("encryption", self._encryption), name="encryption"),
                    group.create_task(self._serve("rotate", self._rotate), name="rotate"),
                    group.create_task(self._serve("trace", self._trace), name="trace"),
                    group.create_task(self._watch_kernel(), name="events"),
                    group.create_task(self._watch.run(), name="tunnels"),
                    group.create_task(self._in_use.run(), name="in-use"),
                    group.create_task(self._peers.run(), name="peers"),
                    group.create_task(self._traces.run(), name="traces"),
                    group.create_task(self._newcomers.run(), name="newcomers"),
                ]
                group.create_task(self._reporter.run(), name="reports")  # ends by itself: nothing cuts a message short
                await self._turns()
                for task in tasks:
                    task.cancel()
            await self._in_thread(self._kernel.close)

    # What is wanted ------------------------------------------------------------------------------------------------------------------

    async def _recall(self) -> None:
        """Take from the kernel's marker what an earlier applier held, and be ready to tell it to a planner that knows nothing of it."""
        try:
            marker = await self._in_thread(self._kernel.marker)
        except MeshmarkError as error:
            _log.warning("marker_unreadable", error=str(error))
            return
        if marker is None:
            return
        self._seen = marker.epoch, marker.generation
        nothing = HostPlan(Name(self._cluster), Name(self._host), {})
        why = "the broker has no plan for this host; what an earlier one made stays as it is"
        self._reporter.remember(await self._in_thread(lambda: self._applier.stand(nothing, marker.epoch, marker.generation, why)))

    async def _follow(self) -> None:
        async for update in follow_plan(self._broker, "applier", self._cluster, self._host):
            if self._seen is not None and not update.follows(self._seen[0]):
                await self._stand(update, *self._seen)
                continue
            self._seen = update.place
            self._current = update
            self._received_s = time.time()
            self._attempts = 0
            self._context.metrics.wanted_generation.set(update.generation)
            self._wake.set()

    async def _stand(self, update: Update, epoch: int, generation: int) -> None:
        """Leave a plan alone that may not replace what is held, and tell the planner what that is."""
        _log.warning("plan_left_alone", epoch=update.epoch, generation=update.generation, held_epoch=epoch, held_generation=generation)
        why = f"the plan of epoch {update.epoch} does not follow epoch {epoch}, which is held and stays: was the broker's store lost?"
        try:
            report = await self._in_thread(lambda: self._applier.stand(update.plan, epoch, generation, why))
        except MeshmarkError as error:
            _log.warning("marker_unreadable", error=str(error))
        else:
            self._reporter.put(report, update, stranger=True)

    async def _watch_kernel(self) -> None:
        """Wake a turn when something happens that a waiting unit may wait for; what others do may be a number that they take."""
        loop = asyncio.get_running_loop()
        async with EventSource() as source:
            async for event in source:
                if loop.time() <= self._turn_ended_s + _ECHO_S:
                    continue
                waiting = any(isinstance(failure.error, Waiting) for failure in self._applier.failures.values())
                if waiting and event.layer in _WAKING_LAYERS:
                    self._wake.set()
                if event.layer in _TAKING_LAYERS:
                    self._in_use.hint()

    def _tunnels_changed(self) -> None:
        self._received_s = time.time()
        self._wake.set()

    # Turns ---------------------------------------------------------------------------------------------------------------------------

    async def _turns(self) -> None:
        while await self._next_turn():
            current = self._current
            if current is None:
                continue
            requests, self._requests = self._requests, []
            report = await self._turn(current, requests)
            for request in requests:
                if not request.answer.done():
                    request.answer.set_result(report)
            self._reporter.put(report, current)

    async def _turn(self, current: Update, requests: list[_Request]) -> ApplyReport:
        """One turn; a kernel that cannot be read or written at all is reported like any other failure."""
        plan, epoch, generation, received_s = current.plan, current.epoch, current.generation, self._received_s
        # A layer is left alone only when everybody who asks says so.
        leave = set.intersection(*(set(request.repair.leave) for request in requests)) if requests else set()
        addresses = self._peers.follow(plan)
        tunnels = self._watch.follow(plan, () if self._watch.started else await self._found_withdrawn(plan))

        def work() -> ApplyReport:
            self._turns_made += 1
            try:
                if requests:
                    return self._applier.repair(plan, epoch, generation, leave, tunnels, addresses=addresses)
                return self._applier.apply(plan, epoch, generation, received_s, tunnels, addresses=addresses)
            except MeshmarkError as error:
                return self._applier.refuse(plan, epoch, generation, error)

        if requests:
            self._context.metrics.resyncs.labels("repair").inc()
        self._turn_ended_s = float("inf")
        self._idle.clear()
        report = await self._in_thread(work)
        self._idle.set()
        self._turn_ended_s = asyncio.get_running_loop().time()
        self._measure(current, report)
        self._due_s = None
        if any(_is_retried(failure.error) for failure in self._applier.failures.values()):
            self._attempts += 1
            self._due_s = self._turn_ended_s + backoff_s(self._attempts)
        log = _log.info if report.outcome == "applied" else _log.warning
        log("applied", generation=report.generation, outcome=report.outcome, operations=report.operations)
        await self._settle_keys(plan)
        self._peers.made(plan)
        self._newcomers.made(plan)
        await self._peers.look()
        return report

    async def _settle_keys(self, plan: HostPlan) -> None:
        try:
            if await self._in_thread(lambda: self._applier.settle_keys(plan)):
                self._reporter.note_keys()
        except MeshmarkError as error:
            _log.error("no_key", error=str(error))

    async def _found_withdrawn(self, plan: HostPlan) -> frozenset[str]:
        """Tunnels that an applier before this one found dead: they stay withdrawn until they have proved that they work."""
        try:
            return await self._in_thread(lambda: self._applier.found_withdrawn(plan))
        except MeshmarkError as error:
            _log.warning("unreadable", layers=("route",), error=str(error))
            return frozenset()

    async def _next_turn(self) -> bool:
        """Wait for a reason to make a turn: something new, a retry that is due, or (False) the end."""
        timeout_s = max(0.0, self._due_s - asyncio.get_running_loop().time()) if self._due_s is not None else None
        await self._context.until(self._wake, timeout_s)
        self._wake.clear()
        return not self._context.stop.is_set()

    def _measure(self, current: Update, report: ApplyReport) -> None:
        metrics, timings = self._context.metrics, report.timings
        metrics.operations.inc(report.operations)
        for outcome in ("applied", "degraded", "waiting"):
            metrics.unit_outcomes.labels(outcome).set(sum(unit.outcome == outcome for unit in report.units))
        if report.outcome != "applied" or (current.epoch, current.generation) == self._measured:
            return
        # Once for each generation: a retry or a repair says nothing about how long an event took.
        self._measured = (current.epoch, current.generation)
        metrics.applied_generation.set(report.generation)
        metrics.apply_seconds.labels("stage").observe(max(0.0, timings.staged_s - timings.received_s))
        metrics.apply_seconds.labels("commit").observe(max(0.0, timings.committed_s - timings.staged_s))
        metrics.apply_seconds.labels("connect").observe(max(0.0, timings.connected_s - timings.committed_s))
        if current.diff is not None and current.diff.causes:
            stored_s = min(cause.stored_s for cause in current.diff.causes)
            metrics.event_to_applied_seconds.observe(max(0.0, timings.connected_s - stored_s))

    # Commands ------------------------------------------------------------------------------------------------------------------------

    async def _serve(self, verb: str, handler: neighbour.Handler) -> None:
        await self._broker.serve(subjects.command(self._cluster, self._host, verb), lambda message: handler(message.data))

    async def _repair(self, body: bytes) -> bytes:
        """Read the kernel and bring it back to the plan; answers with the report."""
        try:
            repair = codec.decode(body or b"{}", Repair)
        except codec.DecodeError as error:
            msg = f"repair: {error}"
            raise MeshmarkError(msg) from None
        self._require_plan()
        request = _Request(repair, asyncio.get_running_loop().create_future())
        self._requests.append(request)
        self._wake.set()
        return codec.encode(await request.answer)

    async def _rotate(self, body: bytes) -> bytes:
        """Make the key that is to follow, or take it back; answers with the host's public keys."""
        try:
            rotate = codec.decode(body or b"{}", Rotate)
        except codec.DecodeError as error:
            msg = f"rotate: {error}"
            raise MeshmarkError(msg) from None
        plan = self._require_plan().plan
        answer = await self._in_thread(lambda: keys.rotated(self._kernel, plan, abort=rotate.abort))
        if rotate.abort:  # no turn follows where no device has had the key yet, and that would keep it
            await self._settle_keys(plan)
        self._reporter.note_keys()
        return codec.encode(answer)

    async def _trace(self, body: bytes) -> bytes:
        return await self._traces.ask(body, self._require_plan().plan)

    async def _settle(self, _: bytes) -> bytes:
        """Answer once no turn is under way: the kernel's thread takes one work after the other."""
        return codec.encode(await self._in_thread(lambda: Settled(self._turns_made, self._applier.held(), self._applier.withdrawn())))

    async def _diff(self, _: bytes) -> bytes:
        """Answer with the differences between kernel and plan, read now; at most 500."""
        plan = self._require_plan().plan
        found = await self._in_thread(lambda: self._applier.differences(plan))
        return codec.encode(found[:_DIFFERENCES_MAX])

    async def _encryption(self, _: bytes) -> bytes:
        """Answer with the peers and the packets by point, read now."""
        plan = self._require_plan().plan
        return codec.encode(await self._in_thread(lambda: self._applier.encryption(plan)))

    def _require_plan(self) -> Update:
        if self._current is None:
            msg = f"{self._cluster}/{self._host} has no plan yet"
            raise Waiting(msg, "a plan")
        return self._current

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _is_retried(error: MeshmarkError) -> bool:
    return isinstance(error, Transient | Waiting | Conflict | OutcomeUnknown)


async def main(context: Context) -> None:
    """Run the applier until the context says stop."""
    await ApplierService(context, LinuxKernel(Path(context.settings.state_dir), nft_engine=context.settings.nft_engine), Look()).run()
