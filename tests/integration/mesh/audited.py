"""An auditor on a host of a mesh in this process, and what it says."""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import Callable
from typing import Any

import structlog
from msgspec.structs import replace

from schemas import codec, subjects
from schemas.commands import Settled
from schemas.drift import DriftEvent
from schemas.flow import FlowMessage
from schemas.topology import DriftPolicy
from services.auditor.service import AuditorService
from services.kernel.linux import LinuxKernel
from services.planner.state import HostId
from services.runtime import neighbour
from services.runtime.health import Readiness
from services.runtime.metrics import Metrics
from services.runtime.service import Context
from services.runtime.settings import Settings
from tests.hosts import LinuxHost
from tests.meshes import Mesh
from tests.unit.stubs import StubBroker

SOON_S = 60.0
"""What has not come by then does not come; the machine may be busy, or emulated."""
ALERT = DriftPolicy(**dict.fromkeys(DriftPolicy.__struct_fields__, "alert"))  # type: ignore[arg-type]


class Auditor:
    """The auditor of ``rome/worker-1``, with an applier beside it that repairs when the test has it do so."""

    def __init__(self, mesh: Mesh[LinuxHost], host: HostId) -> None:
        self._mesh, self._host, self._id = mesh, mesh.hosts[host], host
        self._told: list[DriftEvent] = []
        self.flows: list[FlowMessage] = []
        """What it has told of traced packets."""
        self.metrics = Metrics()
        self._ready: queue.Queue[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = queue.Queue()
        self._thread = self._host.spawn("auditor", lambda: asyncio.run(self._serve()))
        self._loop, self._stop = self._ready.get(timeout=SOON_S)
        self.until(lambda: bool(self.metrics.registry.get_sample_value("meshmark_audit_seconds_count")))

    def next(self, layer: str) -> DriftEvent:
        """Take the next event of a layer."""
        self.until(lambda: bool(self.rest(layer)))
        event = self.rest(layer)[0]
        self._told.remove(event)
        return event

    def rest(self, layer: str) -> list[DriftEvent]:
        """Events of a layer that nobody has taken, but for what is said of an auditor before this one."""
        return [event for event in list(self._told) if event.layer == layer and event.key != f"layer {layer}"]

    def counted(self, point: str, state: str, traffic: str) -> float:
        """Packets at a point of encryption, as the metrics have them."""
        labels = {"point": point, "state": state, "direction": "out" if point.startswith("to-") else "in", "traffic": traffic}
        return self.metrics.registry.get_sample_value("meshmark_encryption_packets_total", labels) or 0.0

    def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + SOON_S
        while not condition():
            assert self._thread.is_alive(), "the auditor has ended"
            assert time.monotonic() < end
            time.sleep(0.02)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(SOON_S)
        assert not self._thread.is_alive()

    async def _serve(self) -> None:
        stop = asyncio.Event()
        broker: Any = StubBroker(stop)
        broker.publish_surely = self._hear
        broker.tell = self._see
        broker.write(replace(self._mesh.core.published[self._id], drift=ALERT), self._mesh.turns)
        settings = Settings(cluster=self._id.cluster, host=self._id.name, quiet_s=0.3)
        context = Context(settings, broker, self.metrics, Readiness("auditor"), stop, structlog.get_logger())

        async def settle(_: bytes) -> bytes:
            return codec.encode(Settled(1, self._host.held()))

        async with neighbour.serving({"settle": settle}):
            self._ready.put((asyncio.get_running_loop(), stop))
            await AuditorService(context, LinuxKernel(None, remembers=True)).run()

    async def _hear(self, subject: str, data: bytes, **_: object) -> None:
        if subject.startswith(f"{subjects.DRIFT}."):
            self._told.append(codec.decode(data, DriftEvent))

    async def _see(self, _: str, data: bytes) -> None:
        self.flows.append(codec.decode(data, FlowMessage))
