"""The auditor's loop: kernel events and a periodic pass in; drift events and repair requests out. One per host.

It shares nothing with the applier but the plan on NATS and the kernel's own marker. A difference is told only when the applier (if there
is one) made no turn while it was seen, and is one to the plan without the hops of tunnels that the applier has withdrawn. Repairs are
asked for over a local socket, and events wait for a broker that is away: what cuts the host off from NATS is repaired all the same.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import structlog
from msgspec.structs import replace

from schemas import codec, subjects
from schemas.commands import Repair, Settled
from schemas.drift import DriftEvent, DriftLayer, Suspect
from schemas.status import ApplyReport
from schemas.withdrawals import without
from services.auditor.compare import LAYERS, Finding, View, compare
from services.auditor.ledger import Ledger
from services.kernel.events import EventSource, KernelEvent
from services.kernel.linux import LinuxKernel
from services.kernel.port import Kernel
from services.runtime import neighbour
from services.runtime.broker import Broker
from services.runtime.errors import MeshmarkError
from services.runtime.plans import Update, follow_plan
from services.runtime.service import Context

_log = structlog.get_logger()

T = TypeVar("T")

_DEBOUNCE_S = 0.02
_RECHECK_S = 1.0
_LOOKS_MAX = 3
"""How often a difference is looked at again because the applier made a turn meanwhile, before it gets a pause."""
_EVENTS_MAX = 10_000


class AuditorService:
    """One host's auditor process."""

    def __init__(self, context: Context, kernel: Kernel) -> None:
        self._context = context
        self._broker: Broker = context.broker
        self._cluster, self._host = context.settings.require_host()
        self._kernel = kernel
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kernel")
        self._ledger = Ledger(self._cluster, self._host)
        self._current: Update | None = None
        self._suspects: dict[DriftLayer, Suspect] = {}
        self._hints: set[DriftLayer] = set(LAYERS)
        self._wake = asyncio.Event()
        self._untold: deque[DriftEvent] = deque(maxlen=_EVENTS_MAX)
        self._told = asyncio.Event()
        self._repair_due_s: float | None = None
        self._withdrawn: tuple[str, ...] = ()

    async def run(self) -> None:
        """Audit until told to stop."""
        with self._thread:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._follow(), name="plan"),
                    group.create_task(self._watch_kernel(), name="events"),
                ]
                group.create_task(self._publish(), name="drift")  # ends by itself: nothing cuts a message short
                self._context.ready("auditor")
                await self._audits()
                for task in tasks:
                    task.cancel()
            await self._in_thread(self._kernel.close)

    async def _follow(self) -> None:
        async for update in follow_plan(self._broker, "auditor", self._cluster, self._host):
            if self._current is not None and not update.follows(self._current.epoch):
                continue  # the applier leaves it alone, too, and says why
            self._current = update
            self._hint(*LAYERS)

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
            current = self._current
            if current is None:
                continue
            with self._context.metrics.audit_seconds.time():
                await self._audit(current, layers)
            await self._repair(current)

    async def _next_audit(self) -> bool:
        """Wait for a hint, a repair that is due, or the periodic pass; False at the end."""
        period_s = self._context.settings.resync_s * random.uniform(0.9, 1.1)  # noqa: S311 - jitter, not a secret
        if self._repair_due_s is not None:
            period_s = min(period_s, max(0.0, self._repair_due_s - time.time()))
        await self._context.until(self._wake, period_s)
        if self._wake.is_set():
            await asyncio.sleep(_DEBOUNCE_S)
        self._wake.clear()
        return not self._context.stop.is_set()

    async def _audit(self, current: Update, layers: tuple[DriftLayer, ...]) -> None:
        # The first to touch a layer since the last look: who repairs comes after who broke.
        suspects, self._suspects = self._suspects, {}
        findings = await self._look(current, layers)
        if findings:
            findings = await self._look_again(current, layers)
        if findings is not None:
            self._tell(self._ledger.observe(findings, layers, time.time(), suspects, current.generation))

    async def _look_again(self, current: Update, layers: tuple[DriftLayer, ...]) -> list[Finding] | None:
        """Look while the applier makes no turn; None when it makes one each time, or when a layer cannot be read."""
        for _ in range(_LOOKS_MAX):
            before = await self._settled()
            self._withdrawn = (before or await self._last_said()).withdrawn
            findings = await self._look(current, layers)
            if not findings or await self._settled() == before:
                return findings
        self._hint_later(layers)
        return None

    async def _look(self, current: Update, layers: tuple[DriftLayer, ...]) -> list[Finding] | None:
        """Compare now; None when a layer cannot be read, which is told as ``unknown``."""
        plan, withdrawn = current.plan, self._withdrawn

        def look() -> View:
            wanted = {key: item for key, item in without(plan.objects(), withdrawn).items() if item.layer in layers}
            marker = self._kernel.marker()
            return View(self._kernel.reference(wanted), self._kernel.read(wanted, layers), marker, {})

        try:
            view = await self._in_thread(look)
        except MeshmarkError as error:
            _log.warning("unreadable", layers=layers, error=str(error))
            for layer in layers:
                self._tell(self._ledger.unreadable(layer, str(error), time.time()))
            self._hint_later(layers)
            return None
        if view.marker is None and plan.units:
            view = replace(view, reported=await self._held())
        return compare(view, plan, set(layers))

    def _hint_later(self, layers: tuple[DriftLayer, ...]) -> None:
        asyncio.get_running_loop().call_later(_RECHECK_S, self._hint, *layers)

    async def _settled(self) -> Settled | None:
        """What the applier holds, once it has finished the turn that it may be in. One that is not there changes nothing either."""
        try:
            return codec.decode(await neighbour.ask("settle"), Settled)
        except (MeshmarkError, codec.DecodeError) as error:
            _log.info("applier_silent", error=str(error))
            return None

    async def _held(self) -> Mapping[str, str]:
        """Which digest of each unit the applier says that it holds, or, where it is not there, last said."""
        return (await self._settled() or await self._last_said()).held

    async def _last_said(self) -> Settled:
        """What an applier that is not there said last; as far as that cannot be heard, what it told this auditor."""
        try:
            message = await self._broker.last("STATUS", subjects.status(self._cluster, self._host))
            report = codec.decode(message.data, ApplyReport) if message else None
        except (MeshmarkError, codec.DecodeError) as error:
            _log.info("no_report", error=str(error))
            return Settled(0, {}, self._withdrawn)
        if report is None:
            return Settled(0, {}, self._withdrawn)
        return Settled(0, {unit.unit: unit.held for unit in report.units}, tuple(sorted(report.tunnels.links)))

    async def _repair(self, current: Update) -> None:
        """Ask the applier to repair what the policy says, at once or, where it is contested, later and later."""
        policy = current.plan.drift
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
            await neighbour.ask("repair", codec.encode(Repair(tuple(layer for layer in LAYERS if layer not in layers))))
        except MeshmarkError as error:
            _log.warning("repair_failed", error=str(error))
        else:
            self._hint(*LAYERS)

    def _tell(self, events: list[DriftEvent]) -> None:
        """Have events published, in order, as soon as the broker takes them."""
        metrics = self._context.metrics
        for event in events:
            metrics.drift_events.labels(event.layer, event.state).inc()
            _log.warning("drift", state=event.state, layer=event.layer, key=event.key)
            if len(self._untold) == _EVENTS_MAX:
                metrics.drift_events_lost.inc()
            self._untold.append(event)
        self._told.set()
        for layer in LAYERS:
            metrics.drift_open.labels(layer).set(self._ledger.open_by_layer(layer))

    async def _publish(self) -> None:
        while not self._context.stop.is_set():
            await self._context.until(self._told)
            self._told.clear()
            while self._untold and not self._context.stop.is_set():
                event = self._untold.popleft()
                await self._broker.publish_surely(subjects.drift(self._cluster, self._host, event.layer), codec.encode(event))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


async def main(context: Context) -> None:
    """Run the auditor until the context says stop."""
    await AuditorService(context, LinuxKernel(Path(context.settings.state_dir))).run()
