"""Nodes and gateways, the pods on them, and their keys. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from schemas.topology import Cluster, Gateway, Node, Pod, PublicKey
from schemas.values import IPV6, Address, Prefix
from services.planner import layout, names
from services.planner.admit import egress, mapping, mesh, routing
from services.planner.admit import peering as peerings
from services.planner.admit.cluster import too_little
from services.planner.admit.problem import Problem, as_problems, listed
from services.planner.families import IPV6_MTU_MIN, outer_family, overlay_mtu
from services.planner.remaps import own_prefixes
from services.planner.state import Attachment, HostId, State


def host(item: Node | Gateway, state: State) -> Iterator[Problem]:
    """What a node and a gateway can both get wrong, and each by itself; the cluster is known."""
    cluster = state.clusters[item.cluster]
    twin = state.gateways[item.cluster].get(item.name) if isinstance(item, Node) else state.nodes[item.cluster].get(item.name)
    if twin is not None:
        yield Problem(f"the name is taken by {twin.ref}; nodes and gateways of a cluster share one name space", "$.name", twin.ref)
    yield from _place(item, cluster, state)
    namesake = state.host_behind(item.cluster, names.overlay_link(item.name))
    if namesake is not None and namesake.name != item.name:
        yield Problem(f"the name leads to the same link name as {namesake.ref}", "$.name", namesake.ref)
    if len(item.uplink) > names.LINK_NAME_BYTES or item.uplink.startswith(names.OWN_LINK_PREFIXES):
        taken = ", ".join(names.OWN_LINK_PREFIXES)
        yield Problem(f"{item.uplink!r} cannot be an uplink: at most 15 bytes, beginning with none of {taken}", "$.uplink", retry=False)
    for attachment in state.attachments[item.cluster].values():
        yield from _met(item, attachment, state)
    yield from _meeting(item, cluster, state)
    own = state.attachments[item.cluster].get(item.name)
    if isinstance(item, Gateway) and own is not None:
        yield from _at_work(item, own, state)
    if isinstance(item, Node):
        yield from _node_prefixes(item, cluster, state)
        yield from as_problems(mesh.whole_prefixes(item, state))
        yield from as_problems(mesh.node(item, state))
        yield from as_problems(egress.node(item, state))
    else:
        yield from as_problems(egress.taken(item, state))


def _met(item: Node | Gateway, attachment: Attachment, state: State) -> Iterator[Problem]:
    """A host's addresses inside what an end of a peering sends into its tunnels."""
    for field, address in _places(item):
        for reason in peerings.loops(address, item.ref, attachment, state):
            yield Problem(reason, field, attachment.peering.ref)


def _places(item: Node | Gateway) -> Iterator[tuple[str, Address]]:
    """Where a host is sent outer packets: fields and addresses."""
    yield from ((f"$.addresses[{index}]", address) for index, address in enumerate(item.addresses))
    if isinstance(item, Node) and item.endpoint is not None and (address := item.endpoint.address) is not None:
        yield "$.endpoint", address


def _at_work(item: Gateway, own: Attachment, state: State) -> Iterator[Problem]:
    """What the far end asks of a gateway that serves a peering: it sends its outer packets here, and not into what it keeps for pods."""
    far_end = Attachment(own.peering, 1 - own.place)
    yield from _met(item, far_end, state)
    for index, address in enumerate(item.addresses):
        yield from peerings.swallowed(address, item.ref, state.clusters[far_end.end.cluster], f"$.addresses[{index}]")
        yield from as_problems(routing.underlay_taken(own.far.cluster, address, f"$.addresses[{index}]", state))
    trial = state
    if state.objects.get(item.ref) != item:
        trial = state.copy()
        trial.put(item)
    yield from (Problem(found.reason, "$.addresses", own.peering.ref) for found in peerings.tunnels(own.peering, trial))


