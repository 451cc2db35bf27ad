"""Which EgressPolicies cannot be right, and what else cannot be beside one that is there. Pure.

Each finding is the reason, the field at fault and the other object (none: empty). The established object wins.
"""

from __future__ import annotations

from collections.abc import Iterator

from schemas.firewall import FirewallConfiguration
from schemas.topology import Cluster, EgressPolicy, Gateway, Node
from schemas.values import IPV6
from services.planner import egress, mesh
from services.planner.admit.cluster import too_little
from services.planner.admit.problem import listed
from services.planner.compile.egress import inside
from services.planner.compile.firewall import mark_bits
from services.planner.families import IPV6_MTU_MIN, outer_family
from services.planner.state import State, seen_prefixes

Finding = tuple[str, str, str]


def problems(item: EgressPolicy, state: State) -> Iterator[Finding]:
    """All that keeps a policy out; its cluster is known."""
    known = state.clusters[item.cluster]
    yield from _pods(item, known, state)
    yield from _destinations(item, known, state)
    node = state.nodes[item.cluster].get(item.node)
    if node is None:
        ref = f"Node/{item.cluster}/{item.node}"
        yield f"node {item.node!r} is not known in cluster {item.cluster!r}; it is admitted when that is", "$.node", ref
        return
    yield from ((reason, "$.node", node.ref) for reason in _unfit(item, known, node))
    yield from _addresses(item, known, node, state)
    for other in sorted(state.nodes[item.cluster].values(), key=lambda other: other.name):
        yield from ((reason, "$.node", other.ref) for reason in _apart(known, node, other))
    for firewall in state.passing[item.cluster].values():
        if isinstance(firewall, FirewallConfiguration) and (at := written(firewall, known)):
            yield f"{at} of {firewall.ref} writes bits of packets' marks by which nodes tell where they lead pods", "$.node", firewall.ref


def node(item: Node, state: State) -> Iterator[Finding]:
    """What the policies of a cluster that are there say against a node."""
    known = state.clusters[item.cluster]
    policies = [state.egress[item.cluster][name] for name in sorted(state.egress[item.cluster])]
    for policy in policies:
        if policy.node == item.name:
            yield from ((f"{policy.ref} lets pods out here: {reason}", "$.addresses", policy.ref) for reason in _unfit(policy, known, item))
        exit_node = item if policy.node == item.name else state.nodes[item.cluster].get(policy.node)
        others = state.nodes[item.cluster].values() if policy.node == item.name else [item]
        for other in others if exit_node is not None else ():
            yield from ((f"{policy.ref}: {reason}", "$.addresses", policy.ref) for reason in _apart(known, exit_node or item, other))
    yield from _taken(item, policies)


def taken(item: Gateway, state: State) -> Iterator[Finding]:
    """Addresses of a gateway as which pods leave."""
    yield from _taken(item, list(state.egress[item.cluster].values()))


def written(item: FirewallConfiguration, known: Cluster) -> str:
    """The field by which a configuration changes the bits of the cluster's marks on nodes without saying that it means to; or nothing."""
    if item.class_marks or item.hosts.role == "gateway":
        return ""
    return next((field for bits, field in mark_bits(item) if bits & known.marks.mask), "")


def _pods(item: EgressPolicy, known: Cluster, state: State) -> Iterator[Finding]:
    for index, prefix in enumerate(item.pods):
        field = f"$.pods[{index}]"
        if not any(whole.contains(prefix) for whole in known.pod_prefixes):
            yield f"{prefix} is not inside the cluster's pod prefixes {listed(known.pod_prefixes)}", field, known.ref
        for other in _others(item, state):
            theirs = next((their for their in other.pods if their.overlaps(prefix)), None)
            if theirs is not None:
                yield f"{prefix} overlaps {theirs} of {other.ref}; a pod has one policy", field, other.ref


def _destinations(item: EgressPolicy, known: Cluster, state: State) -> Iterator[Finding]:
    for index, prefix in enumerate(item.destinations):
        field = f"$.destinations[{index}]"
        for attachment in state.attachments[item.cluster].values():
            for seen, _ in seen_prefixes(state, attachment):
                if seen.contains(prefix):
                    ref = attachment.peering.ref
                    yield f"{prefix} is inside {seen}, by which pods reach {attachment.far.cluster}: that goes through tunnels", field, ref
        for own in inside(known, ()):
            if own.contains(prefix):
                yield f"{prefix} is inside {own}, which is never outside of the cluster", field, known.ref


def _unfit(item: EgressPolicy, known: Cluster, exit_node: Node) -> Iterator[str]:
    """Why a node cannot let a policy's pods out."""
    for family in egress.families(known, item):
        if egress.source(exit_node, item, family) is None:
            yield f"{exit_node.ref} has no IPv{family} address of its own for what pods send; give one in `addresses`"
    if known.encryption == "wireguard" and known.strict != "off" and exit_node.opt_out:
        reason = f"{exit_node.ref} opted out of encryption, and pods' packets would go there in clear"
        yield f'{reason}; take another node, or set strict: "off"'


def _apart(known: Cluster, exit_node: Node, other: Node) -> Iterator[str]:
    """Why the overlay cannot carry pods' packets from a node to an exit node."""
    family = outer_family(exit_node, other)
    if family is None:
        yield f"{other.ref} has no family in common with {exit_node.ref}; give one of them an address of the other's"
    elif IPV6 in mesh.pod_families(known):
        room = min(mesh.overlay_mtu(known, each, family) for each in (exit_node, other))
        if room < IPV6_MTU_MIN:
            yield too_little(f"the headers of what {other.ref} sends {exit_node.ref}", known.mtu - room, known.mtu)


def _addresses(item: EgressPolicy, known: Cluster, exit_node: Node, state: State) -> Iterator[Finding]:
    for index, address in enumerate(item.addresses):
        field = f"$.addresses[{index}]"
        owner = state.host_with(item.cluster, address)
        if owner is not None and owner.name != exit_node.name:
            yield f"{address} is the underlay address of {owner.ref}; answers would not come to {exit_node.name}", field, owner.ref
        for own in inside(known, ()):
            if own.covers(address):
                yield f"{address} lies inside {own}, which nobody outside answers", field, known.ref
        for other in _others(item, state):
            if address in other.addresses and other.node != item.node:
                yield f"{address} is used by {other.ref} on {other.node}; answers come to one node only", field, other.ref


def _taken(item: Node | Gateway, policies: list[EgressPolicy]) -> Iterator[Finding]:
    for index, address in enumerate(item.addresses):
        user = next((policy for policy in policies if address in policy.addresses and policy.node != item.name), None)
        if user is not None:
            yield f"{address} is the address by which pods of {user.ref} leave through {user.node}", f"$.addresses[{index}]", user.ref


def _others(item: EgressPolicy, state: State) -> list[EgressPolicy]:
    policies = state.egress[item.cluster]
    return [policies[name] for name in sorted(policies) if name != item.name]
