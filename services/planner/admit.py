"""Admission: whether an object may join the admitted topology. Pure: an object and the state in, a verdict out.

The established object wins: an object that contradicts an admitted one is refused, and the refusal names both. A refused object is not
forgotten by the service; it is tried again when what it contradicts or misses has changed (``services.planner.service``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, product

from msgspec import Struct

from schemas.firewall import FirewallConfiguration
from schemas.routing import RouteConfiguration
from schemas.topology import TUNNELS_MAX, Cluster, Gateway, IpMapping, Node, Peering, Pod, PublicKey, Topology
from schemas.values import IPV6, Address, Prefix
from services.planner import admit_cluster, admit_firewall, admit_mapping, admit_routing, layout, names
from services.planner.admit_cluster import too_little
from services.planner.families import IPV6_MTU_MIN, carried, outer_family, overlay_mtu, tunnel_endpoint, tunnel_mtu, tunnel_overhead
from services.planner.remaps import Exhausted, choose, far_addresses, own_prefixes, taken, with_choices
from services.planner.state import Attachment, HostId, Seen, State, peering_key, seen_fields, seen_prefixes


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


def admit_together(wishes: Mapping[str, Topology | None], state: State) -> Problem | None:
    """None when all these objects may be put into `state` (None: taken out) at once, though perhaps none of them alone.

    Else the first problem found.
    """
    trial = state.copy()
    items = [item for item in wishes.values() if item is not None]
    for ref, item in wishes.items():
        if item is None:
            trial.remove(ref)
    for item in items:
        trial.put(item)
    trial = with_choices(trial, _joined(trial, items))
    removals = (_removal(state.objects[ref], trial) for ref, item in wishes.items() if item is None and ref in state.objects)
    # One after the other: what comes later rests on what was asked before.
    return next(chain(*removals, *(chain(_succession(item, state), _problems(item, trial)) for item in items)), None)


def _joined(state: State, items: Iterable[Topology]) -> list[Peering]:
    """The peerings whose remaps may have to be chosen for these objects: those among them, and those of clusters among them."""
    found = {item.ref: item for item in items if isinstance(item, Peering)}
    for item in items:
        if isinstance(item, Cluster):
            found.update({attachment.peering.ref: attachment.peering for attachment in state.attachments[item.name].values()})
    return list(found.values())


def overtaken(item: Topology, before: Topology | None, stands: str) -> Problem | None:
    """Why `item` cannot take the place of `before`, which `stands` (as "is admitted"), by their revisions; None when nothing is wrong.

    Where both have one, it grows with each change: a lower one is an old copy, and an equal one of other content is nobody's successor.
    """
    if before is None or item.revision is None or before.revision is None or item.revision > before.revision or item == before:
        return None
    if item.revision < before.revision:
        reason = f"revision {item.revision} is older than revision {before.revision}, which {stands}"
    else:
        reason = f"revision {item.revision} {stands} with other content; a change needs a higher one"
    return Problem(reason, "$.revision", item.ref, retry=False)


def admit_removal(ref: str, state: State) -> Problem | None:
    """None when the object may go: nothing that is admitted needs it."""
    item = state.objects.get(ref)
    return next(_removal(item, state), None) if item is not None else None


def _removal(item: Topology, state: State) -> Iterator[Problem]:
    yield from (Problem(f"still used by {user}; it goes when that is gone", other=user) for user in _users(item, state))


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
    if (old := overtaken(item, before, "is admitted")) is not None:
        yield old
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
    yield from (Problem(*found, retry=False) for found in admit_cluster.contradictions(item))
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


def _dependents(item: Cluster, state: State) -> Iterator[Problem]:
    """A changed cluster must suit what is already admitted in it."""
    trial = state.copy()
    trial.put(item)
    trial = with_choices(trial, _joined(trial, [item]))
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
    for attachment in state.attachments[item.cluster].values():
        yield from _met(item, attachment, state)
    yield from _meeting(item, cluster, state)
    own = state.attachments[item.cluster].get(item.name)
    if isinstance(item, Gateway) and own is not None:
        yield from _at_work(item, own, state)
    if isinstance(item, Node):
        yield from _node_prefixes(item, cluster, state)


def _met(item: Node | Gateway, attachment: Attachment, state: State) -> Iterator[Problem]:
    """A host's addresses inside what an end of a peering sends into its tunnels."""
    for index, address in enumerate(item.addresses):
        for reason in _loops(address, item.ref, attachment, state):
            yield Problem(reason, f"$.addresses[{index}]", attachment.peering.ref)


def _at_work(item: Gateway, own: Attachment, state: State) -> Iterator[Problem]:
    """What the far end asks of a gateway that serves a peering: it sends its outer packets here, and not into what it keeps for pods."""
    far_end = Attachment(own.peering, 1 - own.place)
    yield from _met(item, far_end, state)
    for index, address in enumerate(item.addresses):
        yield from _swallowed(address, item.ref, state.clusters[far_end.end.cluster], f"$.addresses[{index}]")
        yield from _found(admit_routing.underlay_taken(own.far.cluster, address, f"$.addresses[{index}]", state))
    trial = state
    if state.objects.get(item.ref) != item:
        trial = state.copy()
        trial.put(item)
    yield from (Problem(found.reason, "$.addresses", own.peering.ref) for found in _tunnels(own.peering, trial))


