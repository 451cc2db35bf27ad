"""The plaintext audit by packets: each way to break a node's encryption is the right alert, healing resolves it, and a sound mesh has none.

Two nodes of examples/encryption.yaml that encrypt and one that opted out, with an auditor on the first. Differences are only told here, so
that what is broken stays so until the test has it repaired.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

from schemas.topology import WireguardSettings
from schemas.values import FAMILIES, IPV4, IPV6, Address, Family, Prefix
from services.auditor import plaintext, plaintext_watch
from services.cli.lab import namespaces
from services.cli.lab.layout import UNDERLAY
from services.planner.state import HostId
from tests.hosts import LinuxHost
from tests.integration.mesh.audited import Auditor
from tests.integration.mesh.rome import encrypting_cluster
from tests.meshes import Mesh
from tests.speakers import opened, received
from tests.topologies import said

pytestmark = pytest.mark.privileged

ONE, TWO = HostId("rome", "worker-1"), HostId("rome", "worker-2")
SHOP, STOCK, POST = Address("10.200.1.10"), Address("10.200.2.10"), Address("10.200.3.10")
PLACES = {SHOP: "rome.pod.shop", STOCK: "rome.pod.stock", POST: "rome.pod.post"}
PORT = 7000
PATIENCE_S = 60.0
ALERT_S = 5.0
"""A third of a second where nothing else runs; in an emulated machine some."""
GRACE_S, QUIET_S = 0.5, 1.5


class Way(NamedTuple):
    """A way to break it: on which node, by which command, with which fields of the cluster; and what is told on the first node.

    The first node's pod says something to `to`, which answers. `key` is the alert's, none for what must not leak; `drift` the layer of the
    difference that is told.
    """

    name: str
    node: HostId
    command: str
    key: str
    drift: str = ""
    fields: tuple[tuple[str, Any], ...] = ()
    to: Address = STOCK
    tunnel: str = ""


_STEER = "nft flush chain inet meshmark.mesh.rome steer"
_OUT, _IN = "out pods 10.200.1.10 10.200.2.10", "in pods 10.200.2.10 10.200.1.10"
_OVER_OUT, _OVER_IN = "out overlay 10.200.1.10 10.200.2.10", "in overlay 10.200.2.10 10.200.1.10"
_OVERLAY, _OFF = (("routing", "overlay"),), (("strict", "off"),)
_SILENT = "peer removed"
WAYS = [
    Way("mark rule removed", ONE, _STEER, _OUT, "nft"),
    Way("table 10 emptied", ONE, "ip route flush table 10", _OUT, "route"),
    Way("rule to table 10 removed", ONE, "ip rule del priority 1000", _OUT, "rule"),
    Way(_SILENT, ONE, "wg set me.0 peer $(wg show me.0 peers) remove", "", "wireguard"),
    Way("reply in clear", TWO, _STEER, _IN),
    Way("outer overlay in clear", ONE, "ip rule del priority 1000", _OVER_OUT, "rule", _OVERLAY, tunnel="VXLAN"),
    Way("outer overlay in clear, back", TWO, "ip rule del priority 1000", _OVER_IN, "", _OVERLAY, tunnel="VXLAN"),
    Way("opted out", ONE, "true", "", to=POST),
    Way("strict mode off", ONE, _STEER, _OUT, "nft", _OFF),
]


@pytest.fixture(scope="module")
def rome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh[LinuxHost]]:
    with encrypting_cluster(tmp_path_factory.mktemp("rome")) as mesh:
        yield mesh


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody changes the mesh but the test."""
    monkeypatch.setattr(plaintext, "GRACE_S", GRACE_S)
    monkeypatch.setattr(plaintext, "QUIET_S", QUIET_S)
    monkeypatch.setattr(plaintext_watch, "_ROUND_S", 0.2)


def turn_into(mesh: Mesh[LinuxHost], fields: tuple[tuple[str, Any], ...] = ()) -> None:
    """Let the cluster have these fields besides those of the example."""
    base = {"routing": "native", "strict": "audit", "wireguard": WireguardSettings(), "control": ()}
    mesh.hear([said(replace(mesh.core.state.clusters["rome"], **(base | dict(fields))), time.time_ns())])


async def works(to: Address) -> None:
    """Something gets there and back: a handshake may come first."""
    with opened("rome.pod.shop") as client, opened(PLACES[to], port=PORT) as server:
        await _there_and_back(client, server, to)


