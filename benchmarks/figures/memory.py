"""Memory of each service in the running lab, beside what its imports alone take in a fresh interpreter.

The figure is the resident set (RSS). The proportional set (PSS, in the details) divides pages that processes share among them: many
appliers on one machine, as in the lab, share the interpreter; on a host of its own an applier takes nearly its whole RSS.
Goal: 60 MB for applier and auditor (the issue on native netlink sets it).
"""

from __future__ import annotations

import asyncio
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks import lab
from benchmarks.result import Figure, Result, median, result, rounded
from services.runtime.accounts import ServerConfig
from services.runtime.server import Server

_SETTLE_S = 5.0
_GOAL_BYTES = 60_000_000
_LIBRARIES = {
    "planner": ("msgspec", "nats", "prometheus_client", "structlog", "tenacity"),
    "applier": ("msgspec", "nats", "prometheus_client", "pyroute2", "structlog", "tenacity"),
    "auditor": ("msgspec", "nats", "prometheus_client", "pyroute2", "structlog", "tenacity"),
}
"""What each service needs of others' code: the floor."""
_WAIT = "import sys; print(flush=True); sys.stdin.read()"


def run(say: Callable[[str], None]) -> list[Result]:
    samples, wireguard = asyncio.run(_sample(say))
    bare = _imports_mib(())
    found = []
    for role in ("planner", "applier", "auditor"):
        floor = _imports_mib(_LIBRARIES[role])
        own = _imports_mib((f"services.{role}.service",))
        details = {
            "pss_mib": _middle(samples[role], 1),
            "processes": len(samples[role]),
            "own_code_imported_mib": own,
            "bare_python_mib": bare,
        }
        goal = None if role == "planner" else rounded(_GOAL_BYTES / (1 << 20))
        found.append(result(f"memory-{role}", [rss for rss, _ in samples[role]], "MiB", floor=floor, goal=goal, details=dict(details)))
    server = samples["nats-server"]
    found.append(
        result(
            "memory-nats-server",
            [rss for rss, _ in server],
            "MiB",
            floor=_idle_server_mib(),
            details={
                "pss_mib": _middle(server, 1),
                "wireguard_go_rss_mib": _middle(wireguard, 0) if wireguard else 0.0,
                "wireguard_go_processes": len(wireguard),
            },
        )
    )
    return found


Sizes = list[tuple[float, float]]


async def _sample(say: Callable[[str], None]) -> tuple[dict[str, Sizes], Sizes]:
    """RSS and PSS in MiB of every process, by role; and those of the tunnels' userspace, where the kernel has no WireGuard."""
    async with lab.standing(say) as standing:
        await asyncio.sleep(_SETTLE_S)
        found: dict[str, Sizes] = {}
        for name, pid in standing.pids.items():
            found.setdefault(name.partition(".")[0], []).append(sizes_mib(pid))
        return found, [sizes_mib(pid) for pid in standing.processes("wireguard-go")]


def sizes_mib(pid: int) -> tuple[float, float]:
    """RSS and PSS of a process."""
    return parse_sizes(Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii"))


def parse_sizes(rollup: str) -> tuple[float, float]:
    """RSS and PSS in MiB, from the text of ``smaps_rollup``; KeyError when they are not there."""
    fields = {line.partition(":")[0]: line.partition(":")[2].split() for line in rollup.splitlines()[1:]}
    return int(fields["Rss"][0]) / 1024, int(fields["Pss"][0]) / 1024


def _imports_mib(modules: Iterable[str]) -> float:
    """RSS of a fresh interpreter that has imported these."""
    code = "".join(f"import {module}\n" for module in modules) + _WAIT
    folder = Path(__file__).parent.parent.parent
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=folder) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        found, _ = sizes_mib(process.pid)
        process.stdin.close()
    return rounded(found)


def _idle_server_mib() -> float:
    """RSS of a nats-server without streams or clients."""
    with TemporaryDirectory(prefix="meshmark-bench-") as path:
        word = secrets.token_hex(8)
        config = ServerConfig(port=-1, store_dir=f"{path}/streams", planner=word, publisher=word, reader=word, system=word)
        with Server(config, Path(path) / "server") as server:
            time.sleep(1)
            assert server.pid is not None
            return sizes_mib(server.pid)[0]


def _middle(found: Sizes, place: int) -> float:
    return rounded(median([both[place] for both in found]))


FIGURE = Figure("memory", "resident memory of each service in the lab", run, needs_root=True)
