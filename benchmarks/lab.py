"""A lab that stands still: hosts, pods and services as ``meshmark lab up`` makes them, of its own modules, but nobody follows the topology.

The lab's supervisor makes a network namespace for every Endpoint that is admitted. That is work which no real host does (its CNI does it)
and which would compete for the machine's cores with what is measured; so it is left out, and nothing else is. Measuring code runs in the
underlay, beside the broker (`in_underlay`): the relay by which the machine reaches a lab is not part of the path.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from schemas.topology import Gateway, Node, Topology
from services.cli.files import load
from services.cli.lab import namespaces, readiness
from services.cli.lab.broker import LabBroker
from services.cli.lab.feed import Feed
from services.cli.lab.layout import UNDERLAY, Layout, layout
from services.cli.lab.processes import Child, Command
from services.cli.lab.state import CURRENT, SOCKETS, Folder, claim
from services.cli.lab.teardown import sweep
from services.cli.lab.wiring import Wiring
from services.runtime.errors import Transient

T = TypeVar("T")

EXAMPLE = Path(__file__).parent.parent / "examples" / "two-clusters.yaml"
_READY_S = 180.0


class Lab:
    """A running lab. `pids` are the services' processes by name (``applier.rome.gateway``, ``planner``), `commands` how hosts' start."""

    def __init__(
        self, folder: Folder, url: str, pids: Mapping[str, int], children: Sequence[Child], *, wiring: Wiring, commands: Sequence[Command]
    ) -> None:
        self.folder = folder
        self.url = url
        self.pids = pids
        self.commands = {command.name: command for command in commands}
        self._children = children
        self._wiring = wiring

    def renew(self, namespace: str) -> None:
        """Make a host and its pods anew, as they are when the machine has started and no service yet. Nothing may run there."""
        hosts, pods = dict(self._wiring.made.hosts), dict(self._wiring.made.pods)
        others = {name: host for name, host in hosts.items() if name != namespace}
        self._wiring.turn_into(Layout(others, {name: pod for name, pod in pods.items() if pod.node != namespace}))
        self._wiring.turn_into(Layout(hosts, pods))

    def require_unbroken(self) -> None:
        """Raise Transient when a service has ended by itself: what was measured then is not the system, but its recovery."""
        for child in self._children:
            if child.ends:
                last = child.command.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:]
                msg = f"{child.command.name} ended {child.ends} times while it was measured: {' | '.join(last)}"
                raise Transient(msg)

    def processes(self, program: str) -> list[int]:
        """Every process of this name in the lab's namespaces, such as a tunnel's wireguard-go."""
        return [pid for pid in namespaces.processes(namespaces.existing()) if _program(pid) == program]

    async def in_underlay(self, work: Callable[[], Awaitable[T]]) -> T:
        """What `work` comes to, run by an event loop of its own in the broker's network namespace."""

        async def run() -> T:
            return await work()

        return await asyncio.to_thread(namespaces.inside, UNDERLAY, lambda: asyncio.run(run()))


@contextlib.asynccontextmanager
async def standing(
    say: Callable[[str], None], example: Path = EXAMPLE, beside: Sequence[Topology] = (), *, is_served: bool = True
) -> AsyncIterator[Lab]:
    """An example's lab, ready; nothing of it is left afterwards. Conflict when this machine has a lab already.

    Hosts and pods `beside` are wired like the lab's own, and no service serves them or knows of them. A lab that is not served has broker
    and planner only: plans wait for hosts whose services somebody else starts.
    """
    with claimed() as folder:
        topology = load([example])
        wiring = Wiring()
        wiring.make_underlay()
        broker = LabBroker(folder)
        pids: dict[str, int] = {}
        try:
            await broker.start()
            async with asyncio.TaskGroup() as tasks:
                keeping = tasks.create_task(broker.keep(), name="broker")
                crew = _Crew(tasks, pids)
                crew.start([broker.crew.planner()])
                wanted = layout(topology)
                wiring.turn_into(layout([*topology, *beside]))
                for host in wanted.hosts.values():
                    broker.crew.enrol(host)
                broker.reload()
                commands = [command for host in wanted.hosts.values() for command in broker.crew.host_services(host)]
                if is_served:
                    crew.start(commands)
                try:
                    await _publish(broker.url, topology, say, is_served=is_served)
                    standing = Lab(folder, broker.url, pids, crew.children, wiring=wiring, commands=commands)
                    pids["nats-server"] = standing.processes("nats-server")[0]
                    yield standing
                    standing.require_unbroken()
                finally:
                    await crew.stop()
                    keeping.cancel()
        finally:
            await broker.stop()


@contextlib.contextmanager
def claimed() -> Iterator[Folder]:
    """The machine's one place for a lab, with a folder for it; both are given back empty."""
    with TemporaryDirectory(prefix="meshmark-bench-") as path:
        folder = Folder(Path(path) / "lab")
        with claim(folder):
            sweep(folder)
            folder.make()
            has_sockets = SOCKETS.exists()  # hosts have folders of their own in its place
            SOCKETS.mkdir(exist_ok=True)
            try:
                yield folder
            finally:
                sweep(folder)
                CURRENT.unlink(missing_ok=True)
                if not has_sockets:
                    SOCKETS.rmdir()


async def _publish(url: str, topology: Sequence[Topology], say: Callable[[str], None], *, is_served: bool) -> None:
    async with Feed.open(url, "bench") as feed:
        for item in topology:
            await feed.publish(item)
        if is_served:
            await readiness.get_ready(feed, topology, lambda _: None, _READY_S)
        else:
            hosts = {(item.cluster, item.name) for item in topology if isinstance(item, Node | Gateway)}
            async with asyncio.timeout(_READY_S):
                await feed.until(lambda board: board.generations.keys() >= hosts)
    say("the lab is ready")


def _program(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip()
    except FileNotFoundError:  # it ended meanwhile
        return ""


class _Crew:
    """The services' processes, kept running."""

    def __init__(self, tasks: asyncio.TaskGroup, pids: dict[str, int]) -> None:
        self._tasks = tasks
        self._pids = pids
        self.children: list[Child] = []

    def start(self, commands: Sequence[Command]) -> None:
        for command in commands:
            child = Child(command, self._note)
            self.children.append(child)
            self._tasks.create_task(child.run(), name=command.name)

    async def stop(self) -> None:
        await asyncio.gather(*(child.stop() for child in self.children))

    def _note(self, service: str, pid: int | None) -> None:
        if pid is None:
            self._pids.pop(service, None)
        else:
            self._pids[service] = pid