def _place(item: Node | Gateway, cluster: Cluster, state: State) -> Iterator[Problem]:
    """Where an underlay address cannot be."""
    for index, address in enumerate(item.addresses):
        field = f"$.addresses[{index}]"
        for unusable in layout.NO_HOST:
            if Prefix(unusable).covers(address):
                yield Problem(f"{address} lies inside {unusable}: no host has such an address", field, retry=False)
        for prefix in own_prefixes(cluster):
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
            yield Problem(too_little(what, layout.OVERLAY_OVERHEAD_BYTES[family], cluster.mtu), "$.addresses", cluster.ref)


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
    try:
        remaps = choose(state, item, is_established=item.ref in state.peerings)
        state = state.seeing({**state.remaps, peering_key(item): remaps})
    except Exhausted as error:
        yield Problem(str(error), error.field, error.other)
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
            yield from _apart(attachment, state, f"$.ends[{index}]")
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
        yield Problem(too_little(f"the tunnels' headers, by {narrow.ref},", taken, narrow.mtu), f"$.ends[{place}].cluster", narrow.ref)


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
    cluster = state.clusters[attachment.end.cluster]
    seen = [(f"{at}.{one.field}[{one.position}]", one) for one in seen_fields(state, attachment)]
    in_use = list(taken(state, cluster, attachment.peering.ref))
    for index, (field, one) in enumerate(seen):
        yield from (Problem(*found, retry=False) for found in admit_cluster.beyond_use(one.seen, field))
        for entry in in_use:
            if one.seen.overlaps(entry.prefix):
                yield Problem(f"{one.seen} overlaps {entry.what}{entry.prefix} of {entry.owner}; {_cure(one, cluster)}", field, entry.owner)
        for earlier, other in seen[:index]:
            if one.seen.overlaps(other.seen):
                yield Problem(f"{one.seen} overlaps {other.seen} ({earlier})", field)


def _apart(attachment: Attachment, state: State, at: str) -> Iterator[Problem]:
    """What hosts send outside the tunnels must not meet what goes through them: outer packets, and those to broker and management."""
    cluster = state.clusters[attachment.end.cluster]
    for one in seen_fields(state, attachment):
        for kept, prefix in product(cluster.control, (one.seen, one.real)):
            if kept.overlaps(prefix):
                reason = f"{prefix} of {attachment.peering.ref} overlaps the control prefix {kept} of {cluster.ref}"
                yield Problem(reason, f"{at}.{one.field}[{one.position}]", cluster.ref)
    hosts: list[Node | Gateway] = [*state.nodes[cluster.name].values(), *state.gateways[cluster.name].values()]
    for known in hosts:
        for address in known.addresses:
            yield from (Problem(reason, at, known.ref) for reason in _loops(address, known.ref, attachment, state))
    far, ref = f"the far gateway {attachment.far_host}", f"Gateway/{attachment.far.cluster}/{attachment.far.gateway}"
    for address in far_addresses(state, attachment):
        yield from (Problem(reason, at, ref) for reason in _loops(address, far, attachment, state))
        yield from _swallowed(address, far, cluster, at)
        yield from _found(admit_routing.underlay_taken(cluster.name, address, at, state))
    yield from _found(admit_routing.remote_taken(attachment, at, state))


def _swallowed(address: Address, owner: str, cluster: Cluster, field: str) -> Iterator[Problem]:
    """No prefix of a gateway's own cluster may hold the far gateway's address either: what is for pods does not leave by the uplink."""
    for prefix in own_prefixes(cluster):
        if prefix.covers(address):
            yield Problem(f"{prefix} of {cluster.ref} holds the underlay address {address} of {owner}: a loop", field, cluster.ref)


def _cure(one: Seen, cluster: Cluster) -> str:
    if one.is_given or any(pool.family == one.real.family for pool in cluster.pools):
        return "give a remap that is free there"
    return f"give a remap that is free there, or {cluster.ref} an IPv{one.real.family} pool to take one from"


def _loops(address: Address, owner: str, attachment: Attachment, state: State) -> Iterator[str]:
    """No prefix of a remote cluster may hold an underlay address: outer packets would be sent into the tunnel."""
    for prefix in {prefix for pair in seen_prefixes(state, attachment) for prefix in pair}:
        if prefix.covers(address):
            yield f"{prefix} of {attachment.peering.ref} holds the underlay address {address} of {owner}: a loop"


def _list(prefixes: Iterable[Prefix]) -> str:
    return ", ".join(prefixes)


__all__ = ["Problem", "admit", "admit_removal", "admit_together", "overtaken"]
