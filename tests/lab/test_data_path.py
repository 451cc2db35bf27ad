"""Packets between pods of two clusters: addresses, spread over the tunnels, order, segment size, marks."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator, Iterator

import pytest

from schemas.values import IPV4, SOCKET_FAMILY, Family
from services.cli.lab import namespaces
from services.cli.lab.layout import PREFIX
from tests.lab.conftest import Live, Packet, eventually

pytestmark = pytest.mark.privileged

FLOWS = 240
ROUNDS = 5
TUNNELS = ("mt.0", "mt.1", "mt.2")
OUTER_PORTS = "{ 4789, 51840-51903 }"
IPV4_HEADER, TCP_HEADER = 20, 20


def pod_socket(name: str, kind: socket.SocketKind = socket.SOCK_DGRAM, family: Family = IPV4) -> socket.socket:
    """A socket inside a pod named as ``rome/shop``, not blocking."""

    def make() -> socket.socket:
        made = socket.socket(SOCKET_FAMILY[family], kind)
        made.setblocking(False)
        return made

    return namespaces.inside(f"{PREFIX}{name.replace('/', '.pod.')}", make)


@contextlib.asynccontextmanager
async def echo(name: str, family: Family = IPV4) -> AsyncIterator[tuple[int, dict[tuple[str, int], list[int]]]]:
    """A UDP server in a pod that answers with what it got: its port, and the numbers that came, by sender, in order."""
    loop, seen = asyncio.get_running_loop(), dict[tuple[str, int], list[int]]()
    with pod_socket(name, family=family) as server:
        server.bind(("", 0))

        def answer() -> None:
            with contextlib.suppress(BlockingIOError):
                while True:
                    data, sender = server.recvfrom(64)
                    seen.setdefault(sender[:2], []).append(struct.unpack("!I", data)[0])
                    server.sendto(data, sender)

        loop.add_reader(server, answer)
        try:
            yield server.getsockname()[1], seen
        finally:
            loop.remove_reader(server)


@contextlib.contextmanager
def captures(live: Live, host: str, links: tuple[str, ...]) -> Iterator[dict[str, list[Packet]]]:
    with contextlib.ExitStack() as stack:
        yield {link: stack.enter_context(live.mesh.capture(host, link)) for link in links}


async def test_every_pod_reaches_every_other(live: Live) -> None:
    """UDP and TCP between all pods, both directions: each sees the addresses that the topology says."""
    checks = await live.carries()
    assert len(checks) == 4 * 3 * 2
    between = [check for check in checks if "rome" in check.name and "milan" in check.name]
    assert len(between) == 2 * 2 * 2 * 2
    assert all("10.63." in check.detail for check in between if "rome/" in check.name.split("→")[0])


async def test_flows_spread_over_the_tunnels_and_stay_in_order(live: Live) -> None:
    """240 flows use all three tunnels evenly; each flow keeps to one tunnel in each direction, and its datagrams stay in order."""
    walk = live.walk("rome/shop", "milan/bank")
    # Neighbours along the way are found first: what waits for one of them is limited.
    await live.carries()
    async with echo("milan/bank") as (port, seen):
        with captures(live, "rome.gateway", TUNNELS) as packets, contextlib.ExitStack() as stack:
            flows = [stack.enter_context(pod_socket("rome/shop")) for _ in range(FLOWS)]
            for number in range(ROUNDS):
                for flow in flows:
                    flow.sendto(struct.pack("!I", number), (walk.dial, port))
                    await asyncio.sleep(0.001)
                await eventually(
                    lambda number=number: sum(map(len, seen.values())) == FLOWS * (number + 1),
                    "all datagrams arrive",
                    lambda: Counter(len(numbers) for numbers in seen.values()),
                )
            # Probes of the tunnels pass there, too.
            await eventually(
                lambda: sum(packet.protocol == socket.IPPROTO_UDP for found in packets.values() for packet in found) == 2 * FLOWS * ROUNDS,
                "all answers pass the tunnels",
            )
    assert all(numbers == list(range(ROUNDS)) for numbers in seen.values())
    for outgoing in (True, False):
        used: dict[int, set[str]] = {}
        for link, found in packets.items():
            for packet in found:
                if packet.outgoing == outgoing and packet.protocol == socket.IPPROTO_UDP:
                    used.setdefault(packet.source_port if outgoing else packet.destination_port, set()).add(link)
        assert len(used) == FLOWS
        assert all(len(links) == 1 for links in used.values()), "a flow changed its tunnel"
        share = Counter(link for links in used.values() for link in links)
        # 80 each are expected; of a fair choice any of the three, in either direction, strays by 40 once in two million.
        assert share.keys() == set(TUNNELS)
        assert all(40 < count < 120 for count in share.values()), share


async def test_the_same_ports_take_the_same_tunnel_again(live: Live) -> None:
    """A new socket with the same ports is the same flow: the choice depends on the packet, not on the sender's socket."""
    walk = live.walk("rome/shop", "milan/bank")
    async with echo("milan/bank") as (port, seen):
        with captures(live, "rome.gateway", TUNNELS) as packets:
            for number in range(12):
                with pod_socket("rome/shop") as flow:
                    flow.bind(("0.0.0.0", 40111))
                    flow.sendto(struct.pack("!I", number), (walk.dial, port))
                    await eventually(lambda number=number: sum(map(len, seen.values())) == number + 1, "the datagram arrives")
    used = {link for link, found in packets.items() for packet in found if packet.outgoing and packet.source_port == 40111}
    assert len(used) == 1


