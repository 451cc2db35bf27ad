"""How much of a traced flow is seen, by its rate, and beside other traffic: in the lab of examples/encryption.yaml, with all services.

One UDP flow goes from a pod to one on another node, by WireGuard, while it is traced as ``meshmark trace`` traces it. Counted are the
packets that arrived, and of those the ones that were seen at each of their points on both nodes, outer packets with them. Above the rate
to which hosts sample a flow, most are not told of by design. What kernels and auditors say that they lost is in the details. Beside one of
the flows, other packets go through the first node, 50,000 a second or as many as the machine can. Flows take turns, in random order.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import random
import re
import socket
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from msgspec import Struct

from benchmarks import lab, paced
from benchmarks.result import Details, Figure, Result, median, result, rounded
from schemas.host_objects import TRACE_TABLE
from services.auditor.trace.trails import Trail
from services.cli import records
from services.cli.lab import namespaces
from services.cli.lab.layout import PREFIX, host_namespace
from services.cli.session import Nats
from services.cli.trace.ends import Only, session
from services.cli.trace.live import packets
from services.planner.state import HostId, State
from services.runtime.errors import Transient

_EXAMPLE = lab.EXAMPLE.parent / "encryption.yaml"
_HOSTS = _ONE, _TWO = HostId("rome", "worker-1"), HostId("rome", "worker-2")
_SENDER, _RECEIVER = f"{PREFIX}rome.pod.shop", f"{PREFIX}rome.pod.stock"
_TO, _PORT = "10.200.2.10", 7000
_OTHERS_TO, _OTHERS_PORT, _OTHERS = "172.18.0.13", 9, 50_000
_RATES = (10, 100, 1_000, 10_000)
_BESIDE, _SAMPLE = 100, 64
_ROUNDS, _SEED = 2, 1
_SECONDS, _TRACE_SECONDS = 1.5, 3
_HEAD_START_S = 0.4
_PATIENCE_S = 15.0
_BUFFER_BYTES = 8 << 20
_OWN = {(str(_ONE), point) for point in ("FROM_ENDPOINT", "TO_STACK", "TO_CRYPTO")}
_OWN |= {(str(_TWO), point) for point in ("FROM_CRYPTO", "TO_ENDPOINT")}
_OUTER = {(str(_ONE), "TO_NETWORK"), (str(_TWO), "FROM_NETWORK")}
_NORMAL_95 = 1.96
_UPLINK, _TX_PACKETS = "eth0", 10
_METRICS = "http://127.0.0.1:9502/metrics"
_SO_RCVBUFFORCE = 33
_LOST = re.compile(r'^meshmark_trace_lost_total\{by="(\w+)"\} (\S+)$', re.MULTILINE)


class Seen(Struct, frozen=True):
    """What became of a flow's packets: sent and arrived; of those, told of by any host, seen at each of their own points on both, and at
    every point, outer packets' with them. `lost` is what kernels and auditors say that they lost, by where.
    """

    sent: int
    arrived: int
    told: int
    own: int
    whole: int
    lost: dict[str, float]
    beside_per_second: float = 0.0


class Kind(Struct, frozen=True):
    """Packets a second, whether others go beside them, and of how many packets hosts are asked to tell of one."""

    rate: int
    beside: bool = False
    sample: int = 1

    @property
    def name(self) -> str:
        more = f"-one-of-{self.sample}" if self.sample > 1 else ""
        return f"{self.rate}{more}{'-beside-others' if self.beside else ''}"


def run(say: Callable[[str], None]) -> list[Result]:
    return asyncio.run(_run(say))


async def _run(say: Callable[[str], None]) -> list[Result]:
    kinds = [*(Kind(rate) for rate in _RATES), Kind(_BESIDE, beside=True), Kind(_RATES[-1], sample=_SAMPLE)]
    found: dict[Kind, list[Seen]] = {kind: [] for kind in kinds}
    draw = random.Random(_SEED)
    async with lab.standing(say, _EXAMPLE) as standing:
        ports = itertools.count(_PORT)  # of each flow its own: what an earlier one has left on its way is none of it
        await _send(next(ports), 100, 1)  # neighbours are found, and WireGuard's session made
        for _ in range(_ROUNDS):
            draw.shuffle(kinds)
            for kind in kinds:
                seen = await _flow(standing, kind, next(ports))
                found[kind].append(seen)
                say(f"{kind.name}: {seen.whole} of {seen.arrived} seen at every point, {seen.told} told of")
    return [summed_up(kind, rounds) for kind, rounds in found.items()]


def summed_up(kind: Kind, rounds: Sequence[Seen]) -> Result:
    """The share of packets that were not seen at every point, in per cent: less is better."""
    arrived, told, own, whole = (sum(getattr(seen, name) for seen in rounds) for name in ("arrived", "told", "own", "whole"))
    low, high = wilson(arrived - whole, arrived)
    lost: dict[str, float] = {}
    for seen in rounds:
        lost |= {by: lost.get(by, 0.0) + count for by, count in seen.lost.items() if count}
    details: Details = {
        "packets": {"sent": sum(seen.sent for seen in rounds), "arrived": arrived, "told of": told},
        "missed at any point, %": {"of all": _percent(arrived - whole, arrived), "from": rounded(100 * low), "to": rounded(100 * high)},
        "seen, %": {
            "at every point": _percent(whole, arrived),
            "at each of its own": _percent(own, arrived),
            "at each of its own, of those that were told of": _percent(own, told),
        },
        "said to be lost": lost or "nothing",
    }
    if kind.beside:
        details["others a second"] = rounded(median(seen.beside_per_second for seen in rounds))
    samples = [_percent(seen.arrived - seen.whole, seen.arrived) for seen in rounds]
    return result(f"trace-missed-{kind.name}", samples, "%", details=details)


def wilson(count: int, of: int) -> tuple[float, float]:
    """The 95 % interval of a share of which `count` in `of` was seen, as if packets were independent of each other."""
    if not of:
        return 0.0, 1.0
    share, weight = count / of, _NORMAL_95**2 / of
    middle = (share + weight / 2) / (1 + weight)
    half = math.sqrt(share * (1 - share) * weight + weight**2 / 4) / (1 + weight)
    return max(0.0, middle - half), min(1.0, middle + half)


def _percent(count: int, of: int) -> float:
    return rounded(100 * count / of) if of else 100.0


async def _flow(standing: lab.Lab, kind: Kind, port: int) -> Seen:
    """One flow of this rate, traced from before its first packet until after its last one."""
    before = _lost()
    async with _received(port) as arrived:
        tracing = asyncio.create_task(standing.in_underlay(lambda: _traced(standing.url, Only(("udp",), (port,), kind.sample))))
        await _until_traced(tracing)
        others = asyncio.create_task(_others()) if kind.beside else None
        if kind.beside:
            await asyncio.sleep(_HEAD_START_S)
        sent = await _send(port, kind.rate, _SECONDS)
        trails = await tracing
        beside_per_second = await others if others is not None else 0.0
    lost = {by: count - before.get(by, 0.0) for by, count in _lost().items()}
    own = sum(points(trail) >= _OWN for trail in trails)
    whole = sum(points(trail) >= _OWN | _OUTER for trail in trails)
    return Seen(sent, len(arrived), len(trails), own, whole, lost, beside_per_second)


def points(trail: Trail) -> set[tuple[str, str]]:
    """Where a packet was seen, as itself and in what carried it, as far as that is more than a guess."""
    outer = (link.event for link in trail.outer if link.corr.confidence != "inferred")
    return {(event.node_name, event.trace_observation_point) for event in (*trail.seen, *outer)}


async def _traced(url: str, only: Only) -> list[Trail]:
    """The packets of the flow, one way, as the command finds them."""
    async with Nats(nats_url=url).connect() as broker:
        # Allocations are written before what they are for is admitted.
        admitted, allocations = await records.admitted(broker), await records.allocations(broker)
        state = State(admitted, allocations.remaps)
        wanted = session(state, allocations, ("rome/shop", "rome/stock"), None, _TRACE_SECONDS, only=only)
        found = [trail async for some in packets(broker, wanted, follow=False) for trail in some]
    return [trail for trail in found if trail.way == "forward"]


async def _until_traced(tracing: asyncio.Task[list[Trail]]) -> None:
    """Wait until both hosts trace. Transient when they do not in time."""
    end_s = time.monotonic() + _PATIENCE_S
    while not tracing.done() and time.monotonic() < end_s:
        tables = [await _run_in(host_namespace(*host), "nft", "list", "tables") for host in _HOSTS]
        if all(TRACE_TABLE in listed for listed in tables):
            return
    msg = f"{' and '.join(map(str, _HOSTS))} do not trace"
    raise Transient(msg)


@contextlib.asynccontextmanager
async def _received(port: int) -> AsyncIterator[set[int]]:
    """The numbers of the flow's datagrams that arrive while the body runs."""
    loop, numbers = asyncio.get_running_loop(), set[int]()
    opened = namespaces.inside(_RECEIVER, lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    with opened:
        opened.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER_BYTES)
        opened.setblocking(False)  # noqa: FBT003 - positional in the standard library
        opened.bind(("", port))

        def drain() -> None:
            with contextlib.suppress(BlockingIOError):
                while True:
                    numbers.add(int.from_bytes(opened.recv(paced.NUMBER_BYTES), "big"))

        loop.add_reader(opened, drain)
        try:
            yield numbers
        finally:
            loop.remove_reader(opened)


