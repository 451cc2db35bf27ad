"""The mesh of a cluster's nodes: who encrypts, where others find it, by which addresses it speaks, and how much room is left. Pure.

What goes between two nodes' pods is encrypted when both encrypt and both public keys are known; a node that opted out, and one without a
key, is spoken to in clear.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from schemas.topology import Cluster, Node, Pod
from schemas.values import FAMILIES, Address, Endpoint, Family, Mac
from services.planner import layout
from services.planner.families import overlay_address
from services.planner.state import HostId, State

ROAMING_KEEPALIVE_SECONDS = 25
"""A node whose place others learn from its packets is forgotten by what translates them when it sends none."""


TURNING_KEEPALIVE_SECONDS = 5
"""While a node changes its key: peers that have nothing to say shake hands all the same, and those that are away are known by it."""
PORT_MAX = 65535


def ports(cluster: Cluster) -> tuple[int, int]:
    """The UDP ports of a node's WireGuard devices: the one that is always there, and the one beside it while keys change."""
    return cluster.wireguard.port, cluster.wireguard.port + 1


def pod_families(cluster: Cluster) -> tuple[Family, ...]:
    """The families of what pods send, IPv4 first."""
    found = {prefix.family for prefix in cluster.pod_prefixes}
    return tuple(family for family in FAMILIES if family in found)


def underlay_families(node: Node) -> tuple[Family, ...]:
    found = {address.family for address in node.addresses}
    return tuple(family for family in FAMILIES if family in found)


def is_meant_to_encrypt(cluster: Cluster, node: Node) -> bool:
    """Whether a node has a WireGuard device, be its key known or not."""
    return cluster.encryption == "wireguard" and not node.opt_out


def encrypts(state: State, node: Node) -> bool:
    """Whether a node encrypts what goes to others that do, too."""
    cluster = state.clusters[node.cluster]
    return is_meant_to_encrypt(cluster, node) and HostId(node.cluster, node.name) in state.keys


def meets_others(cluster: Cluster, node: Node) -> bool:
    """Whether a node meets all others of its cluster in the mesh, by an overlay or encrypted; some may meet by an egress policy besides."""
    return cluster.routing == "overlay" or is_meant_to_encrypt(cluster, node)


def strays(state: State, pod: Pod) -> tuple[Address, ...]:
    """A pod's addresses to which its node's prefixes do not lead; none while the node is not known."""
    owner = state.nodes[pod.cluster].get(pod.node)
    if owner is None:
        return ()
    return tuple(address for address in pod.addresses if not any(prefix.covers(address) for prefix in owner.pod_prefixes))


def pod_source(node: Node, family: Family) -> Address | None:
    """The address inside its pod prefixes by which a node itself sends to pods; None where it has no prefix of the family."""
    given = next((address for address in node.source_addresses if address.family == family), None)
    prefix = next((prefix for prefix in node.pod_prefixes if prefix.family == family), None)
    if given is not None or prefix is None:
        return given
    return prefix.address(1 if prefix.size > 1 else 0)


def source(cluster: Cluster, node: Node, number: int, family: Family) -> Address | None:
    """The address by which a node itself sends to other nodes' pods: without pods of its own, its overlay address."""
    return pod_source(node, family) or overlay_source(cluster, number, family)


def overlay_source(cluster: Cluster, number: int, family: Family) -> Address | None:
    """A node's overlay address; None where the cluster has no internal prefix of the family."""
    has_room = any(prefix.family == family for prefix in cluster.internal_prefixes)
    return overlay_address(cluster, number, family) if has_room else None


def address_of(node: Node, family: Family) -> Address | None:
    """The underlay address of a family."""
    return next((address for address in node.addresses if address.family == family), None)


def endpoints(cluster: Cluster, node: Node) -> tuple[Endpoint, ...]:
    """All places where others may find a node's WireGuard device; none of a roaming node."""
    if node.roaming:
        return ()
    if node.endpoint is not None:
        return (node.endpoint,)
    return tuple(Endpoint.at(address, cluster.wireguard.port) for address in node.addresses)


def endpoint_beside(place: Endpoint | None) -> Endpoint | None:
    """Where a node's second device is, whose first one is at `place`: at the next port. None where that is to be learned."""
    if place is None or place.port == PORT_MAX:
        return None
    return place.moved(1)


def endpoint(cluster: Cluster, families: Iterable[Family], there: Node) -> Endpoint | None:
    """Where a node with underlay addresses of these families finds another one; None when it has no way, or learns it.

    A name is given as it is: which family it has, the node finds out.
    """
    found = {each.family: each for each in endpoints(cluster, there)}
    return found[None] if None in found else next((found[family] for family in FAMILIES if family in found and family in families), None)


def device_overhead(node: Node) -> int:
    """Bytes that a node's encryption takes: those of IPv6 where any peer may be found by it."""
    return layout.WIREGUARD_OVERHEAD_BYTES[max(underlay_families(node))]


def device_mtu(cluster: Cluster, node: Node) -> int:
    """The MTU of a node's WireGuard device."""
    return cluster.mtu - device_overhead(node)


def overlay_mtu(cluster: Cluster, node: Node, family: Family) -> int:
    """The MTU of a node's mesh overlay links whose outer packets are of a family."""
    taken = device_overhead(node) if is_meant_to_encrypt(cluster, node) else 0
    return cluster.mtu - taken - layout.OVERLAY_OVERHEAD_BYTES[family]


def pod_mtu(cluster: Cluster, node: Node) -> int:
    """The largest packet that a node's pods can send to any other node's, in bytes."""
    if cluster.routing == "overlay":
        return min(overlay_mtu(cluster, node, family) for family in underlay_families(node))
    return device_mtu(cluster, node)


def mac(number: int) -> Mac:
    """The Ethernet address of a node's mesh overlay links, by its number."""
    return Mac(":".join(f"{octet:02x}" for octet in (0x02, 0x4D, 3, 0, *number.to_bytes(2, "big"))))


def meet(cluster: Cluster, here: Node, there: Node) -> bool:
    """Whether the mesh can carry packets between two nodes; one that roams may be heard of in time."""
    one, other = _reach(here.addresses, here.endpoint, here.roaming), _reach(there.addresses, there.endpoint, there.roaming)
    if cluster.routing == "overlay" and not one.sends & other.sends:
        return False
    both = is_meant_to_encrypt(cluster, here) and is_meant_to_encrypt(cluster, there)
    return not both or bool(one.sends & other.found and other.sends & one.found)


class _Reach(NamedTuple):
    """The families in which a node sends, and those in which others find it."""

    sends: frozenset[Family]
    found: frozenset[Family]


@lru_cache(maxsize=65536)
def _reach(addresses: tuple[Address, ...], endpoint: Endpoint | None, roaming: bool) -> _Reach:  # noqa: FBT001 - a key of the cache
    # Every node is asked about every other.
    sends = frozenset(address.family for address in addresses)
    if endpoint is None and not roaming:
        return _Reach(sends, sends)
    # Where a roaming node will be, and what a name stands for, is not known here.
    family = endpoint.family if endpoint is not None and not roaming else None
    return _Reach(sends, frozenset(FAMILIES) if family is None else frozenset((family,)))


def outer(families: Iterable[Family], there: Node) -> Family:
    """The family of the overlay's packets to a node, for one with underlay addresses of `families`. Admission refuses nodes without one."""
    both = set(families) & set(underlay_families(there))
    return next(family for family in FAMILIES if family in both)