async def _there_and_back(client: socket.socket, server: socket.socket, to: Address) -> float:
    """When the answer was sent."""
    client.sendto(b"there", (to, PORT))
    _, back = await received(server, PATIENCE_S)
    sent_s = time.time()
    server.sendto(b"back", back)
    await received(client, PATIENCE_S)
    return sent_s


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
async def test_each_way_to_break_it_is_told_and_resolved(rome: Mesh[LinuxHost], way: Way) -> None:
    """The alert with the flow, and the difference behind it; repaired, both are resolved, and packets pass encrypted again."""
    turn_into(rome, way.fields)
    await works(way.to)
    host, plan = rome.hosts[way.node], rome.core.published[way.node]
    auditor = Auditor(rome, ONE)
    try:
        await asyncio.sleep(2 * GRACE_S)
        host.run("sh", "-ec", way.command)
        with opened("rome.pod.shop") as client, opened(PLACES[way.to], port=PORT) as server:
            sent_s, port = time.time(), client.getsockname()[1]
            if way.name == _SILENT:
                client.sendto(b"there", (way.to, PORT))
                port = client.getsockname()[1]
            else:
                answered_s = await _there_and_back(client, server, way.to)
                sent_s, port = answered_s if way.node == TWO else sent_s, client.getsockname()[1]
        if way.drift:
            assert (await asyncio.to_thread(auditor.next, way.drift)).state == "raised"
        if way.key:
            alert = await asyncio.to_thread(auditor.next, "plaintext")
            packet = alert.packet
            assert packet is not None
            assert (alert.state, alert.key, packet.protocol, packet.link, packet.dropped) == ("raised", way.key, "udp", "eth0", False)
            ports = (port, PORT) if packet.direction == "out" else (PORT, port)
            assert (packet.source_port, packet.destination_port) == ports
            assert (packet.tunnel.protocol if packet.tunnel else "") == way.tunnel
            assert "Node/rome/worker-2" in alert.because
            assert alert.at_s - sent_s < ALERT_S
        else:
            await asyncio.sleep(2 * GRACE_S)
        host.repair(plan, rome.turns)
        assert host.differences(plan) == []
        await works(way.to)
        if way.key:
            resolved = await asyncio.to_thread(auditor.next, "plaintext")
            assert (resolved.state, resolved.key) == ("resolved", way.key)
        assert auditor.rest("plaintext") == []
    finally:
        host.repair(plan, rome.turns)
        auditor.close()


# No false alarms --------------------------------------------------------------------------------------------------------------------------

OUTSIDE = {IPV4: Address("192.0.2.50"), IPV6: Address("2001:db8:99::50")}
BROKER = {IPV4: Address("192.0.2.51"), IPV6: Address("2001:db8:99::51")}
NODES = {
    ONE: {IPV4: Address("172.18.0.11"), IPV6: Address("2001:db8:18::11")},
    TWO: {IPV4: Address("172.18.0.12"), IPV6: Address("2001:db8:18::12")},
}
POD = {
    "shop": {IPV4: SHOP, IPV6: Address("fd00:200:0:1::10")},
    "stock": {IPV4: STOCK, IPV6: Address("fd00:200:0:2::10")},
    "post": {IPV4: POST, IPV6: Address("fd00:200:0:3::10")},
}
NODE_PORT = 30080
SERVICE = {IPV4: f"{STOCK}:{PORT}", IPV6: f"[{POD['stock'][IPV6]}]:{PORT}"}
FOREIGN = "\n".join(
    f"table {table} services {{\n"
    " chain dialled {\n  type nat hook prerouting priority -100\n"
    f"  {table} daddr {NODES[ONE][family]} udp dport {NODE_PORT} dnat to {SERVICE[family]}\n }}\n}}"
    for table, family in (("ip", IPV4), ("ip6", IPV6))
)
"""A service's port on the first node, for who is outside."""
FORMS: dict[str, tuple[tuple[str, Any], ...]] = {
    "native": (),
    "native, nodes": (("wireguard", WireguardSettings(nodes=True)),),
    "overlay": _OVERLAY,
    "overlay, nodes": (*_OVERLAY, ("wireguard", WireguardSettings(nodes=True))),
}
PACKETS = 2600
"""In each form, so that it is more than ten thousand in all; answers not counted."""


