"""A whole mesh in this process: the planner, and the applier and auditor of every host, each in a thread inside its network namespace.

For the emulated machine, where starting Python takes longer than anything that a mesh does. Namespaces and cables are the lab's; so is
what a real deployment has besides: a broker with accounts, a network that routes between the hosts, a CNI on the nodes. Needs WireGuard in
the kernel: devices of wireguard-go would share one folder, in which two gateways have the same names.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import structlog

from schemas import codec, subjects
from schemas.topology import Topology
from schemas.values import IPV4
from services.applier.service import main as applier
from services.auditor.service import main as auditor
from services.cli.lab import namespaces, probe
from services.cli.lab.crew import Crew, service_name
from services.cli.lab.layout import BROKER, UNDERLAY, Host, Layout, host_namespace, layout
from services.cli.lab.state import Folder
from services.cli.lab.wiring import Wiring
from services.planner.service import main as planner
from services.runtime import accounts
from services.runtime.broker import Broker
from services.runtime.errors import Waiting
from services.runtime.health import Readiness
from services.runtime.metrics import Metrics
from services.runtime.server import Server
from services.runtime.service import Context, Main
from services.runtime.settings import BrokerSettings, Settings

PORT = 4222
CHANGE_S = 120.0
_POLL_S = 0.5
_END_S = 30.0


class Resident:
    """Services in one event loop, in a thread that lives in a network namespace."""

    def __init__(self, namespace: str, services: Sequence[tuple[Settings, str, Main]]) -> None:
        self._namespace = namespace
        self._services = services
        self._stops: list[asyncio.Event] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._live, name=namespace)
        self.error: BaseException | None = None
        self._thread.start()

    def stop(self) -> None:
        """Let the services end; call `join` after it."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(lambda: [stop.set() for stop in self._stops])

    def join(self) -> None:
        self._thread.join(_END_S)
        assert not self._thread.is_alive(), f"the services in {self._namespace} do not end"

    def _live(self) -> None:
        try:
            namespaces.enter(self._namespace)
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve())
        except BaseException as error:  # noqa: BLE001 - shown by the thread that waits for the mesh
            self.error = error

    async def _serve(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for settings, name, main in self._services:
                stop = asyncio.Event()
                self._stops.append(stop)
                tasks.create_task(_run(settings, name, main, stop), name=name)


async def _run(settings: Settings, name: str, main: Main, stop: asyncio.Event) -> None:
    metrics = Metrics()
    async with Broker.connect(settings.broker(), name, metrics=metrics, stop=stop) as broker:
        await main(Context(settings, broker, metrics, Readiness("broker", name), stop, structlog.get_logger(name)))


async def _publish(broker: Broker, subject: str, data: bytes) -> None:
    """Publish as soon as there is a stream: a planner that has just started makes it, and takes its time here."""
    while True:
        with contextlib.suppress(Waiting):
            await broker.publish(subject, data)
            return
        await asyncio.sleep(_POLL_S)


class Mesh:
    """The mesh of a topology. Objects are published as a publisher would; hosts are made before anybody says that they are there."""

    def __init__(self, path: Path, topology: Sequence[Topology]) -> None:
        self.topology = {item.ref: item for item in topology}
        self._folder = Folder(path)
        self._folder.make()
        self._crew = Crew(self._folder, PORT)
        self._wiring = Wiring()
        self._layout = layout(topology)
        for host in self._layout.hosts.values():
            self._crew.enrol(host)
        self._server = Server(self._crew.config(), self._folder.nats, prefix=["ip", "netns", "exec", UNDERLAY])
        self._residents: list[Resident] = []

    def start(self) -> None:
        self._wiring.make_underlay()
        self._wiring.turn_into(self._layout)
        self._crew.write_credentials()
        self._server.start()
        self._residents.append(Resident(UNDERLAY, [(self._settings(accounts.PLANNER, "127.0.0.1", "planner"), "planner", planner)]))
        self._residents += [Resident(host.namespace, self._host_services(host)) for host in self._layout.hosts.values()]

    def stop(self) -> None:
        """End the services, then the broker, then remove the namespaces; what failed on the way is raised at the end."""
        try:
            for resident in self._residents:
                resident.stop()
            for resident in self._residents:
                resident.join()
            self.check()
        finally:
            self._server.stop()
            self._wiring.turn_into(Layout({}, {}))
            namespaces.remove([UNDERLAY])

    def check(self) -> None:
        """Fail when a service has failed."""
        for resident in self._residents:
            if resident.error is not None:
                raise resident.error

    def publish(self, *items: Topology) -> None:
        for item in items:
            self.topology[item.ref] = item
        self._say([(subjects.topology(item.kind, item.home, item.name), codec.encode(item)) for item in items])

    def delete(self, ref: str) -> None:
        item = self.topology.pop(ref)
        self._say([(subjects.topology(item.kind, item.home, item.name), b"")])

    def await_packets(self) -> None:
        """Wait until every pair of pods that the topology joins talks, both ways, with the addresses that it says."""
        failing: list[probe.Check] = []

        def all_pass() -> bool:
            found = asyncio.run(probe.check(self.topology.values()))
            failing[:] = [check for check in found if not check.ok]
            return bool(found) and not failing

        self.eventually(all_pass, lambda: f"packets of all pods arrive; {failing}")

    def eventually(self, condition: Callable[[], bool], what: Callable[[], str]) -> None:
        """Wait for a condition, with a limit; fail with `what` after it, or at once when a service has failed."""
        deadline = time.monotonic() + CHANGE_S
        while not condition():
            self.check()
            assert time.monotonic() < deadline, f"not within {CHANGE_S:g} s: {what()}"
            time.sleep(_POLL_S)

    def run(self, cluster: str, host: str, *argv: str) -> str:
        """What a command prints on a host."""
        command = ["ip", "netns", "exec", host_namespace(cluster, host), *argv]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def _say(self, messages: Sequence[tuple[str, bytes]]) -> None:
        async def publish() -> None:
            async with Broker.connect(BrokerSettings(url=f"nats://127.0.0.1:{PORT}"), "test") as broker:
                for subject, data in messages:
                    await _publish(broker, subject, data)

        self._in_underlay(publish)

    def _in_underlay(self, work: Callable[[], Awaitable[None]]) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(CHANGE_S):
                await work()

        namespaces.inside(UNDERLAY, lambda: asyncio.run(bounded()))

    def _host_services(self, host: Host) -> list[tuple[Settings, str, Main]]:
        name = service_name(host.namespace)
        mains: dict[accounts.Role, Main] = {"applier": applier, "auditor": auditor}
        return [
            (self._settings(accounts.host_user(role, host.cluster, host.name), BROKER[IPV4], name, host.cluster, host.name), role, main)
            for role, main in mains.items()
        ]

    def _settings(self, user: str, broker: str, state: str, cluster: str = "", host: str = "") -> Settings:
        self._folder.host(state).mkdir(exist_ok=True)
        return Settings(
            nats_url=f"nats://{broker}:{PORT}",
            credentials=str(self._folder.credentials(user)),
            cluster=cluster,
            host=host,
            state_dir=str(self._folder.host(state)),
            http="",
        )
