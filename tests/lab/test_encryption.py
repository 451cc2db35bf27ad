"""The lab of a cluster that encrypts, with all its services: applier and broker come and go, and nobody who speaks notices."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from schemas.topology import Node
from services.cli import records
from tests.captures import Packet
from tests.lab.conftest import EXAMPLES, Live, Mesh, connected, up
from tests.speakers import opened

pytestmark = [pytest.mark.privileged, pytest.mark.slow, pytest.mark.timeout(300)]

DEVICE, PORT = "me.0", 51871
PAIRS = (("rome/shop", "rome/stock"), ("rome/stock", "rome/shop"))
ENCRYPTING = ("rome.worker-1", "rome.worker-2")


@pytest.fixture(scope="module")
def rome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    with up(EXAMPLES / "encryption.yaml", tmp_path_factory.mktemp("encryption") / "state") as found:
        yield found


def sessions(rome: Mesh) -> dict[str, str]:
    """Endpoints, AllowedIPs and handshakes of both nodes' peers."""
    shown = ("endpoints", "allowed-ips", "latest-handshakes")
    return {f"{host} {what}": rome.run_in_view(host, "wg", "show", DEVICE, what) for host in ENCRYPTING for what in shown}


def in_clear(packets: list[Packet]) -> list[Packet]:
    """What shop and stock say to each other, on an uplink."""
    return [packet for packet in packets if {packet.source, packet.destination} == {"10.200.1.10", "10.200.2.10"}]


def test_the_command_looks_at_uplinks_too(rome: Mesh) -> None:
    """A check of the lab has the paths of pods inside the cluster, and says that nothing of theirs is in clear on the uplinks."""
    done = rome.meshmark("lab", "check", "--output", "json", timeout_s=120)
    document = json.loads(done.stdout)
    assert document["ok"] is True, done.stdout
    checks = {check["name"]: check["detail"] for check in document["checks"]}
    assert {"udp rome/shop → rome/stock", "tcp6 rome/stock → rome/shop", "udp rome/shop → rome/post"} <= checks.keys()
    for host in ("rome/worker-1", "rome/worker-2"):
        assert checks[f"uplink of {host}: encrypted, and nothing in clear"].endswith("0 in clear that should not be")


@pytest.mark.parametrize("service", ["applier.rome.worker-1", "nats-server", "planner", "auditor.rome.worker-2"])
async def test_a_service_that_comes_back_costs_no_packet_and_no_handshake(rome: Mesh, service: str) -> None:
    """Killed under traffic and started again: streams lose nothing, and peers have the endpoints and handshakes that they had."""
    async with connected(rome) as live:
        await live.carries()
        before = sessions(rome)
        with rome.capture("rome.worker-1") as uplink:
            async with live.undisturbed(*PAIRS):
                await rome.kill(service)
                await live.eventually(lambda: rome.pid(service), f"{service} runs")
        assert sessions(rome) == before
        assert in_clear(uplink) == []


@pytest.mark.parametrize("killed", ["", "applier.rome.worker-2", "planner"])
async def test_a_node_changes_its_key_and_nobody_who_speaks_notices(rome: Mesh, killed: str) -> None:
    """By the command, whatever service is killed meanwhile: streams lose nothing, and one key is left, which is another one."""
    async with connected(rome) as live:
        await live.carries()
        before = rome.run_in_view("rome.worker-2", "wg", "show", DEVICE, "public-key").strip()
        async with live.undisturbed(*PAIRS):
            changing = asyncio.create_task(live.meshmark("rotate", "rome/worker-2"))
            # On a fast machine it is over before anybody has looked; what is killed then is killed after it.
            await live.eventually(
                lambda: changing.done() or "me.1" in rome.run_in_view("rome.worker-1", "ip", "link"), "a second device", lambda: changing
            )
            if killed:
                await rome.kill(killed)
            done = await changing
        assert done.returncode == 0, done.stderr
        after = rome.run_in_view("rome.worker-2", "wg", "show", DEVICE, "public-key").strip()
        assert done.stdout.splitlines()[-1] == f"rome/worker-2: its public key is {after}"
        assert after != before
        await live.eventually(lambda: "me.1" not in rome.run_in_view("rome.worker-1", "ip", "link"), "the second device is gone")
        await live.carries()


