"""The process that owns a lab: it makes the underlay, runs the broker and all services, and follows the admitted topology.

What exists is a function of the STATE stream: a Node, Gateway or Endpoint that is published later appears, one that is deleted goes away.
The supervisor may be killed at any instant: everything that it made is found by name (``services.cli.lab.teardown``).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec
import structlog

from schemas.topology import Topology
from services.cli.lab import readiness
from services.cli.lab.board import Board
from services.cli.lab.broker import LabBroker
from services.cli.lab.crew import service_name
from services.cli.lab.detach import Progress, redirect
from services.cli.lab.feed import Feed
from services.cli.lab.layout import UNDERLAY, Host, Layout, layout
from services.cli.lab.processes import Child, Command
from services.cli.lab.state import CURRENT, SOCKETS, Folder, Record, claim, identify
from services.cli.lab.teardown import sweep
from services.cli.lab.wiring import Wiring
from services.runtime import logs
from services.runtime.errors import MeshmarkError, Transient

_READY_S = 90.0
_RETRY_S = 1.0

log = structlog.get_logger(__name__)


class Supervisor:
    """One lab, from nothing to nothing. Without `services` there are the hosts and pods of `topology` alone, to try the wiring."""

    def __init__(self, folder: Folder, topology: Sequence[Topology], progress: Progress, *, services: bool = True) -> None:
        self._folder = folder
        self._topology = topology
        self._progress = progress
        self._services = services
        self._wiring = Wiring()
        self._record = Record(identify(os.getpid()))
        self._stop = asyncio.Event()
        self._children: dict[str, tuple[Child, asyncio.Task[None]]] = {}
        self._running: dict[str, Host] = {}

    async def run(self) -> None:
        """Make the lab, tell when it is ready, keep it until SIGTERM or SIGINT, and take down the services in order.

        Raises MeshmarkError when the lab does not get ready. Namespaces are left for ``teardown.sweep``.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        self._intend([UNDERLAY])
        await asyncio.to_thread(self._wiring.make_underlay)
        if self._services:
            await self._run_services()
        else:
            await self._wire(layout(self._topology))
            self._become_ready()
            await self._stop.wait()

    async def _run_services(self) -> None:
        if not SOCKETS.exists():
            self._note(socket_folder=True)
            SOCKETS.mkdir()
        broker = LabBroker(self._folder)
        try:
            await broker.start()
            self._progress.say(f"nats-server listens on {broker.url}")
            async with asyncio.TaskGroup() as tasks:
                keeping = tasks.create_task(broker.keep(), name="broker")
                self._start(tasks, broker.crew.planner())
                following = tasks.create_task(self._follow(tasks, broker), name="follow")
                try:
                    await self._stop.wait()
                finally:
                    following.cancel()
                    await self._stop_children()
                    keeping.cancel()
        finally:
            await broker.stop()

    async def _follow(self, tasks: asyncio.TaskGroup, broker: LabBroker) -> None:
        """Publish the topology, tell when it is in force, and keep the lab like what is admitted, until cancelled."""
        async with Feed.open(broker.url, "lab") as feed, asyncio.TaskGroup() as own:
            own.create_task(self._converge(tasks, broker, feed), name="converge")
            for item in self._topology:
                await feed.publish(item)
            self._progress.say(f"published {len(self._topology)} topology objects")
            try:
                await readiness.get_ready(feed, self._topology, self._progress.say, _READY_S)
            except Transient as error:
                msg = f"{error}; {self._where_to_look()}"
                raise Transient(msg) from None
            self._become_ready()

    def _where_to_look(self) -> str:
        """For a lab that does not get ready: the services that keep ending, and the logs."""
        failing = sorted(name for name, (child, _) in self._children.items() if child.ends)
        words = f"ended by themselves: {', '.join(failing)}; " if failing else ""
        return f"{words}logs are in {self._folder.path / 'log'}"

    def _become_ready(self) -> None:
        self._note(phase="ready")
        self._progress.ready()

    async def _converge(self, tasks: asyncio.TaskGroup, broker: LabBroker, feed: Feed) -> None:
        """Make the lab like the admitted topology whenever that changes. A change that fails is tried again."""
        while True:
            version = feed.board.version
            wanted = layout(feed.board.objects.values())
            try:
                if wanted != self._wiring.made:
                    await self._turn_into(tasks, broker, wanted)
            except MeshmarkError as error:
                log.warning("cannot make the lab like the topology, trying again", error=str(error))
                await asyncio.sleep(_RETRY_S)
                continue
            await feed.until(_newer_than(version))

    async def _turn_into(self, tasks: asyncio.TaskGroup, broker: LabBroker, wanted: Layout) -> None:
        for line in wanted.unplaced:
            log.info("no place in the lab yet", what=line)
        gone = [host for name, host in self._running.items() if name not in wanted.hosts or wanted.hosts[name].machine != host]
        await asyncio.gather(*(self._end_host(host) for host in gone))
        await self._wire(wanted)
        fresh = [host for name, host in wanted.hosts.items() if name not in self._running]
        if any([broker.crew.enrol(host) for host in fresh]):  # noqa: C419 - every host is enrolled, not only the first
            broker.reload()
        for host in fresh:
            self._running[host.namespace] = host.machine
            for command in broker.crew.host_services(host):
                self._start(tasks, command)

    async def _wire(self, wanted: Layout) -> None:
        self._intend([*wanted.hosts, *wanted.pods])
        await asyncio.to_thread(self._wiring.turn_into, wanted)

    async def _end_host(self, host: Host) -> None:
        name = service_name(host.namespace)
        await asyncio.gather(*(self._end(service) for service in (f"auditor.{name}", f"applier.{name}")))
        del self._running[host.namespace]

    def _start(self, tasks: asyncio.TaskGroup, command: Command) -> None:
        child = Child(command, self._note_process)
        self._children[command.name] = child, tasks.create_task(child.run(), name=command.name)

    async def _end(self, service: str) -> None:
        child, task = self._children.pop(service)
        await child.stop()
        await task

    async def _stop_children(self) -> None:
        """Hosts first: a planner that goes on planning for a moment does no harm, a host without one neither."""
        await asyncio.gather(*(self._end(name) for name in list(self._children) if name != "planner"))
        await asyncio.gather(*(self._end(name) for name in list(self._children)))

    def _intend(self, names: Iterable[str]) -> None:
        """Write down namespaces before they are made."""
        self._note(namespaces=sorted({*self._record.namespaces, *names}))

    def _note_process(self, service: str, pid: int | None) -> None:
        known = {name: process for name, process in self._record.processes.items() if name != service}
        with contextlib.suppress(ProcessLookupError):
            if pid is not None:
                known[service] = identify(pid)
        self._note(processes=known)

    def _note(self, **changes: object) -> None:
        self._record = msgspec.structs.replace(self._record, **changes)
        self._folder.write(self._record)


def _newer_than(version: int) -> Callable[[Board], bool]:
    return lambda board: board.version != version


def supervise(folder: Folder, topology: Sequence[Topology], progress: Progress, *, log: Path | None = None, services: bool = True) -> None:
    """Have a lab, from claiming the machine's place for it until nothing is left of it. MeshmarkError says why it did not come up.

    When the error speaks of the logs, they stay in the folder. What this process prints goes to the file `log`, if given.
    """
    with claim(folder):
        sweep(folder)
        folder.make()
        if log is not None:
            redirect(log)
        logs.configure("lab", "info", "console")
        keep_logs = True
        try:
            asyncio.run(Supervisor(folder, topology, progress, services=services).run())
            keep_logs = False
        except* MeshmarkError as group:
            error = _first(group)
            keep_logs = isinstance(error, Transient)
            raise error from None
        finally:
            sweep(folder, keep_logs=keep_logs)
            CURRENT.unlink(missing_ok=True)


def _first(group: BaseExceptionGroup[MeshmarkError]) -> MeshmarkError:
    found = group.exceptions[0]
    return _first(found) if isinstance(found, BaseExceptionGroup) else found
