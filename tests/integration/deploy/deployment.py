"""What deploy/compose.yaml starts, started from the replayed images: broker and planner in one network, each host's services in its own.

All network namespaces hang on one bridge, in the broker's. The command's and the test's own connections are made from there.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from schemas import codec, subjects
from schemas.drift import DriftEvent
from schemas.plan import SnapshotHead
from schemas.status import ApplyReport
from schemas.topology import Topology
from services.kernel.namespace import enter_network
from services.runtime.accounts import host_user
from services.runtime.broker import Broker
from services.runtime.settings import Settings

T = TypeVar("T")
BROKER_ADDRESS = "172.18.255.1"
URL = f"nats://{BROKER_ADDRESS}:4222"
PLANNER_USER = 10001
STOP_S = 20.0  # MESHMARK_SHUTDOWN_S as it is by default, and as long again for a hard end
WAIT_S = 120.0
TUN = Path("/dev/net/tun")
PROBE = "import sys, urllib.request as r; r.urlopen(f'http://{sys.argv[1]}/readyz', timeout=2)"


class Container:
    """One service of the compose file: an image, a network, and this service's files. Its first process is an init."""

    def __init__(self, name: str, command: list[str], log: Path) -> None:
        self.name = name
        self.log = log
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)

    def stop(self) -> tuple[int, float]:
        """As an engine does: SIGTERM to the first process. Returns the exit code, and after how many seconds it came."""
        assert self._process is not None
        started = time.monotonic()
        for child in self._children(self._process.pid):
            os.kill(child, signal.SIGTERM)
        try:
            return self._process.wait(2 * STOP_S), time.monotonic() - started
        finally:
            self.kill()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def has_ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def programs(self) -> dict[int, str]:
        """The processes inside by number, without the init, which is the replay's own."""
        assert self._process is not None
        found, waiting = {}, [grandchild for child in self._children(self._process.pid) for grandchild in self._children(child)]
        while waiting:
            pid = waiting.pop()
            with contextlib.suppress(OSError):
                found[pid] = Path(f"/proc/{pid}/comm").read_text().strip()
            waiting += self._children(pid)
        return found

    @staticmethod
    def _children(pid: int) -> list[int]:
        with contextlib.suppress(OSError):
            return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        return []


