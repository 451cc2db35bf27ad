"""IpMappings: what an address is to its cluster, and which node leads to it. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from schemas.topology import IpMapping, Node
from schemas.values import Address
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


def led_by(state: State, node: Node) -> Iterator[IpMapping]:
    """The mappings that a node leads to."""
    for item in state.mappings[node.cluster]:
        if not is_pods(state, item) and (leader := leading_node(state, item)) is not None and leader.name == node.name:
            yield item


def leaders_around(state: State, node: Node) -> Iterator[Node]:
    """The nodes that lead, or led, to what this node may have led to, or may lead to now. The node itself is one or is not."""
    for item in state.mappings[node.cluster]:
        if not is_pods(state, item):
            yield from filter(None, (leading_node(state, item), leading_node(state, item, without=node.name)))
