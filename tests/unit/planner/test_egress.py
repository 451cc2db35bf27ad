"""Policies of what leaves a cluster through which node: plans in every routing."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from schemas.host_objects import NftChain, PlanObject, PolicyRule, Route, WireguardPeer
from schemas.nft import Match, VerdictMap
from schemas.topology import EgressPolicy
from schemas.values import Name, Prefix
from services.cli.render import plan_text
from services.planner import layout
from services.planner.compile import compile_all, drops
from services.planner.core import Core, Said
from services.planner.state import HostId
from tests.topologies import cluster, gateway, node, peering, said, settled_plans, tell
from tests.unit.planner.policies import elements, items, objects, policy, publish

GOLDEN = Path(__file__).parent / "golden_egress"
ONE, TWO, THREE = (HostId("rome", f"worker-{number}") for number in (1, 2, 3))
UNIT = "mesh/rome"


@pytest.mark.parametrize("path", sorted(GOLDEN.iterdir()), ids=lambda path: path.stem)
def test_golden_plans(path: Path) -> None:
    """What a reviewer has read: a node that leads its pods to another one, and the nodes that let them out, natively and by the overlay."""
    routing, host = path.stem.split(".")
    assert plan_text(settled_plans(items(routing=routing))[HostId("rome", host)]) == path.read_text(encoding="utf-8")


def test_one_rule_a_family_for_each_node_that_lets_pods_out() -> None:
    """However many policies and pods there are: they are elements. No rule of nftables names a pod either, but for its policy's chain."""
    more = [policy(f"p{number}", pods=(Prefix(f"10.200.1{number}.0/24"),), node=Name("worker-2")) for number in range(10)]
    few, many = (objects(settled_plans([*items(), *these]), ONE) for these in ([], more))
    for kind in (PolicyRule, Route):
        assert [item for item in few if isinstance(item, kind)] == [item for item in many if isinstance(item, kind)]
    rules = [{item.name: len(item.rules) for item in found if isinstance(item, NftChain) and item.hook} for found in (few, many)]
    assert rules[0] == rules[1]
    assert len([item for item in many if isinstance(item, PolicyRule) and item.priority == layout.RULE_EGRESS]) == 4  # two nodes, twice


@pytest.mark.parametrize("routing", ["native", "overlay"])
def test_the_way_to_an_exit_ends_in_unreachable(routing: str) -> None:
    """By mark to a table that holds the overlay's way to that node, and a refusal of everything else; a node has none to itself."""
    plans = settled_plans(items(routing=routing))
    found = [item for item in objects(plans, ONE) if isinstance(item, Route) and item.table in layout.EGRESS_TABLES]
    tables = {item.table for item in found}
    assert len(tables) == 2
    for table in tables:
        assert {(item.prefix, item.type) for item in found if item.table == table} == {
            (Prefix(each), kind) for each in ("0.0.0.0/0", "::/0") for kind in ("unicast", "unreachable")
        }
    assert all(hop.link == "mm.4" for item in found for hop in item.hops)
    assert len({item.table for item in objects(plans, TWO) if isinstance(item, Route) and item.table in layout.EGRESS_TABLES}) == 1


def ways_out(found: Iterable[PlanObject]) -> int:
    """How many ways lead to exit nodes, of both families."""
    return len([item for item in found if isinstance(item, Route) and item.table in layout.EGRESS_TABLES and item.type == "unicast"])


@pytest.mark.parametrize("strict,others", [("enforce", 2), ("audit", 4), ("off", 4)])
@pytest.mark.parametrize("routing", ["native", "overlay"])
def test_nothing_goes_to_an_exit_whose_key_is_not_known_where_nothing_may_go_in_clear(routing: str, strict: str, others: int) -> None:
    """Its table refuses everything until then, on nodes that encrypt; nor does a node lead pods anywhere before its own key is known."""
    without = [item for item in items(routing=routing, strict=strict) if item.ref != "PublicKey/rome/worker-3"]
    core = Core()
    tell(core, without)
    publish(core)
    assert ways_out(objects(core.published, ONE)) == others
    assert ways_out(objects(core.published, THREE)) == others - 2
    core.hear([said(next(item for item in items() if item.ref == "PublicKey/rome/worker-3"), 1000)])
    publish(core)
    assert ways_out(objects(core.published, ONE)) == 4
    assert ways_out(objects(core.published, THREE)) == 2
    assert compile_all(core.state, core.allocations)[ONE].units == core.published[ONE].units


