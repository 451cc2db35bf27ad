"""Policy rules, nftables rules, elements and routes of a gateway, against tunnels x nodes, for both ways in which nodes appear to peers.

Counted in compiled plans: nothing is timed.

Peer: what the seed needs, 1 rule per target node (its N; the form before it, MxN, is in the details). Both are counted low: only the rules
that lead incoming packets to nodes, which is what the seed's text compares. A gateway of the seed has further ones.
Goal: the number at the smallest size. It must not grow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import product

from benchmarks import topologies
from benchmarks.result import Details, Figure, Result, result
from schemas.host_objects import NftChain, NftElement, PolicyRule, Route
from schemas.plan import HostPlan
from services.planner.compile import compile_host

_TUNNELS = (1, 2, 8)
_NODES = (1, 10, 100, 1000)
_SOURCES: tuple[topologies.Sources, ...] = ("per-node", "shared")
_NODE_LENGTH = 26


def run(say: Callable[[str], None]) -> list[Result]:
    places = list(product(_SOURCES, _TUNNELS, _NODES))
    found = {place: count(compiled(*place)) for place in places}
    say(f"{len(found)} plans compiled")
    goal = found[places[0]]["policy_rules"]
    table: Details = {
        f"{sources}, {tunnels} tunnels x {nodes} nodes": {**found[sources, tunnels, nodes], "seed_mxn": tunnels * nodes, "seed_n": nodes}
        for sources, tunnels, nodes in places
    }
    return [
        result(
            f"rules-per-gateway-{nodes}-nodes",
            [found[sources, _TUNNELS[-1], nodes]["policy_rules"] for sources in _SOURCES],
            "rules",
            peer=nodes,
            goal=goal,
            details={name: row for name, row in table.items() if name.endswith(f" {nodes} nodes")},
        )
        for nodes in _NODES
    ]


def compiled(sources: topologies.Sources, tunnels: int, nodes: int) -> HostPlan:
    """The gateway's plan once every tunnel is in use. Each node has one pod prefix."""
    core = topologies.planner(topologies.mesh(nodes, tunnels, node_length=_NODE_LENGTH, sources=sources), tunnels)
    return compile_host(core.state, core.allocations, topologies.GATEWAY)


def count(plan: HostPlan) -> dict[str, int]:
    """How many objects of each sort a host's kernel would hold."""
    found: Counter[str] = Counter(policy_rules=0, nft_rules=0, nft_elements=0, routes=0)
    for item in plan.objects().values():
        match item:
            case PolicyRule():
                found["policy_rules"] += 1
            case NftChain():
                found["nft_rules"] += len(item.rules)
            case NftElement():
                found["nft_elements"] += 1
            case Route():
                found["routes"] += 1
    return dict(found)


FIGURE = Figure("rules-per-gateway", "objects of a gateway's plan against tunnels x nodes", run)
