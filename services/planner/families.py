"""Which family where: what a peering carries, over which family its links go, and how much room that leaves. Pure.

A peering carries a family when both its clusters have pods or external prefixes of it; nothing is planned for any other. The outer packets
of a link are IPv4 where both its ends have such an address, else IPv6, whatever is inside.
"""

from __future__ import annotations

from schemas.topology import Cluster, Gateway, Node, Peering
from schemas.values import FAMILIES, IPV4, IPV6, Address, Endpoint, Family
from services.planner import layout
from services.planner.state import Attachment, State

Host = Node | Gateway
IPV6_MTU_MIN = 1280
"""RFC 8200; the kernel takes IPv6 off a link with less."""


def carried(state: State, peering: Peering) -> tuple[Family, ...]:
    """The families of a peering's traffic, IPv4 first. Both its clusters must be known."""
    here, there = (state.clusters[end.cluster].families for end in peering.ends)
    return tuple(family for family in FAMILIES if family in here & there)


def outer_family(here: Host, there: Host) -> Family | None:
    """The family of packets between two hosts; None when they have none in common."""
    both = {address.family for address in here.addresses} & {address.family for address in there.addresses}
    return next((family for family in FAMILIES if family in both), None)


def underlay_ends(here: Host, there: Host) -> tuple[Address, Address]:
    """The addresses between which two hosts speak. Admission sees to it that there are some."""
    family = outer_family(here, there)
    own, far = (next(address for address in host.addresses if address.family == family) for host in (here, there))
    return own, far


def overlay_mtu(cluster: Cluster, here: Host, there: Host) -> int:
    """The MTU of the overlay link between two hosts of a cluster."""
    return cluster.mtu - layout.OVERLAY_OVERHEAD_BYTES[outer_family(here, there) or IPV6]


def overlay_address(cluster: Cluster, number: int, family: Family) -> Address:
    """A host's overlay address: its number is the host part in each family."""
    return next(prefix for prefix in cluster.internal_prefixes if prefix.family == family).address(number)


def tunnel_endpoint(state: State, attachment: Attachment) -> Endpoint | None:
    """Where an end finds the other end's first tunnel; None when the gateways have no family in common."""
    own, far = (state.gateways[host.cluster][host.name] for host in (attachment.host, attachment.far_host))
    given = attachment.far.endpoint
    if given is not None:
        # Only the host knows what a name is; it takes an address of its own families.
        return given if given.name or any(address.family == given.family for address in own.addresses) else None
    if outer_family(own, far) is None:
        return None
    return Endpoint.at(underlay_ends(own, far)[1], attachment.peering.port)


def tunnel_overhead(state: State, peering: Peering) -> int:
    """Bytes that a tunnel's headers take: those of IPv6 where either end sends it, or may when it looks a name up: both need one MTU."""
    endpoints = [tunnel_endpoint(state, Attachment(peering, place)) for place in (0, 1)]
    families = {endpoint.family or IPV6 for endpoint in endpoints if endpoint is not None}
    return layout.WIREGUARD_OVERHEAD_BYTES[IPV6 if IPV6 in families else IPV4]


def tunnel_mtu(state: State, peering: Peering) -> int:
    """The MTU of a peering's tunnels, at both ends."""
    return min(state.clusters[end.cluster].mtu for end in peering.ends) - tunnel_overhead(state, peering)
