"""The admitted topology, indexed for the questions that admission and compilation ask."""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, TypeVar

from schemas.allocation import Remaps, Rotation
from schemas.in_use import InUse
from schemas.objects import PassThrough
from schemas.topology import Cluster, EgressPolicy, Gateway, IpMapping, Node, Peering, PeeringEnd, Pod, PublicKey, Topology
from schemas.values import Address, Prefix
from services.planner.names import overlay_link
from services.planner.ring import Ring


class HostId(NamedTuple):
    """A host: the cluster's name and the node's or gateway's."""

    cluster: str
    name: str

    def __str__(self) -> str:
        return f"{self.cluster}/{self.name}"


_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

PeeringId = tuple[str, str]
"""A peering's cluster and name."""


class Attachment(NamedTuple):
    """A gateway's place in its peering: which end it is (0 or 1), that end and the other one."""

    peering: Peering
    place: int

    @property
    def end(self) -> PeeringEnd:
        return self.peering.ends[self.place]

    @property
    def far(self) -> PeeringEnd:
        return self.peering.ends[1 - self.place]

    @property
    def host(self) -> HostId:
        return HostId(self.end.cluster, self.end.gateway)

    @property
    def far_host(self) -> HostId:
        return HostId(self.far.cluster, self.far.gateway)


class Mappings:
    """The mappings of a cluster: by name, by real address, and by the external address that was given."""

    def __init__(self) -> None:
        self.by_name: dict[str, IpMapping] = {}
        self.by_real: dict[Address, IpMapping] = {}
        self.by_external: dict[Address, IpMapping] = {}
        self.by_leader: dict[str, list[IpMapping]] | None = None
        """What each node leads to (``mappings.led_by``); None when that is to be found anew."""

    def __iter__(self) -> Iterator[IpMapping]:
        return iter(self.by_name.values())

    def put(self, item: IpMapping) -> None:
        self.by_name[item.name] = self.by_real[item.real] = item
        if item.external is not None:
            self.by_external[item.external] = item

    def remove(self, item: IpMapping) -> None:
        del self.by_name[item.name]
        _forget(self.by_real, item.real, item)
        if item.external is not None:
            _forget(self.by_external, item.external, item)


def _forget(index: dict[_Key, _Value], key: _Key, value: _Value) -> None:
    """Drop an entry that still says `value`: of objects that change places, the one that came first may have it by now."""
    if index.get(key) == value:
        del index[key]


