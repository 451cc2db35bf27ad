"""A fake machine and a real one (a network namespace of its own) with the same handles for tests."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from schemas.host_objects import NftTable, PlanObject, PolicyRule, Route, VxlanLink
from schemas.values import Address, Mac, Prefix
from services.kernel.fake import FakeHost, FakeKernel
from services.kernel.linux import LinuxKernel
from services.kernel.namespace import enter_network
from services.kernel.port import Kernel
from services.kernel.transaction import Change, Marker, repairs
from services.runtime.settings import NftEngineName
from tests.hosts import has_geneve

_numbers = itertools.count()
_ZERO = (
    *(f"ipv4/{name}" for name in ("ip_forward", "fwmark_reflect", "fib_multipath_hash_policy")),
    *(f"ipv6/{name}" for name in ("conf/all/forwarding", "conf/all/disable_ipv6", "conf/default/disable_ipv6", "fwmark_reflect")),
)
_ORDER = ("sysctl", "rule", "link", "address", "neighbour", "wireguard", "route")

OVER_BOTH_ENGINES = pytest.mark.parametrize(
    "machine",
    ["fake", *(pytest.param(engine, marks=pytest.mark.privileged) for engine in ("nfnetlink", "libnftables"))],
    indirect=True,
)


class FakeMachine:
    """A `FakeHost`, with foreign objects on demand."""

    is_real = False

    def __init__(self) -> None:
        self.engine = "fake"
        self.tag = "x"
        self.host = FakeHost()
        self.kernel: Kernel = FakeKernel(self.host)

    @property
    def has_geneve(self) -> bool:
        return self.host.geneve

    def restart(self) -> Kernel:
        self.kernel = FakeKernel(self.host)
        return self.kernel

    def looking(self) -> Kernel:
        """The kernel of a process that only looks."""
        return FakeKernel(self.host, looks_only=True)

    def add_foreign(self) -> None:
        foreign = (
            NftTable("other"),
            Route(254, Prefix("10.250.0.0/16"), "blackhole"),
            PolicyRule(500, 99),
            VxlanLink("foreign0", 9, Address("127.0.0.1"), Address("127.0.0.8"), Mac("02:00:00:00:00:09"), 1400),
        )
        self.host.foreign.update({item.key: item for item in foreign})

    def foreign_state(self) -> str:
        return repr(sorted(self.host.foreign.items()))

    def tamper(self, _commands: str, change: Callable[[FakeHost, str], None]) -> None:
        change(self.host, self.tag)

    def take_port(self, port: int) -> str:
        """Have somebody else listen on a UDP port, and say by which name the error is to call it."""
        self.host.ports[port] = f"python ({port})"
        return self.host.ports[port]

    def free_port(self, port: int) -> None:
        del self.host.ports[port]

    def sysctl(self, name: str) -> str:
        return self.host.sysctls.get(name, "0")

    def close(self) -> None:
        pass


class LinuxMachine:
    """A network namespace; its kernel object lives in one thread that is inside it."""

    is_real = True

    def __init__(self, folder: Path, engine: NftEngineName = "nfnetlink") -> None:
        # Short, since it is part of interface names; unlike any other run's, since WireGuard's sockets share one folder.
        self.tag = f"{os.getpid() % 46656:x}{next(_numbers):x}"
        self.namespace = f"mm-test-{self.tag}"
        self._folder = folder
        self.engine = engine
        self._taken: dict[int, socket.socket] = {}
        subprocess.run(["ip", "netns", "add", self.namespace], check=True)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=self.namespace)
        self._thread.submit(self._settle_in).result()
        self.kernel: Kernel = self._make()

    @property
    def has_geneve(self) -> bool:
        return has_geneve(self.namespace)

    def restart(self) -> Kernel:
        self.kernel.close()
        self.kernel = self._make()
        return self.kernel

    def looking(self) -> Kernel:
        return InThread(self._thread, self._thread.submit(LinuxKernel, None).result())  # type: ignore[return-value]

    def run(self, command: str) -> str:
        done = subprocess.run(
            ["ip", "netns", "exec", self.namespace, "sh", "-ec", command], check=False, capture_output=True, text=True, timeout=20
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def ip(self, *arguments: str, commands: str = "") -> str:
        """What ``ip`` prints, or nothing when it fails; by one process: where starting programs is slow, that is what tests consist of."""
        done = subprocess.run(["ip", "-n", self.namespace, *arguments], input=commands, check=False, capture_output=True, text=True)
        return done.stdout

    def add_foreign(self) -> None:
        self.run(
            "nft 'add table inet other; add chain inet other c { type filter hook input priority 0; }; add rule inet other c accept';"
            "nft add table ip meshmark.v4; ip route add blackhole 10.250.0.0/16; ip rule add pref 500 lookup 99;"
            "ip link add foreign0 type vxlan id 9 local 127.0.0.1 remote 127.0.0.8 dstport 4789 nolearning; ip link set foreign0 up;"
            "ip addr add 10.251.0.1/24 dev foreign0; sysctl -qw net.ipv4.conf.all.log_martians=1"
        )

    def foreign_state(self) -> str:
        return self.run(
            "nft list table inet other; nft list table ip meshmark.v4; ip route show table all proto boot; ip -d -o link show foreign0;"
            "ip rule | grep -v 'proto 77'; ip -o addr show foreign0 scope global; cat /proc/sys/net/ipv4/conf/all/log_martians"
        )

    def tamper(self, commands: str, _change: Callable[[FakeHost, str], None]) -> None:
        self.run(commands.format(o=f"mo.{self.tag}", t=f"mt.{self.tag}"))

    def take_port(self, port: int) -> str:
        """Listen on a UDP port of the namespace, and say by which name the error is to call who does."""

        def listen() -> socket.socket:
            made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            made.bind(("127.0.0.1", port))
            return made

        self._taken[port] = self._thread.submit(listen).result()
        return f"({os.getpid()})"

    def free_port(self, port: int) -> None:
        self._taken.pop(port).close()

    def sysctl(self, name: str) -> str:
        return self.run(f"cat /proc/sys/{name}").strip()

    def close(self) -> None:
        try:
            for taken in self._taken.values():
                taken.close()
            self.kernel.close()
            links = [line.split(": ")[1].split("@")[0] for line in self.ip("-o", "link").splitlines()]
            own = [f"link del {link}" for link in links if link.startswith(("mt.", "mo.", "me.", "mm."))]
            self.ip("-force", "-batch", "-", commands="\n".join(own))
            self._wait_for_sockets()
        finally:
            self._thread.shutdown()
            subprocess.run(["ip", "netns", "del", self.namespace], check=False)

    def _settle_in(self) -> None:
        """Enter the namespace, and give it what a new one may have taken from the machine."""
        enter_network(Path("/run/netns") / self.namespace)
        for name in _ZERO:
            Path("/proc/sys/net", name).write_text("0", encoding="ascii")
        self.ip("-batch", "-", commands="link set lo up\naddr add fd00:18::1/64 dev lo nodad")

    def _wait_for_sockets(self) -> None:
        end = time.monotonic() + 5
        while list(Path("/var/run/wireguard").glob(f"mt.{self.tag}*")) and time.monotonic() < end:
            time.sleep(0.01)

    def _make(self) -> Kernel:
        made = self._thread.submit(lambda: LinuxKernel(self._folder, remembers=True, nft_engine=self.engine))
        return InThread(self._thread, made.result())  # type: ignore[return-value]


class InThread:
    """Every method of an object, called in the one thread of an executor."""

    def __init__(self, thread: ThreadPoolExecutor, target: object) -> None:
        self._thread = thread
        self._target = target

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._target, name)

        def call(*arguments: Any) -> Any:
            def work() -> Any:
                result = method(*arguments)
                return list(result) if name == "flows" else result

            return self._thread.submit(work).result(60)

        return call


Machine = FakeMachine | LinuxMachine


def differences(kernel: Kernel, plan: dict[str, PlanObject]) -> list[Change]:
    return repairs(plan, kernel.reference(plan), kernel.read(plan))


def make(kernel: Kernel, changes: list[Change], marker: Marker | None = None) -> None:
    """Make changes in an order that works on an idle host: what comes, the nft batch, what goes."""
    by_layer = sorted((change for change in changes if change.subject.layer != "nft"), key=lambda item: _ORDER.index(item.subject.layer))
    for change in by_layer:
        if change.new is not None:
            kernel.write(change)
    kernel.commit([change for change in changes if change.subject.layer == "nft"], marker)
    for change in reversed(by_layer):
        if change.new is None:
            kernel.write(change)


def converge(kernel: Kernel, plan: dict[str, PlanObject], marker: Marker | None = None) -> None:
    make(kernel, differences(kernel, plan), marker)
