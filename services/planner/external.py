"""The external prefixes of a cluster: which of their addresses its nodes have as senders, and which are left for mappings. Pure.

Of each family the first external prefix that has an address for every host number is the one for `sources`, else the first. Its first
address stands for all nodes, the address with a node's number for that node; neither is ever given to a mapping.
"""

from __future__ import annotations

from schemas.topology import Cluster
from schemas.values import Address, Family, Prefix
from services.planner.layout import HOST_NUMBER_MAX


def has_room(prefix: Prefix) -> bool:
    """Whether there is an address for every number that a host can have."""
    return prefix.size > HOST_NUMBER_MAX


def sources_prefix(cluster: Cluster, family: Family) -> Prefix | None:
    """The external prefix whose first addresses are the nodes' as senders; None where the cluster has none of the family."""
    known = [prefix for prefix in cluster.external_prefixes if prefix.family == family]
    return next(filter(has_room, known), next(iter(known), None))


def shared_source(cluster: Cluster, family: Family) -> Address | None:
    """The one address that may stand for all nodes."""
    prefix = sources_prefix(cluster, family)
    return prefix.address(0) if prefix is not None else None


def node_source(cluster: Cluster, number: int, family: Family) -> Address | None:
    """The address that stands for the node with this number alone; None where there is no room for such addresses."""
    prefix = sources_prefix(cluster, family)
    return prefix.address(number) if prefix is not None and has_room(prefix) else None


def is_per_node(cluster: Cluster, family: Family) -> bool:
    """Whether a node's traffic gets an address of the node's own, rather than the shared one."""
    prefix = sources_prefix(cluster, family)
    return cluster.sources != "shared" and prefix is not None and has_room(prefix)


def is_for_sources(cluster: Cluster, address: Address) -> bool:
    """Whether an address may be one that nodes have as senders, whatever `sources` says now."""
    prefix = sources_prefix(cluster, address.family)
    if prefix is None or not prefix.covers(address):
        return False
    return prefix.place(address) <= (HOST_NUMBER_MAX if has_room(prefix) else 0)


def mapping_numbers(prefix: Prefix) -> range:
    """Places in an external prefix that may be chosen for mappings: its upper half, without its last and what it may ever keep."""
    kept = HOST_NUMBER_MAX + 1 if has_room(prefix) else 1
    return range(max(prefix.size // 2, kept), prefix.size - 1)
