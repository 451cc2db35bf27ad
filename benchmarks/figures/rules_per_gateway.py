"""Policy rules, nftables rules, elements and routes of a gateway, against tunnels x nodes. Counted in compiled plans: nothing is timed.

Peer: what the seed needs, 1 rule per target node (its N; the form before it, MxN, is in the details). Both are counted low: only the rules
that lead incoming packets to nodes, which is what the seed's text compares. A gateway of the seed has further ones.
Goal: the number at the smallest size. It must not grow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from benchmarks import topologies
from benchmarks.result import Details, Figure, Result, result
from schemas.plan import HostPlan, NftChain, NftElement, PolicyRule, Route
from services.planner.compile import compile_host

_TUNNELS = (1, 2, 8)
_NODES = (2, 10, 60, 1000)
_NODE_LENGTH = 26
_CIDRS = 1
"""Pod prefixes per node in these topologies."""


def run(say: Callable[[str], None]) -> list[Result]:
    found = {(tunnels, nodes): count(compiled(tunnels, nodes)) for nodes in _NODES for tunnels in _TUNNELS}
    say(f"{len(found)} plans compiled")
    goal = found[_TUNNELS[0], _NODES[0]]["policy_rules"]
    table: Details = {
        f"{tunnels} tunnels x {nodes} nodes": {**counts, "seed_mxn": tunnels * nodes * _CIDRS, "seed_n": nodes * _CIDRS}
        for (tunnels, nodes), counts in found.items()
    }
    return [
        result(
            f"rules-per-gateway-{nodes}-nodes",
            [found[_TUNNELS[-1], nodes]["policy_rules"]],
            "rules",
            peer=nodes * _CIDRS,
            goal=goal,
            details={name: row for name, row in table.items() if name.endswith(f" {nodes} nodes")},
        )
        for nodes in _NODES
    ]


def compiled(tunnels: int, nodes: int) -> HostPlan:
    """The gateway's plan once every tunnel is in use."""
    core = topologies.planner(topologies.mesh(nodes, tunnels, node_length=_NODE_LENGTH), tunnels)
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
