"""Admission of a cluster's mesh: what its nodes contradict each other in; who was there first stays."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from schemas import codec
from schemas.codec import DecodeError
from schemas.topology import Cluster, Marks, Node, PublicKey, Topology, WireguardSettings, convert_topology
from schemas.values import Address, Endpoint, Key, Name, Prefix
from services.planner.core import Core
from tests.firewalls import one_chain, rule
from tests.routes import routes, to
from tests.topologies import cluster, encrypting, node, pod, said, tell, two_clusters

V6 = Address("2001:db8:18::14")
ROME = {"encryption": "wireguard"}


def refused(*items: Topology) -> list[tuple[str, str, str]]:
    """Object, field and other object of each refusal."""
    return [(f"{item.kind}/{item.cluster}/{item.name}", item.field, item.other) for item in tell(Core(), items).refused]


def rome(*items: Topology, **changes: object) -> list[tuple[str, str]]:
    """Field and other object of each refusal in a cluster of three nodes that encrypts."""
    return [found[1:] for found in refused(*encrypting(**changes), *items)]


def worker(number: int, **changes: object) -> Node:
    return replace(node(f"worker-{number}", number), **changes)


def test_the_example_is_admitted_in_every_mode() -> None:
    """Natively and by an overlay, encrypted and not, with and without nodes' own traffic."""
    for routing in ("native", "overlay"):
        for nodes in (False, True):
            assert rome(routing=routing, wireguard=WireguardSettings(nodes=nodes)) == []
        assert rome(routing=routing, encryption="none", strict="off") == []


def test_a_key_is_one_hosts_and_the_first_to_say_it_keeps_it() -> None:
    """So no node is its own peer, and no peer is two nodes."""
    key = Key("RHkjZkBjJfxTYTYvlL4KqhcJVvNpvXDXnWFi6FJ2lTs=")
    taken = PublicKey(cluster=Name("rome"), name=Name("worker-3"), key=key)
    assert rome(taken) == [("$.key", "PublicKey/rome/worker-1")]


@pytest.mark.parametrize(
    "item,field,other",
    [
        (worker(4, endpoint=Endpoint("10.200.9.9:51871")), "$.endpoint", "Cluster/rome/rome"),
        (worker(4, endpoint=Endpoint("127.0.0.1:51871")), "$.endpoint", ""),
        (worker(4, addresses=(Address("10.200.9.9"),)), "$.addresses[0]", "Cluster/rome/rome"),
        (worker(4, addresses=(V6,)), "$.addresses", "Node/rome/worker-3"),
        (worker(4, endpoint=Endpoint("172.18.0.12:51871")), "$.endpoint", "Node/rome/worker-2"),
        (worker(4, endpoint=Endpoint("[2001:db8::9]:51871"), opt_out=True), None, ""),
        (worker(4, uplink=Name("me.0")), "$.uplink", ""),
        (worker(4, uplink=Name("mm.worker")), "$.uplink", ""),
        (worker(4, source_addresses=(Address("10.200.4.99"),)), None, ""),
        (worker(4, pod_prefixes=(Prefix("10.200.4.0/24"),), roaming=True), None, ""),
        (worker(4, pod_prefixes=()), None, ""),
        (worker(4, pod_prefixes=(Prefix("10.200.1.77/32"),)), "$.podPrefixes[0]", "Node/rome/worker-1"),
        (pod("first", "worker-1", "10.200.1.1"), "$.addresses[0]", "Node/rome/worker-1"),
        (pod("first", "worker-3", "10.200.1.1"), "$.addresses[0]", "Node/rome/worker-1"),
        (pod("first", "worker-3", "10.200.3.1"), None, ""),
    ],
)
def test_what_would_loop_or_be_mistaken_is_refused(item: Topology, field: str | None, other: str) -> None:
    """Endpoints among pods, two nodes at one place, nodes without a way to each other, addresses that are a node's own."""
    routing = "overlay" if item.name == "worker-4" and getattr(item, "addresses", ()) == (V6,) else "native"
    found = rome(item, routing=routing)
    assert found[:1] == ([] if field is None else [(field, other)])


