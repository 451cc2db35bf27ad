"""Fail closed: whatever is missing, nothing for a remote cluster leaves by an uplink, and nothing reaches a local pod instead."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from schemas.firewall import FirewallChain, FirewallConfiguration, FirewallMatch, FirewallRule, NoTrack
from schemas.host_objects import MAIN_TABLE, Route
from schemas.objects import HostSelector
from schemas.plan import HostPlan
from schemas.topology import Peering, Topology
from schemas.values import Name, Prefix
from services.applier.core import Applier
from services.cli.lab import namespaces
from services.cli.lab.layout import PREFIX
from services.kernel.linux import LinuxKernel
from services.kernel.namespace import enter_network
from services.kernel.transaction import Change, Marker
from services.planner.allocate import Allocations
from services.planner.compile import compile_host
from services.planner.core import settle_rollouts
from services.planner.state import HostId, State
from services.runtime.errors import MeshmarkError
from tests.lab.conftest import Live, Mesh, Packet

pytestmark = pytest.mark.privileged

PORT, GUARDED_PORT = 9, 10
ROME, MILAN = ("rome.gateway", "rome.worker-1", "rome.worker-2"), ("milan.gateway", "milan.worker-1", "milan.worker-2")
REMOTE = tuple(Prefix(f"10.{number}.0.0/16") for number in (61, 62, 63, 64))
PODS = Prefix("10.200.0.0/16")


@contextlib.contextmanager
def stopped(mesh: Mesh, hosts: Sequence[str]) -> Iterator[None]:
    """Appliers and auditors of these hosts stand still while the body runs."""
    pids = [mesh.pid(f"{service}.{host}") for host in hosts for service in ("applier", "auditor")]
    try:
        for pid in pids:
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in pids:
            if pid is not None:
                os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def watched(mesh: Mesh) -> Iterator[dict[str, list[Packet]]]:
    """What leaves by the uplinks of all hosts, and what reaches the pods."""
    pods = [f"{item.cluster}.pod.{item.name}" for item in mesh.topology if item.kind == "Endpoint"]
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(mesh.capture(name)) for name in (*mesh.hosts, *pods)}


def leaked(packets: dict[str, list[Packet]], mesh: Mesh) -> list[tuple[str, str, str]]:
    """Test packets in clear on an uplink, by any address of a pod: there is no reason for one."""
    return [
        (name, packet.source, packet.destination)
        for name in mesh.hosts
        for packet in packets[name]
        if packet.outgoing and packet.destination_port == PORT and any(prefix.covers(packet.destination) for prefix in (*REMOTE, PODS))
    ]


def strayed(packets: dict[str, list[Packet]], allowed: Sequence[str] = ()) -> list[str]:
    """Pods that test packets reached and that are not `allowed` to get any."""
    arrived = {
        name
        for name, found in packets.items()
        if ".pod." in name
        for packet in found
        if not packet.outgoing and packet.destination_port == PORT
    }
    return sorted(arrived - set(allowed))


def send(client: str, *destinations: str, count: int = 5, port: int = PORT) -> None:
    """Datagrams from a pod, as ``rome.pod.shop``, or a host to addresses; an ICMP error is as good as silence."""
    with namespaces.inside(f"{PREFIX}{client}", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as opened:
        for _ in range(count):
            for destination in destinations:
                with contextlib.suppress(OSError):
                    opened.sendto(b"leak?", (destination, port))


def send_all(live: Live) -> None:
    """From every pod to every pod of the other cluster, and from every node."""
    names = [f"{item.cluster}/{item.name}" for item in live.mesh.topology if item.kind == "Endpoint"]
    for client in names:
        far = [server for server in names if server.split("/")[0] != client.split("/")[0]]
        targets = [live.walk(client, server).dial for server in far]
        send(client.replace("/", ".pod."), *targets)
        send(f"{client.split('/')[0]}.{live.pod(client).node}", *targets)


async def judged(live: Live, act: Callable[[], None], allowed: Sequence[str] = ()) -> None:
    """Send between all pods while what `act` did holds: nothing leaks, nothing strays."""
    with watched(live.mesh) as packets:
        await asyncio.to_thread(act)
        await asyncio.to_thread(send_all, live)
        # What was sent has gone its way, or has waited for a neighbour in vain, well within this time.
        await asyncio.sleep(1.5)
    assert leaked(packets, live.mesh) == []
    assert strayed(packets, allowed) == []


async def test_the_watch_sees_what_arrives(live: Live) -> None:
    """With all in place, the same watch sees every pod reached: it is not blind."""
    with watched(live.mesh) as packets:
        await asyncio.to_thread(send_all, live)
        await asyncio.sleep(0.5)
    assert leaked(packets, live.mesh) == []
    assert len(strayed(packets)) == 4


async def test_a_pods_route_taken_away_on_the_gateway(live: Live) -> None:
    """Without the gateway's route to a node's pods, packets for them go nowhere; other pods are still reached."""
    with stopped(live.mesh, MILAN):
        await judged(
            live,
            lambda: live.mesh.run("milan.gateway", "ip", "route", "del", "10.200.1.0/24", "table", "7002"),
            allowed=("milan.pod.post", "rome.pod.shop", "rome.pod.stock"),
        )


async def test_a_pods_route_taken_away_on_the_node(live: Live) -> None:
    """Without the CNI's route to a pod, a packet that came out of the overlay does not follow the default route."""
    (line,) = live.mesh.run("milan.worker-1", "ip", "route", "show", "10.200.1.10").splitlines()
    try:
        await judged(
            live,
            lambda: live.mesh.run("milan.worker-1", "ip", "route", "del", "10.200.1.10"),
            allowed=("milan.pod.post", "rome.pod.shop", "rome.pod.stock"),
        )
    finally:
        live.mesh.run("milan.worker-1", "ip", "route", "replace", *line.split())


