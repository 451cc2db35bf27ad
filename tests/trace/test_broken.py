"""Each way to break a node's encryption, by packets: the right verdict of a trace in each direction, and the right alert.

Two nodes of examples/encryption.yaml that encrypt and one that opted out, with an auditor on the first. Differences are only told here, so
that what is broken stays so until the test has it repaired.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
from msgspec import Struct

from schemas.flow import Encryption
from schemas.values import Address
from services.auditor.trace.trails import Way as Direction
from services.auditor.trace.verdicts import courses
from services.planner.state import HostId
from tests.hosts import LinuxHost
from tests.integration.mesh.audited import Auditor
from tests.speakers import opened, received
from tests.trace.flows import place_of, seen
from tests.trace.site import GRACE_S, Rome
from tests.tracing import ONE, PODS, TWO, Recorder, recording

pytestmark = pytest.mark.privileged

PORT = 7000
PATIENCE_S = 60.0
ALERT_S = 5.0
"""A third of a second where nothing else runs; in an emulated machine some."""
Verdicts = dict[Direction, Encryption]


class Way(Struct, frozen=True):
    """A way to break it: on which node, by which command, with which fields of the cluster, and what is told.

    `client` says something to `server`, which answers, but for `lost`; with `amid`, once before it is broken, too, in the same trace.
    `verdicts` are the trace's, `key` the alert's, none for what must not leak; `drift` the layer of the difference that the first node's
    auditor tells; `dropped` whether strict mode drops what is in clear.
    """

    name: str
    node: HostId
    command: str
    verdicts: Verdicts
    key: str = ""
    drift: str = ""
    fields: dict[str, Any] = {}
    client: str = "shop"
    server: str = "stock"
    tunnel: str = ""
    amid: bool = False
    lost: bool = False
    dropped: bool = False


STEER = "nft flush chain inet meshmark.mesh.rome steer"
RULE = "ip rule del priority 1000"
OUT, IN = "out pods 10.200.1.10 10.200.2.10", "in pods 10.200.2.10 10.200.1.10"
OVER_OUT, OVER_IN = "out overlay 10.200.1.10 10.200.2.10", "in overlay 10.200.2.10 10.200.1.10"
OVERLAY, STRICT = {"routing": "overlay"}, {"strict": "enforce"}
THERE: Verdicts = {"forward": "plaintext", "reply": "encrypted"}
BACK: Verdicts = {"forward": "encrypted", "reply": "plaintext"}
WAYS = [
    Way("mark rule removed", ONE, STEER, THERE, OUT, "nft"),
    Way("table 10 emptied", ONE, "ip route flush table 10", THERE, OUT, "route"),
    Way("rule to table 10 removed", ONE, RULE, THERE, OUT, "rule"),
    Way("peer removed", ONE, "wg set me.0 peer $(wg show me.0 peers) remove", {"forward": "unknown"}, drift="wireguard", lost=True),
    Way("reply in clear", TWO, STEER, BACK, IN),
    Way("reply to a node in clear", TWO, STEER, BACK, "in pods 10.200.2.10 10.200.1.1", client="worker-1"),
    Way("outer overlay in clear", ONE, RULE, THERE, OVER_OUT, "rule", OVERLAY, tunnel="VXLAN"),
    Way("outer overlay in clear, back", TWO, RULE, BACK, OVER_IN, "", OVERLAY, tunnel="VXLAN"),
    Way("opted out", ONE, "true", {"forward": "plaintext", "reply": "plaintext"}, server="post"),
    Way("strict mode off", ONE, STEER, THERE, OUT, "nft", {"strict": "off"}),
    Way("mark rule removed in strict mode", ONE, STEER, {"forward": "encrypted", "reply": "encrypted"}, "", "nft", STRICT),
    Way(
        "dropped by strict mode",
        ONE,
        f"{RULE}; ip rule del priority 1001",
        {"forward": "unknown"},
        OUT,
        "rule",
        STRICT,
        lost=True,
        dropped=True,
    ),
    Way("in the middle of a flow", ONE, STEER, {"forward": "partial", "reply": "encrypted"}, OUT, "nft", amid=True),
]


async def works(way: Way) -> None:
    """Something gets there and back: a handshake may come first."""
    with opened(place_of(way.client)) as client, opened(place_of(way.server), port=PORT) as server:
        await there_and_back(client, server, PODS[way.server][0], lambda: None)


async def there_and_back(client: socket.socket, server: socket.socket, to: Address, take: Callable[[], None]) -> float:
    """When the answer was sent. `take` is called where a packet has arrived."""
    client.sendto(b"there", (to, PORT))
    _, back = await received(server, PATIENCE_S)
    take()
    sent_s = time.time()
    server.sendto(b"back", back)
    await received(client, PATIENCE_S)
    take()
    return sent_s


async def broken(host: LinuxHost, way: Way, take: Callable[[], None]) -> tuple[float, int]:
    """Break it, and have something said: when what is in clear was sent, and by which port of the client's."""
    to = PODS[way.server][0]
    with opened(place_of(way.client)) as client, opened(place_of(way.server), port=PORT) as server:
        if way.amid:
            await there_and_back(client, server, to, take)
        host.run("sh", "-ec", way.command)
        sent_s = time.time()
        if way.lost:
            client.sendto(b"there", (to, PORT))
            take()
        else:
            answered_s = await there_and_back(client, server, to, take)
            sent_s = answered_s if way.node == TWO else sent_s
        return sent_s, client.getsockname()[1]


