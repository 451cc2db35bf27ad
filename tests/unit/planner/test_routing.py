"""Published routes in plans: which hosts hold them, as what units, with what numbers, and what contradicts them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from schemas.host_objects import NextHop, PlanObject, PolicyRule, Route
from schemas.objects import HostSelector
from schemas.plan import diff_units
from schemas.topology import Topology
from schemas.values import Address, Name, Prefix
from services.cli.files import load
from services.cli.render import plan_text
from services.planner.compile.passing import may_meet
from services.planner.compile.routing import priority_of, table_of
from services.planner.core import Core
from services.planner.state import HostId
from tests.routes import compiled, routes, to
from tests.topologies import EXAMPLE, ROME_GATEWAY, cluster, dual_stack, gateway, node, peering, said, settled_plans, tell, two_clusters

GOLDEN = Path(__file__).parent / "golden_routing"
UNIT, REF = "route/rome/test", "RouteConfiguration/rome/test"
TABLE, PRIORITY = 77245971, 17021
ONE = to("10.9.0.0/16", "eth1")
BY_TUNNELS = to("10.9.0.0/16", "@tunnels")


def objects(host: HostId, *items: Topology) -> list[PlanObject]:
    """What the unit of the configuration `test` holds on a host."""
    return [entry.object for entry in settled_plans([*two_clusters(), *items])[host].units[UNIT].values()]


def test_golden_plan_of_the_example() -> None:
    """The gateway's plan with the example's routes; write it anew with ``meshmark plan`` of both example files."""
    plan = settled_plans(load([EXAMPLE, EXAMPLE.with_name("routes.yaml")]))[ROME_GATEWAY]
    published = {name: unit for name, unit in plan.units.items() if name.startswith("route/")}
    assert plan_text(replace(plan, units=published)) == (GOLDEN / "rome.gateway.txt").read_text(encoding="utf-8")


def test_every_configuration_is_a_unit_with_a_table() -> None:
    """On the hosts that it selects; each names what it comes from, and a deleted one leaves nothing."""
    items = [routes(routes=[ONE], hosts={"role": "node"}), routes("other", routes=[ONE], rules=[{}], hosts={"names": ["worker-1"]})]
    plans = settled_plans([*two_clusters(), *items])
    held = {host.name: {name for name in plan.units if name.startswith("route/")} for host, plan in plans.items() if host.cluster == "rome"}
    assert held == {"gateway": set(), "worker-1": {UNIT, "route/rome/other"}, "worker-2": {UNIT}}
    units = plans[HostId("rome", "worker-1")].units
    assert not set(units[UNIT]) & set(units["route/rome/other"])
    assert {entry.because for entry in units[UNIT].values()} == {(REF,)}
    core = Core()
    tell(core, [*two_clusters(), *items])
    core.published.update({step.host: step.plan for step in core.steps()})
    core.hear([replace(said(items[1], 100), payload=b"")])
    assert [(step.host.name, [diff.unit for diff in step.diffs]) for step in core.steps()] == [("worker-1", ["route/rome/other"])]


def test_tunnels_are_next_hops_with_the_weights_of_their_peering() -> None:
    """Those that carry traffic; a node has none, so a route by tunnels only is not there."""
    mesh = [*two_clusters()[:-3], peering(2, weights=(3, 1))]
    plans = settled_plans([*mesh, routes(routes=[BY_TUNNELS, to("10.8.0.0/16", "eth1")])])
    unit = plans[ROME_GATEWAY].units[UNIT]
    assert next(entry.object for entry in unit.values()) == Route(
        TABLE, Prefix("10.9.0.0/16"), hops=(NextHop("mt.0", weight=3), NextHop("mt.1"))
    )
    assert unit[f"route {TABLE} 10.9.0.0/16 0"].because == ("Peering/rome/rome-milan", REF)
    assert len(plans[HostId("rome", "worker-1")].units[UNIT]) == 1


def test_ipv6_tunnels_are_next_hops_by_the_far_ends_address() -> None:
    """As the kernel wants it for several; each family as far as the peering carries it."""
    item = routes(routes=[to("fd00:9::/32", "@tunnels"), BY_TUNNELS], hosts={"role": "gateway"})
    plan = settled_plans([*dual_stack(), item])[ROME_GATEWAY]
    hops = {entry.object.prefix.family: entry.object.hops for entry in plan.units[UNIT].values() if isinstance(entry.object, Route)}
    assert hops.keys() == {4, 6}
    assert all(hop.via is not None and hop.onlink for hop in hops[6])
    assert [hop.link for hop in hops[6]] == [hop.link for hop in hops[4]]
    only = settled_plans([*two_clusters(), item])[ROME_GATEWAY]
    assert [entry.object.prefix for entry in only.units[UNIT].values() if isinstance(entry.object, Route)] == [Prefix("10.9.0.0/16")]


def test_another_tunnel_is_another_hop_and_another_rule() -> None:
    """And nothing else changes."""
    item = routes(routes=[BY_TUNNELS, ONE | {"metric": 1}], rules=[{"iif": "@tunnels"}, {"iif": "lo", "to": "10.9.0.0/16"}])
    few, more = (settled_plans([*two_clusters(tunnels=number), item])[ROME_GATEWAY] for number in (1, 2))
    (diff,) = diff_units({UNIT: few.units[UNIT]}, {UNIT: more.units[UNIT]})
    changed = [entry.object for entry in diff.put]
    assert {type(found) for found in changed} == {Route, PolicyRule}
    assert len(changed) == 2
    assert diff.drop == ()


@pytest.mark.parametrize(
    "fields, families",
    [
        ({"rules": [{}]}, {4, 6}),
        ({"rules": [{}], "routes": [to("fd00::/8", "eth1")]}, {6}),
        ({"rules": [{"to": "0.0.0.0/0"}]}, {4}),
        ({"rules": [{"from": "fd00::/8"}], "routes": [ONE]}, {6}),
    ],
)
def test_a_rule_is_made_for_the_families_that_it_is_about(fields: dict[str, Any], families: set[int]) -> None:
    """Of its prefixes, else of the configuration's routes, else both."""
    assert {item.family for item in compiled(routes(**fields)).values() if isinstance(item, PolicyRule)} == families


