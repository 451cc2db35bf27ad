"""What a pod's packet to another pod must look like on arrival, computed from the topology alone.

Between two clusters, the client dials the server as the client's end of the peering sees it; the server sees the client as the
server's end sees it, and itself under its real address. This is the lab's own reading of the contract, independent of the planner.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from schemas.topology import Cluster, Peering, PeeringEnd, Pod, Topology
from schemas.values import Address, Prefix


class Walk(Struct, frozen=True):
    """The address that the client dials, and the two that the server must see."""

    dial: Address
    seen_source: Address
    seen_destination: Address


def expected(topology: Iterable[Topology], client: Pod, server: Pod) -> Walk | None:
    """How packets from `client` reach `server`, by the first address of each; None when their clusters have no peering."""
    source, destination = client.addresses[0], server.addresses[0]
    if client.cluster == server.cluster:
        return Walk(destination, source, destination)
    items = list(topology)
    clusters = {item.name: item for item in items if isinstance(item, Cluster)}
    peerings = sorted((item for item in items if isinstance(item, Peering)), key=lambda item: item.ref)
    for peering in peerings:
        ends = {end.cluster: end for end in peering.ends}
        if ends.keys() == {client.cluster, server.cluster}:
            dial = _seen(ends[client.cluster], clusters[server.cluster], destination)
            seen_source = _seen(ends[server.cluster], clusters[client.cluster], source)
            return Walk(dial, seen_source, destination)
    return None


def _seen(end: PeeringEnd, other: Cluster, address: Address) -> Address:
    """A pod's address of the `other` cluster as this end sees it; an address outside its pod prefixes is seen as it is."""
    remaps: tuple[Prefix, ...] = end.remap_pods or other.pod_prefixes
    for real, seen in zip(other.pod_prefixes, remaps, strict=True):
        if real.covers(address):
            return real.translate(address, seen)
    return address
