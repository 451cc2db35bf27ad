"""Numbers that objects get once and keep: host numbers, and how far a peering's tunnels are rolled out.

An allocation is written once, by compare-and-set, and read back after a restart. The number that a host gets first is a hash of
its name, so that the same topology leads to the same numbers in any order of arrival, and on paper (``meshmark plan``) as in the lab;
when that number is taken, it is the next free one.
"""

from __future__ import annotations

import hashlib
from typing import Literal

from msgspec import Struct

from schemas.topology import Gateway, Node, Topology
from services.planner.layout import HOST_NUMBER_MAX
from services.planner.state import Attachment, HostId, State

NUMBER: Literal["number"] = "number"
TUNNELS: Literal["tunnels"] = "tunnels"


class Number(Struct, frozen=True):
    """A host's number in its cluster, 1 to 4094: the host part of its overlay address in each family."""

    number: int


class Rollout(Struct, frozen=True):
    """How far a peering's tunnels are rolled out, counted from tunnel 0.

    `present` of them have a device at the first end, `joined` at the second end too, `used` carry traffic. A tunnel carries traffic only
    while both ends have its device. The ends take turns because two WireGuard devices that greet each other at once both discard the
    other's answer, and try again only after five seconds.
    """

    present: int
    joined: int
    used: int

    def devices(self, place: int) -> int:
        """How many tunnels have a device at the first (0) or the second end (1)."""
        return (self.present, self.joined)[place]

    @classmethod
    def complete(cls, tunnels: int) -> Rollout:
        return cls(tunnels, tunnels, tunnels)


NOTHING = Rollout.complete(0)


class Exhausted(ValueError):
    """No number is free; the text names the prefix that is too small."""


class Allocations:
    """All allocations, and which of them are to be written (``take_changes``); one that is gone is written as nothing."""

    def __init__(self) -> None:
        self.numbers: dict[HostId, Number] = {}
        self.rollouts: dict[tuple[str, str], Rollout] = {}
        self._owner: dict[tuple[str, int], HostId] = {}
        self._changed: set[tuple[str, str, str]] = set()

    def put_number(self, host: HostId, value: Number) -> None:
        """Take over an allocation that was read back."""
        self.numbers[host] = value
        self._owner[host.cluster, value.number] = host

    def number(self, host: HostId) -> int:
        """The number of a host that has one; KeyError otherwise."""
        return self.numbers[host].number

    def rollout(self, peering: tuple[str, str]) -> Rollout:
        return self.rollouts.get(peering, NOTHING)

    def set_rollout(self, peering: tuple[str, str], value: Rollout) -> None:
        if self.rollouts.get(peering) != value:
            self.rollouts[peering] = value
            self._changed.add((TUNNELS, *peering))

    def allocate(self, state: State, item: Topology) -> None:
        """Give `item` what it needs and does not have yet. `state` already holds it."""
        if not isinstance(item, Node | Gateway):
            return
        host = HostId(item.cluster, item.name)
        if host not in self.numbers or self.number(host) > _room(state, host.cluster):
            number = self._free_number(state, host)
            self._release(host)
            self.put_number(host, Number(number))
            self._changed.add((NUMBER, *host))

    def take_changes(self) -> list[tuple[str, str, str]]:
        """What is to be written since the last call: (what, cluster, name), sorted."""
        found, self._changed = sorted(self._changed), set()
        return found

    def _free_number(self, state: State, host: HostId) -> int:
        room = _room(state, host.cluster)
        first = int.from_bytes(hashlib.blake2b(host.name.encode(), digest_size=8).digest(), "big") % room
        candidates = [(first + step) % room + 1 for step in range(room)]
        for number in candidates:
            if (host.cluster, number) not in self._owner:
                return number
        for number in candidates:
            if state.host(self._owner[host.cluster, number]) is None:
                self._release(self._owner[host.cluster, number])
                return number
        smallest = min(state.clusters[host.cluster].internal_prefixes, key=lambda prefix: prefix.size)
        msg = f"the internal prefix {smallest} has no room for another host ({room} in use)"
        raise Exhausted(msg)

    def _release(self, host: HostId) -> None:
        """Forget a host's number; that it has none any more is written like any other change."""
        value = self.numbers.pop(host, None)
        if value is not None:
            self._owner.pop((host.cluster, value.number), None)
            self._changed.add((NUMBER, *host))


def _room(state: State, cluster: str) -> int:
    """The highest host number that each of the cluster's internal prefixes has an address for."""
    return min(HOST_NUMBER_MAX, *(prefix.size - 2 for prefix in state.clusters[cluster].internal_prefixes))


def advance(current: Rollout, wanted: int, *, first_holds: bool, both_hold: bool) -> Rollout:
    """The next step of a rollout towards `wanted` tunnels.

    `first_holds` says that the first end holds what the current step wants, `both_hold` that both do, with each other's keys. Growing,
    devices come at the first end, then at the second, then routes at both; shrinking, routes go at both ends, then devices. From any state,
    repeated calls with both true end at ``Rollout.complete(wanted)``.
    """
    present, joined, used = current.present, current.joined, current.used
    if wanted < used:
        return Rollout(present, joined, wanted)
    if wanted > present:
        return Rollout(wanted, joined, used)
    if wanted > joined:
        return Rollout(present, wanted, used) if first_holds else current
    if not both_hold:
        return current
    return Rollout(present, joined, wanted) if wanted > used else Rollout.complete(wanted)


def peering_id(attachment: Attachment) -> tuple[str, str]:
    """Key of a peering among the rollouts: its cluster and name."""
    return attachment.peering.cluster, attachment.peering.name
