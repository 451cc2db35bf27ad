"""What the figures were measured on, read from the machine itself. A figure without it means nothing."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

from msgspec import Struct

from services.runtime.server import find_binary


class Machine(Struct, frozen=True):
    """Hardware, kernel, tools and load. `load` is the one-minute average at the start of the run, `load_after` at its end."""

    cpu: str
    cores: int
    memory_mib: int
    kernel: str
    python: str
    nftables: str
    nats_server: str
    libraries: dict[str, str]
    commit: str
    load: float
    load_after: float = 0.0


_LIBRARIES = ("msgspec", "nats-py", "pyroute2", "pip-nftables", "pyperf")
_ROOT = Path(__file__).parent.parent


def describe() -> Machine:
    """This machine, now."""
    return Machine(
        cpu=_field("/proc/cpuinfo", "model name") or platform.machine(),
        cores=len(os.sched_getaffinity(0)),
        memory_mib=int((_field("/proc/meminfo", "MemTotal") or "0").split()[0]) // 1024,
        kernel=platform.release(),
        python=platform.python_version(),
        nftables=_said("nft", "--version"),
        nats_server=_said(find_binary(), "--version"),
        libraries={name: version(name) for name in _LIBRARIES},
        commit=_said("git", "-C", str(_ROOT), "describe", "--always", "--dirty"),
        load=os.getloadavg()[0],
    )


def _field(file: str, name: str) -> str:
    for line in Path(file).read_text(encoding="utf-8").splitlines():
        if line.startswith(name):
            return line.partition(":")[2].strip()
    return ""


def _said(*command: str) -> str:
    """The first line that a program prints; empty when it is not there."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip().partition("\n")[0]
