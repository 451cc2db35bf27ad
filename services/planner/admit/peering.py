"""Peerings: their gateways, and how each end sees the other. Pure.

What an end sends into its tunnels must be free in its own cluster, and nothing that hosts send outside of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from schemas.topology import TUNNELS_MAX, Cluster, Gateway, Node, Peering
from schemas.values import IPV6, Address, Prefix
from services.planner import layout
from services.planner.admit import cluster as clusters
from services.planner.admit import firewall, routing
from services.planner.admit.cluster import too_little
from services.planner.admit.problem import Problem, as_problems, listed, missing_cluster
from services.planner.families import IPV6_MTU_MIN, carried, tunnel_endpoint, tunnel_mtu, tunnel_overhead
from services.planner.remaps import Exhausted, choose, far_addresses, own_prefixes, taken
from services.planner.state import Attachment, Seen, State, peering_key, seen_fields, seen_prefixes


def peering(item: Peering, state: State) -> Iterator[Problem]:
    """All that keeps two clusters from being joined so."""
    missing = [
        problem for index, end in enumerate(item.ends) for problem in missing_cluster(end.cluster, f"$.ends[{index}].cluster", state)
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
        yield from tunnels(item, state)


def tunnels(item: Peering, state: State) -> Iterator[Problem]:
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
                f"{len(ours)} prefixes for the {len(theirs)} of {far.ref} ({listed(theirs)}); give one for each", f"{at}.{field}", far.ref
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
    yield from as_problems(firewall.marks_on_gateway(attachment, state, field))


def _seen(attachment: Attachment, state: State, at: str) -> Iterator[Problem]:
    """The prefixes by which an end sees the other must be free in its own cluster."""
    cluster = state.clusters[attachment.end.cluster]
    seen = [(f"{at}.{one.field}[{one.position}]", one) for one in seen_fields(state, attachment)]
    in_use = list(taken(state, cluster, attachment.peering.ref))
    for index, (field, one) in enumerate(seen):
        yield from (Problem(*found, retry=False) for found in clusters.beyond_use(one.seen, field))
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
            yield from (Problem(reason, at, known.ref) for reason in loops(address, known.ref, attachment, state))
    far, ref = f"the far gateway {attachment.far_host}", f"Gateway/{attachment.far.cluster}/{attachment.far.gateway}"
    for address in far_addresses(state, attachment):
        yield from (Problem(reason, at, ref) for reason in loops(address, far, attachment, state))
        yield from swallowed(address, far, cluster, at)
        yield from as_problems(routing.underlay_taken(cluster.name, address, at, state))
    yield from as_problems(routing.remote_taken(attachment, at, state))


def swallowed(address: Address, owner: str, cluster: Cluster, field: str) -> Iterator[Problem]:
    """No prefix of a gateway's own cluster may hold the far gateway's address either: what is for pods does not leave by the uplink."""
    for prefix in own_prefixes(cluster):
        if prefix.covers(address):
            yield Problem(f"{prefix} of {cluster.ref} holds the underlay address {address} of {owner}: a loop", field, cluster.ref)


def _cure(one: Seen, cluster: Cluster) -> str:
    if one.is_given or any(pool.family == one.real.family for pool in cluster.pools):
        return "give a remap that is free there"
    return f"give a remap that is free there, or {cluster.ref} an IPv{one.real.family} pool to take one from"


def loops(address: Address, owner: str, attachment: Attachment, state: State) -> Iterator[str]:
    """No prefix of a remote cluster may hold an underlay address: outer packets would be sent into the tunnel."""
    for prefix in {prefix for pair in seen_prefixes(state, attachment) for prefix in pair}:
        if prefix.covers(address):
            yield f"{prefix} of {attachment.peering.ref} holds the underlay address {address} of {owner}: a loop"
