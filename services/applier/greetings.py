"""Who shakes hands on which device, of a host that has one more than always: keys are changed. Pure: the time is an argument.

A session of WireGuard ends after three minutes at the latest, and with keepalives the next one begins within seconds: a peer without a
handshake for longer than that does not answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from schemas.host_objects import PlanObject, WireguardLink, WireguardPeer
from schemas.plan import is_beside
from schemas.status import Greeted, Greetings
from schemas.values import Key
from services.kernel.peers import FRESH_HANDSHAKE_S
from services.kernel.port import PeerSeen

AWAY_S = FRESH_HANDSHAKE_S + 30.0
"""A peer whose last handshake is older than this is away: keepalives and their repetitions had time for the next one."""
ASKED_S = 30.0
"""So long peers have been asked before one that never answered is away."""
_AWAY_MAX = 1000
_FIRST = 4


def greetings(planned: Iterable[PlanObject], seen: Mapping[str, Sequence[PeerSeen]], now_s: float, since_s: float) -> Greetings:
    """The handshakes of peers that are planned on all devices of the plan; nothing where none is beside the others.

    `seen` are the peers of each device now, and `since_s` is when the last of the devices came.
    """
    links: dict[str, WireguardLink] = {}
    peers: dict[str, set[Key]] = {}
    for item in planned:
        if isinstance(item, WireguardLink):
            links[item.name] = item
        elif isinstance(item, WireguardPeer):
            peers.setdefault(item.link, set()).add(item.public_key)
    if not any(map(is_beside, links)):
        return Greetings()
    common = set.intersection(*(peers.get(name, set()) for name in links))
    times = {name: {peer.public_key: peer.handshake_s for peer in seen.get(name, ())} for name in links}
    fresh = {name: {key for key in common if now_s - times[name].get(key, 0.0) <= AWAY_S} for name in links}
    silent = common - set[Key]().union(*fresh.values()) if now_s - since_s >= ASKED_S else set()
    away = silent if len(silent) <= _AWAY_MAX else set()
    devices = []
    for name, link in sorted(links.items()):
        lacking = sorted(common - fresh[name] - away)
        devices.append(Greeted(name, link.public_key, len(lacking), tuple(lacking[:_FIRST])))
    return Greetings(tuple(devices), tuple(sorted(away)))