def test_peers_take_outer_packets_where_pods_leave_by_them_only() -> None:
    """Natively, a node's own address is among what a peer may send if one of the two lets pods out; else its pods are all."""
    one_exit = [item for item in items() if item.ref != "EgressPolicy/rome/bank"]
    plans = settled_plans(one_exit)
    for host, others in ((ONE, {"172.18.0.12/32"}), (TWO, {"172.18.0.11/32", "172.18.0.13/32"}), (THREE, {"172.18.0.12/32"})):
        allowed = {prefix for item in objects(plans, host) if isinstance(item, WireguardPeer) for prefix in item.allowed_ips}
        assert {str(prefix) for prefix in allowed if str(prefix).startswith("172.")} == others


def test_who_lets_out_translates_and_who_leads_does_not() -> None:
    """The exit node maps pods to the given address or its own; others keep pods' addresses and map them to the policy's chain."""
    plans = settled_plans(items())
    assert elements(objects(plans, TWO), "leaving") == {"10.200.1.0/24": "172.18.0.12"}
    assert elements(objects(plans, TWO), "leaving6") == {"fd00:200:0:1::/64": "2001:db8:18::12"}
    assert elements(objects(plans, THREE), "leaving.bank.4") == {"10.200.2.10": "192.0.2.9"}
    assert elements(objects(plans, THREE), "leaving") == {}
    assert elements(objects(plans, ONE), "led") == {"10.200.1.0/24": "jump by.shop", "10.200.2.10": "jump by.bank"}
    assert elements(objects(plans, TWO), "led") == {"10.200.2.10": "jump by.bank"}


@pytest.mark.parametrize("host", [ONE, TWO, THREE], ids=str)
def test_no_answer_of_an_exit_node_begins_a_flow(host: HostId) -> None:
    """Whether a node leads a policy's pods or lets them out: for what is outside to that policy, they have to begin."""
    found = objects(settled_plans(items()), host)
    assert elements(found, "chosen") == {"10.200.1.0/24": "jump back.shop", "10.200.2.10": "jump back.bank"}
    assert elements(found, "chosen6") == {"fd00:200:0:1::/64": "jump back.shop"}
    chains = {item.name: item.rules for item in found if isinstance(item, NftChain)}
    assert chains["back.shop"] == (drops.NO_ANSWER,)
    assert chains["back.bank"] == ((Match("ip saddr", ("@to.bank.4",)), *drops.NO_ANSWER),)
    reply, drop = (
        next(number for number, rule in enumerate(chains["egress_forward"]) if match in rule)
        for match in (Match("ct direction", ("reply",)), VerdictMap("ip daddr", "chosen"))
    )
    assert reply < drop
    assert Match("ct direction", ("original",)) in chains["egress_forward"][drop]


def test_inside_is_all_that_a_cluster_and_its_peers_have() -> None:
    """Pods, external and internal prefixes, what is seen of peers, broker, gateways, and what is never routed."""
    rome = cluster("rome", control=(Prefix("192.0.2.7/32"),), external_prefixes=(Prefix("10.70.0.0/16"),))
    base = [rome, cluster("milan"), gateway("rome"), gateway("milan"), node("worker-1", 1), node("worker-2", 2), peering()]
    found = objects(settled_plans([*base, policy(pods=(Prefix("10.200.1.0/24"),), node=Name("worker-2"))]), ONE)
    inside = elements(found, "inside").keys()
    assert {"10.200.0.0/16", "10.70.0.0/16", "10.80.0.0/16", "10.61.0.0/16", "192.0.2.7", "169.254.0.0/16", "224.0.0.0/3"} <= inside
    assert elements(found, "hosts").keys() == {"172.18.0.10", "172.18.0.11", "172.18.0.12"}


def test_a_cluster_without_policies_has_nothing_of_it() -> None:
    """The last policy takes all along that the first one brought."""
    core = Core()
    tell(core, items())
    policies = [item for item in items() if isinstance(item, EgressPolicy)]
    core.hear([Said(("egresspolicy", "rome", item.name), b"", 100 + number) for number, item in enumerate(policies)])
    core.steps()
    without = settled_plans([item for item in items() if not isinstance(item, EgressPolicy)])
    assert {step: core._compiler.plan(step).units for step in (ONE, TWO, THREE)} == {host: plan.units for host, plan in without.items()}