def traffic(family: Family) -> list[tuple[str, Address, int]]:
    """Who says something to whom, at which port."""
    return [
        ("rome.pod.shop", POD["stock"][family], PORT),
        ("rome.pod.stock", POD["shop"][family], PORT),
        ("rome.pod.shop", POD["post"][family], PORT),
        ("rome.pod.post", POD["stock"][family], PORT),
        ("rome.pod.shop", OUTSIDE[family], PORT),
        ("rome.worker-1", POD["stock"][family], PORT),
        ("rome.worker-2", POD["shop"][family], PORT),
        ("rome.worker-1", NODES[TWO][family], PORT),
        ("rome.worker-2", NODES[ONE][family], 4000),  # nobody is there: an error comes back
        ("rome.worker-1", BROKER[family], PORT),
        ("underlay", NODES[ONE][family], NODE_PORT),
        ("rome.pod.post", NODES[ONE][family], PORT),
    ]


class Echoes:
    """Sockets that send back what they hear, until they are closed."""

    def __init__(self, places: list[tuple[str, Family]]) -> None:
        self._stack = contextlib.ExitStack()
        self._ended = threading.Event()
        self.heard = 0
        made = [self._stack.enter_context(opened(place, family, port=PORT)) for place, family in places]
        self._thread = threading.Thread(target=self._answer, args=(made,), name="echoes")
        self._thread.start()

    def _answer(self, made: list[socket.socket]) -> None:
        while not self._ended.is_set():
            for each in select.select(made, [], [], 0.05)[0]:
                with contextlib.suppress(OSError):  # an ICMP error for what was sent before
                    data, sender = each.recvfrom(65535)
                    self.heard += 1
                    each.sendto(data, sender)

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self._stack.close()


@pytest.mark.parametrize("form", FORMS)
async def test_a_sound_mesh_has_no_alert(rome: Mesh[LinuxHost], form: str) -> None:
    """Whatever passes: pods and nodes, outsiders at a service's port, the broker, broadcasts, fragments, neighbours, handshakes."""
    control = tuple(Prefix(f"{address}/{32 if family == IPV4 else 128}") for family, address in BROKER.items())
    namespaces.script([f"address replace {address.host_prefix} dev br0" for address in (*OUTSIDE.values(), *BROKER.values())], UNDERLAY)
    rome.hosts[ONE].run("nft", FOREIGN)
    turn_into(rome, (*FORMS[form], ("control", control)))
    places = [f"rome.pod.{name}" for name in POD] + ["rome.worker-1", "rome.worker-2", "underlay"]
    echoes = Echoes([(place, family) for place in places for family in FAMILIES])
    auditor = Auditor(rome, ONE)
    try:
        await asyncio.sleep(2 * GRACE_S)
        # A peer that is made again has no session: handshakes.
        rome.hosts[TWO].run("sh", "-ec", "wg set me.0 peer $(wg show me.0 peers) remove")
        rome.hosts[TWO].repair(rome.core.published[TWO], rome.turns)
        sent = 0
        with contextlib.ExitStack() as stack:
            flows = [(stack.enter_context(opened(place, family)), to, port) for family in FAMILIES for place, to, port in traffic(family)]
            dhcp = stack.enter_context(opened("rome.worker-1", port=68))
            dhcp.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
            while sent < PACKETS:
                for number, (speaker, to, port) in enumerate(flows):
                    with contextlib.suppress(OSError):  # an ICMP error for what was sent before, or no room
                        speaker.sendto(bytes(3000 if (sent + number) % 50 == 0 else 64), (to, port))
                        sent += 1
                with contextlib.suppress(OSError):  # the lab's hosts may have no route for it
                    dhcp.sendto(bytes(300), ("255.255.255.255", 67))
                if sent % 500 < len(flows):
                    for host in (ONE, TWO):
                        rome.hosts[host].run("ip", "neigh", "flush", "dev", "eth0")
                await asyncio.sleep(0.01)
        await asyncio.sleep(1.0)
        assert auditor.rest("plaintext") == []
        points = [(way, whose) for way in ("to-network", "from-network") for whose in ("pods", "overlay", "nodes")]
        clear = [auditor.counted(way, "plaintext", whose) for way, whose in points]
        assert clear == [0.0] * 6
        sound = [("to-crypto", "inner"), ("to-network", "encrypted"), ("from-network", "encrypted"), ("from-crypto", "inner")]
        auditor.until(lambda: all(auditor.counted(*point, "all") > PACKETS / 20 for point in sound))
        assert echoes.heard > PACKETS / 3
    finally:
        auditor.close()
        echoes.close()
        for table in ("ip", "ip6"):
            rome.hosts[ONE].run("nft", f"delete table {table} services")