@pytest.mark.parametrize("client,server", [("rome/shop", "milan/bank"), ("milan/post", "rome/stock")])
async def test_segments_fit_the_tunnel(live: Live, client: str, server: str) -> None:
    """The MSS that the far pod sees in a SYN, and the near one in the answer, is the tunnel's MTU less the headers."""
    mtu = min(item.mtu for item in live.mesh.topology if item.kind == "Cluster") - 60
    walk = live.walk(client, server)
    near, far = (name.replace("/", ".pod.") for name in (client, server))
    with live.mesh.capture(near) as at_client, live.mesh.capture(far) as at_server:
        with pod_socket(server, socket.SOCK_STREAM) as listener, pod_socket(client, socket.SOCK_STREAM) as caller:
            listener.bind(("0.0.0.0", 0))
            listener.listen()
            port = listener.getsockname()[1]
            await asyncio.wait_for(asyncio.get_running_loop().sock_connect(caller, (walk.dial, port)), 10)
        await eventually(lambda: any(syn_mss(packet) for packet in at_client if not packet.outgoing), "the answer was seen")
    sizes = {syn_mss(packet) for packet in (*at_client, *at_server) if not packet.outgoing and syn_mss(packet)}
    assert sizes == {mtu - IPV4_HEADER - TCP_HEADER}


def syn_mss(packet: Packet) -> int:
    """The MSS option of a segment with SYN, 0 for any other packet."""
    if packet.protocol != socket.IPPROTO_TCP:
        return 0
    segment = packet.body
    if not segment[13] & 0x02:
        return 0
    options = segment[20 : (segment[12] >> 4) * 4]
    while options and options[0]:
        size = 1 if options[0] == 1 else options[1]
        if options[0] == 2:
            return int.from_bytes(options[2:4], "big")
        options = options[size:]
    return 0


async def test_outer_packets_carry_no_class_bits(live: Live) -> None:
    """Encapsulated packets of overlay and tunnels leave every host without a class mark, while the inner ones had one."""
    outer = f"fib saddr type local udp dport {OUTER_PORTS}"  # the host's own: a pod's server may have such a port as well
    table = (
        f'table inet probe {{ chain out {{ type filter hook postrouting priority 400; {outer} counter comment "outer";'
        f' {outer} meta mark & 0xff00 != 0 counter comment "marked"; }};'
        ' chain in { type filter hook prerouting priority -140; meta mark & 0xff00 != 0 counter comment "classified"; }; }'
    )
    for host in live.mesh.hosts:
        live.mesh.run(host, "nft", table.replace("table inet probe", "add table inet probe; table inet probe"))
    try:
        await live.carries()
        counted = {host: counters(live.mesh.run(host, "nft", "list", "table", "inet", "probe")) for host in live.mesh.hosts}
    finally:
        for host in live.mesh.hosts:
            live.mesh.run(host, "nft", "delete", "table", "inet", "probe")
    assert all(found["outer"] > 0 for found in counted.values())
    assert {host: found["marked"] for host, found in counted.items()} == dict.fromkeys(counted, 0)
    assert all(counted[host]["classified"] > 0 for host in counted if host.endswith("gateway"))


def counters(text: str) -> dict[str, int]:
    """Packets by comment in an nft listing."""
    found = {}
    for line in text.splitlines():
        if "comment" in line:
            words = line.split()
            found[line.split('"')[1]] = int(words[words.index("packets") + 1])
    return found


async def test_too_large_packets_get_an_answer_through_both_translations(live: Live) -> None:
    """A datagram that fits the pod's link and not the tunnel comes back as ICMP `fragmentation needed` with the tunnel's MTU."""
    walk = live.walk("rome/shop", "milan/bank")
    with live.mesh.capture("rome.pod.shop") as packets, pod_socket("rome/shop") as flow:
        flow.setsockopt(socket.IPPROTO_IP, 10, 2)  # IP_MTU_DISCOVER, IP_PMTUDISC_DO
        with contextlib.suppress(OSError):
            flow.sendto(bytes(1450 - 28), (walk.dial, 9))
        await eventually(lambda: any(too_large(packet) for packet in packets), "the error comes back")
    assert {mtu for packet in packets if (mtu := too_large(packet))} == {1440}


def too_large(packet: Packet) -> int:
    """The MTU in an ICMP `fragmentation needed`, 0 for any other packet."""
    if packet.outgoing or packet.protocol != socket.IPPROTO_ICMP or tuple(packet.body[:2]) != (3, 4):
        return 0
    return int.from_bytes(packet.body[6:8], "big")
