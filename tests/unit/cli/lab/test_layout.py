"""What the lab makes for a topology."""

import pytest

from schemas.topology import Cluster, Gateway, Node, Pod
from schemas.values import Address, Name, Prefix
from services.cli.lab.layout import find_namespace, interface, layout, spelled
from tests.topologies import dual_stack

ROME = Cluster(name=Name("rome"), pod_prefixes=(Prefix("10.200.0.0/16"),), internal_prefixes=(Prefix("10.80.0.0/16"),), mtu=1400)


def node(name: str, address: str, *prefixes: str) -> Node:
    return Node(name=Name(name), cluster=Name("rome"), addresses=(Address(address),), pod_prefixes=tuple(map(Prefix, prefixes)))


def pod(name: str, on: str, address: str) -> Pod:
    return Pod(name=Name(name), cluster=Name("rome"), node=Name(on), addresses=(Address(address),))


def test_nodes_gateways_and_pods_get_namespaces_named_after_them():
    gateway = Gateway(name=Name("gate"), cluster=Name("rome"), addresses=(Address("172.18.0.10"),))
    found = layout([ROME, node("w1", "172.18.0.11", "10.200.1.0/24"), gateway, pod("shop", "w1", "10.200.1.10")])
    assert set(found.hosts) == {"mm.rome.w1", "mm.rome.gate"}
    assert set(found.pods) == {"mm.rome.pod.shop"}
    assert found.pods["mm.rome.pod.shop"].node == "mm.rome.w1"
    assert {host.mtu for host in found.hosts.values()} == {1400}


def test_a_node_routes_the_pods_of_other_nodes_and_a_gateway_routes_none():
    gateway = Gateway(name=Name("gate"), cluster=Name("rome"), addresses=(Address("172.18.0.10"),))
    nodes = [node("w1", "172.18.0.11", "10.200.1.0/24"), node("w2", "172.18.0.12", "10.200.2.0/24")]
    found = layout([ROME, *nodes, gateway])
    assert found.hosts["mm.rome.w1"].routes == {(Prefix("10.200.2.0/24"), Address("172.18.0.12"))}
    assert found.hosts["mm.rome.gate"].routes == frozenset()


def test_a_pod_outside_its_nodes_prefixes_is_routed_by_itself():
    nodes = [node("w1", "172.18.0.11", "10.200.1.0/24"), node("w2", "172.18.0.12", "10.200.2.0/24")]
    found = layout([ROME, *nodes, pod("roams", "w2", "10.200.1.77"), pod("stays", "w2", "10.200.2.5")])
    prefixes = {prefix for prefix, _ in found.hosts["mm.rome.w1"].routes}
    assert prefixes == {Prefix("10.200.2.0/24"), Prefix("10.200.1.77/32")}


def test_what_lacks_its_cluster_or_node_is_said_and_left_out():
    found = layout(
        [ROME, pod("shop", "w9", "10.200.1.10"), Node(name=Name("w1"), cluster=Name("oslo"), addresses=(Address("172.18.9.1"),))]
    )
    assert not found.hosts
    assert not found.pods
    assert found.unplaced == ("Endpoint/rome/shop: node w9 is not there", "Node/oslo/w1: cluster oslo is not there")


@pytest.mark.parametrize(
    "place,namespace",
    [
        ("rome/w1", "mm.rome.w1"),
        ("rome.w1", "mm.rome.w1"),
        ("rome/shop", "mm.rome.pod.shop"),
        ("rome.shop", "mm.rome.pod.shop"),
        ("rome/pod/shop", "mm.rome.pod.shop"),
        ("rome/both", "mm.rome.both"),
        ("rome/pod/both", "mm.rome.pod.both"),
        ("underlay", "mm.underlay"),
        ("a.b/c.d", "mm.a.b.pod.c.d"),
        ("rome/bank", None),
        ("shop", None),
    ],
)
def test_a_place_is_a_host_or_a_pod(place: str, namespace: str | None):
    """A pod need not be called one, unless a host of its cluster has the same name."""
    known = ["mm.rome.w1", "mm.rome.pod.shop", "mm.rome.both", "mm.rome.pod.both", "mm.underlay", "mm.a.b.pod.c.d"]
    assert find_namespace(place, known) == namespace


def test_a_namespace_is_spelled_as_it_may_be_typed():
    """Whatever is listed is understood."""
    known = ["mm.rome.w1", "mm.rome.pod.shop", "mm.underlay", "mm.a.b.pod.c.d"]
    assert [spelled(name) for name in known[:3]] == ["rome/w1", "rome/pod/shop", "underlay"]
    assert [find_namespace(spelled(name), known) for name in known] == known


def test_two_objects_never_share_a_namespace():
    """A host called ``pod.shop`` would have the namespace of the pod ``shop``."""
    found = layout([ROME, node("w1", "172.18.0.11"), node("pod.shop", "172.18.0.12"), pod("shop", "w1", "10.200.1.10")])
    assert "mm.rome.pod.shop" in found.pods
    assert found.unplaced == ("Node/rome/pod.shop: the namespace mm.rome.pod.shop is taken",)


def test_a_change_of_routes_leaves_the_machine_as_it_is():
    before = layout([ROME, node("w1", "172.18.0.11")]).hosts["mm.rome.w1"]
    after = layout([ROME, node("w1", "172.18.0.11"), node("w2", "172.18.0.12", "10.200.2.0/24")]).hosts["mm.rome.w1"]
    assert before != after
    assert before.machine == after.machine


def test_a_host_speaks_ipv6_where_anything_on_it_does() -> None:
    """A cluster of IPv4 alone has quiet hosts; pods of IPv6, or an address of it, end that. Routes go by the underlay of their family."""
    assert not any(host.speaks_ipv6 for host in layout([ROME, node("w1", "172.18.0.11")]).hosts.values())
    found = layout(dual_stack())
    assert all(host.speaks_ipv6 for host in found.hosts.values())
    assert found.hosts["mm.milan.worker-1"].routes == {(Prefix("fd00:200:0:2::/64"), Address("2001:db8:18:1::12"))}
    assert found.hosts["mm.rome.worker-1"].routes == {
        (Prefix("10.200.2.0/24"), Address("172.18.0.12")),
        (Prefix("fd00:200:0:2::/64"), Address("2001:db8:18::12")),
    }


def test_interface_names_fit_and_differ_for_long_names():
    names = {interface("host", f"mm.{'a' * 60}.{'b' * 62}{number}") for number in range(9)}
    assert len(names) == 9
    assert max(map(len, names)) <= 15
