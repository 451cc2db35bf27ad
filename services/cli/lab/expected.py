"""What a pod's packet to another pod must look like on arrival, computed from the topology alone.

Between two clusters, the client dials the server as the client's end of the peering sees it; the server sees the client as the
server's end sees it, and itself under its real address. This is the lab's own reading of the contract, independent of the planner.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec import Struct

from schemas.topology import Cluster, Node, Peering, PeeringEnd, Pod, Topology
from schemas.values import IPV4, Address, Family, Name, Prefix


class Walk(Struct, frozen=True):
    """The address that the client dials, and the two that the server must see. Other sources that are as right are in `or_source`."""

    dial: Address
    seen_source: Address
    seen_destination: Address
    or_source: tuple[Address, ...] = ()

    def fits(self, source: str, destination: str) -> bool:
        """Whether the server saw what it must see."""
        return source in (self.seen_source, *self.or_source) and destination == self.seen_destination


def expected(topology: Iterable[Topology], client: Pod, server: Pod, family: Family = IPV4) -> Walk | None:
    """How packets of a family from `client` reach `server`, by the first address of each; None when there is no way."""
    source, destination = (next((item for item in pod.addresses if item.family == family), None) for pod in (client, server))
    if source is None or destination is None:
        return None
    items = list(topology)
    if client.cluster == server.cluster:
        is_joined = client.node == server.node or _has_way(items, client, server, family)
        return Walk(destination, source, destination) if is_joined else None
    between = joined(items, client.cluster, server.cluster, family)
    return Walk(between.dial(destination), between.source(source), destination) if between is not None else None


class Between(Struct, frozen=True):
    """A peering as packets from one cluster to the other pass it."""

    here: Cluster
    there: Cluster
    near: PeeringEnd
    far: PeeringEnd

    def dial(self, address: Address) -> Address:
        """What to dial here for an address of the cluster there."""
        return _seen(self.near, self.there, address)

    def source(self, address: Address) -> Address:
        """As what an address of the cluster here arrives there."""
        return _seen(self.far, self.here, address)

    def original(self, address: Address) -> Address | None:
        """What the cluster there calls an address that is dialled here; None when it is none of its own."""
        for real, seen in _pairs(self.near, self.there):
            if seen.covers(address):
                return seen.translate(address, real)
        return None


def joined(topology: Iterable[Topology], here: str, there: str, family: Family) -> Between | None:
    """The first peering that carries a family between two clusters."""
    items = list(topology)
    clusters = {item.name: item for item in items if isinstance(item, Cluster)}
    for peering in sorted((item for item in items if isinstance(item, Peering)), key=lambda item: item.ref):
        ends = {end.cluster: end for end in peering.ends}
        if ends.keys() == {here, there} and all(family in clusters[name].families for name in ends):
            return Between(clusters[Name(here)], clusters[Name(there)], ends[Name(here)], ends[Name(there)])
    return None


def _has_way(items: Iterable[Topology], client: Pod, server: Pod, family: Family) -> bool:
    """Whether packets of a family get from one pod's node to the other's: by an overlay, encrypted, or as they are."""
    home = [item for item in items if item.home == client.cluster]
    nodes = [item for item in home if isinstance(item, Node)]
    cluster = next((item for item in home if isinstance(item, Cluster)), None)
    if cluster is not None and cluster.routing == "overlay":
        return True
    opted_out = {node.name for node in nodes if node.opt_out}
    if cluster is not None and cluster.encryption == "wireguard" and not opted_out & {client.node, server.node}:
        return True
    return all(any(address.family == family for address in node.addresses) for node in nodes)


def _seen(end: PeeringEnd, other: Cluster, address: Address) -> Address:
    """An address of the `other` cluster as this end sees it; one outside its pod and external prefixes is seen as it is."""
    for real, seen in _pairs(end, other):
        if real.covers(address):
            return real.translate(address, seen)
    return address


def _pairs(end: PeeringEnd, other: Cluster) -> Iterator[tuple[Prefix, Prefix]]:
    """The other cluster's prefixes, and what this end calls them."""
    yield from zip(other.pod_prefixes, end.remap_pods or other.pod_prefixes, strict=True)
    yield from zip(other.external_prefixes, end.remap_external or other.external_prefixes, strict=True)