def judged(rome: Rome, way: Way, recorder: Recorder) -> Verdicts:
    """Each direction's verdict."""
    wanted = rome.session(way.client, way.server)
    return {course.way: course.verdict for course in courses(seen(rome, wanted, recorder.found))}


async def alerted(auditor: Auditor, way: Way, sent_s: float, port: int) -> None:
    """The alert with the flow and where it comes from, soon enough; the difference behind it, where the node's own auditor sees one."""
    if way.drift:
        assert (await asyncio.to_thread(auditor.next, way.drift)).state == "raised"
    if not way.key:
        await asyncio.sleep(2 * GRACE_S)
        assert auditor.rest("plaintext") == []
        return
    alert = await asyncio.to_thread(auditor.next, "plaintext")
    packet = alert.packet
    assert packet is not None
    assert (alert.state, alert.key, packet.protocol, packet.link, packet.dropped) == ("raised", way.key, "udp", "eth0", way.dropped)
    ports = (port, PORT) if packet.direction == "out" else (PORT, port)
    assert (packet.source_port, packet.destination_port) == ports
    assert (packet.tunnel.protocol if packet.tunnel else "") == way.tunnel
    assert "Node/rome/worker-2" in alert.because
    assert alert.at_s - sent_s < ALERT_S


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
async def test_each_way_to_break_it_is_told_and_resolved(rome: Rome, way: Way, record_property: Callable[[str, object], None]) -> None:
    """A trace has the right verdict of each direction, and the alert names the flow; repaired, both are well again."""
    record_property("broken_way", way.name)
    rome.turn(**way.fields)
    await works(way)
    host, plan = rome.hosts[way.node], rome.plan(way.node)
    wanted = rome.session(way.client, way.server)
    auditor = Auditor(rome.mesh, ONE)
    try:
        await asyncio.sleep(2 * GRACE_S)
        with recording({name: rome.hosts[name] for name in wanted.hosts}) as recorder:
            for wish in set(wanted.hosts.values()):
                recorder.lend(wish)
            sent_s, port = await broken(host, way, recorder.take)
            # The trace table's last messages of a packet that was lost may come after those that say so.
            await asyncio.sleep(GRACE_S if way.lost else 0)
            recorder.take()
        assert judged(rome, way, recorder) == way.verdicts
        record_property("detected", (way.name, "trace"))
        await alerted(auditor, way, sent_s, port)
        record_property("detected", (way.name, "alert"))
        host.repair(plan, rome.mesh.turns)
        assert host.differences(plan) == []
        await works(way)
        if way.key:
            resolved = await asyncio.to_thread(auditor.next, "plaintext")
            assert (resolved.state, resolved.key) == ("resolved", way.key)
        assert auditor.rest("plaintext") == []
    finally:
        host.repair(plan, rome.mesh.turns)
        auditor.close()
