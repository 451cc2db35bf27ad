"""Which tunnels are dead: observations and the time go in, verdicts come out. No clock, no sockets.

A tunnel is judged by whether the far end's kernel answers through it. One that has never answered since it was made is given time, and then
judged by its last handshake where no other tunnel shows that the far end answers at all.
A dead tunnel comes back after it has been good for a while, for longer each time that it dies again soon. A single answer that is lost
meanwhile is none of its faults: it would not have died of that either, and a path that loses some would keep it out for ever.
When all are dead none is withdrawn: the routes lose nothing by staying, and whatever works first is used at once.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable, Mapping
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from schemas.host_objects import LinkAddress, PlanObject, Route, WireguardLink, WireguardPeer
from schemas.plan import is_beside
from schemas.status import DeadTunnel, TunnelHealth
from schemas.values import Address
from services.kernel.transaction import Observed

PERIOD_S = 0.5
"""Between two rounds: one probe through each tunnel, and what was answered since the round before."""
MISSES = 3
"""Rounds without an answer, one after the other, after which a tunnel is dead."""
BREAK = 2
"""Rounds without an answer, one after the other, by which a dead tunnel that was good is so no more."""
STALL_S = 1.25
"""A round that comes later than this after the one before says nothing about what was not answered: this host was late itself."""
GRACE_S = 15.0
"""A tunnel that never answered, or never shook hands, is given this long."""
HANDSHAKE_MAX_S = 180.0
"""WireGuard renews a session that carries anything within two minutes, and keeps no session for longer than three."""
HOLD_FIRST_S, HOLD_MAX_S = 10.0, 60.0
"""How long a dead tunnel must be good to come back: at first, and at most."""
CALM_S = 120.0
"""A tunnel that dies this soon after it came back must be good for twice as long the next time."""
ALL_DEAD_HOLD_S = 1.0
"""The same when all are dead: long enough for those that come back together to be seen together."""

_LINK_LENGTHS = {30: 3, 31: 1, 126: 3, 127: 1}
"""Prefix lengths of a tunnel's own network, and the bits in which the two ends' addresses differ."""


class Tunnel(Struct, frozen=True):
    """A tunnel to watch: its link, the addresses of both ends inside it, and what it is made of; another make is another tunnel."""

    link: str
    own: Address
    far: Address
    make: tuple[PlanObject, ...]

    @property
    def keeps_alive(self) -> bool:
        """True when the tunnel carries something, and so shakes hands, without anybody's traffic or probes."""
        return any(isinstance(part, WireguardPeer) and part.keepalive_seconds for part in self.make)


class Round(Struct, frozen=True):
    """What was seen since the last round: links that answered, and the last handshake of some links (Unix time, 0 for never).

    `probing` is False while no probes can be sent. `now_s` only grows; `at_s` is Unix time.
    """

    now_s: float
    at_s: float
    answered: Collection[str]
    handshakes_s: Mapping[str, float]
    probing: bool


class State(Struct, frozen=True):
    """A tunnel as it stands. Times but `changed_at_s` (Unix) are those of the rounds; `back_s` is when it last came back."""

    tunnel: Tunnel
    made_s: float
    alive: bool = True
    has_answered: bool = False
    misses: int = 0
    changed_at_s: float = 0.0
    reason: str = ""
    good_since_s: float | None = None
    back_s: float | None = None
    hold_s: float = HOLD_FIRST_S


class Transition(Struct, frozen=True):
    """A tunnel that died or came back, and why."""

    link: str
    to: Literal["dead", "alive"]
    reason: str


