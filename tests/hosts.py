"""A real host in this process: an applier's core and the kernel of a network namespace, in a thread that lives there."""

from __future__ import annotations

import base64
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from schemas.commands import TraceFlow
from schemas.plan import HostPlan
from schemas.status import ApplyReport
from schemas.values import Name
from services.applier.core import Applier, Difference
from services.kernel.linux import LinuxKernel
from services.kernel.namespace import enter_network
from services.kernel.port import Kernel
from tests.listings import listings
from tests.mounts import enter_with_own

T = TypeVar("T")

SOCKETS = Path("/run/wireguard")
NO_GENEVE = "this kernel has no geneve: the suite real-kernel runs this where there is one"


class LinuxHost:
    """A network namespace that is there, and who applies plans to it.

    Its devices of wireguard-go may be called as those of any other host: /run/wireguard is a folder of its own. `private_key` is its
    WireGuard key (32 bytes); without one it makes its own.
    """

    def __init__(self, namespace: str, folder: Path, private_key: bytes = b"") -> None:
        self.namespace = namespace
        self._folder = folder
        if private_key:
            (folder / "wireguard.key").write_bytes(base64.b64encode(private_key) + b"\n")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=namespace)
        self._thread.submit(_settle_in, namespace).result()
        self._start()

    def apply(self, plan: HostPlan, generation: int = 1) -> ApplyReport:
        return self._do(lambda: self._applier.apply(plan, 1, generation))

    def ask(self, work: Callable[[Kernel, Applier], T]) -> T:
        """What some work with the kernel and the applier comes to, done in the namespace."""
        return self._do(lambda: work(self._kernel, self._applier))

    def differences(self, plan: HostPlan) -> list[Difference]:
        return self._do(lambda: self._applier.differences(plan))

    def trace(self, wish: TraceFlow) -> None:
        assert self._do(lambda: self._kernel.trace(wish))

    def forget_traced(self) -> float | None:
        return self._do(self._kernel.forget_traced)

    def restart(self) -> None:
        """End the applier and start another one."""
        self._do(self._kernel.close)
        self._start()

    def run(self, *argv: str) -> str:
        """What a command prints, run in the namespace and with the sockets of its devices."""
        return self._do(lambda: subprocess.run(argv, check=True, capture_output=True, text=True).stdout)

    def spawn(self, name: str, work: Callable[[], None]) -> threading.Thread:
        """A thread in the namespace and with the sockets of its devices, at work."""

        def start() -> threading.Thread:
            thread = threading.Thread(target=work, name=name)
            thread.start()
            return thread

        return self._do(start)

    def repair(self, plan: HostPlan, generation: int) -> ApplyReport:
        return self._do(lambda: self._applier.repair(plan, 1, generation))

    def held(self) -> dict[str, str]:
        """The digest of each unit that is held."""
        return self._do(self._applier.held)

    def listed(self) -> dict[str, list[str]]:
        """What the kernel lists of any owner."""
        return listings(self.run)

    def empty(self) -> None:
        """Remove all that is ours."""
        report = self.apply(HostPlan(Name("nobody"), Name("nothing"), {}))
        assert report.outcome == "applied", report

    def close(self) -> None:
        """Let go of the namespace, with nothing of ours in it."""
        try:
            self.empty()
            self._do(self._kernel.close)
        finally:
            self._thread.shutdown()

    def _start(self) -> None:
        self._kernel = self._do(lambda: LinuxKernel(self._folder))
        self._applier = Applier(self._kernel, lambda: 0.0)

    def _do(self, work: Callable[[], T]) -> T:
        return self._thread.submit(work).result()


def has_geneve(namespace: str) -> bool:
    """Whether this kernel knows the kind, asked by making a link of it that does not stay."""
    link = ["ip", "-n", namespace, "link"]
    made = subprocess.run([*link, "add", "probe", "type", "geneve", "id", "1", "remote", "127.0.0.1"], check=False, capture_output=True)
    if made.returncode == 0:
        subprocess.run([*link, "delete", "probe"], check=True)
    return made.returncode == 0


def _settle_in(namespace: str) -> None:
    """Move this thread into the namespace, and where /run/wireguard is nobody else's."""
    SOCKETS.mkdir(exist_ok=True)
    enter_network(Path("/run/netns") / namespace)
    enter_with_own(SOCKETS)
