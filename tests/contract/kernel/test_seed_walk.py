"""The seed's rules, published, do to packets what the seed says: marks by interface, prefixes remapped both ways, NodePorts led back.

A gateway with two node links and one tunnel. Routes and policy rules are published as the seed has them; the firewall is the example's.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from services.kernel.linux import LinuxKernel
from services.kernel.transaction import Change
from tests.contract.kernel.firewall_host import Host, seed
from tests.routes import compiled, routes, to

pytestmark = pytest.mark.privileged

TUNNEL, WORKER, CONTROL_PLANE = "liqo-tunnel1", "liqo.n556fkng95", "liqo.t4wpt9k7mb"
LINKS = (TUNNEL, WORKER, CONTROL_PLANE)
SET_UP = """
link add {link} address 02:00:00:00:01:0{number} type veth peer name far{number}
link set {link} up
link set far{number} up
neigh add 10.200.7.5 lladdr 02:00:00:00:02:0{number} dev {link}
neigh add 10.200.7.6 lladdr 02:00:00:00:02:0{number} dev {link}
neigh add 10.200.1.9 lladdr 02:00:00:00:02:0{number} dev {link}
neigh add 10.70.0.0 lladdr 02:00:00:00:02:0{number} dev {link}
"""
ROUTES = (
    routes("milan-gw-ext", rules=[{"fwmark": 0xFF00}], routes=[to("0.0.0.0/0", TUNNEL)]),
    routes("worker-gw-node", rules=[{"fwmark": 0xFE00, "to": "10.200.1.0/24"}], routes=[to("10.200.1.9", WORKER)]),
    routes("worker-nodeport", rules=[{"fwmark": 1, "to": "10.70.0.0"}], routes=[to("10.70.0.0", WORKER)]),
    routes("control-plane-nodeport", rules=[{"fwmark": 2, "to": "10.70.0.0"}], routes=[to("10.70.0.0", CONTROL_PLANE)]),
)


class Seen(NamedTuple):
    """A UDP packet as it left: by which link, from and to which address and port."""

    link: str
    source: tuple[str, int]
    destination: tuple[str, int]


class Gateway:
    """Sends packets into links and sees them leave."""

    def __init__(self, host: Host, state_dir: Path) -> None:
        self._host = host
        host.hold(*seed().values())
        host.run("sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.default.disable_ipv6=1", "net.ipv4.conf.all.rp_filter=0")
        host.run("sysctl", "-qw", "net.ipv4.conf.default.rp_filter=0")
        script = "".join(SET_UP.format(link=link, number=number) for number, link in enumerate(LINKS))
        for line in filter(None, script.splitlines()):
            host.run("ip", *line.split())
        kernel = host.call(LinuxKernel, state_dir)
        for item in ROUTES:
            for found in compiled(item).values():
                host.call(kernel.write, Change(None, found))
        host.call(kernel.close)
        self._far = {link: host.call(self._opened, f"far{number}") for number, link in enumerate(LINKS)}

    @staticmethod
    def _opened(name: str) -> socket.socket:
        opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0800))
        opened.bind((name, 0x0800))
        opened.settimeout(2)
        return opened

    def passes(self, link: str, source: tuple[str, int], destination: tuple[str, int]) -> Seen:
        """A packet that comes in by a link, as it leaves."""
        number = LINKS.index(link)
        ethernet = bytes.fromhex(f"02000000010{number}02000000020{number}0800")
        self._far[link].send(ethernet + _packet(source, destination))
        for _ in range(200):
            for way, far in self._far.items():
                far.settimeout(0.01)
                try:
                    raw, (_, _, direction, *_) = far.recvfrom(2048)
                except TimeoutError:
                    continue
                if direction != socket.PACKET_OUTGOING:
                    return _seen(way, raw[14:])
        pytest.fail(f"nothing left for {destination}")

    def close(self) -> None:
        for far in self._far.values():
            far.close()


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    host = Host()
    try:
        made = Gateway(host, tmp_path)
        yield made
        made.close()
    finally:
        host.close()


def _packet(source: tuple[str, int], destination: tuple[str, int]) -> bytes:
    udp = struct.pack("!HHHH", source[1], destination[1], 8, 0)
    addresses = socket.inet_aton(source[0]) + socket.inet_aton(destination[0])
    head = struct.pack("!BBHHHBBH", 0x45, 0, 28, 0, 0, 64, socket.IPPROTO_UDP, 0) + addresses
    total = sum(struct.unpack("!10H", head))
    total = (total & 0xFFFF) + (total >> 16)
    checksum = ~((total & 0xFFFF) + (total >> 16)) & 0xFFFF
    return head[:10] + struct.pack("!H", checksum) + head[12:] + udp


def _seen(link: str, raw: bytes) -> Seen:
    ports = struct.unpack("!HH", raw[20:24])
    return Seen(link, (socket.inet_ntoa(raw[12:16]), ports[0]), (socket.inet_ntoa(raw[16:20]), ports[1]))


def test_outgoing_packets_reach_the_other_clusters_pods_and_come_back(gateway: Gateway) -> None:
    """From a node to 10.61.7.5: the host part is kept, the tunnel takes it; the answer has the address that was dialled."""
    out = gateway.passes(WORKER, ("10.200.1.9", 4000), ("10.61.7.5", 80))
    assert out == Seen(TUNNEL, ("10.200.1.9", 4000), ("10.200.7.5", 80))
    back = gateway.passes(TUNNEL, ("10.200.7.5", 80), ("10.200.1.9", 4000))
    assert back == Seen(WORKER, ("10.61.7.5", 80), ("10.200.1.9", 4000))


@pytest.mark.parametrize("host", ["0.1", "0.5", "7.5", "255.254"])
def test_incoming_packets_come_from_where_the_cluster_sees_them(gateway: Gateway, host: str) -> None:
    """Any pod of the other cluster, whose prefix is the same as ours, is seen in its own prefix with its host part."""
    found = gateway.passes(TUNNEL, (f"10.200.{host}", 4000), ("10.200.1.9", 80))
    assert found == Seen(WORKER, (f"10.61.{host}", 4000), ("10.200.1.9", 80))


def test_answers_to_node_ports_go_back_to_the_node_that_asked(gateway: Gateway) -> None:
    """Two nodes send from the one shared address: the connection's mark leads each answer to its node."""
    for link, port in ((WORKER, 4001), (CONTROL_PLANE, 4002)):
        out = gateway.passes(link, ("10.70.0.0", port), ("10.61.7.5", 80))
        assert out == Seen(TUNNEL, ("10.70.0.0", port), ("10.200.7.5", 80))
    for link, port in ((CONTROL_PLANE, 4002), (WORKER, 4001)):
        back = gateway.passes(TUNNEL, ("10.200.7.5", 80), ("10.70.0.0", port))
        assert back == Seen(link, ("10.61.7.5", 80), ("10.70.0.0", port))


def test_two_nodes_may_use_the_same_port(gateway: Gateway) -> None:
    """To two pods: the answer of each goes back to the node that asked it."""
    asked = ((WORKER, "7.5"), (CONTROL_PLANE, "7.6"))
    for link, host in asked:
        out = gateway.passes(link, ("10.70.0.0", 4001), (f"10.61.{host}", 80))
        assert out == Seen(TUNNEL, ("10.70.0.0", 4001), (f"10.200.{host}", 80))
    for link, host in reversed(asked):
        back = gateway.passes(TUNNEL, (f"10.200.{host}", 80), ("10.70.0.0", 4001))
        assert back == Seen(link, (f"10.61.{host}", 80), ("10.70.0.0", 4001))
