"""One lab for all tests that ask for it: `mesh` is what it is made of, `live` says things to it and waits for what comes of them.

`live` gives every test the mesh of the example, all pods reaching each other, and gives it back like that: what a test published,
changed or deleted is undone when it ends, whether it passed or not. Tests of this folder that make labs of their own run first.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from schemas.plan import HostPlan
from schemas.topology import Gateway, Node, Peering, Pod, PublicKey, Topology
from schemas.values import FAMILIES, IPV4, Family
from services.cli.files import load
from services.cli.lab import listing, namespaces, probe, traffic
from services.cli.lab.crew import host_view
from services.cli.lab.expected import Walk, expected
from services.cli.lab.feed import Feed
from services.cli.lab.layout import PREFIX, UNDERLAY, layout
from services.cli.lab.probe import Check
from services.cli.lab.state import Folder, Record
from services.planner.allocate import Allocations
from services.planner.compile import compile_all
from services.planner.core import settle_rollouts
from services.planner.state import HostId, State
from services.runtime.broker import Broker
from services.runtime.errors import MeshmarkError
from services.runtime.settings import BrokerSettings
from tests.captures import Packet, capture

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
EXAMPLE = EXAMPLES / "two-clusters.yaml"
CHANGE_S = 60.0
"""A change, also one that makes namespaces and starts services, is in force within this time on a busy machine."""
POLL_S = 0.05
CROSSING = ("/node/", "/mapping/")
"""In the names of probes that are not between pods."""
MARKER_TABLE = "meshmark.marker"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """There is one lab at a time: a file's tests that make their own come before those that share one."""
    places = [index for index, item in enumerate(items) if item.path.parent == Path(__file__).parent]
    ordered = sorted((items[index] for index in places), key=lambda item: (str(item.path), "mesh" in getattr(item, "fixturenames", ())))
    for index, item in zip(places, ordered, strict=True):
        items[index] = item


async def eventually(
    condition: Callable[[], Any], what: str, seen: Callable[[], object] = lambda: "", *, timeout_s: float = CHANGE_S
) -> None:
    """Wait until `condition` holds (it may be a coroutine function); fail with `what` and what `seen` says then."""
    deadline = time.monotonic() + timeout_s
    trouble = ""
    while True:
        try:
            found = condition()
            if inspect.isawaitable(found):
                found = await found
            trouble = ""
        except MeshmarkError as error:
            found, trouble = False, str(error)
        if found:
            return
        if time.monotonic() > deadline:
            pytest.fail(f"not within {timeout_s:g} s: {what} {seen() or ''} {trouble}".strip())
        await asyncio.sleep(POLL_S)