def _place(item: Node | Gateway, cluster: Cluster, state: State) -> Iterator[Problem]:
    """Where an underlay address cannot be."""
    for field, address in _places(item):
        for unusable in layout.NO_HOST:
            if Prefix(unusable).covers(address):
                yield Problem(f"{address} lies inside {unusable}: no host has such an address", field, retry=False)
        for prefix in own_prefixes(cluster):
            if prefix.covers(address):
                yield Problem(f"the underlay address {address} lies inside {prefix} of its cluster: a loop", field, cluster.ref)
        yield from as_problems(routing.underlay_taken(item.cluster, address, field, state))
    for index, address in enumerate(item.addresses):
        field = f"$.addresses[{index}]"
        yield from (Problem(found[0], field, *found[2:]) for found in mapping.underlay(item, address, state))
        other = state.host_with(item.cluster, address)
        if other is not None and other.name != item.name:
            yield Problem(f"the underlay address {address} is taken by {other.ref}", field, other.ref)


def _meeting(item: Node | Gateway, cluster: Cluster, state: State) -> Iterator[Problem]:
    """Nodes and gateways of a cluster must reach each other, with room for what the cluster's pods send."""
    others = state.gateways[item.cluster] if isinstance(item, Node) else state.nodes[item.cluster]
    for other in others.values():
        family = outer_family(item, other)
        if family is None:
            reason = f"no family in common with {other.ref} ({', '.join(other.addresses)}); add an address of one of its families"
            yield Problem(reason, "$.addresses", other.ref)
        elif IPV6 in cluster.families and overlay_mtu(cluster, item, other) < IPV6_MTU_MIN:
            what = f"the headers of an overlay link to {other.ref} over IPv{family}"
            yield Problem(too_little(what, layout.OVERLAY_OVERHEAD_BYTES[family], cluster.mtu), "$.addresses", cluster.ref)


def _node_prefixes(item: Node, cluster: Cluster, state: State) -> Iterator[Problem]:
    for index, prefix in enumerate(item.pod_prefixes):
        field = f"$.podPrefixes[{index}]"
        if not any(whole.contains(prefix) for whole in cluster.pod_prefixes):
            yield Problem(f"{prefix} is not inside the cluster's pod prefixes {listed(cluster.pod_prefixes)}", field, cluster.ref)
        for other in state.nodes[item.cluster].values():
            for theirs in other.pod_prefixes if other.name != item.name else item.pod_prefixes[:index]:
                if prefix.overlaps(theirs):
                    yield Problem(f"{prefix} overlaps {theirs} of {other.ref}", field, other.ref)


def pod(item: Pod, state: State) -> Iterator[Problem]:
    """The node must be there, and the addresses the cluster's and nobody else's."""
    cluster = state.clusters[item.cluster]
    if item.node not in state.nodes[item.cluster]:
        yield Problem(
            f"node {item.node!r} is not known in cluster {item.cluster!r}; it is admitted when that is",
            "$.node",
            f"Node/{item.cluster}/{item.node}",
        )
    for index, address in enumerate(item.addresses):
        field = f"$.addresses[{index}]"
        if not any(prefix.covers(address) for prefix in cluster.pod_prefixes):
            yield Problem(f"{address} is not inside the cluster's pod prefixes {listed(cluster.pod_prefixes)}", field, cluster.ref)
        other = state.pod_with(item.cluster, address)
        if other is not None and other != item.ref:
            yield Problem(f"{address} belongs to {other}", field, other)
    yield from as_problems(mesh.pod(item, state))


def public_key(item: PublicKey, state: State) -> Iterator[Problem]:
    """The host must be there, and the key its own."""
    host = HostId(item.cluster, item.name)
    if state.host(host) is None:
        yield Problem(
            f"host {item.name!r} is not known in cluster {item.cluster!r}; it is admitted when that is",
            "$.name",
            f"Gateway/{item.cluster}/{item.name}",
        )
    if item.next == item.key:
        yield Problem("the key that is to follow is the same; leave `next` out", "$.next", retry=False)
    rotation = state.rotations.get(host)
    if rotation is not None and item.key in rotation.retired:
        reason = "the host had this key before it changed it; an old copy is not taken (for another one, remove the host's key file)"
        yield Problem(reason, "$.key", retry=False)
    for other_host, other in state.keys.items():
        for field, key in (("$.key", item.key), ("$.next", item.next)) if other_host != host else ():
            if key is not None and key in (other.key, other.next):
                yield Problem(f"the key is {other.ref}'s; every host has a key of its own", field, other.ref)
