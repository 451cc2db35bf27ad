"""The numbers that others use on this host, kept up to date for the reports, and those of them that the plan has as well.

A thread of its own looks, so that no turn waits for it; what was seen while the kernel was written is thrown away. It is looked again when
the kernel says that something changed, and now and then, since it does not say it of sockets and other people's tables; never for more than
a small share of the time, however busy the host or long its lists.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import structlog

from schemas.host_objects import MAIN_TABLE, NftChain, PlanObject, PolicyRule, Route, WireguardLink
from schemas.in_use import InUse, Number
from schemas.nft import CopyMark, SetMark
from services.runtime.errors import MeshmarkError

_log = structlog.get_logger()

PERIOD_S = 5.0
REST_S = 1.0
"""The least time between two looks."""
_REST_SHARE = 50
"""A look is followed by a rest of so many times the processor's time that it took."""
_JITTER = (0.8, 1.2)


class InUseWatch:
    """Looks and tells. `idle` is set while no turn is under way, `turns` counts those that began; `tell` is given all that was seen."""

    def __init__(self, look: Callable[[], InUse], idle: asyncio.Event, turns: Callable[[], int], tell: Callable[[InUse], None]) -> None:
        self._look = look
        self._idle = idle
        self._turns = turns
        self._tell = tell
        self._hinted = asyncio.Event()

    def hint(self) -> None:
        """Something may have changed: look soon."""
        self._hinted.set()

    async def run(self) -> None:
        """Watch until cancelled."""
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="in-use") as thread:
            while True:
                self._hinted.clear()
                cost_s = await self._once(thread)
                await asyncio.sleep(max(REST_S, _REST_SHARE * cost_s))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(PERIOD_S * random.uniform(*_JITTER)):  # noqa: S311 - jitter, not a secret
                        await self._hinted.wait()

    async def _once(self, thread: ThreadPoolExecutor) -> float:
        """Look once, as soon as no turn is under way; how much of the processor's time it took, in seconds."""
        await self._idle.wait()
        turns = self._turns()
        seen, cost_s = await asyncio.get_running_loop().run_in_executor(thread, self._timed)
        if isinstance(seen, Exception):
            _log.warning("in_use_unknown", error=str(seen))
        elif self._idle.is_set() and self._turns() == turns:
            self._tell(seen)
        else:
            self.hint()
        return cost_s

    def _timed(self) -> tuple[InUse | Exception, float]:
        """What was seen, or why nothing was; and the time of this thread that it took. Waiting, as for others' locks, is no cost."""
        began_s = time.thread_time()
        seen: InUse | Exception
        try:
            seen = self._look()
        except (OSError, MeshmarkError) as error:
            seen = error
        return seen, time.thread_time() - began_s


def collisions(objects: Iterable[PlanObject], in_use: InUse) -> tuple[str, ...]:
    """The numbers that these objects take and somebody else uses, for people, each once."""
    if not in_use:
        return ()
    met = ((number, use) for number in dict.fromkeys(_numbers(objects)) if (use := in_use.met(number)) is not None)
    return tuple(dict.fromkeys(f"{number.words}: {use.by}" for number, use in met))


def _numbers(objects: Iterable[PlanObject]) -> Iterator[Number]:
    for item in objects:
        match item:
            case Route() if item.table != MAIN_TABLE:
                yield Number("table", item.table, item.prefix.family)
            case PolicyRule():
                yield Number("priority", item.priority, item.family)
                if item.table != MAIN_TABLE:
                    yield Number("table", item.table, item.family)
            case WireguardLink():
                yield Number("port", item.listen_port)
            case NftChain():
                yield from (Number("mark", bits) for bits in _written(item))


def _written(chain: NftChain) -> Iterator[int]:
    """The bits of packets' marks that a chain writes."""
    for rule in chain.rules:
        for statement in rule:
            if isinstance(statement, SetMark):
                yield statement.mask
            elif isinstance(statement, CopyMark) and statement.to == "meta":
                yield 0xFFFFFFFF  # bits outside its mask become 0
