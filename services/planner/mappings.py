"""IpMappings: what an address is to its cluster, and which node leads to it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from schemas.topology import IpMapping, Node
from schemas.values import Address
from services.planner.ring import Ring
from services.planner.state import Attachment, State, seen_prefixes


def is_pods(state: State, item: IpMapping) -> bool:
    """Whether the real address is in a pod prefix of its cluster: then the pod's own node leads to it."""
    return any(prefix.covers(item.real) for prefix in state.clusters[item.cluster].pod_prefixes)


def peering_to(state: State, cluster: str, address: Address) -> Attachment | None:
    """The end of the peering by which a cluster sees this address as a remote one."""
    for attachment in state.attachments[cluster].values():
        if any(seen.covers(address) for seen, _ in seen_prefixes(state, attachment)):
            return attachment
    return None


def is_behind(state: State, attachment: Attachment, item: IpMapping) -> bool:
    """Whether the real address is the far cluster's own: that one needs no way to itself through another's mapping."""
    return any(seen.covers(item.real) for seen, _ in seen_prefixes(state, attachment))


def leading_node(state: State, item: IpMapping, without: str = "") -> Node | None:
    """The node by which packets get to a real address that is no pod's: the one that has it, the given one, or a stable choice.

    Chosen is among nodes that have an underlay address of its family, where there are such. `without` leaves a node out.
    """
    nodes = state.nodes[item.cluster]
    owner = state.host_with(item.cluster, item.real)
    if item.node is None and isinstance(owner, Node) and owner.name != without:
        return owner
    if item.node is not None:
        return nodes.get(item.node)
    first = None
    for name in state.rings[item.cluster].after(item.name):
        if name != without:
            if any(address.family == item.real.family for address in nodes[name].addresses):
                return nodes[name]
            first = first or nodes[name]
    return first


def led_by(state: State, node: Node) -> Sequence[IpMapping]:
    """The mappings that a node leads to."""
    held = state.mappings[node.cluster]
    if held.by_leader is None:
        held.by_leader = {}
        for item in held:
            if not is_pods(state, item) and (leader := leading_node(state, item)) is not None:
                held.by_leader.setdefault(leader.name, []).append(item)
    return held.by_leader.get(node.name, ())


def leaders_around(state: State, node: Node) -> Iterator[Node]:
    """Every node whose mappings may have changed with this one, which is given as it was or as it is; perhaps some more."""
    for item in state.mappings[node.cluster]:
        if not is_pods(state, item) and (leader := leading_node(state, item)) is not None and _bears_on(node, item, leader):
            yield leader
            yield from filter(None, [leading_node(state, item, without=node.name)])


def _bears_on(node: Node, item: IpMapping, leader: Node) -> bool:
    """Whether a node leads, led, or kept another from leading: by its name, its address, or its place before the leader of now."""
    named = node.name == item.node or item.real in node.addresses
    is_stopgap = all(address.family != item.real.family for address in leader.addresses)
    return named or is_stopgap or Ring.distance(item.name, node.name) <= Ring.distance(item.name, leader.name)