async def test_all_tunnels_down(live: Live) -> None:
    """With every tunnel down at both ends, nothing arrives and nothing leaks."""

    def down() -> None:
        for host in ("rome.gateway", "milan.gateway"):
            for number in range(3):
                live.mesh.run(host, "ip", "link", "set", f"mt.{number}", "down")

    with stopped(live.mesh, (*ROME, *MILAN)):
        await judged(live, down)


def segment(source: str, destination: str, flags: int) -> bytes:
    """An IPv4 packet with a TCP segment that belongs to no connection."""
    addresses = socket.inet_aton(source) + socket.inet_aton(destination)
    head = struct.pack("!HHIIBBHHH", 4444, PORT, 1000, 2000, 0x50, flags, 1000, 0, 0)
    total = sum(struct.unpack("!16H", addresses + struct.pack("!BBH", 0, socket.IPPROTO_TCP, len(head)) + head))
    total = (total >> 16) + (total & 0xFFFF)
    checksum = ~(total + (total >> 16)) & 0xFFFF
    outer = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(head), 1, 0, 64, socket.IPPROTO_TCP, 0)
    return outer + addresses + head[:16] + struct.pack("!H", checksum) + head[18:]


async def test_what_connection_tracking_calls_invalid(live: Live) -> None:
    """An answer to nothing is translated by nobody: it must not reach the far pod by an address that means another pod there."""
    walk, source = live.walk("rome/shop", "milan/bank"), live.pod("rome/shop").addresses[0]
    flags = {"SYN and ACK": 0x12, "RST": 0x04, "none": 0x00}

    def send_segments() -> None:
        opening = namespaces.inside(f"{PREFIX}rome.pod.shop", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW))
        with opening as raw:
            for kind in flags.values():
                raw.sendto(segment(source, walk.dial, kind), (walk.dial, 0))

    def dropped() -> int:
        rules = live.mesh.run("rome.gateway", "nft", "list", "chain", "inet", "meshmark.rome.rome-milan", "classify").splitlines()
        (line,) = [rule for rule in rules if "invalid" in rule]
        return int(line.split("packets ")[1].split()[0])

    before = dropped()
    with watched(live.mesh) as packets:
        await asyncio.to_thread(send_segments)
        await live.eventually(lambda: dropped() == before + len(flags), "all of them are dropped and counted", lambda: [str(dropped())])
    assert leaked(packets, live.mesh) == []
    assert strayed(packets) == []


async def test_what_somebody_keeps_from_being_tracked(live: Live) -> None:
    """A published rule takes a gateway's packets out of connection tracking: untranslated they go nowhere."""
    match = FirewallMatch(field="protocol", value="udp")
    rule = FirewallRule(match=(match,), actions=(NoTrack(),))
    chain = FirewallChain(name="early", hook="prerouting", priority="raw", rules=(rule,))
    hosts = HostSelector(role="gateway")
    await live.publish(FirewallConfiguration(name=Name("blind"), cluster=Name("milan"), hosts=hosts, chains=(chain,)))
    await judged(live, lambda: None)