def test_encryption_is_not_switched_on_where_nodes_would_not_find_each_other() -> None:
    """The cluster stays as it is, and comes to encrypt when the last node in the way has gone."""
    far = worker(4, addresses=(V6,))
    alone = [cluster("rome"), worker(1), far]
    assert refused(*alone, cluster("rome", **ROME)) == [("Cluster/rome/rome", "", "Node/rome/worker-1")]
    assert refused(*alone, worker(4, addresses=(V6,), opt_out=True), cluster("rome", **ROME)) == []


def test_a_pod_whose_address_the_node_itself_would_have_stays() -> None:
    """Encryption asks for an address of the node's own among its pods: one that a pod has is refused, another one may be given."""
    there = [cluster("rome"), worker(1), pod("first", "worker-1", "10.200.1.1")]
    assert refused(*there, cluster("rome", **ROME)) == [("Cluster/rome/rome", "", "Node/rome/worker-1")]
    assert refused(*there, worker(1, source_addresses=(Address("10.200.1.254"),)), cluster("rome", **ROME)) == []
    assert refused(*there, cluster("rome", routing="overlay", **ROME)) == []


def test_a_whole_prefix_of_another_nodes_is_nobodys_pod() -> None:
    """Two nodes' AllowedIPs would be the same prefix; whoever comes second is refused."""
    small, roaming = worker(2, pod_prefixes=(Prefix("10.200.2.9/32"),)), pod("roam", "worker-1", "10.200.2.9")
    assert refused(cluster("rome"), worker(1), small, roaming) == [("Endpoint/rome/roam", "$.addresses[0]", "Node/rome/worker-2")]
    found = refused(cluster("rome"), worker(1), roaming, small)
    assert found == [("Node/rome/worker-2", "$.podPrefixes[0]", "Endpoint/rome/roam")]


@pytest.mark.parametrize(
    "mtu,fields,addresses,fits",
    [
        (1340, {"encryption": "wireguard"}, ("172.18.0.11",), True),
        (1339, {"encryption": "wireguard"}, ("172.18.0.11",), False),
        (1359, {"encryption": "wireguard"}, ("172.18.0.11", "2001:db8::1"), False),
        (1360, {"encryption": "wireguard"}, ("172.18.0.11", "2001:db8::1"), True),
        (1390, {"encryption": "wireguard", "routing": "overlay"}, ("172.18.0.11",), True),
        (1429, {"encryption": "wireguard", "routing": "overlay"}, ("2001:db8::1",), False),
        (1430, {"encryption": "wireguard", "routing": "overlay"}, ("2001:db8::1",), True),
    ],
)
def test_ipv6_has_room_inside_or_is_refused(mtu: int, fields: dict[str, object], addresses: tuple[str, ...], *, fits: bool) -> None:
    """1280 bytes are left for pods' packets, whatever is around them."""
    both = {"pod_prefixes": (Prefix("fd00:200::/48"),), "internal_prefixes": (Prefix("fd00:80::/64"),), "external_prefixes": ()}
    one = worker(1, addresses=tuple(map(Address, addresses)), pod_prefixes=(Prefix("fd00:200:0:1::/64"),))
    assert (refused(cluster("rome", mtu=mtu, **both, **fields), one) == []) is fits


@pytest.mark.parametrize(
    "fields,field",
    [
        ({"strict": "audit"}, "$.strict"),
        ({"strict": False}, "$.strict"),
        ({"marks": {"encrypt": 0xE00}}, "$.marks.encrypted"),
        ({"marks": {"decrypted": 0x1000}}, "$.marks.decrypted"),
        ({"marks": {"encrypt": 0}}, "$.marks.encrypt"),
        ({"wireguard": {"port": 0}}, "$.wireguard.port"),
    ],
)
def test_a_cluster_that_contradicts_itself_is_not_even_read(fields: dict[str, object], field: str) -> None:
    """Strict mode without encryption, marks that are one and the same or outside of their mask, numbers that are none."""
    plain = codec.to_builtins(cluster("rome"))
    with pytest.raises(DecodeError) as caught:
        convert_topology({**plain, **fields})
    assert caught.value.field == field


