"""An auditor and an applier at work in a network namespace of their own, and what the auditor says of it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
import structlog
from msgspec.structs import replace

from schemas import codec
from schemas.commands import Repair, Settled
from schemas.drift import DriftEvent
from schemas.host_objects import PlanObject, Sysctl, WireguardLink
from schemas.plan import Entry, HostPlan
from schemas.topology import DriftPolicy
from services.applier.core import Applier
from services.auditor.service import AuditorService
from services.kernel.linux import LinuxKernel
from services.runtime import neighbour
from services.runtime.health import Readiness
from services.runtime.metrics import Metrics
from services.runtime.service import Context
from services.runtime.settings import Settings
from tests.contract.kernel.gateway_plan import gateway_plan, overlay
from tests.contract.kernel.machines import LinuxMachine
from tests.unit.stubs import NODE, StubBroker

QUIET_S = 0.3
SOON_S = 5.0
"""An event that is not there by then does not come; the machine may be busy."""
STORY_S = 60.0

T = TypeVar("T")


class Beside:
    """The applier's core, behind the socket of an applier."""

    def __init__(self, folder: Path, objects: dict[str, PlanObject], policy: DriftPolicy) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="applier")
        self._kernel = self._thread.submit(LinuxKernel, folder).result()
        self._core = Applier(self._kernel, time.time)
        public = self._kernel.public_key()
        unit = {
            key: Entry(replace(item, public_key=public) if isinstance(item, WireguardLink) else item, (f"Test/{item.layer}",))
            for key, item in objects.items()
        }
        self.plan = HostPlan(NODE.cluster, NODE.name, {"gateway": unit}, policy)
        self.turns = 0
        self.asked: list[Repair] = []

    async def work(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def repair(self, body: bytes) -> bytes:
        asked = codec.decode(body or b"{}", Repair)
        self.asked.append(asked)
        self.turns += 1
        report = await self.work(lambda: self._core.repair(self.plan, 1, 1, asked.leave))
        return codec.encode(report)

    async def settle(self, _: bytes) -> bytes:
        return await self.work(lambda: codec.encode(Settled(self.turns, self._core.held())))

    async def differences(self) -> list[str]:
        found = await self.work(lambda: self._core.differences(self.plan))
        return [item.key for item in found]

    def close(self) -> None:
        self._thread.submit(self._kernel.close).result()
        self._thread.shutdown()


class Watched:
    """What a test does to the host, and hears of it."""

    def __init__(self, machine: LinuxMachine, broker: StubBroker, applier: Beside) -> None:
        self._machine = machine
        self._broker = broker
        self.applier = applier
        self.tag = machine.tag

    def run(self, commands: str) -> str:
        """Shell commands on the host; {o} and {t} are the beginnings of overlay and tunnel names."""
        return self._machine.run(self.named(commands))

    def named(self, text: str) -> str:
        return text.format(o=f"mo.{self.tag}", t=f"mt.{self.tag}")

    async def next(self) -> DriftEvent:
        async with asyncio.timeout(SOON_S):
            return await self._broker.drift.get()

    async def story(self, count: int) -> list[tuple[str, str]]:
        """Keys and states of the next events."""
        return [(event.key, event.state) for event in [await self.next() for _ in range(count)]]

    async def until(self, condition: Callable[[], bool]) -> None:
        end_s = time.monotonic() + SOON_S
        while not condition():
            assert time.monotonic() < end_s
            await asyncio.sleep(0.05)

    async def is_silent(self, seconds: float = 4 * QUIET_S) -> bool:
        """Whether nothing is said for a few rounds."""
        await asyncio.sleep(seconds)
        return self._broker.drift.empty()

    def state(self) -> list[str]:
        """The host as the tools list it, in no order, without what counts or comes by itself."""
        listed = self.run(
            "ip -o addr show scope global | sed 's/^[0-9]*: //'; ip -o link | sed 's/^[0-9]*: //' | grep 'm[ot]\\.'; ip rule; ip -6 rule;"
            "ip route show table all proto 77; ip -6 route show table all proto 77 | sed 's/ pref medium//';"
            "for link in $(ip -o link | grep -o 'mt\\.[0-9a-z]*'); do wg show $link allowed-ips; wg show $link listen-port; done"
        )
        return sorted(" ".join(sorted(line.split())) for line in listed.splitlines())


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[LinuxMachine]:
    made = LinuxMachine(tmp_path)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def audited(machine: LinuxMachine, tmp_path: Path) -> Callable[..., None]:
    """Runs a story on a host that holds a plan of every layer, audited, with an applier beside; the drift policy is an argument."""

    def run(
        story: Callable[[Watched], Awaitable[None]],
        policy: DriftPolicy = DriftPolicy(),  # noqa: B008 - a value
        quiet_s: float = QUIET_S,
    ) -> None:
        async def whole() -> None:
            async with asyncio.timeout(STORY_S), _at_work(machine, tmp_path, policy, quiet_s) as watched:
                await story(watched)

        # The thread of the machine is in its namespace, and so are threads that it starts.
        machine._thread.submit(asyncio.run, whole()).result(2 * STORY_S)

    return run


@contextlib.asynccontextmanager
async def _at_work(machine: LinuxMachine, folder: Path, policy: DriftPolicy, quiet_s: float) -> AsyncIterator[Watched]:
    loose = Sysctl(f"net/ipv4/conf/{overlay(machine.tag)}/rp_filter", "2")
    applier = Beside(folder, {**gateway_plan(machine.tag), loose.key: loose}, policy)
    stop = asyncio.Event()
    broker: Any = StubBroker(stop)
    settings = Settings(cluster=NODE.cluster, host=NODE.name, quiet_s=quiet_s)
    context = Context(settings, broker, Metrics(), Readiness("auditor"), stop, structlog.get_logger())
    try:
        await applier.repair(b"")
        assert await applier.differences() == []
        applier.asked.clear()
        broker.write(applier.plan, 1)
        async with neighbour.serving({"settle": applier.settle, "repair": applier.repair}):
            task = asyncio.create_task(AuditorService(context, LinuxKernel(None)).run())
            try:
                watched = Watched(machine, broker, applier)
                looks = context.metrics.registry
                await watched.until(lambda: bool(looks.get_sample_value("meshmark_audit_seconds_count")))
                assert await watched.is_silent()
                yield watched
            finally:
                stop.set()
                await task
    finally:
        applier.plan = replace(applier.plan, units={})
        await applier.repair(b"")
        applier.close()