SPOILED = "table ip other { chain c { type filter hook prerouting priority -80; ip daddr 10.200.2.0/24 meta mark set 0; }; }"
"""Somebody else's, who takes the mark off again: no difference of ours."""


def status(rome: Mesh) -> tuple[int, dict[str, dict[str, Any]]]:
    """What the command says of each node, by name, and its exit code."""
    done = rome.meshmark("encrypt", "status", "--output", "json")
    return done.returncode, {one["host"]: one for one in json.loads(done.stdout)}


async def test_what_somebody_lets_out_in_clear_is_told_by_both_ends(rome: Mesh) -> None:
    """An alert where it leaves and one where it arrives, with the packet, and over once it is; status shows both, and what was counted."""
    async with connected(rome) as live, live.broker() as broker:
        await live.carries()
        assert status(rome)[0] == 0
        rome.run("rome.worker-1", "nft", SPOILED)
        try:
            with opened("rome.pod.shop") as speaker:

                async def is_open() -> bool:
                    speaker.sendto(b"in clear", ("10.200.2.10", 7000))
                    return {event.host for event in await records.open_drift(broker) if event.packet} == {"worker-1", "worker-2"}

                async def speak_on() -> None:
                    while True:
                        await asyncio.sleep(0.2)
                        speaker.sendto(b"in clear", ("10.200.2.10", 7000))

                await live.eventually(is_open, "both ends tell")
                port = speaker.getsockname()[1]
                speaking = asyncio.create_task(speak_on())  # an alert is over soon after the last packet, which status may take as long as
                code, found = await asyncio.to_thread(status, rome)
                speaking.cancel()
            assert code == 2
            for host, way in (("worker-1", "out"), ("worker-2", "in")):
                (alert,) = found[host]["alerts"]
                assert alert["key"] == f"{way} pods 10.200.1.10 10.200.2.10"
                assert (alert["packet"]["sourcePort"], alert["packet"]["destinationPort"], alert["packet"]["link"]) == (port, 7000, "eth0")
                assert found[host]["leaked"] > 0
        finally:
            rome.run("rome.worker-1", "nft", "delete table ip other")

        async def is_over() -> bool:
            return not await records.open_drift(broker)

        await live.eventually(is_over, "no alert is open")
        assert status(rome)[0] == 0


def test_status_of_a_host_that_does_not_answer(rome: Mesh) -> None:
    """It is silent and the others are shown, with handshakes."""
    stopped = rome.pid("applier.rome.worker-2")
    assert stopped is not None
    os.kill(stopped, signal.SIGSTOP)
    try:
        code, found = status(rome)
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert code == 2
    assert {name: one["state"] for name, one in found.items()} == {"worker-1": "encrypts", "worker-2": "silent", "worker-3": "optedOut"}
    (peer,) = found["worker-1"]["now"]["peers"]
    assert peer["node"] == "worker-2"
    assert peer["handshakeSeconds"] > 0


async def test_what_is_said_while_the_broker_is_away_is_so_afterwards(rome: Mesh) -> None:
    """The broker is killed, and right after it a node opts in: it encrypts as soon as the broker is back."""
    async with connected(rome) as live:
        await rome.kill("nats-server")
        node = rome.object("Node/rome/worker-3")
        assert isinstance(node, Node)

        async def is_said() -> bool:
            await live.feed.publish(opted_in(node))
            return True

        await live.eventually(is_said, "the broker hears it")
        await live.publish(opted_in(node))
        await live.carries()
        with rome.capture("rome.worker-3") as uplink:
            await live.carries()
        assert any(PORT in (packet.source_port, packet.destination_port) for packet in uplink)
        await encrypts(live, rome)


def opted_in(node: Node) -> Node:
    return Node(name=node.name, cluster=node.cluster, addresses=node.addresses, pod_prefixes=node.pod_prefixes)


async def encrypts(live: Live, rome: Mesh) -> None:
    """Until the third node has shaken hands with both others."""
    await live.eventually(
        lambda: rome.run_in_view("rome.worker-3", "wg", "show", DEVICE, "latest-handshakes").count("\t0\n") == 0, "all shake hands"
    )
