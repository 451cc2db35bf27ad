"""Tunnels that carry nothing any more: their flows move, the others do not notice, and all is as before once they carry again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import struct
import time
from collections.abc import AsyncIterator, Iterator

import pytest
from msgspec.structs import replace

from schemas.topology import Pod
from schemas.values import IPV4, Address, Family, Name
from tests.lab.conftest import Live, Mesh, eventually
from tests.lab.test_data_path import captures, echo, pod_socket

pytestmark = pytest.mark.privileged

GATEWAYS = ("rome.gateway", "milan.gateway")
TUNNELS = ("mt.0", "mt.1", "mt.2")
PORT = 51840
FLOWS = 60
INTERVAL_S = 0.05
DETECTION_S = 5.0
"""Three rounds of half a second, one that had begun, and the turns of both ends; the rest is for a busy machine."""
KIOSK = Pod(name=Name("kiosk"), cluster=Name("rome"), node=Name("worker-2"), addresses=(Address("10.200.2.11"),))


@contextlib.contextmanager
def blocked(mesh: Mesh, tunnel: int) -> Iterator[None]:
    """A tunnel's UDP port is dropped in the middle, both ways, while the body runs."""
    rule = f"udp dport {PORT + tunnel} counter drop"
    table = f"inet block{tunnel}"
    chain = f"add table {table}; add chain {table} c {{ type filter hook forward priority -300; }}; add rule {table} c {rule}"
    mesh.run("underlay", "nft", chain)
    try:
        yield
    finally:
        mesh.run("underlay", "nft", f"delete table {table}")


def withdrawn(live: Live) -> dict[str, list[str]]:
    """What both gateways last reported as withdrawn."""
    return {
        str(host): [item.link for item in live.board.reports[host].tunnels.withdrawn] for host in live.plans() if host.name == "gateway"
    }


def hops(mesh: Mesh, host: str, family: Family = IPV4) -> set[str]:
    """The links by which a gateway sends to the far cluster."""
    shown = mesh.run(host, "ip", f"-{family}", "-o", "route", "show", "table", "7001")
    words = " ".join(line for line in shown.splitlines() if "nexthop" in line).split()
    return {word for word in words if word.startswith("mt.")}


class Flows:
    """Many UDP flows between two pods, each known by its port: what of each came back, and the tunnels it took."""

    def __init__(self) -> None:
        self.sent: dict[int, list[float]] = {}
        self.back: dict[int, set[int]] = {}

    def lost(self, port: int) -> list[int]:
        return [number for number in range(len(self.sent[port])) if number not in self.back[port]]

    def quiet_s(self, port: int) -> float:
        """From the first datagram of a flow that was lost to the last."""
        times = [self.sent[port][number] for number in self.lost(port)]
        return times[-1] - times[0] + INTERVAL_S if times else 0.0


@contextlib.asynccontextmanager
async def flows(live: Live, client: str, server: str, family: Family = IPV4) -> AsyncIterator[Flows]:
    """Flows while the body runs, from when they are known to run; counted to the end when it is left."""
    loop, found = asyncio.get_running_loop(), Flows()
    walk = live.walk(client, server, family)
    async with echo(server, family) as (port, _):
        with contextlib.ExitStack() as stack:
            sockets = [stack.enter_context(pod_socket(client, family=family)) for _ in range(FLOWS)]
            for each in sockets:
                each.bind(("", 0))
                own = each.getsockname()[1]
                found.sent[own], found.back[own] = [], set()
                loop.add_reader(each, _take, each, found.back[own])
                stack.callback(loop.remove_reader, each)

            async def send() -> None:
                while True:
                    for each in sockets:
                        times = found.sent[each.getsockname()[1]]
                        with contextlib.suppress(OSError):
                            each.sendto(struct.pack("!I", len(times)), (walk.dial, port))
                        times.append(time.monotonic())
                    await asyncio.sleep(INTERVAL_S)

            sending = asyncio.create_task(send())
            await eventually(lambda: all(len(numbers) > 5 for numbers in found.back.values()), "all flows run")
            for own, times in found.sent.items():
                # What was lost while neighbours were found is no part of it.
                found.back[own].update(range(len(times)))
            try:
                yield found
            finally:
                sending.cancel()
                await eventually(
                    lambda: all(len(times) - 1 in found.back[own] for own, times in found.sent.items()), "the last of each comes back"
                )


def _take(opened: socket.socket, numbers: set[int]) -> None:
    with contextlib.suppress(BlockingIOError):
        while True:
            numbers.add(struct.unpack("!I", opened.recv(64))[0])


async def tunnels_by_flow(live: Live, ports: set[int], *, outgoing: bool) -> dict[int, set[str]]:
    """Which tunnels each flow takes now, on its way out of rome or back."""
    with captures(live, "rome.gateway", TUNNELS) as packets:
        used: dict[int, set[str]] = {}

        def all_seen() -> bool:
            for link, found in packets.items():
                for packet in list(found):
                    port = packet.source_port if outgoing else packet.destination_port
                    if packet.outgoing == outgoing and port in ports:
                        used.setdefault(port, set()).add(link)
            return used.keys() == ports

        await eventually(all_seen, "each flow is seen in a tunnel")
    return used


async def test_flows_of_a_dead_tunnel_move_and_the_others_stay(live: Live) -> None:
    """One tunnel of three is cut: its flows are back within the time of detection, each other flow loses nothing and keeps its tunnel;
    no auditor calls it drift, `meshmark status` names it; uncut, every flow is where it was."""
    await flows_move_and_others_stay(live, IPV4)


