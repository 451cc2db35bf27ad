"""What a cluster's nodes can contradict each other in as a mesh: encryption, and the overlay between nodes. Pure.

Each finding is the reason, the field at fault and the other object (none: empty). Where something is wrong with two objects, the one that
is there stays.
"""

from __future__ import annotations

from collections.abc import Iterator

from schemas.firewall import FirewallConfiguration
from schemas.topology import Cluster, Node, Pod
from schemas.values import IPV4, IPV6, Address
from services.planner import layout, mesh
from services.planner.admit import egress
from services.planner.admit.cluster import too_little
from services.planner.families import IPV6_MTU_MIN
from services.planner.state import State

Finding = tuple[str, str, str]


def cluster(item: Cluster) -> Iterator[tuple[str, str]]:
    """What a cluster gets wrong by itself: reason and field."""
    if item.encryption == "none" and item.routing == "native":
        return
    if item.encryption == "wireguard" and item.wireguard.port == mesh.PORT_MAX:
        yield "the next port is taken, too, while keys change; give 65534 at the most", "$.wireguard.port"
    for overlay, port in layout.OVERLAY_PORT.items():
        if port in mesh.ports(item):
            words = "" if item.wireguard.port == port else ", and it is taken, too, while keys change"
            yield f"{port} is the port of {overlay} overlays{words}", "$.wireguard.port"
    taken = layout.WIREGUARD_OVERHEAD_BYTES[IPV4] if item.encryption == "wireguard" else 0
    taken += layout.OVERLAY_OVERHEAD_BYTES[IPV4] if item.routing == "overlay" else 0
    if IPV6 in mesh.pod_families(item) and item.mtu - taken < IPV6_MTU_MIN:
        yield too_little("the headers of what nodes send each other", taken, item.mtu), "$.mtu"


def node(item: Node, state: State) -> Iterator[Finding]:
    """All that keeps a node out of its cluster's mesh; the cluster is known."""
    known = state.clusters[item.cluster]
    if not mesh.meets_others(known, item):
        return
    taken = known.mtu - mesh.pod_mtu(known, item)
    if IPV6 in mesh.pod_families(known) and known.mtu - taken < IPV6_MTU_MIN:
        yield too_little("the headers of what the node sends others", taken, known.mtu), "$.addresses", known.ref
    yield from _meeting(known, item, state)
    if mesh.is_meant_to_encrypt(known, item):
        yield from _places(known, item, state)
        if known.routing == "native":
            yield from _sources(known, item, state)


def _meeting(known: Cluster, item: Node, state: State) -> Iterator[Finding]:
    """All nodes must find each other."""
    for other in state.nodes[item.cluster].values():
        if other.name != item.name and mesh.meets_others(known, other) and not mesh.meet(known, item, other):
            where = ", ".join(mesh.endpoints(known, other)) or ", ".join(other.addresses)
            reason = f"no family in common with {other.ref} ({where}); add an address of one of its families"
            yield reason, "$.addresses", other.ref


def _places(known: Cluster, item: Node, state: State) -> Iterator[Finding]:
    """No two nodes are found at one place. Their addresses differ anyway."""
    own = set(mesh.endpoints(known, item))
    for other in state.nodes[item.cluster].values():
        given = item.endpoint is not None or other.endpoint is not None
        if given and other.name != item.name and mesh.is_meant_to_encrypt(known, other):
            for place in own & set(mesh.endpoints(known, other)):
                yield f"{place} is where {other.ref} is found; give each a port of its own", "$.endpoint", other.ref


def _sources(known: Cluster, item: Node, state: State) -> Iterator[Finding]:
    for family in mesh.pod_families(known):
        address = mesh.pod_source(item, family)
        owner = state.pod_with(item.cluster, address) if address is not None else None
        if owner is not None:
            reason = f"the node itself sends to pods from {address}, which is {owner}'s; give another in `sourceAddresses`"
            yield reason, "$.sourceAddresses", owner


def pod(item: Pod, state: State) -> Iterator[Finding]:
    """A pod's addresses must be none by which a node sends, and none that is all of another node's prefix."""
    known, strays = state.clusters[item.cluster], mesh.strays(state, item)
    owner = state.nodes[item.cluster].get(item.node)
    others = state.nodes[item.cluster].values() if strays else [owner] if owner is not None else []
    for index, address in enumerate(item.addresses):
        field = f"$.addresses[{index}]"
        for other in others:
            if address in strays and address.host_prefix in other.pod_prefixes:
                yield f"{address} is a whole pod prefix of {other.ref}; two nodes cannot have the same", field, other.ref
            if _sends_from(known, other, address):
                reason = f"{address} is where {other.ref} itself sends to pods from; give that another one in `sourceAddresses`"
                yield reason, field, other.ref


def _sends_from(known: Cluster, other: Node, address: Address) -> bool:
    sends = mesh.is_meant_to_encrypt(known, other) and known.routing == "native"
    return sends and address.family in mesh.pod_families(known) and mesh.pod_source(other, address.family) == address


def whole_prefixes(item: Node, state: State) -> Iterator[Finding]:
    """Pod prefixes of one address, which a pod of another node has."""
    for index, prefix in enumerate(item.pod_prefixes):
        ref = state.pod_with(item.cluster, prefix.address(0)) if prefix.size == 1 else None
        owner = state.objects.get(ref) if ref is not None else None
        if isinstance(owner, Pod) and owner.node != item.name:
            yield f"{prefix.address(0)} belongs to {owner.ref} on {owner.node}", f"$.podPrefixes[{index}]", owner.ref


def marks(item: FirewallConfiguration, state: State) -> Iterator[Finding]:
    """Writes of the bits by which nodes tell what is to be encrypted, unless the configuration says that it means them."""
    known = state.clusters[item.cluster]
    if known.encryption == "none" and not state.egress[item.cluster]:
        return
    mask = known.marks.mask
    if at := egress.written(item, known):
        reason = (
            f"the bits {mask:#x} of a mark say on nodes what is to be encrypted, and which way it goes; write with a mask "
            f"inside {~mask & 0xFFFFFFFF:#x}, "
            "say role: gateway, or classMarks: true to change them on purpose"
        )
        yield reason, at, known.ref