def test_numbers_are_stable_and_leave_room() -> None:
    """A table and a priority from the name alone, among nobody's; a lower order comes first, whatever the names."""
    found = [routes(f"name-{number}", rules=[{}]) for number in range(500)]
    assert len({table_of(item) for item in found}) == len(found)
    assert all(77_000_000 <= table_of(item) < 78_000_000 for item in found)
    early, late = ({priority_of(replace(item, order=order), item.rules[0]) for item in found} for order in (-1, 0))
    assert max(early) < min(late)
    ends = [priority_of(replace(item, order=order), item.rules[0]) for item in found for order in (-100, 100)]
    assert 1000 < min(ends) < max(ends) < 32766
    assert (table_of(routes(rules=[{}])), priority_of(routes(rules=[{}]), found[0].rules[0])) == (TABLE, PRIORITY), "as in any release"


# Selectors -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "one, other, meet",
    [
        ({}, {}, True),
        ({"role": "node"}, {"role": "gateway"}, False),
        ({"role": "node"}, {"names": ["gateway"]}, True),
        ({"names": ["worker-*"]}, {"names": ["edge", "*-1"]}, True),
        ({"names": ["worker-*"]}, {"names": ["edge-*", "work"]}, False),
        ({"names": ["a?c"]}, {"names": ["ab*"]}, True),
        ({"names": ["a?"]}, {"names": ["a"]}, False),
        ({"names": ["*a*b*"]}, {"names": ["b*a"]}, True),
        ({"peering": "one"}, {"peering": "two"}, True),
        ({"peering": "one"}, {"peering": "two", "role": "gateway"}, False),
        ({"peering": "one", "role": "gateway"}, {"peering": "one"}, True),
    ],
)
def test_selectors_meet_when_there_can_be_a_host_for_both(one: dict[str, Any], other: dict[str, Any], *, meet: bool) -> None:
    """Whether it is there already or not."""
    selectors = [routes(rules=[{}], hosts=hosts).hosts for hosts in (one, other)]
    assert isinstance(selectors[0], HostSelector)
    assert may_meet(*selectors) is meet
    assert may_meet(*reversed(selectors)) is meet


# Contradictions --------------------------------------------------------------------------------------------------------------------


def refusals(*items: Topology) -> list[tuple[str, str, str]]:
    """Object, field and other object of each refusal."""
    return [(f"{item.kind}/{item.cluster}/{item.name}", item.field, item.other) for item in tell(Core(), items).refused]


def refused(*items: Topology) -> list[tuple[str, str]]:
    """Field and other object of each refusal, in the two clusters."""
    return [found[1:] for found in refusals(*two_clusters(), *items)]


