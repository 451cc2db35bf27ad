"""From the moment that a tunnel carries nothing any more to the last of its flows being back on another one, in the lab.

60 flows of 10 datagrams a second run between two pods over the example's three tunnels. In each run one tunnel's UDP port is dropped in
the middle, both ways, so that both ends have to find out by themselves. A flow that takes the tunnel in one direction is affected. What
the others lose is counted, and whether they keep their tunnels.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import time
from collections.abc import AsyncIterator, Callable

from msgspec import Struct

from benchmarks import flows, lab
from benchmarks.result import Figure, Result, median, result, rounded
from schemas.topology import Peering, Pod
from services.applier.health import MISSES, PERIOD_S
from services.cli.files import load
from services.cli.lab.expected import expected
from services.cli.lab.layout import PREFIX, UNDERLAY
from services.runtime.errors import Transient

_RUNS = 6
_GATEWAY = f"{PREFIX}rome.gateway"
_WARM_UP_S, _BLOCKED_S, _BACK_S = 3.0, 6.0, 120.0


class Loss(Struct, frozen=True):
    """One run. Times in seconds from the block; datagrams are those sent from then on."""

    moved_s: float
    quiet_s: list[float]
    affected: int
    lost_by_affected: int
    others: int
    lost_by_others: int
    others_moved: int
    back_s: float


def run(say: Callable[[str], None]) -> list[Result]:
    return asyncio.run(_run(say))


async def _run(say: Callable[[str], None]) -> list[Result]:
    topology = load([lab.EXAMPLE])
    pods = {f"{item.cluster}/{item.name}": item for item in topology if isinstance(item, Pod)}
    (peering,) = (item for item in topology if isinstance(item, Peering))
    walk = expected(topology, pods["rome/shop"], pods["milan/bank"])
    assert walk is not None
    losses = []
    async with lab.standing(say):
        places = flows.Places(_GATEWAY, [f"mt.{number}" for number in range(peering.tunnels)])
        async with flows.running(f"{PREFIX}rome.pod.shop", f"{PREFIX}milan.pod.bank", walk.dial) as traffic:
            await asyncio.sleep(_WARM_UP_S)
            for number in range(_RUNS):
                tunnel = number % peering.tunnels
                losses.append(await _lose(traffic, places, f"mt.{tunnel}", peering.port + tunnel))
                say(f"tunnel {tunnel}: flows moved after {losses[-1].moved_s:.2f} s, back after {losses[-1].back_s:.0f} s")
        places.close()
    return [_sum_up(losses)]


async def _settled(traffic: flows.Flows, places: flows.Places) -> dict[tuple[int, bool], str]:
    """Where each flow goes, once all are seen."""
    async with asyncio.timeout(_BACK_S):
        while len(found := await places.look(traffic)) < 2 * flows.FLOWS:
            pass
    return found


async def _lose(traffic: flows.Flows, places: flows.Places, link: str, port: int) -> Loss:
    before = await _settled(traffic, places)
    affected = {own for (own, _), taken in before.items() if taken == link}
    others = traffic.sent_s.keys() - affected
    async with _blocked(port):
        began_s = time.monotonic()
        await asyncio.sleep(_BLOCKED_S)
        during = await _settled(traffic, places)
    unblocked_s = time.monotonic()
    while await places.look(traffic) != before:
        if time.monotonic() > unblocked_s + _BACK_S:
            msg = f"flows did not come back to {link} within {_BACK_S:.0f} s"
            raise Transient(msg)
    back_s = time.monotonic() - unblocked_s
    ended_s = time.monotonic()
    await asyncio.sleep(flows.LAST_S)
    away_s = [found for own in affected if (found := traffic.away_s(own, began_s)) is not None]
    return Loss(
        max(until_s for _, until_s in away_s) - began_s,
        [until_s - since_s for since_s, until_s in away_s],
        len(affected),
        sum(traffic.lost(own, began_s, ended_s) for own in affected),
        len(others),
        sum(traffic.lost(own, began_s, ended_s) for own in others),
        sum(during.get(key) != taken for key, taken in before.items() if key[0] in others),
        back_s,
    )


@contextlib.asynccontextmanager
async def _blocked(port: int) -> AsyncIterator[None]:
    table = "inet meshmark_bench"
    _nft(f"add table {table}; add chain {table} c {{ type filter hook forward priority -300; }}; add rule {table} c udp dport {port} drop")
    try:
        yield
    finally:
        _nft(f"delete table {table}")


def _nft(text: str) -> None:
    subprocess.run(["ip", "netns", "exec", UNDERLAY, "nft", text], check=True, capture_output=True)


def _sum_up(losses: list[Loss]) -> Result:
    return result(
        "tunnel-loss",
        [loss.moved_s for loss in losses],
        "s",
        floor=PERIOD_S * MISSES,
        details={
            "maximum_s": rounded(max(loss.moved_s for loss in losses)),
            "quiet_s_p50_of_an_affected_flow": rounded(median([quiet_s for loss in losses for quiet_s in loss.quiet_s])),
            "affected_flows": [loss.affected for loss in losses],
            "datagrams_lost_by_affected_flows": [loss.lost_by_affected for loss in losses],
            "other_flows": [loss.others for loss in losses],
            "datagrams_lost_by_other_flows": [loss.lost_by_others for loss in losses],
            "other_flows_that_changed_their_tunnel": [loss.others_moved for loss in losses],
            "back_after_unblocking_s": [rounded(loss.back_s) for loss in losses],
        },
    )


FIGURE = Figure("tunnel-loss", f"a dead tunnel's flows on other tunnels, {_RUNS} times", run, needs_root=True)
