"""The loop that watches a host's tunnels: probes out, answers and handshakes in, a word to the applier when a verdict changes.

It needs no broker and no thread of its own, and wakes twice a second however many tunnels there are.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping

import structlog

from schemas.plan import HostPlan
from schemas.status import TunnelHealth
from services.applier.health import PERIOD_S, Health, Round, tunnels_of
from services.applier.probes import Prober
from services.runtime.errors import MeshmarkError
from services.runtime.metrics import Metrics

_HANDSHAKE_ROUNDS = 10
"""Handshakes are asked for in one of so many rounds, and only of tunnels that never answered."""

_log = structlog.get_logger()

Handshakes = Callable[[Collection[str]], Awaitable[Mapping[str, float]]]


class TunnelWatch:
    """Watches the tunnels of the plan that it was last given. `changed` is called when `health` is another than before."""

    def __init__(self, metrics: Metrics, handshakes: Handshakes, changed: Callable[[], None]) -> None:
        self._metrics = metrics
        self._handshakes = handshakes
        self._changed = changed
        self._health = Health()
        self._prober = Prober()
        self._plan: HostPlan | None = None
        self._told = TunnelHealth()

    @property
    def started(self) -> bool:
        """True once there is a plan to watch the tunnels of."""
        return self._plan is not None

    def follow(self, plan: HostPlan, found_withdrawn: Collection[str] = ()) -> TunnelHealth:
        """Watch the tunnels of `plan`, and say what is known of them. `found_withdrawn` are those that the kernel's routes lack already."""
        if plan is not self._plan:
            self._plan = plan
            loop_s = asyncio.get_running_loop().time()
            self._health.watch(tunnels_of(plan.objects()), loop_s, time.time(), found_withdrawn)
        self._told = self._health.report()
        return self._told

    async def run(self) -> None:
        """Watch until cancelled."""
        loop = asyncio.get_running_loop()
        number, due_s = 0, loop.time()
        try:
            while True:
                number += 1
                due_s = max(due_s + PERIOD_S, loop.time())
                await asyncio.sleep(due_s - loop.time())
                await self._round(ask=number % _HANDSHAKE_ROUNDS == 0)
        finally:
            self._prober.close()

    async def _round(self, *, ask: bool) -> None:
        now_s = asyncio.get_running_loop().time()
        doubtful = self._health.in_question(now_s) if ask else []
        handshakes_s = await self._asked(doubtful) if doubtful else {}
        # Taken after the wait for the kernel's thread, however long that was: what came meanwhile counts.
        tunnels = self._health.tunnels
        answered = self._prober.answered(tunnels)
        probing = self._prober.send(tunnels)
        for step in self._health.observe(Round(asyncio.get_running_loop().time(), time.time(), answered, handshakes_s, probing)):
            self._metrics.tunnel_transitions.labels(step.to).inc()
            _log.warning("tunnel_dead" if step.to == "dead" else "tunnel_alive", link=step.link, reason=step.reason)
        for state, count in self._health.count().items():
            self._metrics.tunnels.labels(state).set(count)
        if self._health.report() != self._told:
            self._told = self._health.report()
            self._changed()

    async def _asked(self, links: Collection[str]) -> Mapping[str, float]:
        try:
            return await self._handshakes(links)
        except MeshmarkError as error:
            _log.warning("handshakes_unknown", error=str(error))
            return {}
