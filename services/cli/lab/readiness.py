"""Waiting until what was published is in force on every host, and packets get through. All waits are bounded by the caller's timeout."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from schemas.topology import Topology
from services.cli.lab import probe
from services.cli.lab.board import Board
from services.cli.lab.feed import Feed
from services.cli.lab.probe import Check
from services.runtime.errors import Permanent, Transient

_AGAIN_S = 0.5
_SAY_S = 1.0

Say = Callable[[str], None]


async def get_ready(feed: Feed, wanted: Sequence[Topology], say: Say, timeout_s: float) -> None:
    """Until every host holds its plan and all pods that the topology joins reach each other.

    Raises Permanent when an object was refused, Transient with what is missing when the time is over.
    """
    failed: list[Check] = []
    try:
        async with asyncio.timeout(timeout_s):
            await until_in_force(feed, wanted, say)
            say("every host holds its plan; trying the ways between the pods")
            await _until_carrying(feed, failed)
    except TimeoutError:
        missing = feed.board.missing(wanted) or [f"{check.name}: {check.detail}" for check in failed]
        msg = f"not ready after {timeout_s:g} s: {'; '.join(missing[:3])}"
        raise Transient(msg) from None


async def until_in_force(feed: Feed, wanted: Sequence[Topology], say: Say) -> None:
    """Until `wanted` is admitted and every host reports its newest plan as applied; Permanent when one of `wanted` is refused."""
    loop = asyncio.get_running_loop()
    said_s = 0.0
    while missing := feed.board.missing(wanted):
        if refused := feed.board.refused(wanted):
            raise Permanent("; ".join(refused))
        if loop.time() - said_s > _SAY_S:
            said_s = loop.time()
            say(f"waiting: {missing[0]}{f' (and {len(missing) - 1} more)' if len(missing) > 1 else ''}")
        await feed.until(_without(missing[0], wanted))


async def _until_carrying(feed: Feed, failed: list[Check]) -> None:
    """Until all probes pass; `failed` holds those of the last round that did not.

    The planner plans the routes into the tunnels when both ends have reported the tunnels: plans come in two waves, and only packets
    tell that the last one has been.
    """
    while True:
        failed[:] = [check for check in await probe.check(feed.board.as_seen(), feed.board.chosen) if not check.ok]
        if not failed:
            return
        await asyncio.sleep(_AGAIN_S)


def _without(line: str, wanted: Sequence[Topology]) -> Callable[[Board], bool]:
    """Whether this line is no longer what is missing, or there is no point in waiting for it."""
    return lambda board: line not in board.missing(wanted) or bool(board.refused(wanted))