class State:
    """Admitted objects by reference (``Kind/cluster/name``). `put` and `remove` keep the indexes right.

    `remaps` are those that peerings got from pools, `rotations` how far nodes' changes of keys are: the allocations' own, which write them
    (``Allocations.remaps``, ``Allocations.rotations``).
    """

    def __init__(
        self,
        objects: Iterable[Topology] = (),
        remaps: dict[PeeringId, Remaps] | None = None,
        rotations: Mapping[HostId, Rotation] | None = None,
    ) -> None:
        self.remaps: dict[PeeringId, Remaps] = {} if remaps is None else remaps
        self.rotations: Mapping[HostId, Rotation] = {} if rotations is None else rotations
        self.in_use: dict[HostId, InUse] = {}
        """What hosts report as used by others, of those that report anything: for what is to be admitted, and of no plan's making."""
        self.objects: dict[str, Topology] = {}
        self.clusters: dict[str, Cluster] = {}
        self.peerings: dict[str, Peering] = {}
        self.nodes: dict[str, dict[str, Node]] = defaultdict(dict)
        self.gateways: dict[str, dict[str, Gateway]] = defaultdict(dict)
        self.pods: dict[str, dict[str, Pod]] = defaultdict(dict)
        self.pods_by_node: dict[HostId, set[str]] = defaultdict(set)
        self.keys: dict[HostId, PublicKey] = {}
        self.changing: dict[str, set[str]] = defaultdict(set)
        """By cluster, the hosts that have said which key is to follow theirs."""
        self.attachments: dict[str, dict[str, Attachment]] = defaultdict(dict)
        self.mappings: dict[str, Mappings] = defaultdict(Mappings)
        self.egress: dict[str, dict[str, EgressPolicy]] = defaultdict(dict)
        """By cluster and name."""
        self.rings: dict[str, Ring] = defaultdict(Ring)
        """The nodes of each cluster, for choices that few changes touch."""
        self.passing: dict[str, dict[str, PassThrough]] = defaultdict(dict)
        """Pass-through objects by cluster and reference."""
        self._addresses: dict[tuple[str, Address], str] = {}
        self._hosts_by_address: dict[tuple[str, Address], Node | Gateway] = {}
        self._hosts_by_link: dict[tuple[str, str], Node | Gateway] = {}
        self._counts: Counter[str] = Counter()
        for item in objects:
            self.put(item)

    def put(self, item: Topology) -> None:
        """Add an object, or replace the one with its reference."""
        self.remove(item.ref)
        self.objects[item.ref] = item
        self._counts[item.kind] += 1
        if isinstance(item, Node | Gateway):
            self._hosts_by_address.update({(item.cluster, address): item for address in item.addresses})
            self._hosts_by_link[item.cluster, overlay_link(item.name)] = item
        self._put_choice(item)
        match item:
            case PassThrough():
                self.passing[item.cluster][item.ref] = item
            case Cluster():
                self.clusters[item.name] = item
            case Node():
                self.nodes[item.cluster][item.name] = item
            case Gateway():
                self.gateways[item.cluster][item.name] = item
            case PublicKey():
                self._put_key(item)
            case Peering():
                self.peerings[item.ref] = item
                for index, end in enumerate(item.ends):
                    self.attachments[end.cluster][end.gateway] = Attachment(item, index)
            case Pod():
                self.pods[item.cluster][item.name] = item
                self.pods_by_node[HostId(item.cluster, item.node)].add(item.name)
                self._addresses.update({(item.cluster, address): item.ref for address in item.addresses})

    def remove(self, ref: str) -> Topology | None:
        """Take an object out; returns it, or None when it was not there."""
        item = self.objects.pop(ref, None)
        if item is not None:
            self._counts[item.kind] -= 1
            self.passing[item.home].pop(ref, None)
            self._remove_choice(item)
        match item:
            case Cluster():
                del self.clusters[item.name]
            case Node() | Gateway():
                del (self.nodes if isinstance(item, Node) else self.gateways)[item.cluster][item.name]
                for address in item.addresses:
                    _forget(self._hosts_by_address, (item.cluster, address), item)
                _forget(self._hosts_by_link, (item.cluster, overlay_link(item.name)), item)
            case PublicKey():
                del self.keys[HostId(item.cluster, item.name)]
                self.changing[item.cluster].discard(item.name)
            case Peering():
                del self.peerings[item.ref]
                for index, end in enumerate(item.ends):
                    _forget(self.attachments[end.cluster], end.gateway, Attachment(item, index))
            case Pod():
                del self.pods[item.cluster][item.name]
                self.pods_by_node[HostId(item.cluster, item.node)].discard(item.name)
                for address in item.addresses:
                    _forget(self._addresses, (item.cluster, address), item.ref)
        return item

    def _put_key(self, item: PublicKey) -> None:
        self.keys[HostId(item.cluster, item.name)] = item
        if item.next is not None:
            self.changing[item.cluster].add(item.name)

    def _put_choice(self, item: Topology) -> None:
        """Index mappings and policies, and what is chosen from for them."""
        if isinstance(item, IpMapping):
            self.mappings[item.cluster].put(item)
        elif isinstance(item, EgressPolicy):
            self.egress[item.cluster][item.name] = item
        elif isinstance(item, Node):
            self.rings[item.cluster].add(item.name)
        self._forget_choices(item)

    def _remove_choice(self, item: Topology) -> None:
        if isinstance(item, IpMapping):
            self.mappings[item.cluster].remove(item)
        elif isinstance(item, EgressPolicy):
            del self.egress[item.cluster][item.name]
        elif isinstance(item, Node):
            self.rings[item.cluster].discard(item.name)
        self._forget_choices(item)

    def _forget_choices(self, item: Topology) -> None:
        if isinstance(item, IpMapping | Node | Cluster):
            self.mappings[item.home].by_leader = None

    def copy(self) -> State:
        found = State(self.objects.values(), dict(self.remaps), self.rotations)
        found.in_use = self.in_use
        return found

    def seeing(self, remaps: dict[PeeringId, Remaps]) -> State:
        """The very same objects with other remaps from pools; to be read only."""
        view = copy.copy(self)
        view.remaps = remaps
        return view

    def host(self, host: HostId) -> Node | Gateway | None:
        return self.nodes[host.cluster].get(host.name) or self.gateways[host.cluster].get(host.name)

    def hosts(self) -> Iterator[HostId]:
        """Every node and gateway."""
        for group in (self.nodes, self.gateways):
            for cluster, members in group.items():
                yield from (HostId(cluster, name) for name in members)

    def hosts_of(self, cluster: str) -> Iterator[HostId]:
        yield from (HostId(cluster, name) for name in self.nodes[cluster])
        yield from (HostId(cluster, name) for name in self.gateways[cluster])

    def host_with(self, cluster: str, address: Address) -> Node | Gateway | None:
        """The host that has this underlay address."""
        return self._hosts_by_address.get((cluster, address))

    def host_behind(self, cluster: str, link: str) -> Node | Gateway | None:
        """The host whose overlay link has this name on others."""
        return self._hosts_by_link.get((cluster, link))

    def count(self, kind: str) -> int:
        """How many objects of a kind there are."""
        return self._counts[kind]

    def pod_with(self, cluster: str, address: Address) -> str | None:
        """Reference of the pod that has this address."""
        return self._addresses.get((cluster, address))


class Seen(NamedTuple):
    """How an end sees one of the far cluster's prefixes: the end's field and position there, the `real` prefix and the one it uses.

    `is_given` says that the end gives the remap itself.
    """

    field: str
    position: int
    real: Prefix
    seen: Prefix
    is_given: bool


def seen_fields(state: State, attachment: Attachment) -> Iterator[Seen]:
    """How an end sees the other, pods first, then external: by the remaps that it gives, or that come from pools, or as it really is.

    Prefixes of a family that the end's own cluster does not have are nothing to it. Given remaps pair by index (as far as there are any,
    while admission still asks whether they are as many).
    """
    families, far = state.clusters[attachment.end.cluster].families, state.clusters[attachment.far.cluster]
    end, pooled = attachment.end, state.remaps.get(peering_key(attachment.peering), Remaps())
    for field, given, reals in (
        ("remapPods", end.remap_pods, far.pod_prefixes),
        ("remapExternal", end.remap_external, far.external_prefixes),
    ):
        seen = given or [pooled.seen(end.cluster, real) or real for real in reals]
        for position, (ours, theirs) in enumerate(zip(seen, reals, strict=False)):
            if theirs.family in families:
                yield Seen(field, position, theirs, ours, bool(given))


def seen_prefixes(state: State, attachment: Attachment) -> list[tuple[Prefix, Prefix]]:
    """How an end sees the other: pairs of the prefix it uses and the other cluster's real one, pods first, then external."""
    return [(one.seen, one.real) for one in seen_fields(state, attachment)]


def peering_key(peering: Peering) -> PeeringId:
    """Key of a peering among allocations."""
    return peering.cluster, peering.name