async def test_flush_ruleset_with_every_service_stopped(live: Live) -> None:
    """Somebody flushes nftables on every host while no service runs: the routes alone keep packets from leaving in clear."""
    hosts = (*ROME, *MILAN)
    foreign = {host: live.mesh.run(host, "nft", "list", "table", "ip", "lab-cni") for host in hosts if "worker" in host}

    def flush() -> None:
        for host in hosts:
            live.mesh.run(host, "nft", "flush", "ruleset")

    try:
        with stopped(live.mesh, hosts):
            await judged(live, flush)
    finally:
        for host, text in foreign.items():
            live.mesh.run(host, "nft", text)


# From the first staged step on --------------------------------------------------------------------------------------------------------


class SteppedKernel(LinuxKernel):
    """Calls `after` when a change has been made."""

    after: Callable[[str], None] = staticmethod(lambda _: None)

    def write_all(self, changes: Sequence[Change]) -> Mapping[str, MeshmarkError]:
        refused: dict[str, MeshmarkError] = {}
        for change in changes:
            refused |= super().write_all([change])
            self.after(change.key)
        return refused

    def commit(self, batch: Sequence[Change], marker: Marker | None) -> None:
        super().commit(batch, marker)
        self.after("commit")


class Host:
    """A host whose applier stands still, served step by step by the test."""

    def __init__(self, mesh: Mesh, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._thread.submit(enter_network, Path("/run/netns") / f"{PREFIX}{name}").result()
        self.kernel: SteppedKernel = self._thread.submit(SteppedKernel, mesh.folder.host(name)).result()
        self._applier = Applier(self.kernel, time.time)

    def apply(self, plan: HostPlan, generation: int) -> None:
        report = self._thread.submit(self._applier.apply, plan, 9, generation).result()
        assert report.outcome == "applied", report

    def close(self) -> None:
        self._thread.submit(self.kernel.close).result()
        self._thread.shutdown()


def plan_of(items: Sequence[Topology], host: HostId) -> HostPlan:
    state, allocations = State(items), Allocations()
    allocations.allocate(state, items)
    settle_rollouts(state, allocations)
    return compile_host(state, allocations, host)


@pytest.mark.parametrize(
    "order", [("rome.worker-1", "rome.gateway"), ("rome.gateway", "rome.worker-1")], ids=["node first", "gateway first"]
)
async def test_from_the_first_staged_step_on(live: Live, order: tuple[str, str]) -> None:
    """A packet sent after every single step of bringing a node and its gateway up, and of taking them down, never leaks.

    It may leave only while the node has no guard for the prefix, which is before the plan's first step there and after its last.
    """
    peering = next(item for item in live.mesh.topology if isinstance(item, Peering))
    target, local = live.walk("rome/shop", "milan/post").dial, "rome.pod.stock"
    await live.delete(peering)
    items = [*live.objects.values(), peering]
    plans = {name: plan_of(items, HostId(*name.split("."))) for name in order}
    sent_after: list[str] = []
    with stopped(live.mesh, order), contextlib.ExitStack() as stack:
        hosts = {name: Host(live.mesh, name) for name in order}
        for host in hosts.values():
            stack.callback(host.close)
        packets = {name: stack.enter_context(live.mesh.capture(name)) for name in (*live.mesh.hosts, local)}
        guard = Route(MAIN_TABLE, Prefix("10.61.0.0/16"), "unreachable", 4278198272).key
        guarded = [False]

        def after(name: str, key: str) -> None:
            if name == "rome.worker-1" and key == guard:
                guarded[0] = not guarded[0]
            # Packets of the guarded time have a port of their own: one sent before may still be on its way.
            for sender in ("rome.pod.shop", "rome.worker-1"):
                send(sender, target, count=1, port=GUARDED_PORT if guarded[0] else PORT)
            if guarded[0]:
                sent_after.append(f"{name}: {key}")

        for name, host in hosts.items():
            host.kernel.after = lambda key, name=name: after(name, key)
        for name in order:
            await asyncio.to_thread(hosts[name].apply, plans[name], 1)
        assert guarded[0]
        for name in reversed(order):
            empty = HostPlan(plans[name].cluster, plans[name].host, {})
            await asyncio.to_thread(hosts[name].apply, empty, 2)
        assert not guarded[0]
    assert len(sent_after) > 10
    assert [packet for packet in packets[local] if packet.destination_port == GUARDED_PORT] == []
    leaks = [
        (where, packet.destination)
        for where in live.mesh.hosts
        for packet in packets[where]
        if packet.outgoing and packet.destination_port == GUARDED_PORT
    ]
    assert leaks == []
