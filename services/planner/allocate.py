"""What objects get once and keep: host numbers, remaps from pools, external addresses of mappings, how far tunnels and keys are.

An allocation is written once, by compare-and-set, and read back after a restart. The number that a host gets first is a hash of
its name, so that the same topology leads to the same numbers in any order of arrival, and on paper (``meshmark plan``) as in the lab;
when that number is taken, it is the next free one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from msgspec import Struct

from schemas import codec
from schemas.allocation import Remaps, Rotation
from schemas.topology import Cluster, EgressPolicy, Gateway, IpMapping, Node, Peering, Topology
from schemas.values import Address, Prefix
from services.planner.egress import SLOT, WAY, Slot, Way, exits, known, room
from services.planner.external import is_for_sources, mapping_numbers
from services.planner.layout import HOST_NUMBER_MAX
from services.planner.remaps import Exhausted, choose, contradicted, recovered
from services.planner.rotation import ROTATION, is_under_way
from services.planner.state import Attachment, HostId, PeeringId, State, peering_key

NUMBER: Literal["number"] = "number"
TUNNELS: Literal["tunnels"] = "tunnels"
REMAPS: Literal["remaps"] = "remaps"
EXTERNAL: Literal["external"] = "external"
_PROBES_MAX = 4096
"""So many addresses are tried for a mapping in one external prefix."""


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


class External(Struct, frozen=True):
    """The external address of a mapping that was given none."""

    address: Address


class Allocations:
    """All allocations, and which of them are to be written (``take_changes``); one that is gone is written as nothing.

    A state that they are made for is one with their `remaps`: ``State(objects, allocations.remaps)``.
    """

    def __init__(self) -> None:
        self.numbers: dict[HostId, Number] = {}
        self.rollouts: dict[PeeringId, Rollout] = {}
        self.remaps: dict[PeeringId, Remaps] = {}
        self.externals: dict[tuple[str, str], External] = {}
        """By cluster and name of the mapping."""
        self.rotations: dict[HostId, Rotation] = {}
        self.turning: dict[str, HostId] = {}
        """By cluster the node, and by reference of a peering the gateway, whose change of keys is under way."""
        self.slots: dict[HostId, Slot] = {}
        self.ways: dict[tuple[str, str], Way] = {}
        """By cluster and name of the policy."""
        self._owner: dict[tuple[str, int], HostId] = {}
        self._mapping_with: dict[tuple[str, Address], str] = {}
        self._changed: set[tuple[str, str, str]] = set()

    def put_number(self, host: HostId, value: Number) -> None:
        """Take over an allocation that was read back."""
        self.numbers[host] = value
        self._owner[host.cluster, value.number] = host

    def put_external(self, mapping: tuple[str, str], value: External) -> None:
        """The same for a mapping's external address."""
        self.externals[mapping] = value
        self._mapping_with[mapping[0], value.address] = mapping[1]

    def external(self, item: IpMapping) -> Address:
        """The external address of a mapping, given or chosen; KeyError when it has none yet."""
        return item.external or self.externals[item.cluster, item.name].address

    def number(self, host: HostId) -> int:
        """The number of a host that has one; KeyError otherwise."""
        return self.numbers[host].number

    def slot(self, host: HostId) -> int:
        """The slot of a node through which pods leave; KeyError where it has none."""
        return self.slots[host].slot

    def way(self, state: State, item: EgressPolicy) -> Way:
        """How far a policy has moved towards its node."""
        return known(self.ways.get((item.cluster, item.name)), item, state)

    def set_way(self, policy: tuple[str, str], value: Way | None) -> None:
        """Note a step of a policy, or (None) that it is gone."""
        if self.ways.get(policy) != value:
            if value is None:
                del self.ways[policy]
            else:
                self.ways[policy] = value
            self._changed.add((WAY, *policy))

    def settle_ways(self, state: State, cluster: str) -> None:
        """Forget nodes that are gone as steps of a cluster's policies: one of the same name that comes later is another one."""
        for item in state.egress[cluster].values():
            if (item.cluster, item.name) in self.ways:
                self.set_way((item.cluster, item.name), self.way(state, item))

    def rollout(self, peering: tuple[str, str]) -> Rollout:
        return self.rollouts.get(peering, NOTHING)

    def set_rollout(self, peering: tuple[str, str], value: Rollout) -> None:
        if self.rollouts.get(peering) != value:
            self.rollouts[peering] = value
            self._changed.add((TUNNELS, *peering))

    def put_rotation(self, host: HostId, value: Rotation) -> None:
        """Take over how far a host's change of keys was."""
        self.rotations[host] = value
        if is_under_way(value):
            self.turning[value.peering or host.cluster] = host

    def set_rotation(self, host: HostId, value: Rotation | None) -> None:
        """Note how far a host's change of keys is; None for a host that never made one."""
        before = self.rotations.get(host)
        if before == value:
            return
        if before is not None and self.turning.get(ring := before.peering or host.cluster) == host:
            del self.turning[ring]
        if value is not None:
            self.put_rotation(host, value)
        else:
            del self.rotations[host]
        self._changed.add((ROTATION, *host))

    def allocate(self, state: State, items: Iterable[Topology]) -> None:
        """Give `items` what they need and do not have yet, and forget what they need and is merely kept.

        `state` already holds those that are there; the others are gone, or are what was there before.
        """
        concerned = [item for item in items if isinstance(item, Cluster | Node | Gateway | Peering | IpMapping | EgressPolicy)]
        for item in concerned:
            if state.objects.get(item.ref) is not item:
                continue
            match item:
                case Node() | Gateway():
                    self._number(state, HostId(item.cluster, item.name))
                case Peering():
                    self._remap(state, item)
                case IpMapping():
                    self._allocate_external(state, item)
                case EgressPolicy():
                    self._let_out(state, item)
                case Cluster():
                    self._suit(state, item)
        for key, remap in contradicted(state, [item for item in concerned if not isinstance(item, IpMapping | EgressPolicy)]):
            self._set_remaps(key, Remaps(tuple(one for one in self.remaps[key].remaps if one != remap)))

    def _suit(self, state: State, cluster: Cluster) -> None:
        """Give what is in a cluster, or joined with it, what it needs now."""
        for policy in state.egress[cluster.name].values():
            self._let_out(state, policy)
        joined = {attachment.peering.ref for attachment in state.attachments[cluster.name].values()}
        for ref in sorted(joined):
            self._remap(state, state.peerings[ref])

    def _number(self, state: State, host: HostId) -> None:
        if host not in self.numbers or self.number(host) > _room(state, host.cluster):
            number = self._free_number(state, host)
            self._release(host)
            self.put_number(host, Number(number))
            self._changed.add((NUMBER, *host))

    def _remap(self, state: State, peering: Peering) -> None:
        if all(end.cluster in state.clusters for end in peering.ends):
            self._set_remaps(peering_key(peering), choose(state, peering))

    def _set_remaps(self, key: PeeringId, value: Remaps) -> None:
        if self.remaps.get(key, Remaps()) != value:
            if value.remaps:
                self.remaps[key] = value
            else:
                del self.remaps[key]
            self._changed.add((REMAPS, *key))

    def recover(self, state: State, peering: Peering, held: Sequence[Mapping[Prefix, Prefix]]) -> None:
        """Take over the remaps that published plans were made with, where none are known. `held` is by end: seen by real prefix."""
        if peering_key(peering) not in self.remaps:
            self._set_remaps(peering_key(peering), recovered(state, peering, held))

    def value(self, what: str, cluster: str, name: str) -> Number | External | Remaps | Rollout | Rotation | Slot | Way | None:
        """What is to be written for a change; None for what is gone."""
        if what == NUMBER:
            return self.numbers.get(HostId(cluster, name))
        if what == SLOT:
            return self.slots.get(HostId(cluster, name))
        if what == WAY:
            return self.ways.get((cluster, name))
        if what == REMAPS:
            return self.remaps.get((cluster, name))
        if what == ROTATION:
            return self.rotations.get(HostId(cluster, name))
        return self.externals.get((cluster, name)) if what == EXTERNAL else self.rollouts[cluster, name]

    def restore(self, what: str, cluster: str, name: str, payload: bytes) -> None:
        """Take over what was written."""
        if what == NUMBER:
            self.put_number(HostId(cluster, name), codec.decode(payload, Number))
        elif what == REMAPS:
            self.remaps[cluster, name] = codec.decode(payload, Remaps)
        elif what == ROTATION:
            self.put_rotation(HostId(cluster, name), codec.decode(payload, Rotation))
        elif what == SLOT:
            self.slots[HostId(cluster, name)] = codec.decode(payload, Slot)
        elif what == WAY:
            self.ways[cluster, name] = codec.decode(payload, Way)
        elif what == EXTERNAL:
            self.put_external((cluster, name), codec.decode(payload, External))
        else:
            self.rollouts[cluster, name] = codec.decode(payload, Rollout)

    def take_changes(self) -> list[tuple[str, str, str]]:
        """What is to be written since the last call: (what, cluster, name), sorted."""
        found, self._changed = sorted(self._changed), set()
        return found

    def _let_out(self, state: State, item: EgressPolicy) -> None:
        """A policy's nodes need slots; its first one is that through which its pods leave from the start."""
        for name in sorted(exits(self.way(state, item), item)):
            self._slot(state, HostId(item.cluster, name))
        key = (item.cluster, item.name)
        if key not in self.ways:
            self.set_way(key, Way(item.node))

    def _slot(self, state: State, host: HostId) -> None:
        limit = room(state.clusters[host.cluster].marks)
        if host in self.slots and self.slot(host) <= limit:
            return
        taken = {value.slot: owner for owner, value in self.slots.items() if owner.cluster == host.cluster and owner != host}
        free = next((slot for slot in range(1, limit + 1) if slot not in taken), None)
        if free is None:
            used = {
                HostId(host.cluster, name) for item in state.egress[host.cluster].values() for name in exits(self.way(state, item), item)
            }
            free = next((slot for slot, owner in sorted(taken.items()) if slot <= limit and owner not in used), None)
        if free is None:
            msg = f"the cluster's `marks` tell at most {max(limit, 0)} nodes apart through which pods leave; give a wider mask"
            raise Exhausted(msg, "$.node", f"Cluster/{host.cluster}/{host.cluster}")
        if (owner := taken.get(free)) is not None:
            del self.slots[owner]
            self._changed.add((SLOT, *owner))
        self.slots[host] = Slot(free)
        self._changed.add((SLOT, *host))

    def _allocate_external(self, state: State, item: IpMapping) -> None:
        held = self.externals.get((item.cluster, item.name))
        if item.external is not None:
            self._take_external(state, item, item.external)
        elif held is None or not _suits(state.clusters[item.cluster], item, held.address):
            address = self._free_external(state, item)
            self._release_external(item.cluster, item.name)
            self.put_external((item.cluster, item.name), External(address))
            self._changed.add((EXTERNAL, item.cluster, item.name))

    def _take_external(self, state: State, item: IpMapping, address: Address) -> None:
        """A given address must not be one that another mapping was given to keep."""
        keeper = self._mapping_with.get((item.cluster, address))
        if keeper is not None and keeper != item.name and _keeps(state, item.cluster, keeper):
            other = state.mappings[item.cluster].by_name[keeper].ref
            msg = f"{address} was chosen for {other}; give another one"
            raise Exhausted(msg, "$.external", other)
        for name in filter(None, (keeper, item.name)):
            self._release_external(item.cluster, name)

    def _free_external(self, state: State, item: IpMapping) -> Address:
        cluster = state.clusters[item.cluster]
        given = {other.external for other in state.mappings[item.cluster] if other.external is not None}
        first = int.from_bytes(hashlib.blake2b(item.name.encode(), digest_size=16).digest(), "big")
        for prefix in cluster.external_prefixes:
            numbers = mapping_numbers(prefix) if prefix.family == item.real.family else range(0)
            size = numbers.stop - numbers.start
            for step in range(min(size, _PROBES_MAX)):
                address = prefix.address(numbers.start + (first + step) % size)
                keeper = self._mapping_with.get((item.cluster, address), item.name)
                if address not in given and (keeper == item.name or not _keeps(state, item.cluster, keeper)):
                    self._release_external(item.cluster, keeper)
                    return address
        msg = f"no external prefix of {cluster.ref} has an IPv{item.real.family} address free for it; add one, or give an `external`"
        raise Exhausted(msg, "$.external", cluster.ref)

    def _release_external(self, cluster: str, name: str) -> None:
        value = self.externals.pop((cluster, name), None)
        if value is not None:
            self._mapping_with.pop((cluster, value.address), None)
            self._changed.add((EXTERNAL, cluster, name))

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


def _keeps(state: State, cluster: str, name: str) -> bool:
    """Whether a mapping is there and was given no address, so that it keeps the chosen one."""
    item = state.mappings[cluster].by_name.get(name)
    return item is not None and item.external is None


def _suits(cluster: Cluster, item: IpMapping, address: Address) -> bool:
    inside = any(prefix.covers(address) for prefix in cluster.external_prefixes)
    return address.family == item.real.family and inside and not is_for_sources(cluster, address)


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


def peering_id(attachment: Attachment) -> PeeringId:
    """Key of a peering among allocations: its cluster and name."""
    return peering_key(attachment.peering)
