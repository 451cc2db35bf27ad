"""What may not be seen on uplinks of nodes that encrypt, by the topology alone."""

from __future__ import annotations

import socket

import pytest
from msgspec.structs import replace

from schemas.topology import Cluster
from services.cli.lab.captures import Packet
from services.cli.lab.clear import Watch, encrypting
from tests.topologies import dual_stack
from tests.topologies import encrypting as example

UDP, TCP = socket.IPPROTO_UDP, socket.IPPROTO_TCP
ONE, TWO, THREE = "172.18.0.11", "172.18.0.12", "172.18.0.13"


def packet(source: str, destination: str, protocol: int = TCP, port: int = 80) -> Packet:
    return Packet(True, source, destination, protocol, 40000, port, b"")


@pytest.mark.parametrize(
    "seen,is_in_clear",
    [
        (packet("10.200.1.10", "10.200.2.10"), True),
        (packet("fd00:200:0:2::10", "fd00:200:0:1::10"), True),
        (packet("10.200.1.10", "10.200.1.77"), True),  # its node is the other one, whoever has the prefix
        (packet("10.200.2.10", "10.200.1.77"), False),  # both on one node
        (packet("10.200.1.10", "10.200.3.10"), False),  # whose node opted out
        (packet("10.200.1.10", "192.0.2.9"), False),
        (packet(ONE, TWO), False),
        (packet(ONE, TWO, UDP, 4789), True),
        (packet(ONE, TWO, UDP, 6081), True),
        (packet(ONE, THREE, UDP, 4789), False),
        (packet(ONE, TWO, UDP, 51871), False),
    ],
)
def test_what_should_be_encrypted(seen: Packet, is_in_clear: bool) -> None:
    """Packets between pods of two nodes that encrypt, and an overlay's between two such nodes."""
    (home,) = encrypting(example())
    assert home.is_in_clear(seen) is is_in_clear


def test_a_node_is_right_when_it_encrypts_and_shows_nothing() -> None:
    """A cable on which nothing passed proves nothing."""
    (home,) = encrypting(example())
    inside, clear = packet(ONE, TWO, UDP, 51871), packet("10.200.1.10", "10.200.2.10")
    watch = Watch()
    for name, packets in (("right", [inside]), ("silent", []), ("wrong", [inside, clear])):
        watch.add(name, home, packets)
    right, silent, wrong = watch.checks()
    assert (right.ok, silent.ok, wrong.ok) == (True, False, False)
    assert right.name == "uplink of right: encrypted, and nothing in clear"
    assert wrong.detail == "1 packets of WireGuard's, 1 in clear that should not be, first 10.200.1.10 → 10.200.2.10"


def test_clusters_that_do_not_encrypt_are_not_looked_at() -> None:
    assert encrypting(dual_stack()) == []
    off = [replace(item, encryption="none") if isinstance(item, Cluster) else item for item in example()]
    assert encrypting(off) == []
