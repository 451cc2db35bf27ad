"""What leads packets into a node's device, by packets: pods and nodes dial pods and services, and the uplink shows none of it in clear.

Two nodes of examples/encryption.yaml, with a table of somebody else that translates a service's address, as kube-proxy does.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from schemas.values import FAMILIES, IPV4, Address, Family
from services.planner.state import HostId
from tests.captures import Packet, capture
from tests.hosts import LinuxHost
from tests.integration.mesh.rome import encrypting_cluster
from tests.meshes import Mesh
from tests.speakers import opened, received
from tests.topologies import said

pytestmark = pytest.mark.privileged

PATIENCE_S = 60.0
PORT, WIREGUARD = 7000, 51871
SERVICE = {4: Address("10.96.0.1"), 6: Address("fd00:96::1")}
POD = {4: Address("10.200.2.10"), 6: Address("fd00:200:0:2::10")}
OTHER = {4: Address("10.200.1.10"), 6: Address("fd00:200:0:1::10")}
NODE = {4: Address("10.200.1.1"), 6: Address("fd00:200:0:1::1")}
SAID = b"not for others"
FOREIGN = "\n".join(
    f"table {table} services {{\n"
    f" chain dialled {{\n  type nat hook prerouting priority -100\n  {table} daddr {SERVICE[family]} dnat to {POD[family]}\n }}\n"
    f" chain own {{\n  type nat hook output priority -100\n  {table} daddr {SERVICE[family]} dnat to {POD[family]}\n }}\n"
    "}"
    for table, family in (("ip", 4), ("ip6", 6))
)


@pytest.fixture(scope="module")
def rome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh[LinuxHost]]:
    """The cluster, up and encrypting, with the service on its first node."""
    with encrypting_cluster(tmp_path_factory.mktemp("rome")) as mesh:
        mesh.hosts[HostId("rome", "worker-1")].run("nft", FOREIGN)
        yield mesh


async def spoken(place: str, family: Family, to: Address) -> tuple[str, list[Packet], list[Packet]]:
    """Whom the second node's pod hears from when this place says something to an address; what passed uplink and device meanwhile."""
    with opened(place, family) as client, opened("rome.pod.stock", family, port=PORT) as server:
        client.sendto(SAID, (to, PORT))
        data, sender = await received(server, PATIENCE_S)  # a handshake may come first
        with capture("mm.rome.worker-1", "eth0") as uplink, capture("mm.rome.worker-1", "me.0") as device:
            client.sendto(SAID, (to, PORT))
            data, sender = await received(server, PATIENCE_S)
            server.sendto(data, sender)
            data, answered = await received(client, PATIENCE_S)
    assert (data, answered) == (SAID, (to, PORT))
    return sender[0], uplink, device


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("service", [False, True], ids=["pod", "service"])
@pytest.mark.parametrize("place,source", [("rome.pod.shop", OTHER), ("rome.worker-1", NODE)], ids=["from a pod", "from a node"])
async def test_packets_and_answers_leave_the_uplink_encrypted(
    rome: Mesh[LinuxHost], place: str, source: dict[Family, Address], family: Family, *, service: bool
) -> None:
    """Also those to a service's address, which only the node's own translation turns into a pod's: each is in plain on the device alone."""
    sender, uplink, device = await spoken(place, family, SERVICE[family] if service else POD[family])
    # To a service, a node's own packet is bound to the uplink's address before anybody knows where it goes: that becomes the device's.
    assert sender == source[family]
    assert [(packet.outgoing, packet.source, packet.destination) for packet in device if SAID in packet.body][:1] == [
        (True, source[family], POD[family])
    ]
    assert any(not packet.outgoing and packet.source == POD[family] for packet in device)
    assert not [packet for packet in uplink if SAID in packet.body]
    assert {packet.outgoing for packet in uplink if packet.destination_port == WIREGUARD} == {True, False}


async def test_nothing_leaves_when_somebody_empties_nftables(rome: Mesh[LinuxHost]) -> None:
    """Enforced, what pods send is led by its destination as well; what they hear is the same."""
    first, cluster = rome.hosts[HostId("rome", "worker-1")], rome.core.state.clusters["rome"]
    rome.hear([said(replace(cluster, strict="enforce"), time.time_ns())])
    first.run("nft", "flush ruleset")
    try:
        with (
            capture("mm.rome.worker-1", "eth0") as uplink,
            opened("rome.pod.shop", IPV4) as client,
            opened("rome.pod.stock", IPV4, port=PORT) as server,
        ):
            client.sendto(SAID, (POD[IPV4], PORT))
            _, sender = await received(server, PATIENCE_S)
        assert sender[0] == OTHER[IPV4]
        assert not [packet for packet in uplink if SAID in packet.body]
    finally:
        first.restart()
        rome.hear([said(cluster, time.time_ns())])
        first.run("nft", FOREIGN)