class Health:
    """The tunnels of one host."""

    def __init__(self) -> None:
        self._states: dict[str, State] = {}
        self._last_s = float("-inf")
        self._probing = True

    def watch(self, tunnels: Iterable[Tunnel], now_s: float, at_s: float, found_withdrawn: Collection[str] = ()) -> None:
        """Watch these tunnels from now on, and no others. What is known of those that stay the same is kept.

        Those of `found_withdrawn` are dead to begin with: somebody who knew more took them out of the routes.
        """
        known, self._states = self._states, {}
        for tunnel in tunnels:
            before = known.get(tunnel.link)
            if before is not None and before.tunnel == tunnel:
                self._states[tunnel.link] = before
            elif tunnel.link in found_withdrawn:
                self._states[tunnel.link] = State(tunnel, now_s, alive=False, changed_at_s=at_s, reason="found withdrawn at the start")
            else:
                self._states[tunnel.link] = State(tunnel, now_s, changed_at_s=at_s)

    @property
    def tunnels(self) -> list[Tunnel]:
        return [state.tunnel for state in self._states.values()]

    def in_question(self, now_s: float) -> list[str]:
        """Links whose last handshake is wanted in the next round."""
        if self._far_answers:
            return []
        return [link for link, state in self._states.items() if not state.has_answered and now_s - state.made_s >= GRACE_S]

    @property
    def _far_answers(self) -> bool:
        """True when the far end is known to answer: it would by any tunnel that works."""
        return any(state.has_answered for state in self._states.values())

    def observe(self, seen: Round) -> list[Transition]:
        """Take a round in; returns what changed by it."""
        late = seen.now_s - self._last_s > STALL_S
        self._last_s, self._probing = seen.now_s, seen.probing
        before = self._states
        all_dead = not any(state.alive for state in before.values())
        far_answers = self._far_answers
        self._states = {
            link: _living(state, seen, late=late, far_answers=far_answers)
            if state.alive
            else _waiting(state, seen, late=late, far_answers=far_answers)
            for link, state in before.items()
        }
        self._let_back(seen, all_dead=all_dead)
        return [
            Transition(link, "alive" if state.alive else "dead", state.reason)
            for link, state in self._states.items()
            if state.alive != before[link].alive
        ]

    def report(self) -> TunnelHealth:
        """The verdicts: which tunnels' hops are not to be in the routes, and which are dead but stay there."""
        dead = tuple(DeadTunnel(link, state.changed_at_s, state.reason) for link, state in sorted(self._states.items()) if not state.alive)
        nothing_lives = len(dead) == len(self._states)
        judged_by: Literal["echo", "handshake"] = "echo" if self._probing else "handshake"
        return TunnelHealth(judged_by, () if nothing_lives else dead, dead if nothing_lives else ())

    def count(self) -> dict[str, int]:
        """How many tunnels are in each state."""
        health = self.report()
        withdrawn, dead = len(health.withdrawn), len(health.dead)
        return {"alive": len(self._states) - withdrawn - dead, "withdrawn": withdrawn, "dead": dead}

    def _let_back(self, seen: Round, *, all_dead: bool) -> None:
        good_s = {link: seen.now_s - state.good_since_s for link, state in self._states.items() if state.good_since_s is not None}
        if all_dead and any(duration_s >= ALL_DEAD_HOLD_S for duration_s in good_s.values()):
            back = set(good_s)
        else:
            back = {link for link, duration_s in good_s.items() if duration_s >= self._states[link].hold_s}
        for link in back:
            self._states[link] = replace(
                self._states[link],
                alive=True,
                misses=0,
                changed_at_s=seen.at_s,
                reason=f"good for {good_s[link]:.0f} s",
                good_since_s=None,
                back_s=seen.now_s,
            )


def _living(state: State, seen: Round, *, late: bool, far_answers: bool) -> State:
    """A living tunnel after a round: living, or dead and why."""
    if state.tunnel.link in seen.answered:
        return replace(state, has_answered=True, misses=0)
    misses = state.misses + (seen.probing and not late)
    reason = _unanswered(state, misses) if state.has_answered else _unproven(state, seen, far_answers=far_answers)
    if not reason:
        return replace(state, misses=misses)
    again = state.back_s is not None and seen.now_s - state.back_s <= CALM_S
    hold_s = min(2 * state.hold_s, HOLD_MAX_S) if again else HOLD_FIRST_S
    return replace(state, alive=False, misses=misses, changed_at_s=seen.at_s, reason=reason, hold_s=hold_s)


def _unanswered(state: State, misses: int) -> str:
    return f"no answer from {state.tunnel.far} to {misses} probes" if misses >= MISSES else ""


