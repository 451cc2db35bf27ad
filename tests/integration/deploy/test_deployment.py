"""The images at work: broker, planner, and hosts whose applier and auditor have CAP_NET_ADMIN and no other right."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.kernel.uapi import decode_device
from tests.integration.deploy.deployment import STOP_S, Container, Deployment
from tests.topologies import two_clusters

pytestmark = [pytest.mark.privileged, pytest.mark.slow, pytest.mark.timeout(900)]

ONLY_NET_ADMIN = f"{1 << 12:016x}"
NODE, GATEWAY, FAR_GATEWAY = "rome/worker-1", "rome/gateway", "milan/gateway"
HOSTS = {NODE: "172.18.0.11", GATEWAY: "172.18.0.10", FAR_GATEWAY: "172.18.1.10"}
TABLE = "meshmark.rome.rome-milan"


@pytest.fixture(scope="module")
def deployment(replay, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    made = Deployment(replay, HOSTS, tmp_path_factory.mktemp("deployment"))
    with made.networks(), made.services():
        made.publish(two_clusters(nodes=1, tunnels=2))
        yield made


@pytest.fixture
def node(deployment: Deployment) -> Deployment:
    deployment.wait(lambda: deployment.applied(NODE), f"{NODE} to be applied")
    return deployment


@pytest.fixture
def gateways(deployment: Deployment) -> Deployment:
    for host in (GATEWAY, FAR_GATEWAY):
        deployment.wait(lambda host=host: deployment.applied(host), f"{host} to be applied")
    return deployment


def held(deployment: Deployment) -> str:
    """The node's tables of nftables without counts, its rules and its routes."""
    tables = sorted(deployment.outside(NODE, "nft", "list", "tables").splitlines())
    commands = [f"nft --stateless list {table}" for table in tables]
    commands += ["ip rule", "ip route show table 7010", "ip route show table main"]
    return "\n".join(deployment.outside(NODE, *command.split()) for command in commands)


def rights(container: Container) -> dict[str, str]:
    """The effective capabilities of each program inside."""
    found = {}
    for pid, name in container.programs().items():
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        found[name] = next(line.split()[1] for line in lines if line.startswith("CapEff"))
    return found


def test_a_node_gets_its_plan(node: Deployment):
    assert node.meshmark("status", NODE).returncode == 0
    report = node.report(NODE)
    assert report.outcome == "applied"
    assert {unit.held == unit.wanted for unit in report.units} == {True}
    assert report.capabilities.wireguard == "userspace"

    assert "10.61.0.0/16" in node.outside(NODE, "nft", "list", "set", "inet", TABLE, "remote")
    assert "900:\tfrom all lookup 7010 proto 77" in node.outside(NODE, "ip", "rule")
    assert "dev mo.gateway proto 77 onlink" in node.outside(NODE, "ip", "route", "show", "table", "7010")
    assert "unreachable 10.61.0.0/16 proto 77 metric 4278198272" in node.outside(NODE, "ip", "route", "show", "table", "main")
    assert "vxlan id" in node.outside(NODE, "ip", "-details", "link", "show", "mo.gateway")
    assert node.outside(NODE, "cat", "/proc/sys/net/ipv4/ip_forward").strip() == "1"
    assert "dev mo.gateway" in node.outside(NODE, "ip", "route", "get", "10.61.1.10")


def test_services_are_healthy_and_have_just_their_rights(node: Deployment):
    for host, port in (("", 9464), (NODE, 9464), (NODE, 9465)):
        node.wait(lambda host=host, port=port: node.is_ready(host, port), f"health at port {port} of {host or 'the planner'}")
    for service in ("applier", "auditor"):
        assert rights(node.containers[f"{service} {NODE}"]) == {"meshmark": ONLY_NET_ADMIN}
    assert rights(node.containers["planner"]) == {"meshmark": "0" * 16}
    assert rights(node.containers["nats"]) == {"meshmark": "0" * 16, "nats-server": "0" * 16}


