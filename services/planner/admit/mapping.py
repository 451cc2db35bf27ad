"""Which IpMappings cannot be right: problems as (reason, field, other object, may be right later). Pure."""

from __future__ import annotations

from collections.abc import Iterator

from schemas.topology import Cluster, Gateway, IpMapping, Node
from schemas.values import IPV4, Address, Family, Prefix
from services.planner import layout
from services.planner.external import has_room, is_for_sources, sources_prefix
from services.planner.mappings import is_pods
from services.planner.state import State

Found = tuple[str, str, str, bool]


def problems(item: IpMapping, state: State) -> Iterator[Found]:
    """The cluster must be known."""
    cluster = state.clusters[item.cluster]
    yield from _real(item, cluster, state)
    yield from _external(item, cluster, state)
    yield from _way(item, state)


def sources(item: Cluster) -> Iterator[Found]:
    """Addresses of the nodes' own need a prefix that has them."""
    if item.sources != "per-node":
        return
    for index, prefix in enumerate(item.external_prefixes):
        if sources_prefix(item, prefix.family) == prefix and not has_room(prefix):
            reason = (
                f"no external prefix of IPv{prefix.family} has an address for each of {layout.HOST_NUMBER_MAX} nodes: "
                f"{prefix} has {prefix.size}; give a /{_roomy_length(prefix.family)} or larger, or say sources: shared"
            )
            yield reason, f"$.externalPrefixes[{index}]", "", False


def _roomy_length(family: Family) -> int:
    return (32 if family == IPV4 else 128) - layout.HOST_NUMBER_BITS


def still_needed(item: Cluster, before: Cluster, state: State) -> Iterator[Found]:
    """External prefixes that chosen addresses may be from stay: peers dial those addresses."""
    for prefix in before.external_prefixes:
        user = next((each for each in _sorted(state, item.name) if each.external is None and each.real.family == prefix.family), None)
        if prefix not in item.external_prefixes and user is not None:
            reason = f"{prefix} is in use: {user.ref} may have its address from it; give that an `external` of another prefix first"
            yield reason, "$.externalPrefixes", user.ref, True


def _sorted(state: State, cluster: str) -> list[IpMapping]:
    return sorted(state.mappings[cluster], key=lambda item: item.name)


def _real(item: IpMapping, cluster: Cluster, state: State) -> Iterator[Found]:
    field = "$.real"
    for unusable in (*layout.NO_HOST, *layout.RESERVED):
        if Prefix(unusable).covers(item.real):
            yield f"{item.real} lies inside {unusable}: no packet is led there", field, "", False
            return
    for what, prefixes in (("external", cluster.external_prefixes), ("internal", cluster.internal_prefixes)):
        for prefix in prefixes:
            if prefix.covers(item.real):
                yield f"{item.real} lies inside {prefix}, an {what} prefix of its own cluster: nobody has it", field, cluster.ref, True
    gateway = state.host_with(item.cluster, item.real)
    if isinstance(gateway, Gateway):
        yield f"{item.real} is the underlay address of {gateway.ref}, to which no node leads", field, gateway.ref, True
    other = state.mappings[item.cluster].by_real.get(item.real)
    if other is not None and other.name != item.name:
        yield f"{item.real} is mapped by {other.ref}; one address has one external address", field, other.ref, True
    if all(prefix.family != item.real.family for prefix in cluster.external_prefixes):
        yield f"the cluster has no IPv{item.real.family} external prefix; add one", field, cluster.ref, True


def _external(item: IpMapping, cluster: Cluster, state: State) -> Iterator[Found]:
    field, address = "$.external", item.external
    if address is None:
        return
    if not any(prefix.covers(address) for prefix in cluster.external_prefixes):
        yield f"{address} is not inside the cluster's external prefixes {', '.join(cluster.external_prefixes)}", field, cluster.ref, True
    if is_for_sources(cluster, address):
        yield _kept_for_sources(cluster, address), field, cluster.ref, True
    other = state.mappings[item.cluster].by_external.get(address)
    if other is not None and other.name != item.name:
        yield f"{address} is {other.ref}'s", field, other.ref, True


def _kept_for_sources(cluster: Cluster, address: Address) -> str:
    prefix = sources_prefix(cluster, address.family)
    assert prefix is not None, "it covers the address"
    last = prefix.address(layout.HOST_NUMBER_MAX if has_room(prefix) else 0)
    kept = f"{prefix.address(0)} to {last}" if has_room(prefix) else str(last)
    return f"{address} is kept for what nodes send ({kept} of {prefix}); give another one"


def _way(item: IpMapping, state: State) -> Iterator[Found]:
    for given, field in ((item.node is not None, "node"), (item.masquerade, "masquerade")):
        if given and is_pods(state, item):
            reason = f"{item.real} is in a pod prefix: its pod's node leads to it, and it answers by itself; leave `{field}` out"
            yield reason, f"$.{field}", f"Cluster/{item.cluster}/{item.cluster}", True
    if item.node is None:
        return
    ref = f"Node/{item.cluster}/{item.node}"
    if item.node not in state.nodes[item.cluster]:
        yield f"node {item.node!r} is not known in cluster {item.cluster!r}; it is admitted when that is", "$.node", ref, True
    owner = state.host_with(item.cluster, item.real)
    if isinstance(owner, Node):
        yield from (_another_way(item, owner) if _is_passed_by(item, owner) else ())


def underlay(host: Node | Gateway, address: Address, state: State) -> Iterator[Found]:
    """What a mapping that is there says against an underlay address of a host."""
    item = state.mappings[host.cluster].by_real.get(address)
    if item is None:
        return
    if isinstance(host, Gateway):
        yield f"{address} is mapped by {item.ref}, and no node leads to a gateway", "$.addresses", item.ref, True
    elif _is_passed_by(item, host):
        yield from ((reason, "$.addresses", item.ref, retry) for reason, _, _, retry in _another_way(item, host))


def _is_passed_by(item: IpMapping, owner: Node) -> bool:
    """Whether packets for a node's own address are led by another node, and the answers would not come back by that."""
    return item.node not in (None, owner.name) and not item.masquerade


def _another_way(item: IpMapping, owner: Node) -> Iterator[Found]:
    reason = f"{item.real} is {owner.ref}'s own, whose answers do not come by {item.node}; leave `node` out of {item.ref}, or masquerade"
    yield reason, "$.node", owner.ref, True