class Mesh:
    """The lab as namespaces, processes and files. Hosts are called ``rome.gateway``, pods ``rome.pod.shop``, the middle ``underlay``."""

    def __init__(self, folder: Folder, example: Path) -> None:
        self.folder = folder
        self.topology: list[Topology] = load([example])
        """What the files say: the mesh as every test finds it, but for public keys."""

    @property
    def url(self) -> str:
        return self.folder.url.read_text(encoding="ascii").strip()

    @property
    def hosts(self) -> list[str]:
        """The hosts of the example."""
        return sorted(f"{item.cluster}.{item.name}" for item in self.topology if isinstance(item, Node | Gateway))

    def object(self, ref: str) -> Any:
        """An object of the example by ``Kind/cluster/name``."""
        return next(item for item in self.topology if item.ref == ref)

    def run(self, host: str, *argv: str) -> str:
        """What a command prints on a host or in a pod; Permanent with its complaint when it fails."""
        return listing.run(f"{PREFIX}{host}", *argv)

    def run_in_view(self, host: str, *argv: str) -> str:
        """The same with the host's /run/wireguard, as ``wg`` wants it for devices in userspace."""
        command = [*host_view(self.folder, f"{PREFIX}{host}"), *argv]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def meshmark(self, *arguments: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run the command ``meshmark`` on the machine; it finds the lab by itself."""
        command = [sys.executable, "-m", "services.cli.main", *arguments]
        environment = {**os.environ, "COLUMNS": "200", "TERM": "dumb"}
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, env=environment)

    # Processes -----------------------------------------------------------------------------------------------------------------------

    def pid(self, service: str) -> int | None:
        """The process of ``planner``, ``applier.rome.gateway`` or the like; of ``nats-server`` too. None while there is none."""
        if service == "nats-server":
            found = [pid for pid in namespaces.processes([UNDERLAY]) if _program(pid) == service]
            return found[0] if found else None
        record = self.folder.read()
        process = record.processes.get(service) if isinstance(record, Record) else None
        return process.pid if process is not None and process.alive else None

    async def kill(self, service: str) -> None:
        """Kill a service as a crash would, and wait until the supervisor has started another one."""
        old = self.pid(service)
        assert old is not None, f"{service} does not run"
        os.kill(old, signal.SIGKILL)
        await eventually(lambda: self.pid(service) not in (None, old), f"{service} is started again")

    # Packets -------------------------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def capture(self, host: str, interface: str = "eth0") -> Iterator[list[Packet]]:
        """IP packets on a link of a host while the body runs; the list grows, and is complete when the body is left."""
        with capture(f"{PREFIX}{host}", interface) as packets:
            yield packets

    # Kernel --------------------------------------------------------------------------------------------------------------------------

    def own_state(self, host: str) -> list[str]:
        """All that is meshmark's in a host's kernel, in words that do not change by themselves; so not the marker, which counts."""
        name = f"{PREFIX}{host}"
        tables = [listing.table(name, "inet", table) for table in listing.own_tables(name) if table != MARKER_TABLE]
        return [
            *tables,
            *(rule for family in FAMILIES for rule in listing.own_rules(name, family)),
            *listing.own_routes(name),
            *listing.own_links(name),
        ]

    def state(self, host: str) -> dict[str, str]:
        """All that a host's kernel holds of any owner, as text by what it is. nftables without counters and handles."""
        commands = {
            "nft": ["nft", "--stateless", "list", "ruleset"],
            "rules": ["sh", "-c", "ip rule; ip -6 rule"],
            "routes": ["ip", "-details", "route", "show", "table", "all"],
            "links": ["ip", "-details", "link"],
            "addresses": ["ip", "-brief", "address"],
            "sysctls": ["sysctl", "-a", "--pattern", r"^net\.ipv[46]\.(ip_forward|fwmark_reflect|fib_|conf\.)"],
        }
        return {what: self.run(host, *command) for what, command in commands.items()}


class Live:
    """The lab while a test runs: what was said (`board`), and verbs that say something and wait until it holds."""

    def __init__(self, mesh: Mesh, feed: Feed) -> None:
        self.mesh = mesh
        self.feed = feed

    @property
    def board(self) -> Any:
        return self.feed.board

    @property
    def objects(self) -> dict[str, Topology]:
        """What is admitted, by ``Kind/cluster/name``."""
        return self.feed.board.objects

    eventually = staticmethod(eventually)

    # Saying --------------------------------------------------------------------------------------------------------------------------

    async def publish(self, *items: Topology, settle: bool = True) -> None:
        """Publish objects; with `settle`, wait until every host holds what follows from them."""
        for item in items:
            await self.feed.publish(item)
        if settle:
            await eventually(lambda: self.feed.board.missing(items) == [], "what was published is admitted and in force", self._missing)
            await self.settled()

    async def delete(self, *items: Topology, settle: bool = True) -> None:
        """Delete objects; with `settle`, wait until they are gone and every host holds what follows."""
        for item in items:
            await self.feed.delete(item)
        if settle:
            await eventually(lambda: not {item.ref for item in items} & self.objects.keys(), "what was deleted is gone", self._missing)
            await self.settled()

    # Waiting -------------------------------------------------------------------------------------------------------------------------

    async def settled(self) -> None:
        """Until every host reports that it holds the very plan that the admitted topology leads to once all rollouts have ended, and the
        lab's hosts and pods are there."""
        await eventually(self._is_settled, "every host holds its last plan", self._missing)

    async def carries(self) -> list[Check]:
        """Until every probe passes; returns those between pods."""
        checks: list[Check] = []

        async def passed() -> bool:
            checks[:] = await probe.check(self.board.as_seen(), self.board.chosen)
            return all(check.ok for check in checks)

        await eventually(passed, "all probes pass", lambda: [f"{check.name}: {check.detail}" for check in checks if not check.ok])
        return [check for check in checks if not any(word in check.name for word in CROSSING)]

    async def crosses(self) -> list[Check]:
        """The probes of nodes and of mapped addresses, passed or not."""
        checks = await probe.check(self.objects.values(), self.board.chosen)
        return [check for check in checks if any(word in check.name for word in CROSSING)]

    async def refusal(self, ref: str, after: int = 0) -> Any:
        """The first refusal of this object beyond the first `after` refusals on the board."""

        def found() -> list[Any]:
            return [item for item in self.feed.board.refusals[after:] if f"{item.kind}/{item.cluster}/{item.name}" == ref]

        await eventually(found, f"{ref} is refused")
        return found()[0]

    # Looking -------------------------------------------------------------------------------------------------------------------------

    def plans(self) -> dict[HostId, HostPlan]:
        """The plans that the admitted topology leads to."""
        allocations = Allocations()
        state = State(self.objects.values(), allocations.remaps)
        allocations.allocate(state, self.objects.values())
        settle_rollouts(state, allocations)
        return compile_all(state, allocations)

    def pod(self, name: str) -> Pod:
        """An admitted pod by ``rome/shop``."""
        item = self.objects[f"Endpoint/{name}"]
        assert isinstance(item, Pod)
        return item

    def walk(self, client: str, server: str, family: Family = IPV4) -> Walk:
        """What ``rome/shop`` dials to reach ``milan/bank``, and what that one must see."""
        found = expected(self.feed.board.as_seen(), self.pod(client), self.pod(server), family)
        assert found is not None, f"the topology does not join {client} and {server}"
        return found

    def traffic(self, client: str, server: str) -> contextlib.AbstractAsyncContextManager[traffic.Traffic]:
        """Steady UDP flows from one pod to another and back; ``lost`` and ``sent`` are final when the body is left."""
        spaces = (f"{PREFIX}{name.replace('/', '.pod.')}" for name in (client, server))
        return traffic.running(*spaces, self.walk(client, server).dial)

    @contextlib.asynccontextmanager
    async def undisturbed(self, *pairs: tuple[str, str], least: int = 100) -> AsyncIterator[None]:
        """Flows between these pods run while the body does, and lose not one datagram; at least `least` are sent on each."""
        flows: dict[tuple[str, str], traffic.Traffic] = {}
        async with contextlib.AsyncExitStack() as stack:
            for pair in pairs:
                flows[pair] = await stack.enter_async_context(self.traffic(*pair))
            # Neighbours and connection tracking are there before what is to be judged begins.
            await eventually(lambda: all(flow.sent - flow.lost > least // 2 for flow in flows.values()), "flows run")
            early = {pair: flow.lost for pair, flow in flows.items()}
            assert all(lost < 50 for lost in early.values()), f"lost before anything was done: {early}"
            yield
            sent = {pair: flow.sent for pair, flow in flows.items()}
            await eventually(lambda: all(flow.sent >= sent[pair] + least // 2 for pair, flow in flows.items()), "flows go on")
        lost = {f"{client} → {server}": f"{flow.lost} of {flow.sent}" for (client, server), flow in flows.items() if flow.lost}
        assert not lost, f"datagrams lost: {lost}"

    async def meshmark(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """``Mesh.meshmark`` beside the event loop, so that traffic goes on meanwhile."""
        return await asyncio.to_thread(self.mesh.meshmark, *arguments)

    @contextlib.asynccontextmanager
    async def broker(self, user: str = "publisher") -> AsyncIterator[Broker]:
        """A broker connection of its own, as ``publisher``, ``reader`` or ``planner``, who may use the whole of JetStream."""
        password = msgspec.json.decode(self.mesh.folder.credentials(user).read_bytes())["password"]
        async with Broker.connect(BrokerSettings(url=self.mesh.url, user=user, password=password), "test") as connected:
            yield connected

    # Giving back ---------------------------------------------------------------------------------------------------------------------

    async def restore(self) -> None:
        """Bring the mesh back to the example."""
        wanted = {item.ref: item for item in self.mesh.topology}
        extra = [item for ref, item in self.objects.items() if ref not in wanted and not isinstance(item, PublicKey)]
        if extra:
            await self.delete(*sorted(extra, key=_removal_rank), settle=False)
            await eventually(lambda: not {item.ref for item in extra} & self.objects.keys(), "what a test added is gone", self._missing)
        if lacking := [item for ref, item in wanted.items() if self.objects.get(ref) != item]:
            await self.publish(*lacking, settle=False)
        await self.settled()
        # A gateway that a test cut off, or took away, is trusted again after a while only.
        reports = self.feed.board.reports
        await eventually(
            lambda: not any(reports[host].tunnels.withdrawn for host in self.plans() if host in reports), "all tunnels are in use"
        )
        if extra or lacking:
            await self.carries()

    def _is_settled(self) -> bool:
        board = self.feed.board
        if board.missing(()):
            return False
        place = layout(self.objects.values())
        if {UNDERLAY, *place.hosts, *place.pods} != namespaces.existing():
            return False
        return all(
            {unit.unit: unit.held for unit in board.reports[host].units} == plan.digests()
            for host, plan in self.plans().items()
            if plan.units or host in board.reports
        )

    def _missing(self) -> object:
        refusals = [f"{item.kind}/{item.cluster}/{item.name}: {item.reason}" for item in self.feed.board.refusals[-3:]]
        return {"missing": self.feed.board.missing(()), "refused lately": refusals, "admitted": sorted(self.objects)}


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """The lab of the example, brought up by the command once for a file, and taken down after its last test."""
    with up(EXAMPLE, tmp_path_factory.mktemp("lab") / "state") as found:
        yield found


@contextlib.contextmanager
def up(example: Path, state: Path) -> Iterator[Mesh]:
    """The lab of an example, while the body runs."""
    if namespaces.existing():
        pytest.skip("a lab is up on this machine")
    found = Mesh(Folder(state), example)
    # The supervisor outlives the command: it must not hold a pipe that somebody reads to the end.
    with (found.folder.path.parent / "up.log").open("w+") as said:
        arguments = ["lab", "up", "-f", str(example), "--state", str(found.folder.path), "--detach"]
        done = subprocess.run([sys.executable, "-m", "services.cli.main", *arguments], stdout=said, stderr=said, check=False, timeout=110)
        said.seek(0)
        assert done.returncode == 0, said.read()
    try:
        yield found
    finally:
        down = found.meshmark("lab", "down", "--state", str(found.folder.path), timeout_s=90)
        assert down.returncode == 0, down.stderr
        assert not namespaces.existing()
        assert not found.folder.path.exists()


@pytest.fixture
async def live(mesh: Mesh) -> AsyncIterator[Live]:
    """The mesh as the example says, connected to; given back the same."""
    async with connected(mesh) as found:
        yield found


@contextlib.asynccontextmanager
async def connected(mesh: Mesh) -> AsyncIterator[Live]:
    """A lab as its example says while the body runs, and again afterwards."""
    async with _held(Feed.open(mesh.url, "test")) as feed:
        found = Live(mesh, feed)
        await found.restore()
        try:
            yield found
        finally:
            await found.restore()


@pytest.fixture(name="eventually")
def _eventually() -> Callable[..., Awaitable[None]]:
    """``await eventually(condition, "what it means")``: wait for it with a deadline, or fail saying so."""
    return eventually


@contextlib.asynccontextmanager
async def _held(manager: contextlib.AbstractAsyncContextManager[Any]) -> AsyncIterator[Any]:
    """Enter and leave `manager` in one and the same task: a task group wants that, and a fixture's two halves run in different ones."""
    entered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    leave = asyncio.Event()

    async def hold() -> None:
        try:
            async with manager as value:
                entered.set_result(value)
                await leave.wait()
        except BaseException as error:
            if entered.done():
                raise
            entered.set_exception(error)

    task = asyncio.create_task(hold(), name="held")
    try:
        yield await entered
    finally:
        leave.set()
        await task


def _removal_rank(item: Topology) -> int:
    """What others rest on goes last."""
    return (Peering, Pod, Node, Gateway).index(type(item)) if isinstance(item, Peering | Pod | Node | Gateway) else 9


def _program(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip()
    return ""
