"""The peer is the seed's form, over the very prefixes and links of the plan that it is compared with."""

from __future__ import annotations

import pytest

from benchmarks import seed_rules
from benchmarks.figures.rules_per_gateway import compiled
from benchmarks.seed_rules import Target
from schemas.host_objects import VxlanLink
from schemas.values import Address, Mac, Prefix

TUNNELS = ["mt.0", "mt.1"]


def node(number):
    underlay = Address(f"172.18.0.{number}")
    link = VxlanLink(f"mo.worker-{number}", number, Address("172.18.255.1"), underlay, Mac("02:00:00:00:00:02"), 1450)
    return Target(Prefix(f"10.200.{number}.0/24"), Address(f"10.80.0.{number}"), underlay, link)


NODES = [node(1), node(2)]
OUTGOING = [
    "route add 10.200.0.0/16 table 9999 nexthop dev mt.0 nexthop dev mt.1",
    "rule add priority 999 fwmark 0xff00 to 10.200.0.0/16 lookup 9999",
]


@pytest.fixture(scope="module")
def plan():
    return compiled("per-node", 2, 5)


def test_every_node_of_a_plan_is_a_target_in_the_order_of_its_prefix(plan):
    found = seed_rules.targets(plan)
    assert [target.pods for target in found] == [f"10.200.{number // 4}.{number % 4 * 64}/26" for number in range(5)]
    assert [target.link.name for target in found] == [f"mo.worker-{number}" for number in range(5)]


def test_the_overlay_is_every_link_to_a_node_with_its_address(plan):
    lines = seed_rules.overlay(plan)
    links = [item for item in plan.objects().values() if isinstance(item, VxlanLink)]
    assert len(links) == 5
    for link in links:
        (made,) = [line for line in lines if line.startswith(f"link add {link.name} ")]
        assert f"id {link.vni} local {link.local} remote {link.remote} dstport 4789" in made
        assert [line for line in lines if line.startswith("address add ") and line.endswith(f" dev {link.name}")]


def test_without_rules_all_nodes_are_in_the_main_table():
    assert seed_rules.one_table(NODES, TUNNELS) == [
        "route add 10.200.0.0/16 nexthop dev mt.0 nexthop dev mt.1",
        "route add 10.61.0.0/16 nexthop dev mt.0 nexthop dev mt.1",
        "route add 10.200.1.0/24 via 10.80.0.1 dev mo.worker-1 onlink",
        "route add 10.200.2.0/24 via 10.80.0.2 dev mo.worker-2 onlink",
    ]


def test_the_seed_has_a_rule_and_a_table_per_node_and_no_interface():
    assert seed_rules.rule_per_node(NODES, TUNNELS) == [
        *OUTGOING,
        "route add 10.200.1.0/24 via 10.80.0.1 dev mo.worker-1 onlink table 10000",
        "route add 10.200.2.0/24 via 10.80.0.2 dev mo.worker-2 onlink table 10001",
        "rule add priority 1000 fwmark 0xfe00 to 10.200.1.0/24 lookup 10000",
        "rule add priority 1001 fwmark 0xfe00 to 10.200.2.0/24 lookup 10001",
    ]


def test_before_the_seed_there_was_a_rule_per_node_and_tunnel():
    lines = seed_rules.rule_per_node_and_tunnel(NODES, TUNNELS)
    assert [line for line in lines if line.startswith("rule")] == [
        OUTGOING[1],
        "rule add priority 1000 iif mt.0 to 10.200.1.0/24 lookup 10000",
        "rule add priority 1001 iif mt.1 to 10.200.1.0/24 lookup 10000",
        "rule add priority 1002 iif mt.0 to 10.200.2.0/24 lookup 10001",
        "rule add priority 1003 iif mt.1 to 10.200.2.0/24 lookup 10001",
    ]


@pytest.mark.parametrize("marks", [True, False])
def test_nat_is_of_the_plans_prefixes_both_ways(plan, marks):
    text = seed_rules.nftables(plan, marks_tunnels=marks)
    assert "ip daddr 10.61.0.0/16 meta mark 0xff00 dnat prefix to 10.200.0.0/16" in text
    came = "meta mark 0xfe00" if marks else 'iifname "mt.*"'
    assert f'oifname != "uplink" ip saddr 10.200.0.0/16 {came} snat prefix to 10.61.0.0/16' in text
    assert ('iifname "mt.*" meta mark set 0xfe00' in text) is marks
