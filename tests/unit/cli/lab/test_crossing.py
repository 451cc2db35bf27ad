"""What must arrive of nodes' packets and at mapped addresses, by the topology and what the planner chose."""

from msgspec.structs import replace

from schemas import codec, subjects
from schemas.topology import IpMapping, Topology
from schemas.values import Address, Name
from services.cli.files import load
from services.cli.lab.board import Board
from services.cli.lab.chosen import Chosen
from services.cli.lab.crossing import from_node, to_mapping
from services.cli.lab.expected import Walk
from services.cli.lab.probe import crossings
from services.planner.allocate import EXTERNAL, NUMBER, External, Number
from tests.topologies import EXAMPLES

ROW = load([EXAMPLES / "three-clusters.yaml"])


def found(name: str, kind: str, home: str = "milan") -> Topology:
    return next(item for item in ROW if (item.kind, item.home, item.name) == (kind, home, name))


def chosen() -> Chosen:
    board = Board()
    for cluster, name, number in (("rome", "worker-1", 5), ("milan", "worker-1", 7), ("milan", "worker-2", 8), ("turin", "worker-1", 9)):
        board.tell(subjects.allocation(NUMBER, cluster, name), codec.encode(Number(number)))
    for name, address in (("rome-shop", "10.71.200.77"), ("rome-shop-6", "fd00:71:0:8::77")):
        board.tell(subjects.allocation(EXTERNAL, "milan", name), codec.encode(External(Address(address))))
    return board.chosen


def walk(*addresses: str) -> Walk:
    dial, source, destination, *others = map(Address, addresses)
    return Walk(dial, source, destination, tuple(others))


SHOP, BANK, MILL = (found(name, "Endpoint", home) for name, home in (("shop", "rome"), ("bank", "turin"), ("mill", "milan")))


def test_a_node_appears_under_its_external_address() -> None:
    """Its number in the external prefix, as the far cluster sees that; the first address where nodes share one."""
    assert from_node(ROW, chosen(), found("worker-2", "Node"), BANK, 4) == walk("10.65.1.10", "10.68.0.8", "10.200.1.10")
    assert from_node(ROW, chosen(), found("worker-2", "Node"), BANK, 6) == walk("fd00:65:0:1::10", "fd00:68::8", "fd00:200:0:1::10")
    assert from_node(ROW, chosen(), found("worker-1", "Node", "turin"), MILL, 4) == walk("10.67.1.10", "10.66.0.0", "10.200.1.10")


def test_without_a_number_or_a_peering_there_is_no_way() -> None:
    """What is not known yet is not probed."""
    assert from_node(ROW, Chosen(), found("worker-2", "Node"), BANK, 4) is None
    assert from_node(ROW, chosen(), found("worker-1", "Node", "rome"), BANK, 4) is None
    milan = next(item for item in ROW if item.ref == "Cluster/milan/milan")
    without = [replace(milan, external_prefixes=()) if item == milan else item for item in ROW if item.kind != "Peering"]
    assert from_node(without, chosen(), found("worker-2", "Node"), BANK, 4) is None


def test_a_mapped_pod_or_node_sees_the_client_as_its_cluster_does() -> None:
    """Whatever the client dialled, it is itself to the receiver."""
    for name, real, last in (("mint", "10.200.2.10", 20), ("worker-1", "172.18.1.11", 30)):
        way = to_mapping(ROW, chosen(), SHOP, found(name, "IpMapping"))
        assert way is not None
        assert way[0] == walk(f"10.62.200.{last}", "10.63.1.10", real)
        assert way[1] == ("mm.milan.pod.mint" if name == "mint" else "mm.milan.worker-1")


def test_a_pod_of_a_third_cluster_sees_a_node_between() -> None:
    """Any node, unless the mapping names one; the pod's own cluster has no way to it through another."""
    item = found("turin-bank", "IpMapping")
    way = to_mapping(ROW, chosen(), SHOP, item)
    assert way == (walk("10.62.200.10", "10.68.0.7", "10.200.1.10", "10.68.0.8"), "mm.turin.pod.bank")
    assert way[0].fits("10.68.0.8", "10.200.1.10")
    assert not way[0].fits("10.68.0.9", "10.200.1.10")
    named = to_mapping(ROW, chosen(), SHOP, replace(item, node=Name("worker-2")))
    assert named is not None
    assert named[0] == walk("10.62.200.10", "10.68.0.8", "10.200.1.10")
    assert to_mapping(ROW, chosen(), BANK, item) is None


def test_a_chosen_external_address_is_dialled() -> None:
    """As the planner keeps it; before it is known, the mapping is not probed."""
    item = found("rome-shop", "IpMapping")
    way = to_mapping(ROW, chosen(), BANK, item)
    assert way is not None
    assert way[0].dial == "10.68.200.77"
    assert to_mapping(ROW, Chosen(), BANK, item) is None


def test_an_address_that_nobody_has_in_the_lab_is_not_probed() -> None:
    """It may be right all the same."""
    outside = IpMapping(name=Name("x"), cluster=Name("milan"), real=Address("192.0.2.50"), external=Address("10.71.99.4"))
    assert to_mapping([*ROW, outside], chosen(), SHOP, outside) is None


def test_probes_grow_with_nodes_and_mappings() -> None:
    """A node speaks to one pod of each peer, and one pod of each peer to a mapping."""
    names = [probe.name for probe in crossings(ROW, chosen())]
    assert len(names) == len(set(names)) == 24 + 20
    assert "udp milan/node/worker-1 → turin/bank" in names
    assert "tcp6 rome/shop → milan/mapping/turin-bank-6" in names
