"""Peerings as their ends see each other: with the remaps that they got from pools."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from schemas.allocation import Remaps
from schemas.topology import Cluster, Peering, PeeringEnd, Topology


def filled_in(item: Peering, remaps: Remaps, objects: Mapping[str, Topology]) -> Peering:
    """The peering with its remaps from pools as if its ends had given them. `objects` are by reference."""
    first, second = item.ends
    return replace(item, ends=(_end(first, second, remaps, objects), _end(second, first, remaps, objects)))


def _end(end: PeeringEnd, far: PeeringEnd, remaps: Remaps, objects: Mapping[str, Topology]) -> PeeringEnd:
    cluster = objects.get(f"Cluster/{far.cluster}/{far.cluster}")
    if not isinstance(cluster, Cluster):
        return end
    pods, external = (
        tuple(remaps.seen(end.cluster, real) or real for real in reals) for reals in (cluster.pod_prefixes, cluster.external_prefixes)
    )
    # What is seen as it is stays unsaid.
    return replace(
        end,
        remap_pods=end.remap_pods or (pods if pods != cluster.pod_prefixes else ()),
        remap_external=end.remap_external or (external if external != cluster.external_prefixes else ()),
    )
