"""The auditor's loop: kernel events and a periodic pass in; drift events and repair requests out. One per host.

It shares nothing with the applier but the plan on NATS and the kernel's own marker. A difference is looked at twice before it is told: in
between, the applier (if it answers) has finished the turn that it was in.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import structlog

from schemas import codec, subjects
from schemas.drift import DriftEvent, DriftLayer, Suspect
from services.auditor.compare import LAYERS, Finding, compare
from services.auditor.ledger import Ledger
from services.kernel.events import EventSource, KernelEvent
from services.kernel.linux import LinuxKernel
from services.kernel.port import Kernel
from services.runtime.broker import Broker
from services.runtime.errors import MeshmarkError
from services.runtime.plans import Update, empty_plan, follow_plan
from services.runtime.service import Context

_log = structlog.get_logger()

T = TypeVar("T")

_DEBOUNCE_S = 0.02
_COMMAND_TIMEOUT_S = 5.0
_RECHECK_S = 1.0


class AuditorService:
    """One host's auditor process."""

    def __init__(self, context: Context, kernel: Kernel) -> None:
        self._context = context
        self._broker: Broker = context.broker
        self._cluster, self._host = context.settings.require_host()
        self._kernel = kernel
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kernel")
        self._ledger = Ledger(self._cluster, self._host)
        self._current = Update(empty_plan(self._cluster, self._host), 0, 0)
        self._suspects: dict[DriftLayer, Suspect] = {}
        self._hints: set[DriftLayer] = set(LAYERS)
        self._wake = asyncio.Event()
        self._repair_due_s: float | None = None
        self._held_before = False

    async def run(self) -> None:
        """Audit until told to stop."""
        with self._thread:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._follow(), name="plan"),
                    group.create_task(self._watch_kernel(), name="events"),
                ]
                self._context.ready("auditor")
                await self._audits()
                for task in tasks:
                    task.cancel()
            await self._in_thread(self._kernel.close)

    async def _follow(self) -> None:
        async for update in follow_plan(self._broker, "auditor", self._cluster, self._host):
            self._current = update
            self._hint(*LAYERS)
            if update.message is not None:
                await update.message.settle()

    async def _watch_kernel(self) -> None:
        async with EventSource() as events:
            async for event in events:
                self._note(event)

    def _note(self, event: KernelEvent) -> None:
        if event.overrun:
            self._context.metrics.audit_lost_events.inc()
            _log.warning("kernel_events_lost", layer=event.layer)
            self._hint(*LAYERS)
            return
        # A link that goes down takes its IPv4 routes along without a word about them.
        layer: DriftLayer = "nft" if event.layer == "nft" else "rule" if event.layer == "rule" else "route"
        if event.pid:
            self._suspects.setdefault(layer, Suspect(event.pid, event.process_name or ""))
        self._hint(layer)

    def _hint(self, *layers: DriftLayer) -> None:
        self._hints.update(layers)
        self._wake.set()

    # Audits --------------------------------------------------------------------------------------------------------------------------

    async def _audits(self) -> None:
        while await self._next_audit():
            layers = tuple(layer for layer in LAYERS if layer in self._hints) or LAYERS
            self._hints.clear()
            if self._current.generation == 0 or not await self._has_held():
                continue
            with self._context.metrics.audit_seconds.time():
                await self._audit(layers)
            await self._repair()

    async def _next_audit(self) -> bool:
        """Wait for a hint, a repair that is due, or the periodic pass; False at the end."""
        stop = self._context.stop
        period_s = self._context.settings.resync_s * random.uniform(0.9, 1.1)  # noqa: S311 - jitter, not a secret
        if self._repair_due_s is not None:
            period_s = min(period_s, max(0.0, self._repair_due_s - time.time()))
        tasks = [asyncio.create_task(stop.wait(), name="stop"), asyncio.create_task(self._wake.wait(), name="wake")]
        await asyncio.wait(tasks, timeout=period_s, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        if self._wake.is_set():
            await asyncio.sleep(_DEBOUNCE_S)
        self._wake.clear()
        return not stop.is_set()

    async def _has_held(self) -> bool:
        """True once this host has held a plan: until then, what is missing is still to come, and no drift."""
        if not self._held_before:
            try:
                marker = await self._in_thread(self._kernel.marker)
                self._held_before = marker is not None or await self._has_reported()
            except MeshmarkError as error:
                _log.info("not_known_to_hold", error=str(error))
        return self._held_before

    async def _has_reported(self) -> bool:
        return await self._broker.last("STATUS", subjects.status(self._cluster, self._host)) is not None

    async def _audit(self, layers: tuple[DriftLayer, ...]) -> None:
        # The first to touch a layer since the last look: who repairs comes after who broke.
        suspects, self._suspects = self._suspects, {}
        findings = await self._look(layers)
        if findings:
            await self._settle()
            findings = await self._look(layers)
        if findings is not None:
            await self._publish(self._ledger.observe(findings, layers, time.time(), suspects, self._current.generation))

    async def _look(self, layers: tuple[DriftLayer, ...]) -> list[Finding] | None:
        """Compare now; None when a layer cannot be read, which is told as ``unknown``."""
        plan = self._current.plan

        def look() -> list[Finding]:
            wanted = {key: item for key, item in plan.objects().items() if item.layer in layers}
            marker = self._kernel.marker()
            return compare(plan, self._kernel.reference(wanted), self._kernel.read(wanted, layers), marker, set(layers))

        try:
            return await self._in_thread(look)
        except MeshmarkError as error:
            _log.warning("unreadable", layers=layers, error=str(error))
            for layer in layers:
                await self._publish(self._ledger.unreadable(layer, str(error), time.time()))
            asyncio.get_running_loop().call_later(_RECHECK_S, self._hint, *layers)
            return None

    async def _settle(self) -> None:
        """Let the applier finish the turn that it may be in. One that is not there changes nothing either."""
        try:
            await self._broker.request(subjects.command(self._cluster, self._host, "settle"), b"", _COMMAND_TIMEOUT_S)
        except MeshmarkError as error:
            _log.info("applier_silent", error=str(error))

    async def _repair(self) -> None:
        """Ask the applier to repair what the policy says, at once or, where it is contested, later and later."""
        policy = self._current.plan.drift
        layers = [layer for layer in LAYERS if getattr(policy, layer) == "repair"]
        delay_s = self._ledger.repair_delay_s(layers, time.time())
        now_s = time.time()
        if delay_s is None:
            self._repair_due_s = None
            return
        if self._repair_due_s is None:
            self._repair_due_s = now_s + delay_s
        if now_s < self._repair_due_s:
            return
        self._repair_due_s = now_s + max(delay_s, _RECHECK_S)
        try:
            await self._broker.request(subjects.command(self._cluster, self._host, "repair"), b"", _COMMAND_TIMEOUT_S)
        except MeshmarkError as error:
            _log.warning("repair_failed", error=str(error))
        else:
            self._hint(*LAYERS)

    async def _publish(self, events: list[DriftEvent]) -> None:
        metrics = self._context.metrics
        for event in events:
            metrics.drift_events.labels(event.layer, event.state).inc()
            _log.warning("drift", state=event.state, layer=event.layer, key=event.key)
            await self._broker.publish_surely(subjects.drift(self._cluster, self._host, event.layer), codec.encode(event))
        for layer in LAYERS:
            metrics.drift_open.labels(layer).set(self._ledger.open_by_layer(layer))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


async def main(context: Context) -> None:
    """Run the auditor until the context says stop."""
    await AuditorService(context, LinuxKernel(Path(context.settings.state_dir))).run()
