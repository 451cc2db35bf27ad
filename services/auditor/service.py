"""The auditor's loop: kernel events and periodic passes in; drift events and repair requests out. One per host.

It shares nothing with the applier but the plan on NATS and the kernel's own marker. A difference is told only when the applier (if there
is one) made no turn while it was seen, and is one to the plan without the hops of tunnels that the applier has withdrawn. Repairs are
asked for over a local socket, and events wait for a broker that is away: what cuts the host off from NATS is repaired all the same.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import structlog
from msgspec import Struct
from msgspec.structs import replace

from schemas import codec, subjects
from schemas.drift import DriftEvent, DriftLayer
from schemas.withdrawals import without
from services.auditor.applier import ApplierBeside
from services.auditor.attention import QUIET, Attention, Rounds
from services.auditor.compare import compare
from services.auditor.findings import LAYERS, LINKED, Finding
from services.auditor.inheritance import left_open
from services.auditor.ledger import Ledger
from services.auditor.look import Look, look
from services.auditor.plaintext_watch import PlaintextWatch
from services.auditor.trace.watch import TraceWatch
from services.auditor.unchanged import States, Unchanged
from services.kernel.events import EventSource, KernelEvent
from services.kernel.linux import LinuxKernel
from services.kernel.port import Kernel
from services.runtime.broker import Broker
from services.runtime.errors import MeshmarkError
from services.runtime.plans import Update, follow_plan
from services.runtime.service import Context

_log = structlog.get_logger()

T = TypeVar("T")

_DEBOUNCE_S = 0.02
_RECHECK_S = 1.0
_REPAIR_MAX_S = 30.0
_LOOKS_MAX = 3
"""How often a difference is looked at again because the applier made a turn meanwhile, before it gets a pause."""
_EVENTS_MAX = 10_000


class Seen(Struct, frozen=True):
    """What a look came to: findings, and the layers that could be read."""

    findings: list[Finding]
    layers: tuple[DriftLayer, ...]


class AuditorService:
    """One host's auditor process."""

    def __init__(self, context: Context, kernel: Kernel) -> None:
        self._context = context
        self._broker: Broker = context.broker
        self._cluster, self._host = context.settings.require_host()
        self._kernel = kernel
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kernel")
        self._unchanged = Unchanged(kernel)
        self._ledger = Ledger(self._cluster, self._host, time.time())
        self._applier = ApplierBeside(self._broker, self._cluster, self._host)
        self._traces = TraceWatch(self._broker, context.metrics, self._cluster, self._host)
        self._attention = Attention()
        self._rounds = Rounds({LAYERS: context.settings.resync_s, QUIET: context.settings.quiet_s}, time.time())
        self._plaintext = PlaintextWatch(context, kernel, self._in_thread, self._tell)
        self._current: Update | None = None
        self._wake = asyncio.Event()
        self._untold: deque[DriftEvent] = deque(maxlen=_EVENTS_MAX)
        self._told = asyncio.Event()
        self._repair_due_s: float | None = None
        self._repairs_in_vain = 0

    async def run(self) -> None:
        """Audit until told to stop."""
        with self._thread:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._follow(), name="plan"),
                    group.create_task(self._watch_kernel(), name="events"),
                    group.create_task(self._inherit(), name="inheritance"),
                    group.create_task(self._plaintext.run(), name="plaintext"),
                    group.create_task(self._traces.run(), name="traces"),
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
            self._attention.follow(update.plan)
            self._plaintext.follow(update)
            self._traces.follow(update.plan)
            self._wake.set()

    async def _inherit(self) -> None:
        """Find out, once the broker says so, of which layers an auditor before this one may have left something open."""
        layers = await left_open(self._broker, self._cluster, self._host)
        self._ledger.inherit(layers)
        if layers:
            self._hint(*layers)

    async def _watch_kernel(self) -> None:
        async with EventSource() as events:
            async for event in events:
                self._note(event)

    def _note(self, event: KernelEvent) -> None:
        if event.overrun:
            self._context.metrics.audit_lost_events.inc()
            _log.warning("kernel_events_lost", layer=event.layer)
        if self._attention.note(event):
            self._wake.set()

    def _hint(self, *layers: DriftLayer) -> None:
        self._attention.want(*layers)
        self._wake.set()

    # Audits --------------------------------------------------------------------------------------------------------------------------

    async def _audits(self) -> None:
        while await self._next_audit():
            current = self._current
            if current is None:
                continue
            with self._context.metrics.audit_seconds.time():
                await self._audit(current)
            await self._repair(current)

    async def _next_audit(self) -> bool:
        """Wait for a hint, a repair that is due, or a round; False at the end."""
        due_s = self._rounds.next_s() if self._repair_due_s is None else min(self._rounds.next_s(), self._repair_due_s)
        await self._context.until(self._wake, max(0.0, due_s - time.time()))
        if self._wake.is_set():
            await asyncio.sleep(_DEBOUNCE_S)
        self._wake.clear()
        now_s = time.time()
        self._attention.want(*self._rounds.due(now_s))
        if self._repair_due_s is not None and self._repair_due_s <= now_s:
            self._attention.want(*LAYERS)
        return not self._context.stop.is_set()

    async def _audit(self, current: Update) -> None:
        layers, suspects = self._attention.take()
        fallen = self._attention.fallen()
        if not LINKED.isdisjoint(layers) and self._ledger.is_open(LINKED):
            layers = _with_linked(layers)
        seen: Seen | None = await self._look(current, layers, fallen)
        if seen is not None and seen.findings:
            if any(finding.layer in LINKED for finding in seen.findings):
                layers = _with_linked(layers)
            seen = await self._look_again(current, layers, fallen)
        if seen is None:
            return
        suspects = {**self._attention.suspects(), **suspects}
        events = self._ledger.observe(seen.findings, seen.layers, time.time(), suspects, current.generation)
        if any(event.state == "raised" for event in events):
            self._repair_due_s, self._repairs_in_vain = None, 0
        self._tell(self._with_next_repair(events, self._plan_repair(current)))
        if set(seen.layers) >= LINKED:
            self._attention.forget(fallen, {finding.key for finding in seen.findings if finding.carries})

    async def _look_again(self, current: Update, layers: tuple[DriftLayer, ...], fallen: Mapping[str, int]) -> Seen | None:
        """Look while the applier makes no turn; None when it makes one each time, or when nothing can be read."""
        for _ in range(_LOOKS_MAX):
            before = await self._applier.settled()
            self._applier.withdrawn = (before or await self._applier.last_said()).withdrawn
            seen = await self._look(current, layers, fallen, with_links=True)
            if seen is None or not seen.findings or await self._applier.settled() == before:
                return seen
        self._hint_later(layers)
        return None

    async def _look(
        self, current: Update, layers: tuple[DriftLayer, ...], fallen: Mapping[str, int], *, with_links: bool = False
    ) -> Seen | None:
        """Compare now. Layers that cannot be read are told as ``unknown``; None when none can."""
        plan, withdrawn = current.plan, self._applier.withdrawn

        def work() -> tuple[Look, States] | None:
            left = self._unchanged.left(layers, plan, withdrawn)
            if not left:
                return None
            found = look(self._kernel, without(plan.objects(), withdrawn), left, fallen.keys(), with_links=with_links)
            return found, self._unchanged.states(found.layers, plan, withdrawn, found.view.marker)

        try:
            answer = await self._in_thread(work)
        except MeshmarkError as error:
            self._unreadable(dict.fromkeys(layers, str(error)))
            return None
        if answer is None:
            return Seen([], layers)
        found, states = answer
        self._unreadable(found.unreadable)
        view = found.view
        if view.marker is None and plan.units:
            view = replace(view, reported=await self._applier.held())
        findings = compare(view, plan, set(found.layers))
        differing = {finding.layer for finding in findings}
        # A link's finding may stand for routes.
        self._unchanged.note(states, differing | LINKED if differing & LINKED else differing)
        return Seen(findings, tuple(layer for layer in layers if layer not in found.unreadable))

    def _unreadable(self, reasons: Mapping[DriftLayer, str]) -> None:
        if not reasons:
            return
        _log.warning("unreadable", layers=tuple(reasons), errors=sorted(set(reasons.values())))
        for layer, reason in reasons.items():
            self._tell(self._ledger.unreadable(layer, reason, time.time()))
        self._hint_later(tuple(reasons))

    def _hint_later(self, layers: tuple[DriftLayer, ...]) -> None:
        asyncio.get_running_loop().call_later(_RECHECK_S, self._hint, *layers)

    async def _repair(self, current: Update) -> None:
        """Ask the applier to repair what the policy says: at once, or later and later where it is contested, or where that is in vain."""
        layers = self._plan_repair(current)
        now_s = time.time()
        if self._repair_due_s is None or now_s < self._repair_due_s:
            return
        pause_s = min(_RECHECK_S * 2**self._repairs_in_vain, _REPAIR_MAX_S)
        self._repairs_in_vain += 1
        self._repair_due_s = now_s + max(self._ledger.repair_delay_s(layers, now_s) or 0.0, pause_s)
        report = await self._applier.repair(layer for layer in LAYERS if layer not in layers)
        if report is not None:
            if report.operations:
                self._ledger.repaired(layers, {unit.unit for unit in report.units if unit.outcome == "applied"})
            self._hint(*LAYERS)

    def _plan_repair(self, current: Update) -> list[DriftLayer]:
        """Say when the next repair is due, unless that is known; the layers that the policy has repaired."""
        layers = [layer for layer in LAYERS if getattr(current.plan.drift, layer) == "repair"]
        now_s = time.time()
        delay_s = self._ledger.repair_delay_s(layers, now_s)
        if delay_s is None:
            self._repair_due_s, self._repairs_in_vain = None, 0
        elif self._repair_due_s is None:
            self._repair_due_s = now_s + delay_s
        return layers

    def _with_next_repair(self, events: list[DriftEvent], layers: list[DriftLayer]) -> list[DriftEvent]:
        """Events with the time of the next repair, where that waits."""
        due_s = self._repair_due_s
        if due_s is None or due_s <= time.time():
            return events
        return [replace(event, next_repair_s=due_s) if event.layer in layers and event.state != "resolved" else event for event in events]

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


def _with_linked(layers: tuple[DriftLayer, ...]) -> tuple[DriftLayer, ...]:
    """With all layers in which the cause of a difference on or through a link may be."""
    return tuple(layer for layer in LAYERS if layer in LINKED or layer in layers)


async def main(context: Context) -> None:
    """Run the auditor until the context says stop. It has no state, and sees no private key of ours."""
    await AuditorService(context, LinuxKernel(None, remembers=True)).run()
