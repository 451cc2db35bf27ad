"""What must arrive of packets that are not between pods: from nodes to pods of peers, and from pods to what a peer maps.

As ``expected``, the lab's own reading of the contract. Which number a host has and which address a mapping is the planner's choice; what
follows from it is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from schemas.topology import Cluster, IpMapping, Node, Pod, Topology
from schemas.values import Address, Family
from services.cli.lab.chosen import Chosen
from services.cli.lab.expected import Between, Walk, joined
from services.cli.lab.layout import host_namespace, pod_namespace

_LAST_NUMBER = 4094


class Arrival(NamedTuple):
    """Where a mapped address leads: the namespace that has it, the address there, and the sources that it may see."""

    namespace: str
    address: Address
    sources: tuple[Address, ...]


def from_node(topology: Iterable[Topology], chosen: Chosen, node: Node, server: Pod, family: Family) -> Walk | None:
    """How packets of a node reach a pod of another cluster; None when there is no way, or a number is not known yet."""
    between = joined(topology, node.cluster, server.cluster, family)
    destination = next((address for address in server.addresses if address.family == family), None)
    if between is None or destination is None:
        return None
    source = _sender(between.here, chosen.numbers.get((node.cluster, node.name)), family)
    return Walk(between.dial(destination), between.source(source), destination) if source is not None else None


def to_mapping(topology: Iterable[Topology], chosen: Chosen, client: Pod, item: IpMapping) -> tuple[Walk, str] | None:
    """How packets of a pod reach an address that another cluster maps, and the namespace that they get to.

    None when there is no way, or when the lab has nobody at the real address.
    """
    items, family = list(topology), item.real.family
    between = joined(items, client.cluster, item.cluster, family)
    source = next((address for address in client.addresses if address.family == family), None)
    external = chosen.external(item)
    if between is None or source is None or external is None:
        return None
    arrival = _behind(items, item) or next(_further(items, chosen, between, item), None)
    if arrival is None:
        return None
    sources = arrival.sources or (between.source(source),)
    return Walk(between.dial(external), sources[0], arrival.address, sources[1:]), arrival.namespace


def _behind(items: Iterable[Topology], item: IpMapping) -> Arrival | None:
    """The pod or node of the mapping's own cluster that has the real address; it sees the client as its cluster does."""
    for other in items:
        if isinstance(other, Pod | Node) and other.cluster == item.cluster and item.real in other.addresses:
            named = pod_namespace if isinstance(other, Pod) else host_namespace
            return Arrival(named(other.cluster, other.name), item.real, ())
    return None


def _further(items: list[Topology], chosen: Chosen, between: Between, item: IpMapping) -> Iterator[Arrival]:
    """The pod of a third cluster that has it; it sees a node of the cluster between, any where none is named."""
    nodes = [each for each in items if isinstance(each, Node) and each.cluster == item.cluster and item.node in (None, each.name)]
    for cluster in (each for each in items if isinstance(each, Cluster) and each.name != between.here.name):
        onward = joined(items, item.cluster, cluster.name, item.real.family)
        original = onward.original(item.real) if onward is not None else None
        for pod in (each for each in items if isinstance(each, Pod) and each.cluster == cluster.name):
            if onward is not None and original in pod.addresses:
                numbers = (chosen.numbers.get((node.cluster, node.name)) for node in nodes)
                senders = {sender for number in numbers if (sender := _sender(onward.here, number, item.real.family)) is not None}
                if senders:
                    yield Arrival(pod_namespace(pod.cluster, pod.name), original, tuple(sorted(map(onward.source, senders))))


def _sender(cluster: Cluster, number: int | None, family: Family) -> Address | None:
    """The external address under which a node's packets leave its cluster."""
    prefixes = [prefix for prefix in cluster.external_prefixes if prefix.family == family]
    large = [prefix for prefix in prefixes if prefix.size > _LAST_NUMBER]
    if large and cluster.sources != "shared":
        return large[0].address(number) if number is not None else None
    return (large or prefixes)[0].address(0) if prefixes else None
