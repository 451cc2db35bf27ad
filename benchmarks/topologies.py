"""Topologies of any size: two clusters, one peering, equal pod prefixes. Deterministic."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from typing import Literal

from schemas.topology import Cluster, Gateway, Node, Peering, PeeringEnd, Pod, PublicKey, Topology
from schemas.values import Address, Key, Name, Prefix
from services.planner.allocate import Rollout
from services.planner.core import Core
from services.planner.state import HostId

Sources = Literal["per-node", "shared"]
PODS = Prefix("10.200.0.0/16")
GATEWAY = HostId("rome", "gateway")
PEERING = ("rome", "rome-milan")
_SITES = {"rome": 0, "milan": 1}


def mesh(nodes: int, tunnels: int, *, node_length: int, sources: Sources = "per-node") -> list[Topology]:
    """Rome with `nodes` nodes, each with a pod prefix of `node_length` bits, milan with two; joined by `tunnels` tunnels."""
    found: list[Topology] = [*_cluster("rome", sources), *_cluster("milan", sources)]
    found += _nodes("rome", nodes, node_length)
    found += _nodes("milan", 2, node_length)
    ends = tuple(
        PeeringEnd(cluster=Name(name), gateway=Name("gateway"), remap_pods=(Prefix(pods),), remap_external=(Prefix(external),))
        for name, pods, external in (("rome", "10.61.0.0/16", "10.62.0.0/16"), ("milan", "10.63.0.0/16", "10.64.0.0/16"))
    )
    found.append(Peering(name=Name(PEERING[1]), cluster=Name(PEERING[0]), ends=(ends[0], ends[1]), tunnels=tunnels))
    found.append(PublicKey(name=Name("gateway"), cluster=Name("rome"), key=Key("A" * 43 + "=")))
    found.append(PublicKey(name=Name("gateway"), cluster=Name("milan"), key=Key("B" * 42 + "A=")))
    return found


def pods(nodes: int, each: int, *, node_length: int, roaming: int) -> Iterator[Pod]:
    """`each` pods on every node of rome. The first `roaming` of them have an address that the next node's prefix covers."""
    size = 1 << (32 - node_length)
    first = int(PODS.network.network_address)
    for number in range(nodes * each):
        node, place = number % nodes, number // nodes
        owner = (node + 1) % nodes if number < roaming else node
        address = Address(str(ipaddress.IPv4Address(first + node * size + place + 1)))
        yield Pod(name=Name(f"pod-{number}"), cluster=Name("rome"), node=Name(f"worker-{owner}"), addresses=(address,))


def planner(objects: list[Topology], tunnels: int) -> Core:
    """A planner that has admitted `objects` earlier, rolled all tunnels out and not published anything."""
    core = Core()
    core.allocations.set_rollout(PEERING, Rollout.complete(tunnels))
    core.restore([(item, 1) for item in objects], {}, {})
    return core


def _cluster(name: str, sources: Sources) -> list[Topology]:
    site = _SITES[name]
    return [
        Cluster(
            name=Name(name),
            pod_prefixes=(PODS,),
            external_prefixes=(Prefix(f"10.{70 + site}.0.0/16"),),
            internal_prefixes=(Prefix(f"10.{80 + site}.0.0/16"),),
            sources=sources,
        ),
        Gateway(name=Name("gateway"), cluster=Name(name), addresses=(Address(f"172.{18 + site}.255.1"),)),
    ]


def _nodes(home: str, count: int, length: int) -> Iterator[Node]:
    for number, prefix in zip(range(count), PODS.network.subnets(new_prefix=length), strict=False):
        address = Address(f"172.{18 + _SITES[home]}.{number // 250}.{number % 250 + 1}")
        yield Node(name=Name(f"worker-{number}"), cluster=Name(home), addresses=(address,), pod_prefixes=(Prefix(str(prefix)),))