@pytest.mark.parametrize("table", [10, 7001, 7002, 7010, 7011])
def test_meshmarks_own_tables_are_not_for_others(table: int) -> None:
    assert refused(routes(routes=[ONE], table=table)) == [("$.table", "")]


@pytest.mark.parametrize("priority", [889, 890, 900, 901, 902, 1000, 1001])
def test_meshmarks_own_priorities_are_not_for_others(priority: int) -> None:
    """Those before and after are."""
    assert refused(routes(rules=[{"fwmark": 1}, {"fwmark": 2, "priority": priority}])) == [("$.rules[1].priority", "")]
    assert refused(routes(rules=[{"fwmark": 2, "priority": 888}, {"fwmark": 2, "priority": 999}, {"fwmark": 2, "priority": 1002}])) == []


def test_a_table_is_shared_by_its_number_only() -> None:
    """A number that was made from a name is that configuration's alone."""
    first = routes("first", routes=[ONE])
    assert refused(first, routes(routes=[ONE], table=table_of(first))) == [("$.table", "RouteConfiguration/rome/first")]
    assert refused(routes("second", routes=[ONE], table=table_of(first)), first) == [("$.name", "RouteConfiguration/rome/second")]
    shared = [routes("a", routes=[ONE], table=100), routes("b", routes=[ONE | {"metric": 5}], table=100)]
    assert refused(*shared) == []
    assert refused(*shared, routes(routes=[to("10.8.0.0/16", "eth1"), ONE], table=100)) == [
        ("$.routes[1].prefix", "RouteConfiguration/rome/a")
    ]
    assert refused(*shared, routes(routes=[to("fd00::/8", "eth1", metric=1024)], table=100)) == []
    apart = [routes(role, routes=[ONE], table=100, hosts={"role": role}) for role in ("node", "gateway")]
    assert refused(*apart) == []


@pytest.mark.parametrize(
    "mine, theirs, meet",
    [
        ({"fwmark": 1}, {"fwmark": 1}, True),
        ({"fwmark": 1}, {"fwmark": 2}, False),
        ({"fwmark": 1, "mask": 3}, {"fwmark": 4, "mask": 12}, True),
        ({"fwmark": 1, "mask": 3}, {"fwmark": 2, "mask": 7}, False),
        ({"to": "10.8.0.0/16"}, {"to": "10.8.1.0/24"}, True),
        ({"to": "10.8.0.0/16"}, {"to": "10.9.0.0/16"}, False),
        ({"from": "10.8.0.0/16"}, {"to": "10.9.0.0/16"}, True),
        ({"to": "fd00::/8"}, {"to": "0.0.0.0/0"}, False),
        ({"to": "10.0.0.0/8"}, {"to": "0.0.0.0/0", "iif": "eth1"}, True),
        ({"iif": "eth1"}, {"iif": "eth2"}, False),
        ({"iif": "eth1"}, {"oif": "eth2"}, True),
        ({"iif": "@tunnels"}, {"iif": "mt.3"}, True),
        ({"iif": "@tunnels"}, {"iif": "eth1"}, False),
        ({"iif": "@tunnels"}, {"iif": "@tunnels"}, True),
    ],
)
def test_rules_of_one_priority_do_not_match_the_same_packet(mine: dict[str, Any], theirs: dict[str, Any], *, meet: bool) -> None:
    """The kernel would ask the one that came first. At another priority, or to the same table, they may."""
    other = routes("other", rules=[{"iif": "eth9"}, theirs | {"priority": 3000}])
    found = refused(other, routes(rules=[mine | {"priority": 3000}]))
    assert found == ([("$.rules[0].priority", other.ref)] if meet else [])
    assert refused(other, routes(rules=[mine | {"priority": 3001}])) == []
    assert refused(replace(other, table=100), routes(rules=[mine | {"priority": 3000}], table=100)) == []


# The way to other hosts ------------------------------------------------------------------------------------------------------------

WORKER = "Node/rome/worker-1"
EVERYTHING = to("0.0.0.0/0", "eth1")


def test_a_route_in_main_stands_beside_the_hosts_own() -> None:
    """With a metric, for what is neither the underlay nor another cluster."""
    assert refused(routes(routes=[ONE], table=254)) == [("$.routes[0].metric", "")]
    beside = ONE | {"metric": 100}
    assert refused(routes(routes=[beside], table=254)) == []
    assert refused(routes(routes=[beside, EVERYTHING | {"metric": 100}], table=254))[0][0] == "$.routes[1]"
    assert refused(routes(routes=[to("172.18.0.0/24", type="throw", metric=1)], table=254))[0][0] == "$.routes[0]"
    assert refused(routes(routes=[to("10.61.7.0/24", "eth1", metric=1)], table=254)) == [("$.routes[0].prefix", "Peering/rome/rome-milan")]


