"""Rules that each packet meets do not grow with what a mesh grows by: nodes, pods, tunnels, peers and policies are elements and routes."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from typing import NamedTuple

import pytest

from schemas.host_objects import NftChain, PolicyRule
from schemas.nft import Match
from schemas.plan import HostPlan
from schemas.topology import PublicKey, Topology
from schemas.values import Key, Prefix
from services.planner.state import HostId
from tests.topologies import cluster, node, pod, settled_plans, two_clusters
from tests.unit.planner.policies import items, policy

OWN_CHAINS = ("by.", "back.")
"""Beginnings of names of chains that policies have, one of each."""
ROME, WORKER = HostId("rome", "gateway"), HostId("rome", "worker-1")


class Shape(NamedTuple):
    """What packets go through one after the other: rules by chain, the longest list of values in one match, policy rules."""

    chains: dict[str, int]
    longest: int
    policy_rules: int


def shape(plan: HostPlan) -> Shape:
    found = list(plan.objects().values())
    chains = [item for item in found if isinstance(item, NftChain)]
    values = [len(match.values) for chain in chains for rule in chain.rules for match in rule if isinstance(match, Match)]
    rules = sum(isinstance(item, PolicyRule) for item in found)
    return Shape({item.name: len(item.rules) for item in chains}, max(values, default=0), rules)


def grown(small: Iterable[Topology], large: Iterable[Topology], host: HostId) -> tuple[Shape, Shape]:
    """A host's shape in a small and in a large mesh, whose plan is really larger."""
    one, other = (settled_plans(found)[host] for found in (small, large))
    assert len(other.objects()) > len(one.objects())
    return shape(one), shape(other)


@pytest.mark.parametrize("nodes, tunnels", [(40, 3), (2, 32)], ids=["nodes", "tunnels"])
def test_a_gateway(nodes: int, tunnels: int) -> None:
    """However many nodes there are on its side, and tunnels to the other."""
    one, other = grown(two_clusters(), two_clusters(nodes, tunnels), ROME)
    assert one == other


@pytest.mark.parametrize("strict", ["off", "enforce"])
@pytest.mark.parametrize("routing", ["native", "overlay"])
def test_nodes_that_encrypt(strict: str, routing: str) -> None:
    """With roaming pods among them."""

    def mesh(count: int) -> list[Topology]:
        nodes = [node(f"worker-{number}", number) for number in range(1, count + 1)]
        pods = [pod(f"pod-{number}", f"worker-{number % count + 1}", f"10.200.{200 + number}.1") for number in range(count)]
        return [cluster("rome", encryption="wireguard", strict=strict, routing=routing), *nodes, *map(_key, nodes), *pods]

    one, other = grown(mesh(3), mesh(40), WORKER)
    assert one == other


def _key(item: Topology) -> PublicKey:
    return PublicKey(name=item.name, cluster=item.home, key=Key(base64.b64encode(item.name.encode().ljust(32, b".")).decode()))


@pytest.mark.parametrize("has_destinations", [False, True])
@pytest.mark.parametrize("host", [WORKER, HostId("rome", "worker-2")], ids=["exit", "other"])
def test_policies_of_what_leaves(host: HostId, has_destinations: bool) -> None:
    """Only policies with destinations of their own are a list, of rules that the first packet of a flow meets: one for each family."""
    where = (Prefix("198.51.100.0/24"),) if has_destinations else ()

    def mesh(count: int) -> list[Topology]:
        more = (policy(f"p{number}", pods=(Prefix(f"10.200.{20 + number}.0/24"),), destinations=where) for number in range(count))
        return [*items(), *more]

    one, other = grown(mesh(1), mesh(21), host)
    own = {name: count for name, count in other.chains.items() if name.startswith(OWN_CHAINS)}
    assert all(count <= 2 for count in own.values()), "reached through a map, by the pods of that policy alone"
    shared = {name: count for name, count in other.chains.items() if name not in own}
    if has_destinations:
        shared["egress_nat"] -= 20
    assert shared == {name: count for name, count in one.chains.items() if not name.startswith(OWN_CHAINS)}
    assert (one.longest, one.policy_rules) == (other.longest, other.policy_rules)
