"""A sound mesh has no alert: more than ten thousand packets of all kinds, in each form of encryption."""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from schemas.topology import WireguardSettings
from schemas.values import FAMILIES, IPV4, IPV6, Address, Family, Prefix
from services.cli.lab import namespaces
from services.cli.lab.layout import UNDERLAY
from tests.integration.mesh.audited import Auditor
from tests.speakers import opened
from tests.trace.site import GRACE_S, Rome
from tests.tracing import ONE, PODS, TWO

pytestmark = pytest.mark.privileged

PORT = 7000
SETTLE_S = 1.0
_OVERLAY: dict[str, Any] = {"routing": "overlay"}
_NODES = WireguardSettings(nodes=True)
OUTSIDE = {IPV4: Address("192.0.2.50"), IPV6: Address("2001:db8:99::50")}
BROKER = {IPV4: Address("192.0.2.51"), IPV6: Address("2001:db8:99::51")}
NODES = {
    ONE: {IPV4: Address("172.18.0.11"), IPV6: Address("2001:db8:18::11")},
    TWO: {IPV4: Address("172.18.0.12"), IPV6: Address("2001:db8:18::12")},
}
POD = {name: dict(zip(FAMILIES, PODS[name], strict=True)) for name in ("shop", "stock", "post")}
NODE_PORT = 30080
SERVICE = {IPV4: f"{POD['stock'][IPV4]}:{PORT}", IPV6: f"[{POD['stock'][IPV6]}]:{PORT}"}
FOREIGN = "\n".join(
    f"table {table} services {{\n"
    " chain dialled {\n  type nat hook prerouting priority -100\n"
    f"  {table} daddr {NODES[ONE][family]} udp dport {NODE_PORT} dnat to {SERVICE[family]}\n }}\n}}"
    for table, family in (("ip", IPV4), ("ip6", IPV6))
)
"""A service's port on the first node, for who is outside."""
FORMS: dict[str, dict[str, Any]] = {
    "native": {},
    "native, nodes": {"wireguard": _NODES},
    "overlay": _OVERLAY,
    "overlay, nodes": {**_OVERLAY, "wireguard": _NODES},
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
async def test_a_sound_mesh_has_no_alert(rome: Rome, form: str, record_property: Callable[[str, object], None]) -> None:
    """Whatever passes: pods and nodes, outsiders at a service's port, the broker, broadcasts, fragments, neighbours, handshakes."""
    control = tuple(Prefix(f"{address}/{32 if family == IPV4 else 128}") for family, address in BROKER.items())
    namespaces.script([f"address replace {address.host_prefix} dev br0" for address in (*OUTSIDE.values(), *BROKER.values())], UNDERLAY)
    rome.hosts[ONE].run("nft", FOREIGN)
    rome.turn(control=control, **FORMS[form])
    places = [f"rome.pod.{name}" for name in POD] + ["rome.worker-1", "rome.worker-2", "underlay"]
    echoes = Echoes([(place, family) for place in places for family in FAMILIES])
    auditor = Auditor(rome.mesh, ONE)
    try:
        await asyncio.sleep(2 * GRACE_S)
        # A peer that is made again has no session: handshakes.
        rome.hosts[TWO].run("sh", "-ec", "wg set me.0 peer $(wg show me.0 peers) remove")
        rome.hosts[TWO].repair(rome.plan(TWO), rome.mesh.turns)
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
        await asyncio.sleep(SETTLE_S)
        alarms = auditor.rest("plaintext")
        for alarm in alarms:
            record_property("false_alarm", alarm.key)
        assert alarms == []
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