@pytest.mark.parametrize(
    "layer,by_hand,key",
    [
        ("nft", f"nft flush chain inet {TABLE} closed", f"chain {TABLE} closed"),
        ("nft", f"nft delete table inet {TABLE}", f"table {TABLE}"),
        ("rule", "ip rule delete priority 900", "rule 900 fwmark 0x0/0x0 iif - to -"),
        ("route", "ip route delete table 7010 10.61.0.0/16 dev mo.gateway", "route 7010 10.61.0.0/16 0"),
    ],
)
def test_what_is_deleted_by_hand_is_told_and_comes_back(layer: str, by_hand: str, key: str, node: Deployment):
    before = held(node)
    told = len(node.drift(NODE))
    node.outside(NODE, *by_hand.split())

    def states() -> list[str]:
        return [event.state for event in node.drift(NODE)[told:] if event.key == key]

    node.wait(lambda: "resolved" in states(), f"the end of the drift of {key}")
    assert states() == ["raised", "resolved"]
    raised = next(event for event in node.drift(NODE)[told:] if event.key == key)
    assert raised.layer == layer
    assert held(node) == before
    assert [event.key for event in node.drift(NODE) if event.state == "unknown"] == []


def test_the_reference_of_a_service_without_namespaces_leaves_no_table(node: Deployment):
    tables = node.outside(NODE, "nft", "list", "tables").splitlines()
    assert sorted(tables) == ["table inet meshmark.host", "table inet meshmark.marker", f"table inet {TABLE}"]


def test_services_end_when_told_leave_the_kernel_alone_and_start_again(node: Deployment):
    applier, auditor = (node.containers[f"{service} {NODE}"] for service in ("applier", "auditor"))
    before = held(node)
    for container in (auditor, applier):
        code, seconds = container.stop()
        assert code == 0, node.last_words()
        assert seconds < STOP_S
    assert held(node) == before
    assert "dev mo.gateway" in node.outside(NODE, "ip", "route", "get", "10.61.1.10")
    applier.start()
    auditor.start()
    for port in (9464, 9465):
        node.wait(lambda port=port: node.is_ready(NODE, port), f"health at port {port} again")
    assert held(node) == before


def test_gateways_join_their_tunnels_by_wireguard_go_with_the_same_right(gateways: Deployment):
    """Both ends made a key, learned the other's by way of the planner, and shook hands on every tunnel."""
    for host in (GATEWAY, FAR_GATEWAY):
        gateways.wait(lambda host=host: all(handshakes(gateways, host)), f"handshakes of {host}")
        assert rights(gateways.containers[f"applier {host}"]) == {"meshmark": ONLY_NET_ADMIN, "wireguard-go": ONLY_NET_ADMIN}
        assert "nexthop dev mt.1" in gateways.outside(host, "ip", "route", "show", "table", "7001")
    assert gateways.drift(GATEWAY) == []


def test_tunnels_of_wireguard_go_end_with_the_applier_and_come_back_with_it(gateways: Deployment):
    applier = gateways.containers[f"applier {FAR_GATEWAY}"]
    gateways.wait(lambda: all(handshakes(gateways, FAR_GATEWAY)), "handshakes")
    before = time.time()
    code, seconds = applier.stop()
    assert code == 0, gateways.last_words()
    assert seconds < STOP_S
    assert "mt.0" not in gateways.outside(FAR_GATEWAY, "ip", "link")
    applier.start()
    gateways.wait(lambda: min(handshakes(gateways, FAR_GATEWAY), default=0) > before, "new handshakes")
    gateways.wait(lambda: gateways.applied(FAR_GATEWAY), f"{FAR_GATEWAY} to be applied")
    assert set(applier.programs().values()) == {"meshmark", "wireguard-go"}


def handshakes(deployment: Deployment, host: str) -> list[float]:
    """When each tunnel last shook hands, 0 for never; as wireguard-go's sockets say, which are a folder of the host."""
    found = []
    for number in (0, 1):
        path = deployment.folder / host.replace("/", ".") / "wireguard" / f"mt.{number}.sock"
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(5)
            try:
                connection.connect(str(path))
            except OSError:
                found.append(0.0)
                continue
            connection.sendall(b"get=1\n\n")
            answer = b""
            while not answer.endswith(b"\n\n"):
                answer += connection.recv(1 << 16)
        found += [peer.handshake_s for peer in decode_device(answer.decode()).peers.values()] or [0.0]
    return found
