"""The applier's loop: plans and kernel events in; turns, reports and acknowledgements out. One per host.

One task follows the plan, one takes commands, one listens to the kernel for what waiting units wait for; all of them only set what is
wanted and wake the one task that makes turns. A message is acknowledged after its turn is reported, so a kill at any instant repeats the
turn, which changes nothing that is right already.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import structlog
from tenacity import RetryCallState, wait_random_exponential

from schemas import codec, subjects
from schemas.plan import WireguardLink
from schemas.status import ApplyReport
from schemas.topology import PublicKey
from schemas.values import Name
from services.applier.core import Applier
from services.kernel.events import EventSource
from services.kernel.linux import LinuxKernel
from services.kernel.port import Kernel
from services.runtime.broker import Broker
from services.runtime.errors import Conflict, MeshmarkError, Transient, Waiting
from services.runtime.messages import Message
from services.runtime.plans import Update, empty_plan, follow_plan
from services.runtime.service import Context

_log = structlog.get_logger()

T = TypeVar("T")

_RETRY = wait_random_exponential(multiplier=0.25, max=30)
_KEY_REPEAT_S = 10.0
_DIFFERENCES_MAX = 500
_WAKING_LAYERS = frozenset(("link", "address", "route"))


class ApplierService:
    """One host's applier process."""

    def __init__(self, context: Context, kernel: Kernel) -> None:
        self._context = context
        self._broker: Broker = context.broker
        self._cluster, self._host = context.settings.require_host()
        self._kernel = kernel
        self._applier = Applier(kernel, time.time)
        # One thread for the kernel: its sockets are not for sharing, and no two turns may overlap.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kernel")
        self._current = Update(empty_plan(self._cluster, self._host), 0, 0)
        self._unacknowledged: list[Message] = []
        self._received_s = 0.0
        self._wake = asyncio.Event()
        self._due_s: float | None = None
        self._attempts = 0
        self._key_published_s = 0.0

    async def run(self) -> None:
        """Serve until told to stop. Raises Conflict when another applier serves this network namespace."""
        with _sole_applier(), self._thread:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._follow(), name="plan"),
                    group.create_task(self._serve("repair", self._repair), name="repair"),
                    group.create_task(self._serve("diff", self._diff), name="diff"),
                    group.create_task(self._serve("settle", self._settle), name="settle"),
                    group.create_task(self._watch_kernel(), name="events"),
                ]
                self._context.ready("applier")
                await self._turns()
                for task in tasks:
                    task.cancel()
            await self._in_thread(self._kernel.close)

    # What is wanted ------------------------------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        async for update in follow_plan(self._broker, "applier", self._cluster, self._host):
            if update.epoch < self._current.epoch:
                _log.warning("older_epoch_ignored", epoch=update.epoch, seen=self._current.epoch)
                if update.message is not None:
                    await update.message.settle()
                continue
            self._current = update
            self._received_s = time.time()
            self._attempts = 0
            self._context.metrics.wanted_generation.set(update.generation)
            if update.message is not None:
                self._unacknowledged.append(update.message)
            self._wake.set()

    async def _watch_kernel(self) -> None:
        """Wake a turn when something happens that a waiting unit may wait for."""
        async with EventSource() as events:
            async for event in events:
                waiting = any(isinstance(failure.error, Waiting) for failure in self._applier.failures.values())
                if waiting and event.layer in _WAKING_LAYERS:
                    self._wake.set()

    # Turns ---------------------------------------------------------------------------------------------------------------------------

    async def _turns(self) -> None:
        while await self._next_turn():
            current, messages = self._current, tuple(self._unacknowledged)
            try:
                report = await self._turn(current)
            except MeshmarkError as error:
                _log.error("turn_failed", error=str(error), generation=current.generation)
                self._applier.forget()
                self._schedule_retry()
                continue
            await self._broker.publish_surely(subjects.status(self._cluster, self._host), codec.encode(report))
            for message in messages:
                await message.settle()
                self._unacknowledged.remove(message)
            await self._publish_key(current)

    async def _turn(self, current: Update) -> ApplyReport:
        received_s = self._received_s
        report = await self._in_thread(lambda: self._applier.apply(current.plan, current.epoch, current.generation, received_s))
        self._measure(current, report)
        self._due_s = None
        retryable = [failure for failure in self._applier.failures.values() if not _is_final(failure.error)]
        if retryable:
            self._schedule_retry()
        log = _log.info if report.outcome == "applied" else _log.warning
        log("applied", generation=report.generation, outcome=report.outcome, operations=report.operations)
        return report

    def _schedule_retry(self) -> None:
        self._attempts += 1
        state = RetryCallState(retry_object=None, fn=None, args=(), kwargs={})  # type: ignore[arg-type]
        state.attempt_number = self._attempts
        self._due_s = asyncio.get_running_loop().time() + _RETRY(state)

    async def _next_turn(self) -> bool:
        """Wait for a reason to make a turn: something new, a retry that is due, or (False) the end."""
        loop = asyncio.get_running_loop()
        stopping = asyncio.create_task(self._context.stop.wait(), name="stop")
        waking = asyncio.create_task(self._wake.wait(), name="wake")
        timeout = max(0.0, self._due_s - loop.time()) if self._due_s is not None else None
        await asyncio.wait((stopping, waking), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        for task in (stopping, waking):
            task.cancel()
        self._wake.clear()
        return not self._context.stop.is_set()

    def _measure(self, current: Update, report: ApplyReport) -> None:
        metrics, timings = self._context.metrics, report.timings
        if report.outcome == "applied":
            metrics.applied_generation.set(report.generation)
        for outcome in ("applied", "degraded", "waiting"):
            metrics.unit_outcomes.labels(outcome).set(sum(unit.outcome == outcome for unit in report.units))
        metrics.apply_seconds.labels("stage").observe(max(0.0, timings.staged_s - timings.received_s))
        metrics.apply_seconds.labels("commit").observe(max(0.0, timings.committed_s - timings.staged_s))
        metrics.apply_seconds.labels("connect").observe(max(0.0, timings.connected_s - timings.committed_s))
        if current.diff is not None and current.diff.causes:
            stored_s = min(cause.stored_s for cause in current.diff.causes)
            metrics.event_to_applied_seconds.observe(max(0.0, timings.connected_s - stored_s))

    async def _publish_key(self, current: Update) -> None:
        """Publish the public key until the plan shows that the planner knows it."""
        links = [item for item in current.plan.objects().values() if isinstance(item, WireguardLink)]
        if not links:
            return
        key = await self._in_thread(self._kernel.public_key)
        if all(link.public_key == key for link in links):
            return
        loop_time = asyncio.get_running_loop().time()
        if loop_time - self._key_published_s > _KEY_REPEAT_S or self._key_published_s == 0:
            item = PublicKey(name=Name(self._host), cluster=Name(self._cluster), key=key)
            await self._broker.publish_surely(subjects.topology("PublicKey", self._cluster, self._host), codec.encode(item))
            self._key_published_s = loop_time
            _log.info("public_key_published", key=key)
        if self._due_s is None:
            self._due_s = loop_time + _KEY_REPEAT_S

    # Commands ------------------------------------------------------------------------------------------------------------------------

    async def _serve(self, verb: str, handler: Callable[[], Awaitable[bytes]]) -> None:
        async def answer(_: Message) -> bytes:
            return await handler()

        await self._broker.serve(subjects.command(self._cluster, self._host, verb), answer)

    async def _repair(self) -> bytes:
        """Read the kernel and bring it back to the plan; answers with the report."""
        current = self._current

        def turn() -> ApplyReport:
            self._applier.forget()
            return self._applier.apply(current.plan, current.epoch, current.generation, time.time())

        report = await self._in_thread(turn)
        self._measure(current, report)
        await self._broker.publish_surely(subjects.status(self._cluster, self._host), codec.encode(report))
        return codec.encode(report)

    async def _settle(self) -> bytes:
        """Answer once no turn is under way: the kernel's thread takes one work after the other."""
        return await self._in_thread(lambda: b"{}")

    async def _diff(self) -> bytes:
        """Answer with the differences between kernel and plan, read now; at most 500."""
        plan = self._current.plan
        found = await self._in_thread(lambda: self._applier.differences(plan))
        return codec.encode(found[:_DIFFERENCES_MAX])

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _is_final(error: MeshmarkError) -> bool:
    return not isinstance(error, Transient | Waiting | Conflict)


@contextlib.contextmanager
def _sole_applier() -> Iterator[None]:
    """Hold the network namespace's applier place: an abstract Unix socket, which the kernel frees with the process."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as place:
        try:
            place.bind("\0meshmark-applier")
        except OSError as error:
            msg = "another applier serves this network namespace; stop it first"
            raise Conflict(msg) from error
        yield


async def main(context: Context) -> None:
    """Run the applier until the context says stop."""
    await ApplierService(context, LinuxKernel(Path(context.settings.state_dir))).run()
