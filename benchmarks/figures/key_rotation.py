"""How long a node's change of keys takes in the lab, from the command to its end, and what is lost meanwhile.

8 flows of 100 datagrams a second and their answers run between two pods of the encrypting example, one of which is on the node that
changes its key. A datagram or an answer that does not come is lost. There is no floor: the time is that of handshakes and of five steps
that all nodes acknowledge, and nothing waits for it.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable

from msgspec import Struct

from benchmarks import lab
from benchmarks.result import Figure, Result, result
from schemas.topology import Pod
from services.cli.files import load
from services.cli.lab import traffic
from services.cli.lab.layout import PREFIX, UNDERLAY
from services.runtime.errors import Transient

_RUNS = 5
_EXAMPLE = lab.EXAMPLE.parent / "encryption.yaml"
_HOST, _CLIENT, _SERVER = "rome/worker-2", "rome.pod.shop", "rome.pod.stock"
_BEFORE_S = 1.0


class Change(Struct, frozen=True):
    """One change: how long it took, and the datagrams sent and lost."""

    took_s: float
    sent: int
    lost: int


def run(say: Callable[[str], None]) -> list[Result]:
    return asyncio.run(_run(say))


async def _run(say: Callable[[str], None]) -> list[Result]:
    (server,) = (item for item in load([_EXAMPLE]) if isinstance(item, Pod) and item.name == "stock")
    changes: list[Change] = []
    async with lab.standing(say, _EXAMPLE) as standing:
        for _ in range(_RUNS):
            async with traffic.running(f"{PREFIX}{_CLIENT}", f"{PREFIX}{_SERVER}", server.addresses[0]) as flows:
                await asyncio.sleep(_BEFORE_S)
                began_s = time.monotonic()
                await asyncio.to_thread(_rotate, standing)
                took_s = time.monotonic() - began_s
            changes.append(Change(took_s, flows.sent, flows.lost))
            say(f"changed in {took_s:.2f} s, {flows.lost} of {flows.sent} datagrams lost")
    return [
        result(
            "key-rotation",
            [change.took_s for change in changes],
            "s",
            details={"datagrams_sent": [change.sent for change in changes], "datagrams_lost": [change.lost for change in changes]},
        )
    ]


def _rotate(standing: lab.Lab) -> None:
    command = [sys.executable, "-m", "services.cli.main", "rotate", _HOST, "--nats-url", standing.url]
    done = subprocess.run(["ip", "netns", "exec", UNDERLAY, *command], check=False, capture_output=True, text=True)
    if done.returncode:
        msg = f"the key was not changed: {done.stderr.strip()}"
        raise Transient(msg)


FIGURE = Figure("key-rotation", f"a node's key changed under traffic, {_RUNS} times", run, needs_root=True)