async def flows_move_and_others_stay(live: Live, family: Family) -> None:
    """Fails unless that is so of flows of this family, between two clusters joined by three tunnels."""
    mesh = live.mesh
    before = {host: mesh.own_state(host) for host in GATEWAYS}
    told = len(live.board.drift)
    async with flows(live, "rome/shop", "milan/bank", family) as seen:
        ports = set(seen.sent)
        went = await tunnels_by_flow(live, ports, outgoing=True)
        came = await tunnels_by_flow(live, ports, outgoing=False)
        with blocked(mesh, 1):
            await eventually(lambda: set(map(tuple, withdrawn(live).values())) == {("mt.1",)}, "both ends report it withdrawn")
            assert all(hops(mesh, host, family) == {"mt.0", "mt.2"} for host in GATEWAYS)
            moved = await tunnels_by_flow(live, ports, outgoing=True)
            assert all("mt.1" not in links for links in moved.values())
            shown = await live.meshmark("status", "--output", "json")
            assert shown.returncode == 0
            assert shown.stdout.count('"link": "mt.1"') == 2
        await eventually(lambda: not any(withdrawn(live).values()), "it is back", timeout_s=90)
        assert await tunnels_by_flow(live, ports, outgoing=True) == went
    affected = {port for port in ports if "mt.1" in went[port] | came[port]}
    assert 10 < len(affected) < FLOWS - 10
    assert {port: seen.lost(port) for port in ports - affected if seen.lost(port)} == {}
    assert all(moved[port] == went[port] for port in ports - affected), "a flow of a living tunnel moved"
    quiet = {port: seen.quiet_s(port) for port in affected}
    assert max(quiet.values()) < DETECTION_S, quiet
    assert {host: mesh.own_state(host) for host in GATEWAYS} == before
    assert [(event.host, event.key, event.state) for event in live.board.drift[told:]] == []


async def test_what_happens_while_a_tunnel_is_withdrawn(live: Live) -> None:
    """An applier that is killed, a broker that is, and plans that change do not bring a withdrawn tunnel back: flows lose nothing by it."""
    mesh = live.mesh
    told = len(live.board.drift)
    wider = replace(mesh.object("Peering/rome/rome-milan"), tunnels=4)
    with blocked(mesh, 1):
        await eventually(lambda: set(map(tuple, withdrawn(live).values())) == {("mt.1",)}, "both ends report it withdrawn")
        async with live.undisturbed(("rome/shop", "milan/bank"), ("milan/post", "rome/stock")):
            await mesh.kill("applier.rome.gateway")
            await eventually(lambda: found_at_start(live), "the new applier reports what it found withdrawn")
            await live.publish(KIOSK)
            await live.publish(wider)
            assert all(hops(mesh, host) == {"mt.0", "mt.2", "mt.3"} for host in GATEWAYS)
            await live.delete(KIOSK)
        assert set(map(tuple, withdrawn(live).values())) == {("mt.1",)}
    await eventually(lambda: not any(withdrawn(live).values()), "it is back", timeout_s=90)
    assert all(hops(mesh, host) == {*TUNNELS, "mt.3"} for host in GATEWAYS)
    assert [(event.host, event.key, event.state) for event in live.board.drift[told:]] == []


def found_at_start(live: Live) -> bool:
    report = live.board.reports["rome", "gateway"]
    return [item.reason for item in report.tunnels.withdrawn] == ["found withdrawn at the start"]


async def test_it_needs_no_broker(live: Live) -> None:
    """With nats-server stopped, a tunnel that is cut leaves the routes at both ends, and comes back; reports and silence of the auditors
    follow once the broker goes on."""
    mesh = live.mesh
    told = len(live.board.drift)
    with stopped(mesh, "nats-server"), blocked(mesh, 2):
        await eventually(
            lambda: all(hops(mesh, host) == {"mt.0", "mt.1"} for host in GATEWAYS), "the hop is gone at both ends", timeout_s=30
        )
        async with live.undisturbed(("rome/shop", "milan/bank"), ("milan/post", "rome/stock")):
            await asyncio.sleep(1.5)  # a debounce, a look and a second one
    await eventually(lambda: all(hops(mesh, host) == set(TUNNELS) for host in GATEWAYS), "it is back", timeout_s=90)
    await eventually(lambda: not any(withdrawn(live).values()), "it is reported")
    assert [(event.host, event.key, event.state) for event in live.board.drift[told:]] == []


@contextlib.contextmanager
def stopped(mesh: Mesh, service: str) -> Iterator[None]:
    """A process stands still while the body runs."""
    pid = mesh.pid(service)
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def test_when_all_tunnels_are_dead_none_is_withdrawn(live: Live) -> None:
    """Cut one after the other, the last one puts all back; the first that works again is used at once, alone."""
    mesh = live.mesh
    with contextlib.ExitStack() as first, contextlib.ExitStack() as others:
        first.enter_context(blocked(mesh, 0))
        for tunnel in (1, 2):
            others.enter_context(blocked(mesh, tunnel))

        def all_dead() -> bool:
            return all(len(live.board.reports[*host.split(".")].tunnels.dead) == 3 for host in GATEWAYS)

        await eventually(all_dead, "both ends report all as dead")
        assert all(hops(mesh, host) == set(TUNNELS) for host in GATEWAYS)
        first.close()
        await eventually(lambda: all(hops(mesh, host) <= {"mt.0"} for host in GATEWAYS), "the one that works is used alone", timeout_s=30)
        await live.carries()
    await eventually(lambda: not any(withdrawn(live).values()), "all are back", timeout_s=90)
