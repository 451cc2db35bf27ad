"""Peers that have just come, and are greeted again when nothing has come of WireGuard's own greeting.

WireGuard greets when there is something to send, and again after five seconds. Two things make it wait so long where hosts get to know
each other in one moment, as they do when encryption is switched on: a greeting that meets a device that does not know its sender yet is
lost, and of two that cross both ends discard the answer (docs/decisions/0004). So a peer that was sent something, and does not shake hands
soon after, is made anew: it is greeted at once. One end does so before the other, so that greetings do not cross again.

Only nodes do so: the tunnels of gateways come up at one end before the other.

What waits for a handshake is lost with the peer. So one that was not heard of yet is waited with for longer: its host may be about to know
us, and greets us then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

import structlog
from msgspec import Struct

from schemas.host_objects import WireguardLink, WireguardPeer
from schemas.plan import HostPlan, mesh_unit
from schemas.values import Key
from services.kernel.port import PeerSeen
from services.runtime.errors import MeshmarkError

NEW_S = 15.0
"""So long a peer is new. Later, WireGuard's own greetings are enough: both ends have had time to know each other."""
CROSSED_S = 0.3
"""The end with the lower key greets a peer again that was sent something and has said something, so long after that; a round trip may take
as long."""
UNHEARD_S = 1.5
"""The same for a peer that has said nothing."""
OTHER_S = 2.5
"""The same by the end with the higher key, whatever was heard."""
AGAIN_S = 2.0
"""Between two greetings of one end."""
LOOK_S = 0.1
_REST_SHARE, _REST_MAX_S = 10, 1.0
"""A look is followed by a rest of so many times its length, if that is longer; but a second is enough, since a look may have had to wait
for a turn, and newcomers are new for seconds."""

_log = structlog.get_logger()

Seen = Mapping[str, Sequence[PeerSeen]]
Greet = Callable[[str, Collection[Key]], Awaitable[None]]


class _Newcomer(Struct):
    """A peer since it came: until when it is new, whether we are the end to greet first, and since when it was asked (None: not yet)."""

    until_s: float
    greets_first: bool
    asked_s: float | None = None
    is_greeted: bool = False

    def patience_s(self, peer: PeerSeen) -> float:
        """How long its answer may take."""
        if self.is_greeted:
            return AGAIN_S
        if not self.greets_first:
            return OTHER_S
        return CROSSED_S if peer.received_bytes else UNHEARD_S


class Newcomers:
    """Which peers are new, and which of them are to be greeted again. Pure: times are arguments, in seconds of any clock that goes on."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, Key], _Newcomer | None] = {}
        """By link and key; None for who is new no more."""
        self._plan: HostPlan | None = None

    @property
    def links(self) -> frozenset[str]:
        """The links that have newcomers."""
        return frozenset(link for (link, _), newcomer in self._known.items() if newcomer is not None)

    def follow(self, plan: HostPlan, now_s: float) -> None:
        """Take the peers of a plan that a turn has just made; those that the last one did not have are new."""
        if plan is self._plan:
            return
        own: dict[str, Key | None] = {}
        planned: list[tuple[str, Key]] = []
        mesh = plan.units.get(mesh_unit(plan.cluster))
        for entry in mesh.values() if mesh is not None else ():
            if isinstance(entry.object, WireguardPeer):
                planned.append((entry.object.link, entry.object.public_key))
            elif isinstance(entry.object, WireguardLink):
                own[entry.object.name] = entry.object.public_key
        self._plan = plan
        before, self._known = self._known, {}
        for link, key in planned:
            mine = own.get(link)
            newcomer = _Newcomer(now_s + NEW_S, greets_first=mine is not None and mine < key)
            self._known[link, key] = before.get((link, key), newcomer)

    def due(self, link: str, seen: Sequence[PeerSeen], now_s: float) -> list[Key]:
        """The keys to greet again on a link; who shakes hands, or has come long ago, is new no more. `seen` is empty where nobody knows."""
        found: list[Key] = []
        peers = {peer.public_key: peer for peer in seen}
        for place, newcomer in self._known.items():
            if newcomer is None or place[0] != link:
                continue
            peer = peers.get(place[1])
            if now_s > newcomer.until_s or (peer is not None and peer.handshake_s):
                self._known[place] = None
            elif peer is None or not peer.sent_bytes:
                continue
            elif newcomer.asked_s is None:
                newcomer.asked_s = now_s
            elif now_s - newcomer.asked_s >= newcomer.patience_s(peer):
                newcomer.asked_s, newcomer.is_greeted = now_s, True
                found.append(place[1])
        return found


class NewcomerWatch:
    """Looks at newcomers while there are any; `peers` reads those of links, `greet` greets some of a link anew."""

    def __init__(self, peers: Callable[[Collection[str]], Awaitable[Seen]], greet: Greet) -> None:
        self._peers = peers
        self._greet = greet
        self._newcomers = Newcomers()
        self._wake = asyncio.Event()

    def made(self, plan: HostPlan) -> None:
        """Note that a turn has ended, and was for `plan`."""
        self._newcomers.follow(plan, asyncio.get_running_loop().time())
        self._wake.set()

    async def run(self) -> None:
        """Watch until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await self._wake.wait()
            self._wake.clear()
            while links := self._newcomers.links:
                began_s = loop.time()
                await self._look(links)
                await asyncio.sleep(min(_REST_MAX_S, max(LOOK_S, _REST_SHARE * (loop.time() - began_s))))

    async def _look(self, links: Collection[str]) -> None:
        for link in sorted(links):  # each for itself: of one device that does not answer nobody else's peers are to wait
            seen: Seen = {}
            try:
                seen = await self._peers([link])
            except MeshmarkError as error:
                _log.warning("newcomers_unknown", link=link, error=str(error))
            await self._greet_due(link, seen)

    async def _greet_due(self, link: str, seen: Seen) -> None:
        keys = self._newcomers.due(link, seen.get(link, ()), asyncio.get_running_loop().time())
        if not keys:
            return
        _log.info("greeted_again", link=link, peers=len(keys))
        try:
            await self._greet(link, keys)
        except MeshmarkError as error:
            _log.warning("newcomers_not_greeted", link=link, error=str(error))
