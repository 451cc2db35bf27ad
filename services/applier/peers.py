"""The loop that watches a host's WireGuard peers: how many shake hands, and where those are whose endpoints are names.

It wakes every ten seconds, and sooner for a name that has no address yet; each time the peers of a link are read in one go. Look-ups run
beside it, each in its own time: a resolver that hangs holds up its own name only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

import structlog

from schemas.host_objects import WireguardLink, WireguardPeer
from schemas.plan import HostPlan, is_beside
from schemas.status import Greetings, Peers
from schemas.values import Endpoint
from services.applier.greetings import greetings
from services.applier.lookups import Names, addresses_of
from services.kernel.peers import FRESH_HANDSHAKE_S
from services.kernel.port import PeerSeen
from services.runtime.errors import MeshmarkError
from services.runtime.metrics import Metrics
from services.runtime.retries import backoff_s

PERIOD_S = 10.0
TURNING_PERIOD_S = 1.0
"""While there is a device beside the others: somebody waits for handshakes."""
_LOOKUPS = 8
"""How many names are looked up at once."""
_NAMES_TOLD = 8

_log = structlog.get_logger()

Seen = Mapping[str, Sequence[PeerSeen]]


class PeerWatch:
    """Watches the peers of the plan that it was last given.

    `moved` is called when a name has another address than before, `changed` with what a report is to say, each time that was looked at.
    """

    def __init__(
        self,
        metrics: Metrics,
        peers: Callable[[Collection[str]], Awaitable[Seen]],
        moved: Callable[[], None],
        changed: Callable[[Peers, Greetings], None],
    ) -> None:
        self._metrics = metrics
        self._peers = peers
        self._moved = moved
        self._changed = changed
        self._names = Names(backoff_s)
        self._plan: HostPlan | None = None
        self._links: tuple[str, ...] = ()
        self._planned: dict[tuple[str, str], Endpoint] = {}
        """The endpoints that are planned, by link and public key."""
        self._named: dict[tuple[str, str], Endpoint] = {}
        """Those of them that are names."""
        self._stale: frozenset[Endpoint] = frozenset()
        self._counts = (0, 0, 0, 0)
        self._made: HostPlan | None = None
        """The plan that the last turn made: what is seen is of this one."""
        self._made_s = 0.0
        """Since when there are the devices that there are."""
        self._greetings = Greetings()
        self._asked: set[str] = set()
        self._free = asyncio.Semaphore(_LOOKUPS)
        self._wake = asyncio.Event()

    def follow(self, plan: HostPlan) -> Mapping[Endpoint, Endpoint]:
        """Watch the peers of `plan`, and say which addresses its names have."""
        if plan is not self._plan:
            self._plan = plan
            objects = plan.objects().values()
            self._links = _links(plan)
            peers = [item for item in objects if isinstance(item, WireguardPeer)]
            self._planned = {(item.link, item.public_key): item.endpoint for item in peers if item.endpoint is not None}
            self._named = {key: endpoint for key, endpoint in self._planned.items() if endpoint.name}
            self._names.watch(self._named.values())
            self._stale &= frozenset(self._named.values())
            if self._named or self._is_turning:
                self._wake.set()
        return self._names.addresses()

    def made(self, plan: HostPlan) -> None:
        """Note that a turn has ended, and was for `plan`: handshakes are those of its devices and peers from now on."""
        if plan is self._made:
            return
        if self._made is None or _links(plan) != _links(self._made):
            self._made_s = time.time()
        self._made, self._greetings = plan, Greetings()

    async def run(self) -> None:
        """Watch until cancelled."""
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            while True:
                self._wake.clear()
                await self.look()
                for name in self._names.due(loop.time(), self._stale):
                    if name not in self._asked:
                        self._asked.add(name)
                        group.create_task(self._look_up(name), name=f"lookup {name}")
                due_s = self._names.next_s() if not self._asked else None
                period_s = TURNING_PERIOD_S if self._is_turning else PERIOD_S
                wait_s = period_s if due_s is None else min(period_s, max(0.0, due_s - loop.time()))
                try:
                    async with asyncio.timeout(wait_s):
                        await self._wake.wait()
                except TimeoutError:
                    continue

    @property
    def _is_turning(self) -> bool:
        return any(map(is_beside, self._links))

    async def look(self) -> None:
        """Read the peers, and tell; what cannot be read stays as it was."""
        try:
            self._count(await self._peers(self._links) if self._links else {})
        except MeshmarkError as error:
            self._greetings = Greetings()
            _log.warning("peers_unknown", error=str(error))
        waiting = self._names.waiting()
        reasons = tuple(f"{name}: {reason}" if reason else name for name, reason in waiting.items())
        self._changed(Peers(*self._counts, len(waiting), reasons[:_NAMES_TOLD]), self._greetings)

    def _count(self, seen: Seen) -> None:
        now_s, addresses = time.time(), self._names.addresses()
        every = {(link, peer.public_key): peer for link, peers in seen.items() for peer in peers}
        fresh = {key: peer for key, peer in every.items() if now_s - peer.handshake_s <= FRESH_HANDSHAKE_S}
        stale = sum(peer.handshake_s > 0 for key, peer in every.items() if key not in fresh)
        places = {key: addresses.get(endpoint) if endpoint.name else endpoint for key, endpoint in self._planned.items()}
        roamed = sum((place := places.get(key)) is not None and place != peer.endpoint for key, peer in fresh.items())
        self._stale = frozenset(endpoint for key, endpoint in self._named.items() if key not in fresh)
        self._counts = len(every), len(fresh), stale, roamed
        if self._plan is self._made and self._plan is not None:
            self._greetings = greetings(self._plan.objects().values(), seen, now_s, self._made_s)
        for state, count in (("fresh", len(fresh)), ("stale", stale), ("never", len(every) - len(fresh) - stale)):
            self._metrics.peers.labels(state).set(count)

    async def _look_up(self, name: str) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with self._free:
                try:
                    answers = await addresses_of(name)
                except OSError as error:
                    self._names.failed(name, error.strerror or str(error), loop.time())
                    _log.warning("name_without_address", name=name, error=str(error))
                    return
            if self._names.found(name, answers, loop.time(), self._stale):
                _log.info("name_has_address", name=name, addresses=answers)
                self._moved()
        finally:
            self._asked.discard(name)
            self._wake.set()


def _links(plan: HostPlan) -> tuple[str, ...]:
    return tuple(item.name for item in plan.objects().values() if isinstance(item, WireguardLink))
