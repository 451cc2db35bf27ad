"""What a pod's packet to another pod must look like on arrival, computed from the topology alone.

Between two clusters, the client dials the server as the client's end of the peering sees it; the server sees the client as the
server's end sees it, and itself under its real address. This is the lab's own reading of the contract, independent of the planner.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from schemas.topology import Cluster, Node, Peering, PeeringEnd, Pod, Topology
from schemas.values import IPV4, Address, Family, Name, Prefix


class Walk(Struct, frozen=True):
    """The address that the client dials, and the two that the server must see."""

    dial: Address
    seen_source: Address
    seen_destination: Address


def expected(topology: Iterable[Topology], client: Pod, server: Pod, family: Family = IPV4) -> Walk | None:
    """How packets of a family from `client` reach `server`, by the first address of each; None when there is no way."""
    source, destination = (next((item for item in pod.addresses if item.family == family), None) for pod in (client, server))
    if source is None or destination is None:
        return None
    items = list(topology)
    if client.cluster == server.cluster:
        is_joined = client.node == server.node or _has_underlay(items, client.cluster, family)
        return Walk(destination, source, destination) if is_joined else None
    clusters = {item.name: item for item in items if isinstance(item, Cluster)}
    peerings = sorted((item for item in items if isinstance(item, Peering)), key=lambda item: item.ref)
    for peering in peerings:
        ends = {end.cluster: end for end in peering.ends}
        if ends.keys() == {client.cluster, server.cluster} and all(family in clusters[name].families for name in ends):
            dial = _seen(ends[client.cluster], clusters[server.cluster], destination)
            seen_source = _seen(ends[server.cluster], clusters[client.cluster], source)
            return Walk(dial, seen_source, destination)
    return None


def _has_underlay(items: Iterable[Topology], cluster: Name, family: Family) -> bool:
    """Whether a cluster's nodes can send each other packets of a family as they are."""
    nodes = [item for item in items if isinstance(item, Node) and item.cluster == cluster]
    return all(any(address.family == family for address in node.addresses) for node in nodes)


def _seen(end: PeeringEnd, other: Cluster, address: Address) -> Address:
    """A pod's address of the `other` cluster as this end sees it; an address outside its pod prefixes is seen as it is."""
    remaps: tuple[Prefix, ...] = end.remap_pods or other.pod_prefixes
    for real, seen in zip(other.pod_prefixes, remaps, strict=True):
        if real.covers(address):
            return real.translate(address, seen)
    return address
