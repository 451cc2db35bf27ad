"""Addresses of endpoints that are names. The rules are pure; only ``addresses_of`` asks anybody.

A name is looked up until it has an address, then no more while its peers shake hands: what works is left alone, and a name that leads
elsewhere now is followed when the old way is stale. A plan says the name on every host; what is to be in the kernel is the plan with what
this host has found (``resolved``), and a peer of a name that has no address yet is there without one.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from msgspec.structs import replace

from schemas.host_objects import PlanObject, WireguardPeer
from schemas.values import Address, Endpoint
from schemas.withdrawals import without

LOOKUP_S = 5.0
"""A resolver that does not answer within this time has failed, whatever it says later."""
LOOK_AGAIN_S = 10.0
"""How often a name is looked up whose peers shake no hands."""


Addresses = Mapping[Endpoint, Endpoint]
"""By endpoint with a name, the same one with its address."""


def as_known(objects: Mapping[str, PlanObject], withdrawn: Collection[str], addresses: Addresses) -> Mapping[str, PlanObject]:
    """`objects` of a plan as this host has to hold them: without the hops through dead tunnels, with the addresses of names."""
    return resolved(without(objects, withdrawn), addresses)


def resolved(objects: Mapping[str, PlanObject], addresses: Addresses) -> Mapping[str, PlanObject]:
    """`objects` of a plan, with addresses in place of names; a peer whose name has none yet is left to find us."""
    named = {key: item for key, item in objects.items() if isinstance(item, WireguardPeer) and item.endpoint and item.endpoint.name}
    if not named:
        return objects
    return {**objects, **{key: replace(item, endpoint=addresses.get(item.endpoint)) for key, item in named.items() if item.endpoint}}


class Names:
    """What is known of the names of a plan. `wait_s` says how long to wait after so many failures in a row; times are of one clock."""

    def __init__(self, wait_s: Callable[[int], float]) -> None:
        self._wait_s = wait_s
        self._addresses: dict[Endpoint, Endpoint | None] = {}
        self._due_s: dict[str, float] = {}
        self._failures: dict[str, int] = {}
        self._reasons: dict[str, str] = {}

    def watch(self, endpoints: Iterable[Endpoint]) -> None:
        """Know these names from now on, and forget all others."""
        self._addresses = {endpoint: self._addresses.get(endpoint) for endpoint in endpoints if endpoint.name}
        names = {endpoint.name for endpoint in self._addresses}
        for known in (self._due_s, self._failures, self._reasons):
            for name in known.keys() - names:
                del known[name]

    def due(self, now_s: float, stale: Collection[Endpoint]) -> list[str]:
        """The names to look up now. `stale` are the endpoints whose peers have no fresh handshake."""
        wanted = {endpoint.name for endpoint, address in self._addresses.items() if address is None or endpoint in stale}
        return sorted(name for name in wanted if name is not None and self._due_s.get(name, now_s) <= now_s)

    def next_s(self) -> float | None:
        """When the next name without an address is to be looked up; None for none."""
        lacking = {endpoint.name for endpoint, address in self._addresses.items() if address is None}
        return min((self._due_s.get(name, 0.0) for name in lacking if name), default=None)

    def found(self, name: str, answers: Sequence[Address], now_s: float, stale: Collection[Endpoint]) -> bool:
        """Take what a resolver says, the address that it likes best first; whether that changes anything. Of several a known one stays."""
        self._failures.pop(name, None)
        self._reasons.pop(name, None)
        self._due_s[name] = now_s + LOOK_AGAIN_S
        before = dict(self._addresses)
        for endpoint, old in self._addresses.items():
            is_changed = old is not None and old.address not in answers
            if endpoint.name == name and (old is None or (is_changed and endpoint in stale)):
                self._addresses[endpoint] = Endpoint.at(answers[0], endpoint.port)
        return self._addresses != before

    def failed(self, name: str, reason: str, now_s: float) -> None:
        """Note that nothing was found; what was found before stays."""
        self._failures[name] = self._failures.get(name, 0) + 1
        self._reasons[name] = reason
        self._due_s[name] = now_s + self._wait_s(self._failures[name])

    def addresses(self) -> dict[Endpoint, Endpoint]:
        """The address of each endpoint that has one."""
        return {endpoint: address for endpoint, address in self._addresses.items() if address is not None}

    def waiting(self) -> dict[str, str]:
        """The names that have no address yet, each with the reason; empty before the first answer."""
        lacking = {endpoint.name for endpoint, address in self._addresses.items() if address is None}
        return {name: self._reasons.get(name, "") for name in sorted(name for name in lacking if name)}


async def addresses_of(name: str) -> list[Address]:
    """What the host's resolver says of a name, best first (RFC 6724: what the host has a way to). OSError when it says nothing in time.

    In a thread that nobody waits for: a resolver cannot be interrupted, and neither a turn nor the end of the process may hang on it.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[list[Address]] = loop.create_future()

    def deliver(found: list[Address] | OSError) -> None:
        if answer.done():
            return
        if isinstance(found, OSError):
            answer.set_exception(found)
        else:
            answer.set_result(found)

    def ask() -> None:
        found: list[Address] | OSError
        try:
            found = _asked(name)
        except OSError as error:
            found = error
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(deliver, found)

    threading.Thread(target=ask, name=f"lookup {name}", daemon=True).start()
    try:
        async with asyncio.timeout(LOOKUP_S):
            return await answer
    except TimeoutError as error:
        msg = f"no answer within {LOOKUP_S:g} s"
        raise OSError(msg) from error


def _asked(name: str) -> list[Address]:
    try:
        answers = socket.getaddrinfo(name, None, type=socket.SOCK_DGRAM, flags=socket.AI_ADDRCONFIG)
    except UnicodeError as error:
        raise OSError(str(error)) from error
    found: dict[Address, None] = {}
    for *_, place in answers:
        with contextlib.suppress(ValueError):  # one with a zone, which means something on one link only
            found[Address.parse(place[0])] = None
    if not found:
        msg = "no address that packets can be sent to from here"
        raise OSError(msg)
    return list(found)
