"""What must arrive, by the topology alone."""

from msgspec.structs import replace

from schemas.topology import Cluster, Peering, PeeringEnd, Pod
from schemas.values import Address, Name, Prefix
from services.cli.lab.expected import Walk, expected
from services.cli.lab.probe import probes
from tests.topologies import dual_stack


def cluster(name: str, *pods: str) -> Cluster:
    return Cluster(name=Name(name), pod_prefixes=tuple(map(Prefix, pods)), internal_prefixes=(Prefix("10.80.0.0/16"),))


def pod(cluster_name: str, name: str, address: str) -> Pod:
    return Pod(name=Name(name), cluster=Name(cluster_name), node=Name("w1"), addresses=(Address(address),))


def peering(rome_sees: tuple[str, ...], milan_sees: tuple[str, ...]) -> Peering:
    ends = (
        PeeringEnd(cluster=Name("rome"), gateway=Name("gate"), remap_pods=tuple(map(Prefix, rome_sees))),
        PeeringEnd(cluster=Name("milan"), gateway=Name("gate"), remap_pods=tuple(map(Prefix, milan_sees))),
    )
    return Peering(name=Name("rome-milan"), cluster=Name("rome"), ends=ends)


SHOP = pod("rome", "shop", "10.200.1.10")
STOCK = pod("rome", "stock", "10.200.2.10")
BANK = pod("milan", "bank", "10.200.1.10")
SAME = (cluster("rome", "10.200.0.0/16"), cluster("milan", "10.200.0.0/16"))


def test_within_a_cluster_nothing_is_translated():
    assert expected(SAME, SHOP, STOCK) == Walk(Address("10.200.2.10"), Address("10.200.1.10"), Address("10.200.2.10"))


def test_across_a_peering_each_end_sees_the_other_under_its_own_remap():
    topology = (*SAME, peering(("10.61.0.0/16",), ("10.63.0.0/16",)))
    assert expected(topology, STOCK, BANK) == Walk(Address("10.61.1.10"), Address("10.63.2.10"), Address("10.200.1.10"))
    assert expected(topology, BANK, STOCK) == Walk(Address("10.63.2.10"), Address("10.61.1.10"), Address("10.200.2.10"))


def test_without_a_remap_the_addresses_stay():
    topology = (cluster("rome", "10.200.0.0/16"), cluster("milan", "10.201.0.0/16"), peering((), ()))
    server = pod("milan", "bank", "10.201.1.10")
    assert expected(topology, SHOP, server) == Walk(Address("10.201.1.10"), Address("10.200.1.10"), Address("10.201.1.10"))


def test_remaps_pair_with_prefixes_by_index():
    topology = (
        cluster("rome", "10.200.0.0/16"),
        cluster("milan", "10.200.0.0/16", "10.99.0.0/24"),
        peering(("10.61.0.0/16", "10.62.9.0/24"), ("10.63.0.0/16",)),
    )
    walk = expected(topology, SHOP, pod("milan", "post", "10.99.0.7"))
    assert walk == Walk(Address("10.62.9.7"), Address("10.63.1.10"), Address("10.99.0.7"))


def test_without_a_peering_there_is_no_way():
    assert expected(SAME, SHOP, BANK) is None


def test_each_family_has_its_own_way() -> None:
    """Where pods and clusters have both, each is translated by its own remaps; where a cluster lacks one, there is no way."""
    topology = dual_stack()
    bank, shop = (next(item for item in topology if item.name == name) for name in ("bank", "shop"))
    walk = Walk(Address("fd00:61:0:1::10"), Address("fd00:63:0:1::10"), Address("fd00:200:0:1::10"))
    assert expected(topology, shop, bank, 6) == walk
    assert expected(topology, shop, bank, 4) == Walk(Address("10.61.1.10"), Address("10.63.1.10"), Address("10.200.1.10"))
    assert expected(SAME, SHOP, STOCK, 6) is None


def test_nodes_without_an_underlay_of_the_family_carry_it_for_peers_only() -> None:
    """milan's second node has no IPv4 address: its pods speak IPv4 with rome, and not with pods of other nodes of milan."""
    topology = dual_stack()
    post, bank, shop = (next(item for item in topology if item.name == name) for name in ("post", "bank", "shop"))
    assert expected(topology, bank, post, 4) is None
    assert expected(topology, bank, post, 6) is not None
    assert expected(topology, shop, post, 4) is not None


def test_an_overlay_or_encryption_carries_what_the_underlay_does_not() -> None:
    """Encrypted, unless one of the nodes opted out."""
    topology = dual_stack()
    post, bank = (next(item for item in topology if item.name == name) for name in ("post", "bank"))

    def is_joined(opt_out: bool = False, **fields: object) -> bool:
        changed = [replace(item, **fields) if item.ref == "Cluster/milan/milan" else item for item in topology]
        changed = [replace(item, opt_out=opt_out) if item.ref == f"Node/milan/{post.node}" else item for item in changed]
        return expected(changed, bank, post, 4) is not None

    assert is_joined(routing="overlay")
    assert is_joined(encryption="wireguard")
    assert not is_joined(encryption="wireguard", opt_out=True)
    assert is_joined(routing="overlay", encryption="wireguard", opt_out=True)


def test_every_ordered_pair_is_probed_by_both_protocols():
    found = probes((*SAME, SHOP, STOCK, BANK))
    assert len(found) == 12
    assert len({probe.name for probe in found}) == 12
    assert sum(probe.walk is not None for probe in found) == 4
