"""The seed's rules, published, do to packets what the seed says: marks by interface, prefixes remapped both ways, NodePorts led back.

A gateway with two node links and one tunnel. Routes and policy rules are published as the seed has them; the firewall is the example's.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from services.kernel.linux import LinuxKernel
from services.kernel.transaction import Change
from tests.contract.kernel.firewall_host import Host, seed
from tests.contract.kernel.wires import Seen, Wires
from tests.routes import compiled, routes, to

pytestmark = [pytest.mark.privileged, pytest.mark.any_kernel]

TUNNEL, WORKER, CONTROL_PLANE = "liqo-tunnel1", "liqo.n556fkng95", "liqo.t4wpt9k7mb"
LINKS = (TUNNEL, WORKER, CONTROL_PLANE)
HOSTS = ("10.200.7.5", "10.200.7.6", "10.200.1.9", "10.70.0.0", "10.200.0.0", "10.200.0.5", "10.200.255.255")
ROUTES = (
    routes("milan-gw-ext", rules=[{"fwmark": 0xFF00}], routes=[to("0.0.0.0/0", TUNNEL)]),
    routes("worker-gw-node", rules=[{"fwmark": 0xFE00, "to": "10.200.1.0/24"}], routes=[to("10.200.1.9", WORKER)]),
    routes("worker-nodeport", rules=[{"fwmark": 1, "to": "10.70.0.0"}], routes=[to("10.70.0.0", WORKER)]),
    routes("control-plane-nodeport", rules=[{"fwmark": 2, "to": "10.70.0.0"}], routes=[to("10.70.0.0", CONTROL_PLANE)]),
)


def made(host: Host, state_dir: Path) -> Wires:
    """The seed's gateway, whose links lead here."""
    host.hold(*seed().values())
    wires = Wires(host, LINKS)
    for number, link in enumerate(LINKS):
        for address in HOSTS:
            host.run("ip", *f"neigh add {address} lladdr 02:00:00:00:02:0{number} dev {link}".split())
    kernel = host.call(LinuxKernel, state_dir)
    for item in ROUTES:
        for found in compiled(item).values():
            host.call(kernel.write, Change(None, found))
    host.call(kernel.close)
    return wires


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Wires]:
    host = Host()
    try:
        wires = made(host, tmp_path)
        yield wires
        wires.close()
    finally:
        host.close()


@pytest.mark.parametrize("host", ["0.0", "0.5", "7.5", "255.255"])
def test_outgoing_packets_reach_the_other_clusters_pods_and_come_back(gateway: Wires, host: str) -> None:
    """From a node to 10.61.x.y: the host part is kept, the tunnel takes it; the answer has the address that was dialled."""
    out = gateway.passes(WORKER, ("10.200.1.9", 4000), (f"10.61.{host}", 80))
    assert out == Seen(TUNNEL, ("10.200.1.9", 4000), (f"10.200.{host}", 80))
    back = gateway.passes(TUNNEL, (f"10.200.{host}", 80), ("10.200.1.9", 4000))
    assert back == Seen(WORKER, (f"10.61.{host}", 80), ("10.200.1.9", 4000))


@pytest.mark.parametrize("host", ["0.1", "0.5", "7.5", "255.254"])
def test_incoming_packets_come_from_where_the_cluster_sees_them(gateway: Wires, host: str) -> None:
    """Any pod of the other cluster, whose prefix is the same as ours, is seen in its own prefix with its host part."""
    found = gateway.passes(TUNNEL, (f"10.200.{host}", 4000), ("10.200.1.9", 80))
    assert found == Seen(WORKER, (f"10.61.{host}", 4000), ("10.200.1.9", 80))


def test_answers_to_node_ports_go_back_to_the_node_that_asked(gateway: Wires) -> None:
    """Two nodes send from the one shared address: the connection's mark leads each answer to its node."""
    for link, port in ((WORKER, 4001), (CONTROL_PLANE, 4002)):
        out = gateway.passes(link, ("10.70.0.0", port), ("10.61.7.5", 80))
        assert out == Seen(TUNNEL, ("10.70.0.0", port), ("10.200.7.5", 80))
    for link, port in ((CONTROL_PLANE, 4002), (WORKER, 4001)):
        back = gateway.passes(TUNNEL, ("10.200.7.5", 80), ("10.70.0.0", port))
        assert back == Seen(link, ("10.61.7.5", 80), ("10.70.0.0", port))


def test_two_nodes_may_use_the_same_port(gateway: Wires) -> None:
    """To two pods: the answer of each goes back to the node that asked it."""
    asked = ((WORKER, "7.5"), (CONTROL_PLANE, "7.6"))
    for link, host in asked:
        out = gateway.passes(link, ("10.70.0.0", 4001), (f"10.61.{host}", 80))
        assert out == Seen(TUNNEL, ("10.70.0.0", 4001), (f"10.200.{host}", 80))
    for link, host in reversed(asked):
        back = gateway.passes(TUNNEL, (f"10.200.{host}", 80), ("10.70.0.0", 4001))
        assert back == Seen(link, (f"10.61.{host}", 80), ("10.70.0.0", 4001))