def test_yaml_reads_off_as_false_and_is_told_so() -> None:
    """Which of the words it is, nobody would guess from a complaint about a boolean."""
    with pytest.raises(DecodeError, match='write "off"'):
        convert_topology({**codec.to_builtins(cluster("rome")), "strict": False})


@pytest.mark.parametrize(
    "fields,field",
    [
        ({"roaming": True, "endpoint": "192.0.2.1:5"}, "$.endpoint"),
        ({"sourceAddresses": ["10.200.2.1"]}, "$.sourceAddresses[0]"),
        ({"sourceAddresses": ["10.200.1.1", "10.200.1.2"]}, "$.sourceAddresses[1]"),
    ],
)
def test_a_node_that_contradicts_itself_is_not_even_read(fields: dict[str, object], field: str) -> None:
    """An endpoint that others are to learn, source addresses that no peer takes, or two of one family."""
    with pytest.raises(DecodeError) as caught:
        convert_topology({**codec.to_builtins(worker(1)), **fields})
    assert caught.value.field == field


def test_the_devices_port_is_not_an_overlays() -> None:
    """Both are UDP ports of the node itself."""
    assert refused(cluster("rome", wireguard=WireguardSettings(port=4789), **ROME)) == [("Cluster/rome/rome", "$.wireguard.port", "")]
    assert refused(cluster("rome", wireguard=WireguardSettings(port=4789))) == []


def test_marks_of_encryption_are_not_for_published_firewalls() -> None:
    """Neither before nor after the cluster encrypts; on gateways, beside the mask and on purpose they are."""
    writes = rule(action={"action": "setMark", "value": 1})
    at = "$.chains[0].rules[0].actions[0]"
    assert rome(one_chain(writes)) == [(at, "Cluster/rome/rome")]
    assert rome(one_chain(writes, hosts={"role": "gateway"}), replace(one_chain(writes, name="meant"), class_marks=True)) == []
    assert rome(one_chain(rule(action={"action": "setMark", "value": 0x1000, "mask": 0xF000}))) == []
    assert rome(one_chain(writes), marks=Marks(mask=0xFF00, encrypt=0x100, encrypted=0x200, decrypted=0x300)) == [(at, "Cluster/rome/rome")]
    before = [cluster("rome"), worker(1), one_chain(writes)]
    assert refused(*before, cluster("rome", **ROME)) == [("Cluster/rome/rome", "", "FirewallConfiguration/rome/test")]


def test_no_published_route_takes_the_way_to_an_endpoint() -> None:
    """An endpoint is as much the underlay's as a node's address is."""
    taking = routes(routes=[to("192.0.2.0/24", "eth1")], rules=[{}])
    far = worker(4, endpoint=Endpoint("192.0.2.9:51871"))
    assert rome(far, taking) == [("$.rules[0]", "Node/rome/worker-4")]
    assert rome(taking, far) == [("$.endpoint", "RouteConfiguration/rome/test")]


def test_no_remote_cluster_is_seen_where_an_endpoint_is() -> None:
    """Outer packets would go into the tunnels of the peering."""
    found = refused(*two_clusters(), worker(1, endpoint=Endpoint("10.61.0.9:51871")))
    assert found == [("Node/rome/worker-1", "$.endpoint", "Peering/rome/rome-milan")]


def test_a_key_goes_with_its_node() -> None:
    """Nobody else may delete it, and peers are gone with it."""
    core = Core()
    tell(core, encrypting())
    gone = next(item for item in encrypting() if isinstance(item, Node) and item.name == "worker-2")
    assert any(isinstance(item, Cluster) for item in core.state.objects.values())
    others = [item for item in encrypting() if item.ref in ("Endpoint/rome/stock", "Endpoint/rome/roam", gone.ref)]
    for number, item in enumerate(sorted(others, key=lambda item: isinstance(item, Node)), 100):
        core.hear([replace(said(item, number), payload=b"")])
    assert [host.name for host in core.state.keys] == ["worker-1"]