@pytest.mark.parametrize(
    "rule, refused_here",
    [
        ({}, True),
        ({"to": "172.18.0.0/16"}, True),
        ({"from": "172.18.0.0/16"}, True),
        ({"iif": "lo"}, True),
        ({"fwmark": 0, "mask": 0xFF}, True),
        ({"to": "10.0.0.0/8"}, False),
        ({"from": "10.0.0.0/8"}, False),
        ({"iif": "eth1"}, False),
        ({"oif": "eth1"}, False),
        ({"fwmark": 0x4D2}, False),
        ({"to": "::/0"}, False),
    ],
)
def test_the_hosts_own_packets_to_other_hosts_go_on_as_they_do(rule: dict[str, Any], *, refused_here: bool) -> None:
    """A rule that matches them must not find a route for them; one that throws them back is none."""
    found = refused(routes(rules=[rule], routes=[EVERYTHING]))
    assert [field for field, _ in found] == (["$.rules[0]"] if refused_here else [])
    assert refused(routes(rules=[rule], routes=[EVERYTHING, to("172.18.0.0/16", type="throw")])) == []


def test_the_way_to_broker_and_management_stays() -> None:
    """A control prefix is kept as the underlay is: whole, and in its parts."""
    home, *rest = two_clusters()
    assert home == cluster("rome")
    mesh = [cluster("rome", control=(Prefix("192.0.2.0/28"),)), *rest]
    for prefix in ("192.0.2.0/24", "192.0.2.9/32"):
        assert refusals(*mesh, routes(routes=[to(prefix, "eth1")], rules=[{}])) == [(REF, "$.rules[0]", "Cluster/rome/rome")]
        assert refusals(*mesh, routes(routes=[to(prefix, "eth1", metric=1)], table=254)) == [(REF, "$.routes[0]", "Cluster/rome/rome")]
        assert refusals(*mesh, routes(routes=[to(prefix, "eth1")], rules=[{"fwmark": 1}])) == []


def test_a_route_added_to_a_shared_table_is_looked_at_with_the_others_rules() -> None:
    """The configuration that comes second is refused, whichever part it brings."""
    ruled, routed = routes("ruled", rules=[{"iif": "lo"}], table=100), routes("routed", routes=[EVERYTHING], table=100)
    assert [field for field, _ in refused(ruled, routed)] == ["$.routes[0]"]
    assert [field for field, _ in refused(routed, ruled)] == ["$.rules[0]"]


def test_the_established_one_wins_also_against_hosts_and_peerings() -> None:
    """A node with an address that is routed elsewhere, and a peering whose prefixes are, wait until the configuration is gone."""
    item = routes(rules=[{}], routes=[to("172.19.0.0/16", "eth1")])
    late = node("worker-9", 9, addresses=(Address("172.19.0.9"),))
    assert refusals(*two_clusters(), item, late) == [("Node/rome/worker-9", "$.addresses[0]", REF)]
    *hosts, joined = two_clusters()[:-2]
    main = routes(routes=[to("10.62.0.0/24", "eth1", metric=7)], table=254)
    assert refusals(*hosts, main, joined) == [("Peering/rome/rome-milan", "$.ends[0]", REF)]
    far = routes(rules=[{}], routes=[to("172.18.1.10", "eth1")])
    assert refusals(*hosts, far, joined) == [("Peering/rome/rome-milan", "$.ends[0]", REF)]
    assert refusals(*hosts, joined, far) == [(REF, "$.rules[0]", "Gateway/milan/gateway")]
    moved = gateway("milan", address=Address("172.19.0.10"))
    assert refusals(*hosts, joined, item, moved) == [("Gateway/milan/gateway", "$.addresses[0]", REF)]


def test_a_configuration_needs_its_cluster() -> None:
    """Refused before, admitted with it."""
    core, item = Core(), routes(routes=[ONE])
    assert [one.other for one in tell(core, [item]).refused] == ["Cluster/rome/rome"]
    assert [entry.ref for entry in tell(core, [cluster("rome")], 2).admitted] == ["Cluster/rome/rome", item.ref]
    assert item.cluster == Name("rome")