class Deployment:
    """Broker, planner, and an applier and an auditor for each of `hosts`: underlay addresses by ``cluster/name``."""

    def __init__(self, replay: ModuleType, hosts: dict[str, str], folder: Path) -> None:
        self.hosts = hosts
        self.containers: dict[str, Container] = {}
        self.folder = folder
        self._replay = replay
        self._images = {name: replay.build(name) for name in ("planner", "applier", "auditor")}
        self._tag = f"mmdeploy{os.getpid()}"

    # Networks ----------------------------------------------------------------------------------------------------------------------------

    def network(self, host: str = "") -> str:
        """The name of a host's network namespace; without a host, of the broker's."""
        return f"{self._tag}.{host.replace('/', '.') or 'broker'}"

    def outside(self, host: str, *command: str) -> str:
        """A program of this machine in the host's network namespace."""
        done = subprocess.run(
            ["ip", "netns", "exec", self.network(host), *command], check=False, capture_output=True, text=True, timeout=30
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    @contextlib.contextmanager
    def networks(self) -> Iterator[None]:
        names = [self.network(), *map(self.network, self.hosts)]
        try:
            for name in names:
                subprocess.run(["ip", "netns", "add", name], check=True)
            self._batch(
                self.network(), "link set lo up", "link add br0 type bridge", f"address add {BROKER_ADDRESS}/16 dev br0", "link set br0 up"
            )
            for number, (host, address) in enumerate(self.hosts.items()):
                inside = self.network(host)
                link = f"link add up0 netns {inside} type veth peer name host{number}"
                self._batch(self.network(), link, f"link set host{number} master br0 up")
                self._batch(inside, "link set lo up", f"address add {address}/16 dev up0", "link set up0 up")
            yield
        finally:
            for name in names:
                subprocess.run(["ip", "netns", "delete", name], check=False)

    @staticmethod
    def _batch(network: str, *lines: str) -> None:
        subprocess.run(["ip", "-n", network, "-batch", "-"], input="\n".join(lines), text=True, check=True)

    # Services ----------------------------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def services(self) -> Iterator[None]:
        """Start all as docs/deploy.md says, broker first; at the end stop what still runs, hosts first."""
        try:
            self._start_control()
            for host in self.hosts:
                self._start_host(host)
            yield
        finally:
            for container in reversed(self.containers.values()):
                if not container.has_ended():
                    container.stop()
                container.kill()

    def _start_control(self) -> None:
        data = self.folder / "data"
        data.mkdir(mode=0o700)
        os.chown(data, PLANNER_USER, PLANNER_USER)
        named = [word for host in self.hosts for word in ("--host", host)]
        server = ["meshmark", "server", "--dir", "/data/broker", "--listen", "0.0.0.0:4222", *named]
        options = {"capabilities": (), "network": self.network(), "mounts": {"/data": data}}
        self._start("nats", "planner", server, **options)
        self.wait(lambda: "nats-server at" in self.containers["nats"].log.read_text(), "the broker")
        environment = {
            "MESHMARK_NATS_URL": URL,
            "MESHMARK_CREDENTIALS": "/data/broker/creds/planner.json",
            "MESHMARK_HTTP": "127.0.0.1:9464",
        }
        self._start("planner", "planner", [], environment=environment, **options)

    def _start_host(self, host: str) -> None:
        cluster, _, name = host.partition("/")
        folder = self.folder / host.replace("/", ".")
        etc, sockets, state = folder / "etc", folder / "wireguard", folder / "state"
        for made in (etc, sockets, state):
            made.mkdir(parents=True)
        mounts = {"/etc/meshmark": etc, "/run/wireguard": sockets, "/var/lib/meshmark": state, str(TUN): TUN}
        for service, port in (("applier", 9464), ("auditor", 9465)):
            written = self.folder / "data" / "broker" / "creds" / f"{host_user(service, cluster, name)}.json"
            (etc / f"{service}.json").touch(mode=0o600)
            (etc / f"{service}.json").write_bytes(written.read_bytes())
            environment = {
                "MESHMARK_NATS_URL": URL,
                "MESHMARK_CLUSTER": cluster,
                "MESHMARK_HOST": name,
                "MESHMARK_CREDENTIALS": f"/etc/meshmark/{service}.json",
                "MESHMARK_HTTP": f"127.0.0.1:{port}",
            }
            self._start(f"{service} {host}", service, [], network=self.network(host), environment=environment, mounts=mounts)

    def _start(self, name: str, image_name: str, arguments: list[str], **options: object) -> None:
        image = self._images[image_name]
        command = self._replay.command(image, arguments or image.entrypoint, init=True, **options)
        self.containers[name] = Container(name, command, self.folder / f"{name.replace('/', '.')}.log")
        self.containers[name].start()

    def is_ready(self, host: str, port: int) -> bool:
        """The compose file's health check, in the network of a host (or of the planner)."""
        command = ["ip", "netns", "exec", self.network(host), sys.executable, "-c", PROBE, f"127.0.0.1:{port}"]
        return subprocess.run(command, check=False, capture_output=True, timeout=30).returncode == 0

    # What is said ------------------------------------------------------------------------------------------------------------------------

    def meshmark(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """The command, as a publisher beside the broker."""
        credentials = self.folder / "data" / "broker" / "creds" / "publisher.json"
        environment = {**os.environ, "MESHMARK_NATS_URL": URL, "MESHMARK_CREDENTIALS": str(credentials)}
        command = ["ip", "netns", "exec", self.network(), sys.executable, "-m", "services.cli.main", *arguments]
        return subprocess.run(command, check=False, capture_output=True, text=True, timeout=WAIT_S, env=environment)

    def publish(self, items: Iterable[Topology]) -> None:
        file = self.folder / "topology.yaml"
        file.write_bytes(b"\n---\n".join(codec.encode(item) for item in items))
        done = self.meshmark("publish", "--file", str(file), "--wait-s", str(WAIT_S / 2))
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"

    def report(self, host: str) -> ApplyReport | None:
        async def ask(broker: Broker) -> ApplyReport | None:
            message = await broker.last("STATUS", subjects.status(*host.split("/")))
            return codec.decode(message.data, ApplyReport) if message else None

        return self._ask(ask)

    def drift(self, host: str) -> list[DriftEvent]:
        """All that was ever said about a host, in order."""

        async def ask(broker: Broker) -> list[DriftEvent]:
            said = [codec.decode(message.data, DriftEvent) async for message in broker.replay("DRIFT", f"{subjects.DRIFT}.>")]
            return [event for event in said if f"{event.cluster}/{event.host}" == host]

        return self._ask(ask)

    def _ask(self, question: Callable[[Broker], Awaitable[T]]) -> T:
        """Ask as a reader, from the broker's network: a thread that enters it stays there, so it is one for the purpose."""
        settings = Settings(nats_url=URL, credentials=str(self.folder / "data" / "broker" / "creds" / "reader.json"))

        async def ask() -> T:
            async with Broker.connect(settings.broker(), "test") as broker:
                return await question(broker)

        home = Path("/run/netns") / self.network()
        with ThreadPoolExecutor(1, initializer=enter_network, initargs=(home,)) as thread:
            return thread.submit(lambda: asyncio.run(ask())).result(WAIT_S)

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Until the condition holds; fails with the services' last words, at once when one has ended that nobody stopped."""
        until = time.monotonic() + WAIT_S
        while not condition():
            ended = [name for name, container in self.containers.items() if container.has_ended()]
            assert time.monotonic() < until, f"{what} did not come within {WAIT_S:g} s\n{self.last_words()}"
            assert not ended, f"{', '.join(ended)} ended while waiting for {what}\n{self.last_words()}"
            time.sleep(0.05)

    def last_words(self) -> str:
        tails = ((name, container.log.read_text(errors="replace").splitlines()[-8:]) for name, container in self.containers.items())
        return "\n".join(f"--- {name}\n" + "\n".join(lines) for name, lines in tails)

    def applied(self, host: str) -> bool:
        """Whether the host says that it holds its newest plan."""

        async def newest(broker: Broker) -> int:
            message = await broker.last("SNAPSHOT", subjects.snapshot(*host.split("/"), "head"))
            return codec.decode(message.data, SnapshotHead).generation if message else 0

        report = self.report(host)
        return report is not None and report.outcome == "applied" and report.generation == self._ask(newest) > 0