async def _send(port: int, rate: float, seconds: float) -> int:
    """Send the flow's datagrams; how many."""
    sent, _ = await _paced(_TO, port, rate, seconds)
    return sent


async def _others() -> float:
    """Have other packets go through the first node; how many a second left it by the uplink."""
    before = _left()
    _, took_s = await _paced(_OTHERS_TO, _OTHERS_PORT, _OTHERS, _HEAD_START_S + _SECONDS + _HEAD_START_S)
    return (_left() - before) / took_s


async def _paced(address: str, port: int, rate: float, seconds: float) -> tuple[int, float]:
    words = (await _run_in(_SENDER, sys.executable, "-m", "benchmarks.paced", address, str(port), str(rate), str(seconds))).split()
    return int(words[0]), float(words[1])


async def _run_in(namespace: str, *command: str) -> str:
    process = await asyncio.create_subprocess_exec("ip", "netns", "exec", namespace, *command, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    if process.returncode:
        msg = f"{' '.join(command)} failed in {namespace}"
        raise Transient(msg)
    return out.decode()


def _left() -> int:
    """Packets that left the first node by its uplink."""
    text = namespaces.inside(host_namespace(*_ONE), lambda: Path("/proc/thread-self/net/dev").read_text(encoding="ascii"))
    line = next(line for line in text.splitlines() if line.strip().startswith(f"{_UPLINK}:"))
    return int(line.split()[_TX_PACKETS])


def _lost() -> dict[str, float]:
    """What both auditors say was lost of traces, by where."""
    found: dict[str, float] = {}
    for host in _HOSTS:
        text = namespaces.inside(host_namespace(*host), lambda: urllib.request.urlopen(_METRICS).read().decode())
        for by, count in _LOST.findall(text):
            found[by] = found.get(by, 0.0) + float(count)
    return found


FIGURE = Figure("trace-seen", "packets of a traced flow that were not seen at every point, in %, by rate", run, needs_root=True)
