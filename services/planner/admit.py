"""Admission: whether an object may join the admitted topology. Pure: an object and the state in, a verdict out.

The established object wins: an object that contradicts an admitted one is refused, and the refusal names both. A refused object is not
forgotten by the service; it is tried again when what it contradicts or misses has changed (``services.planner.service``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from msgspec import Struct

from schemas.firewall import FirewallConfiguration
from schemas.routing import RouteConfiguration
from schemas.topology import TUNNELS_MAX, Cluster, Gateway, IpMapping, Node, Peering, Pod, PublicKey, Topology
from schemas.values import IPV4, IPV6, Address, Prefix
from services.planner import admit_firewall, admit_mapping, admit_routing, layout, names
from services.planner.families import IPV6_MTU_MIN, carried, outer_family, overlay_mtu, tunnel_endpoint, tunnel_mtu, tunnel_overhead
from services.planner.state import Attachment, HostId, State, seen_prefixes

_SMALLEST_INTERNAL_LENGTH = {IPV4: 29, IPV6: 112}


class Problem(Struct, frozen=True):
    """Why an object cannot be admitted: a reason for people, the field at fault, and the other object if there is one.

    `retry` is False when no change of other objects can make it right.
    """

    reason: str
    field: str = ""
    other: str = ""
    retry: bool = True


def admit(item: Topology, state: State) -> Problem | None:
    """None when `item` may be put into `state`, else the first problem found."""
    return next(chain(_succession(item, state), _problems(item, state)), None)


def admit_together(items: Sequence[Topology], state: State) -> Problem | None:
    """None when all of `items` may be put into `state` at once, though perhaps none of them alone; else the first problem found."""
    trial = state.copy()
    for item in items:
        trial.put(item)
    # One after the other: what comes later rests on what was asked before.
    return next((problem for item in items for problem in chain(_succession(item, state), _problems(item, trial))), None)


def admit_removal(ref: str, state: State) -> Problem | None:
    """None when the object may go: nothing that is admitted needs it."""
    item = state.objects.get(ref)
    user = next(iter(_users(item, state)), None) if item is not None else None
    return Problem(f"still used by {user}; it goes when that is gone", other=user) if user else None


def _users(item: Topology, state: State) -> Iterator[str]:
    match item:
        case Cluster():
            yield from (other.ref for other in state.objects.values() if not isinstance(other, Cluster) and item.name in _clusters(other))
        case Node():
            yield from (state.pods[item.cluster][name].ref for name in sorted(state.pods_by_node[HostId(item.cluster, item.name)]))
            yield from sorted(mapping.ref for mapping in state.mappings[item.cluster] if mapping.node == item.name)
        case Gateway():
            if attachment := state.attachments[item.cluster].get(item.name):
                yield attachment.peering.ref


def _clusters(item: Topology) -> set[str]:
    return {end.cluster for end in item.ends} if isinstance(item, Peering) else {item.home}


def _succession(item: Topology, state: State) -> Iterator[Problem]:
    """What keeps `item` from following the admitted object of its name."""
    before = state.objects.get(item.ref)
    if before is not None and item.revision is not None and item.revision < (before.revision or 0):
        yield Problem(
            f"revision {item.revision} is older than the admitted revision {before.revision}", "$.revision", item.ref, retry=False
        )
    if isinstance(item, Cluster) and isinstance(before, Cluster) and next(state.hosts_of(item.name), None) is not None:
        yield from _internal_in_use(item, before)
    if isinstance(item, Cluster) and isinstance(before, Cluster):
        yield from (Problem(*found) for found in admit_mapping.still_needed(item, before, state))


def _problems(item: Topology, state: State) -> Iterator[Problem]:
    match item:
        case Cluster():
            yield from _cluster(item, state)
        case Node() | Gateway():
            yield from _missing_cluster(item.cluster, "$.cluster", state) or _host(item, state)
        case Pod():
            yield from _missing_cluster(item.cluster, "$.cluster", state) or _pod(item, state)
        case PublicKey():
            yield from _public_key(item, state)
        case Peering():
            yield from _peering(item, state)
        case IpMapping():
            yield from _missing_cluster(item.cluster, "$.cluster", state) or _mapping(item, state)
        case FirewallConfiguration():
            yield from _missing_cluster(item.cluster, "$.cluster", state) or _firewall(item, state)
        case RouteConfiguration():
            yield from _missing_cluster(item.cluster, "$.cluster", state) or _found(admit_routing.problems(item, state))


def _missing_cluster(cluster: str, field: str, state: State) -> list[Problem]:
    if cluster in state.clusters:
        return []
    return [
        Problem(
            f"cluster {cluster!r} is not known; it is admitted when Cluster/{cluster}/{cluster} is", field, f"Cluster/{cluster}/{cluster}"
        )
    ]


# Clusters ------------------------------------------------------------------------------------------------------------------------


def _cluster(item: Cluster, state: State) -> Iterator[Problem]:
    fields = [(f"$.podPrefixes[{index}]", prefix) for index, prefix in enumerate(item.pod_prefixes)]
    fields += [(f"$.externalPrefixes[{index}]", prefix) for index, prefix in enumerate(item.external_prefixes)]
    fields += [(f"$.internalPrefixes[{index}]", prefix) for index, prefix in enumerate(item.internal_prefixes)]
    for index, (field, prefix) in enumerate(fields):
        for earlier, other in fields[:index]:
            if prefix.overlaps(other):
                yield Problem(f"{prefix} overlaps {other} ({earlier}) of the same cluster", field, retry=False)
    for field, prefix in fields:
        yield from _reserved(prefix, field)
    for index, prefix in enumerate(item.internal_prefixes):
        smallest = _SMALLEST_INTERNAL_LENGTH[prefix.family]
        if prefix.length > smallest:
            reason = f"{prefix} is too small for overlay addresses; give a /{smallest} or larger"
            yield Problem(reason, f"$.internalPrefixes[{index}]", retry=False)
    if IPV6 in item.families and item.mtu - layout.OVERLAY_OVERHEAD_BYTES[IPV4] < IPV6_MTU_MIN:
        yield Problem(_too_little("the overlay's headers", layout.OVERLAY_OVERHEAD_BYTES[IPV4], item.mtu), "$.mtu", retry=False)
    yield from (Problem(*found) for found in admit_mapping.sources(item))
    if item.name in state.clusters:
        yield from _dependents(item, state)


def _internal_in_use(item: Cluster, before: Cluster) -> Iterator[Problem]:
    """Hosts keep their overlay addresses, and their numbers must fit a prefix that is added."""
    for prefix in before.internal_prefixes:
        if prefix not in item.internal_prefixes:
            reason = f"{prefix} is in use: hosts have their overlay addresses from it; delete them first"
            yield Problem(reason, "$.internalPrefixes", item.ref)
    for index, prefix in enumerate(item.internal_prefixes):
        if prefix not in before.internal_prefixes and prefix.size <= layout.HOST_NUMBER_MAX + 1:
            reason = f"{prefix} is too small for the numbers that hosts have already; give a /20 or larger, or delete them first"
            yield Problem(reason, f"$.internalPrefixes[{index}]", item.ref)


def _too_little(what: str, taken: int, mtu: int) -> str:
    """What is wrong with an MTU that leaves no room for IPv6."""
    least = IPV6_MTU_MIN + taken
    return f"{what} take {taken} of {mtu} bytes and leave {mtu - taken}; IPv6 needs {IPV6_MTU_MIN}, so the MTU must be at least {least}"


def _reserved(prefix: Prefix, field: str) -> Iterator[Problem]:
    for reserved in layout.RESERVED:
        if prefix.overlaps(Prefix(reserved)):
            yield Problem(f"{prefix} overlaps {reserved}, which no cluster may use", field, retry=False)


def _dependents(item: Cluster, state: State) -> Iterator[Problem]:
    """A changed cluster must suit what is already admitted in it."""
    trial = state.copy()
    trial.put(item)
    # Peerings first: the questions about hosts rest on remaps that pair with the prefixes.
    for other in sorted(state.objects.values(), key=lambda other: not isinstance(other, Peering)):
        if other.ref != item.ref and item.name in _clusters(other):
            for problem in _problems(other, trial):
                yield Problem(f"{other.ref} would no longer be valid: {problem.reason}", other=other.ref)


# Hosts, pods, keys -------------------------------------------------------------------------------------------------------------


def _host(item: Node | Gateway, state: State) -> Iterator[Problem]:
    cluster = state.clusters[item.cluster]
    twin = state.gateways[item.cluster].get(item.name) if isinstance(item, Node) else state.nodes[item.cluster].get(item.name)
    if twin is not None:
        yield Problem(f"the name is taken by {twin.ref}; nodes and gateways of a cluster share one name space", "$.name", twin.ref)
    yield from _place(item, cluster, state)
    namesake = state.host_behind(item.cluster, names.overlay_link(item.name))
    if namesake is not None and namesake.name != item.name:
        yield Problem(f"the name leads to the same link name as {namesake.ref}", "$.name", namesake.ref)
    if len(item.uplink) > names.LINK_NAME_BYTES or item.uplink.startswith((names.OVERLAY_LINK_PREFIX, names.TUNNEL_LINK_PREFIX)):
        yield Problem(f"{item.uplink!r} cannot be an uplink: at most 15 bytes, not beginning with mo. or mt.", "$.uplink", retry=False)
    for index, address in enumerate(item.addresses):
        for attachment in state.attachments[item.cluster].values():
            yield from _underlay(address, item.ref, attachment, state, f"$.addresses[{index}]")
    yield from _meeting(item, cluster, state)
    own = state.attachments[item.cluster].get(item.name)
    if isinstance(item, Gateway) and own is not None:
        for index, address in enumerate(item.addresses):
            # The far end sends its outer packets here: not into one of its own prefixes for this side.
            yield from _underlay(address, item.ref, Attachment(own.peering, 1 - own.place), state, f"$.addresses[{index}]")
            yield from _found(admit_routing.underlay_taken(own.far.cluster, address, f"$.addresses[{index}]", state))
        trial = state
        if state.objects.get(item.ref) != item:
            trial = state.copy()
            trial.put(item)
        yield from (Problem(found.reason, "$.addresses", own.peering.ref) for found in _tunnels(own.peering, trial))
    if isinstance(item, Node):
        yield from _node_prefixes(item, cluster, state)


def _place(item: Node | Gateway, cluster: Cluster, state: State) -> Iterator[Problem]:
    """Where an underlay address cannot be."""
    for index, address in enumerate(item.addresses):
        field = f"$.addresses[{index}]"
        for unusable in layout.NO_HOST:
            if Prefix(unusable).covers(address):
                yield Problem(f"{address} lies inside {unusable}: no host has such an address", field, retry=False)
        for prefix in (*cluster.pod_prefixes, *cluster.external_prefixes, *cluster.internal_prefixes):
            if prefix.covers(address):
                yield Problem(f"the underlay address {address} lies inside {prefix} of its cluster: a loop", field, cluster.ref)
        yield from (Problem(found[0], field, *found[2:]) for found in admit_mapping.underlay(item, address, state))
        other = state.host_with(item.cluster, address)
        if other is not None and other.name != item.name:
            yield Problem(f"the underlay address {address} is taken by {other.ref}", field, other.ref)
        yield from _found(admit_routing.underlay_taken(item.cluster, address, field, state))


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
            yield Problem(_too_little(what, layout.OVERLAY_OVERHEAD_BYTES[family], cluster.mtu), "$.addresses", cluster.ref)


def _node_prefixes(item: Node, cluster: Cluster, state: State) -> Iterator[Problem]:
    for index, prefix in enumerate(item.pod_prefixes):
        field = f"$.podPrefixes[{index}]"
        if not any(whole.contains(prefix) for whole in cluster.pod_prefixes):
            yield Problem(f"{prefix} is not inside the cluster's pod prefixes {_list(cluster.pod_prefixes)}", field, cluster.ref)
        for other in state.nodes[item.cluster].values():
            for theirs in other.pod_prefixes if other.name != item.name else item.pod_prefixes[:index]:
                if prefix.overlaps(theirs):
                    yield Problem(f"{prefix} overlaps {theirs} of {other.ref}", field, other.ref)


def _pod(item: Pod, state: State) -> Iterator[Problem]:
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
            yield Problem(f"{address} is not inside the cluster's pod prefixes {_list(cluster.pod_prefixes)}", field, cluster.ref)
        other = state.pod_with(item.cluster, address)
        if other is not None and other != item.ref:
            yield Problem(f"{address} belongs to {other}", field, other)


def _public_key(item: PublicKey, state: State) -> Iterator[Problem]:
    host = HostId(item.cluster, item.name)
    if state.host(host) is None:
        yield Problem(
            f"host {item.name!r} is not known in cluster {item.cluster!r}; it is admitted when that is",
            "$.name",
            f"Gateway/{item.cluster}/{item.name}",
        )
    for other_host, other in state.keys.items():
        if other.key == item.key and other_host != host:
            yield Problem(f"the key is {other.ref}'s; every host has a key of its own", "$.key", other.ref)


def _mapping(item: IpMapping, state: State) -> Iterator[Problem]:
    yield from (Problem(*found) for found in admit_mapping.problems(item, state))


def _firewall(item: FirewallConfiguration, state: State) -> Iterator[Problem]:
    yield from _found(admit_firewall.taken_table(item, state))
    yield from _found(admit_firewall.class_marks(item, state))


def _found(findings: Iterable[tuple[str, str, str]]) -> Iterator[Problem]:
    return (Problem(*found) for found in findings)


# Peerings ------------------------------------------------------------------------------------------------------------------------


def _peering(item: Peering, state: State) -> Iterator[Problem]:
    missing = [
        problem for index, end in enumerate(item.ends) for problem in _missing_cluster(end.cluster, f"$.ends[{index}].cluster", state)
    ]
    yield from missing
    if missing:
        return
    for overlay, port in layout.OVERLAY_PORT.items():  # whichever the clusters have now: that may change under a running peering
        if item.port <= port < item.port + TUNNELS_MAX:
            yield Problem(f"the {TUNNELS_MAX} ports from {item.port} on hold {port}, that of {overlay} overlays", "$.port", retry=False)
    for index in (0, 1):
        attachment = Attachment(item, index)
        lengths = list(_remap_lengths(attachment, state, f"$.ends[{index}]"))
        yield from lengths
        yield from _end_gateway(attachment, state, f"$.ends[{index}].gateway")
        if not lengths:
            yield from _seen(attachment, state, f"$.ends[{index}]")
    if all(end.gateway in state.gateways[end.cluster] for end in item.ends):
        yield from _tunnels(item, state)


def _tunnels(item: Peering, state: State) -> Iterator[Problem]:
    """The gateways must reach each other, with room for IPv6 where the tunnels carry it. Both gateways must be known."""
    for index in (0, 1):
        attachment = Attachment(item, index)
        if tunnel_endpoint(state, attachment) is None:
            own, far = (state.gateways[host.cluster][host.name] for host in (attachment.host, attachment.far_host))
            given = attachment.far.endpoint
            there = f"the endpoint {given}" if given else f"{far.ref} ({', '.join(far.addresses)})"
            reason = f"{own.ref} ({', '.join(own.addresses)}) and {there} have no family in common"
            yield Problem(reason, f"$.ends[{1 - index}].{'endpoint' if given else 'gateway'}", own.ref)
            return
    if IPV6 in carried(state, item) and tunnel_mtu(state, item) < IPV6_MTU_MIN:
        place = min((0, 1), key=lambda place: state.clusters[item.ends[place].cluster].mtu)
        narrow, taken = state.clusters[item.ends[place].cluster], tunnel_overhead(state, item)
        yield Problem(_too_little(f"the tunnels' headers, by {narrow.ref},", taken, narrow.mtu), f"$.ends[{place}].cluster", narrow.ref)


def _remap_lengths(attachment: Attachment, state: State, at: str) -> Iterator[Problem]:
    far = state.clusters[attachment.far.cluster]
    for field, ours, theirs in _remaps(attachment, far):
        if ours and len(ours) != len(theirs):
            yield Problem(
                f"{len(ours)} prefixes for the {len(theirs)} of {far.ref} ({_list(theirs)}); give one for each", f"{at}.{field}", far.ref
            )
            continue
        for index, (mapped, real) in enumerate(zip(ours, theirs, strict=False)):
            if mapped.family != real.family:
                reason = f"{mapped} and {real} of {far.ref} are of two families; they pair by index: write an IPv{real.family} prefix"
                yield Problem(reason, f"{at}.{field}[{index}]", far.ref)
            elif mapped.length != real.length:
                reason = f"{mapped} and {real} of {far.ref} differ in length; a remap keeps the host part, so write a /{real.length}"
                yield Problem(reason, f"{at}.{field}[{index}]", far.ref)


def _remaps(attachment: Attachment, far: Cluster) -> Iterator[tuple[str, tuple[Prefix, ...], tuple[Prefix, ...]]]:
    """Fields of an end, what they say, and what that pairs with."""
    yield "remapPods", attachment.end.remap_pods, far.pod_prefixes
    yield "remapExternal", attachment.end.remap_external, far.external_prefixes


def _end_gateway(attachment: Attachment, state: State, field: str) -> Iterator[Problem]:
    cluster, gateway = attachment.host
    if gateway not in state.gateways[cluster]:
        yield Problem(
            f"gateway {gateway!r} is not known in cluster {cluster!r}; it is admitted when that is", field, f"Gateway/{cluster}/{gateway}"
        )
    other = state.attachments[cluster].get(gateway)
    if other is not None and other.peering.ref != attachment.peering.ref:
        yield Problem(f"gateway {attachment.host} serves {other.peering.ref}; a gateway serves one peering", field, other.peering.ref)
    yield from _found(admit_firewall.marks_on_gateway(attachment, state, field))


def _seen(attachment: Attachment, state: State, at: str) -> Iterator[Problem]:
    """The prefixes by which an end sees the other must be free in its own cluster."""
    seen = list(_seen_fields(attachment, state, at))
    taken = list(_taken_prefixes(attachment, state))
    for index, (field, prefix) in enumerate(seen):
        yield from _reserved(prefix, field)
        for theirs, owner in taken:
            if prefix.overlaps(theirs):
                yield Problem(f"{prefix} overlaps {theirs} of {owner}; give a remap that is free there", field, owner)
        for earlier, other in seen[:index]:
            if prefix.overlaps(other):
                yield Problem(f"{prefix} overlaps {other} ({earlier})", field)
    for host in state.hosts_of(attachment.end.cluster):
        known = state.host(host)
        if known is not None:
            yield from (problem for address in known.addresses for problem in _underlay(address, known.ref, attachment, state, at))
    far = state.gateways[attachment.far.cluster].get(attachment.far.gateway)
    given = attachment.far.endpoint
    for address in (*((given.address,) if given else ()), *(far.addresses if far else ())):
        yield from _underlay(address, f"the far gateway {attachment.far_host}", attachment, state, at)
        yield from _found(admit_routing.underlay_taken(attachment.end.cluster, address, at, state))
    yield from _found(admit_routing.remote_taken(attachment, at, state))


def _taken_prefixes(attachment: Attachment, state: State) -> Iterator[tuple[Prefix, str]]:
    """Prefixes that are in use in an end's cluster, with their owners: its own, and those of its other peerings."""
    cluster = state.clusters[attachment.end.cluster]
    for prefix in (*cluster.pod_prefixes, *cluster.external_prefixes, *cluster.internal_prefixes):
        yield prefix, cluster.ref
    for neighbour in state.attachments[cluster.name].values():
        if neighbour.peering.ref != attachment.peering.ref:
            yield from ((theirs, neighbour.peering.ref) for theirs, _ in seen_prefixes(state, neighbour))


def _seen_fields(attachment: Attachment, state: State, at: str) -> Iterable[tuple[str, Prefix]]:
    families, far = state.clusters[attachment.end.cluster].families, state.clusters[attachment.far.cluster]
    for field, ours, theirs in _remaps(attachment, far):
        for index, prefix in enumerate(ours or theirs):
            if prefix.family in families:
                yield f"{at}.{field}[{index}]", prefix


def _underlay(address: Address, owner: str, attachment: Attachment, state: State, field: str) -> Iterator[Problem]:
    """No prefix of a remote cluster may hold an underlay address: outer packets would be sent into the tunnel."""
    for prefix in {prefix for pair in seen_prefixes(state, attachment) for prefix in pair}:
        if prefix.covers(address):
            yield Problem(
                f"{prefix} of {attachment.peering.ref} holds the underlay address {address} of {owner}: a loop",
                field,
                attachment.peering.ref,
            )


def _list(prefixes: Iterable[Prefix]) -> str:
    return ", ".join(prefixes)


__all__ = ["Problem", "admit", "admit_removal", "admit_together"]
