"""Traced packets of this host, published as flow events while the kernel tells of any.

What the kernel tells ends before what overlay packets carry; it shows these by NFLOG beside that, to one listener. Where that is somebody
else, or the kernel has none, flows go without it, and it is tried again now and then.

Nothing is kept but what is under way. Events are said to whoever listens: nobody waits for them, and what cannot be said in time is
dropped, and that is said. The kernel says that its buffer was full, not how much was lost.
"""

from __future__ import annotations

import asyncio
import socket
import time
from functools import lru_cache
from uuid import uuid4

import structlog

from schemas import codec, subjects
from schemas.flow import FlowEvent, FlowMessage, LostEvents
from schemas.host_objects import TRACE_GROUP
from schemas.plan import HostPlan
from services.auditor.trace.flows import Flows, when
from services.auditor.trace.inners import Inners
from services.auditor.trace.passages import IDLE_S, Passages
from services.auditor.trace.view import view_of
from services.kernel.nflog import NflogSource
from services.kernel.nftrace import TraceEvent
from services.kernel.tracing import Heard, TraceSource, rule_comment
from services.runtime.broker import Broker
from services.runtime.errors import MeshmarkError
from services.runtime.metrics import Metrics

_log = structlog.get_logger()

_LISTEN_AGAIN_S = 10.0
_COMMENTS = 1024
_ADVICE = "until it is gone, traces do not show what overlay packets carry"


class TraceWatch:
    """Follows traced packets under the plan that was given last."""

    def __init__(self, broker: Broker, metrics: Metrics, cluster: str, host: str) -> None:
        self._broker = broker
        self._metrics = metrics
        self._node = f"{cluster}/{host}"
        self._subject = subjects.flow(cluster, host)
        self._passages = Passages()
        self._inners = Inners()
        self._shown: NflogSource | None = None
        self._flows: Flows | None = None

    def follow(self, plan: HostPlan) -> None:
        """What is seen from now on is seen under this plan."""
        comment = lru_cache(_COMMENTS)(rule_comment)  # a rule that drops does so often, and to ask the kernel takes time

        def comment_at(drop: TraceEvent) -> str:
            return comment(drop.family, drop.table, drop.chain, drop.handle)

        self._flows = Flows(view_of(plan), plan.because, link_name, lambda: str(uuid4()), comment_at)

    async def run(self) -> None:
        """Listen until cancelled."""
        async with TraceSource() as source, asyncio.TaskGroup() as group:
            group.create_task(self._keep_shown(), name="shown")
            while True:
                heard = await source.heard(IDLE_S if self._passages else None)
                messages = [*self._lost(heard), *map(self._message, self._seen(heard))]
                await self._tell(messages)

    async def _keep_shown(self) -> None:
        """Have the kernel show overlay packets to us, as soon as nobody else is in the way."""
        said = ""
        while True:
            try:
                async with NflogSource(TRACE_GROUP, advice=_ADVICE) as self._shown:
                    said = ""
                    await asyncio.Event().wait()
            except MeshmarkError as error:
                if str(error) != said:
                    said = str(error)
                    _log.warning("overlay_packets_unheard", error=said)
            finally:
                self._shown = None
            await asyncio.sleep(_LISTEN_AGAIN_S)

    def _show(self, heard: Heard) -> None:
        """Take in what was shown: all of which was told by now is there, since the kernel shows first."""
        now_s = time.time()
        if heard.overruns or heard.dropped:
            self._inners.lose(now_s)
        if self._shown is not None:
            lost = self._inners.show(self._shown.taken(), now_s)
            self._metrics.trace_lost.labels("shown").inc(lost)

    def _seen(self, heard: Heard) -> list[FlowEvent]:
        self._show(heard)
        now_s, flows = time.time(), self._flows
        told = ((at_s, event, self._inners.of(event)) for at_s, event in heard.events)
        ended = [passage for at_s, event, data in told for passage in self._passages.hear(event, at_s, data)]
        ended += self._passages.idle(now_s)
        return [event for passage in ended for event in flows.of(passage)] if flows is not None else []

    def _lost(self, heard: Heard) -> list[FlowMessage]:
        lost: list[LostEvents] = []
        if heard.overruns:
            lost.append(LostEvents("PERF_EVENT_RING_BUFFER"))
            self._metrics.trace_lost.labels("kernel").inc(heard.overruns)
        if heard.dropped:
            lost.append(LostEvents("OBSERVER_EVENTS_QUEUE", heard.dropped))
            self._metrics.trace_lost.labels("queue").inc(heard.dropped)
        return [FlowMessage(self._node, when(time.time()), lost_events=item) for item in lost]

    def _message(self, event: FlowEvent) -> FlowMessage:
        return FlowMessage(self._node, event.time, event)

    async def _tell(self, messages: list[FlowMessage]) -> None:
        for place, message in enumerate(messages):
            try:
                await self._broker.tell(self._subject, codec.encode(message))
            except MeshmarkError as error:
                # Flows are for who looks now. When the broker is back, what is new is told.
                self._metrics.trace_lost.labels("broker").inc(len(messages) - place)
                _log.warning("flows_untold", count=len(messages) - place, error=str(error))
                return
        self._metrics.trace_events.inc(sum(message.flow is not None for message in messages))


def link_name(index: int) -> str:
    """The name of the link with this number now; empty for none."""
    try:
        return socket.if_indextoname(index) if index else ""
    except OSError:
        return ""
