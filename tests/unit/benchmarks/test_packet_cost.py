"""What a packet costs is told against plain forwarding in the same round, of the plan that hosts get."""

from __future__ import annotations

import pytest

from benchmarks import gateways, seed_rules, topologies
from benchmarks.datagrams import ends_of
from benchmarks.figures import packet_cost
from benchmarks.figures.packet_cost import MESHMARK, NAT, PLAIN, SEED_MXN, SEED_N
from benchmarks.figures.rules_per_gateway import compiled
from schemas.host_objects import LinkAddress, NftElement, WireguardLink, WireguardPeer
from schemas.topology import Node
from schemas.values import Address


@pytest.fixture(scope="module")
def plan():
    return compiled("per-node", 3, 5)


def rounds(count=12):
    """Rounds on a machine that gets slower: what a variant adds stays, the whole does not."""
    return [
        {PLAIN: 1000.0 + 50 * n, MESHMARK: 1200.0 + 50 * n, SEED_N: 2800.0 + 50 * n, SEED_MXN: 9000.0 + 50 * n, NAT: 1100.0 + 50 * n}
        for n in range(count)
    ]


def test_the_median_is_what_is_added_to_plain_forwarding_however_the_machine_drifts():
    found = packet_cost.summed_up("some", rounds())
    assert (found.median, found.unit, found.spread.minimum, found.spread.maximum) == (200, "ns", 200, 200)
    assert (found.peer, found.floor, found.ratio_peer, found.ratio_floor) == (1800, 100, 0.1111, 2.0)


def test_each_variant_and_each_ratio_has_its_interval():
    details = packet_cost.summed_up("some", rounds()).details
    assert details["seed-mxn adds ns"] == {"median": 8000, "from": 8000, "to": 8000}
    assert details["seed-n over meshmark"] == {"median": 9, "from": 9, "to": 9}
    assert details["ns per packet"][PLAIN] == 1275
    assert details["1,000 packets per second"][PLAIN] == 784.3


def test_the_last_node_gets_every_packet_out_of_the_last_tunnel(plan):
    nodes = seed_rules.targets(plan)
    found = packet_cost.last_node(nodes, 3)
    assert len(found.ways) == 1000
    ((tunnel, packet),) = set(found.ways)
    assert tunnel == 2
    assert nodes[-1].pods.covers(ends_of(packet)[1])


def test_any_node_is_each_node_once_out_of_all_tunnels(plan):
    nodes = seed_rules.targets(plan)
    found = packet_cost.any_node(nodes, 3)
    pods = [ends_of(packet)[1] for _, packet in found.ways]
    assert len(pods) == 5
    assert set(pods) == {f"10.200.{number // 4}.{number % 4 * 64 + 10}" for number in range(5)}
    assert {tunnel for tunnel, _ in found.ways} == {0, 1, 2}
    assert found == packet_cost.any_node(nodes, 3)


def test_outgoing_is_a_packet_of_a_pod_on_each_node_inside_its_vxlan(plan):
    nodes = seed_rules.targets(plan)
    found = packet_cost.outgoing(nodes, ["mt.0", "mt.1", "mt.2"])
    assert {inlet for inlet, _ in found.ways} == {3}
    outer = {ends_of(packet)[0]: packet for _, packet in found.ways}
    assert outer.keys() == {node.underlay for node in nodes}
    for node in nodes:
        vxlan = outer[node.underlay][28:]
        assert int.from_bytes(vxlan[4:7]) == node.link.vni
        source, destination = ends_of(vxlan[22:])
        assert node.pods.covers(source)
        assert seed_rules.SEEN_PODS.covers(destination)


def test_the_remote_pod_is_behind_no_node_and_has_the_names_that_the_plan_gives_it(plan):
    """Else plain forwarding would find it among the nodes, and arrival would be judged by a wrong name."""
    real, seen = packet_cost.last_node(seed_rules.targets(plan), 3).names
    pairs = {item.element: item.value for item in plan.objects().values() if isinstance(item, NftElement) and item.set == "to_seen"}
    assert pairs["10.200.0.0/16"] == seed_rules.SEEN_PODS
    assert (real.split(".")[2:], seen.split(".")[:2]) == (seen.split(".")[2:], ["10", "61"])
    nodes = [item for item in topologies.mesh(1000, 1, node_length=26) if isinstance(item, Node) and item.cluster == "rome"]
    assert len(nodes) == 1000
    assert not any(prefix.covers(Address(real)) for node in nodes for prefix in node.pod_prefixes)


def test_of_the_plan_only_what_makes_tunnels_of_links_is_left_out(plan):
    measured = gateways.without_tunnels(plan).objects()
    left_out = [item for key, item in plan.objects().items() if key not in measured]
    assert {type(item) for item in left_out} == {WireguardLink, WireguardPeer, LinkAddress}
    assert len(left_out) == 3 * 3
    assert [item.link for item in left_out if isinstance(item, LinkAddress)] == ["mt.0", "mt.1", "mt.2"]
    assert gateways.tunnel_addresses(plan) == {"mt.0": "169.254.18.1/30", "mt.1": "169.254.18.5/30", "mt.2": "169.254.18.9/30"}