def _unproven(state: State, seen: Round, *, far_answers: bool) -> str:
    """Why a tunnel that has never answered is dead; empty while it is not."""
    if seen.now_s - state.made_s < GRACE_S:
        return ""
    if far_answers:
        unanswered = state.misses >= MISSES
        return f"no answer from {state.tunnel.far} since it was made, and some through another tunnel" if unanswered else ""
    if not seen.probing and not state.tunnel.keeps_alive:
        return ""  # it may just have nothing to carry
    handshake_s = seen.handshakes_s.get(state.tunnel.link)
    if handshake_s == 0:
        return "no handshake since it was made"
    if handshake_s is not None and seen.at_s - handshake_s > HANDSHAKE_MAX_S:
        return f"no handshake for {seen.at_s - handshake_s:.0f} s"
    return ""


def _waiting(state: State, seen: Round, *, late: bool, far_answers: bool) -> State:
    """A dead tunnel after a round: since when it is good."""
    link = state.tunnel.link
    if link in seen.answered:
        return replace(state, has_answered=True, misses=0, good_since_s=_earlier(state.good_since_s, seen.now_s))
    if state.has_answered or far_answers:
        misses = state.misses + (not late)
        return replace(state, misses=misses, good_since_s=state.good_since_s if misses < BREAK else None)
    if link not in seen.handshakes_s:
        return state
    # A session from before it died says nothing.
    handshake_s = seen.handshakes_s[link]
    good = handshake_s > state.changed_at_s and seen.at_s - handshake_s <= HANDSHAKE_MAX_S
    return replace(state, good_since_s=_earlier(state.good_since_s, seen.now_s) if good else None)


def _earlier(since_s: float | None, now_s: float) -> float:
    return now_s if since_s is None else since_s


def tunnels_of(objects: Mapping[str, PlanObject]) -> list[Tunnel]:
    """The tunnels of a plan: WireGuard links that routes lead through, each with a network of its own for its two ends."""
    used = {hop.link for item in objects.values() if isinstance(item, Route) for hop in item.hops}
    links = {item.name: item for item in objects.values() if isinstance(item, WireguardLink) and item.name in used}
    made: dict[str, list[PlanObject]] = {name: [link] for name, link in links.items()}
    addresses: dict[str, LinkAddress] = {}
    for item in objects.values():
        if isinstance(item, WireguardPeer | LinkAddress) and item.link in links:
            made[item.link].append(item)
            # One family is enough: the tunnel carries both or none. IPv4 where there is a choice.
            if isinstance(item, LinkAddress) and item.length in _LINK_LENGTHS and (item.link not in addresses or ":" not in item.address):
                addresses[item.link] = item
    return [Tunnel(name, item.address, _far(item), tuple(made[name])) for name, item in sorted(addresses.items())]


def _far(item: LinkAddress) -> Address:
    address = ipaddress.ip_address(item.address)
    return Address(str(type(address)(int(address) ^ _LINK_LENGTHS[item.length])))


def found_withdrawn(objects: Mapping[str, PlanObject], observed: Observed) -> frozenset[str]:
    """Links that no route of the kernel has where the plan has them among others, while the links' own routes are there.

    That is what an applier leaves which has withdrawn them, and nobody else: a new tunnel lacks its own route as well, and a hop that
    somebody took out of one route is in the others. While a gateway changes its key, its plans lead packets by other tunnels at each step,
    and the kernel's routes may be those of the step before (``_lacking``).
    """
    lacking: set[str] = set()
    used: set[str] = set()
    own: set[str] = set()
    for key, item in objects.items():
        found = observed.get(key)
        if not isinstance(item, Route) or not isinstance(found, Route):
            continue
        links, there = {hop.link for hop in item.hops}, {hop.link for hop in found.hops}
        if len(links) > 1:
            lacking |= _lacking(links, there)
            used |= there
        elif links == there:
            own |= there
    return frozenset((lacking - used) & own)


def _lacking(planned: set[str], found: set[str]) -> set[str]:
    """Links that a route of the kernel lacks because somebody took their hops out, of all that the plan has there.

    A device that is beside the tunnels leads the packets of one of them: where it has just come, has gone on to the next, or has left, the
    kernel has a link that the plan has no more, in the place of one that it lacks. Where more lack than that, nothing tells which: a
    tunnel that works and waits costs little, packets into a dead one are lost.
    """
    lacking, stood_in = planned - found, found - planned
    is_step = len(lacking) == len(stood_in) and any(map(is_beside, planned | found))
    return set() if is_step else lacking
