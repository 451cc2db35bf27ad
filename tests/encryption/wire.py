"""What passes between two nodes of a cluster that encrypts: on their uplinks and on their WireGuard devices, and who says it."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

from schemas.topology import Cluster
from schemas.values import Address, Family
from services.cli.lab.layout import PREFIX
from tests.captures import Packet, capture
from tests.encryption.site import DEVICE, OVERLAY_PORTS, PORT, UPLINK, Site
from tests.sites import WAIT_S
from tests.speakers import opened, received

T = TypeVar("T")

NODES = ("worker-1", "worker-2")
TABLE = "meshmark.mesh.rome"
AGAIN_S = 0.5
_DATA = b"\x04\x00\x00\x00"
"""The first bytes of WireGuard's message that carries a packet (type 4 of its protocol)."""
_NEIGHBOURS, _REPORTS = range(133, 138), (130, 131, 132, 143)
"""Types of ICMPv6: neighbour discovery (RFC 4861), and multicast reports (RFC 2710, RFC 3810), which are the link's own."""


class Wire(NamedTuple):
    """What passes at the nodes NODES, each in their order: on the uplinks, and on the devices."""

    uplinks: tuple[list[Packet], list[Packet]]
    devices: tuple[list[Packet], list[Packet]]


class Talk(NamedTuple):
    """What was said: the bytes of the request and of its answer, and who the server saw."""

    request: bytes
    answer: bytes
    sender: str


@contextlib.contextmanager
def watched() -> Iterator[Wire]:
    """What passes while the body runs; complete when it is left."""
    with watched_on(UPLINK) as uplinks, watched_on(DEVICE) as devices:
        yield Wire(uplinks, devices)


@contextlib.contextmanager
def watched_on(link: str) -> Iterator[tuple[list[Packet], list[Packet]]]:
    """What passes on this link of both nodes while the body runs."""
    one, two = (capture(f"{PREFIX}rome.{node}", link) for node in NODES)
    with one as here, two as there:
        yield here, there


async def talk(
    client: str, server: str, dial: Address, family: Family, *, port: int = 0, address: str = "", patience_s: float = WAIT_S
) -> Talk:
    """A datagram and its answer, by words that nothing else says; asked again until it is answered.

    `server` listens at `port`, at any if that is 0, and answers from this `address`. TimeoutError when there is no answer in time.
    """
    request, answer = (b"%s-%s" % (word, secrets.token_hex(12).encode()) for word in (b"request", b"answer"))
    with opened(client, family) as here, opened(server, family, port=port, address=address) as there:
        to = (dial, port or there.getsockname()[1])

        async def serve() -> str:
            while True:
                data, sender = await received(there, patience_s)
                if data == request:
                    there.sendto(answer, sender)
                    return sender[0]

        end = time.monotonic() + patience_s
        while True:
            asked = asyncio.ensure_future(serve())
            try:
                async with asyncio.timeout(AGAIN_S):
                    with contextlib.suppress(OSError):
                        here.sendto(request, to)
                    sender = await asked
                    while (await received(here))[0] != answer:
                        pass
                return Talk(request, answer, sender)
            except TimeoutError:
                if time.monotonic() > end:
                    raise
            finally:
                asked.cancel()


async def greets(client: str, server: str, dial: Address, family: Family) -> bool:
    """Whether a TCP connection is made, and carries words both ways."""
    loop = asyncio.get_running_loop()
    with opened(server, family, socket.SOCK_STREAM) as listener:
        listener.listen()
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end:
            with opened(client, family, socket.SOCK_STREAM) as here, contextlib.suppress(OSError):
                async with asyncio.timeout(4 * AGAIN_S):
                    await loop.sock_connect(here, (dial, listener.getsockname()[1]))
                    there, _ = await loop.sock_accept(listener)
                    with there:
                        await loop.sock_sendall(here, b"hello")
                        heard = await loop.sock_recv(there, 16)
                        await loop.sock_sendall(there, heard)
                        return await loop.sock_recv(here, 16) == b"hello"
    return False


async def eventually(asked: Callable[[], T], patience_s: float = WAIT_S) -> T:
    """What is returned once there is something; BlockingIOError and what is empty mean not yet. Fails when the time is over."""
    end = time.monotonic() + patience_s
    while True:
        with contextlib.suppress(BlockingIOError):
            if found := asked():
                return found
        assert time.monotonic() < end, f"nothing within {patience_s:g} s"
        await asyncio.sleep(0.05)


# Judging -----------------------------------------------------------------------------------------------------------------------------


def says(packets: list[Packet], words: bytes, *, outgoing: bool) -> bool:
    """Whether these words pass in plain, in this direction."""
    return any(packet.outgoing is outgoing and words in packet.body for packet in packets)


def encrypted(packets: list[Packet], *, outgoing: bool) -> int:
    """How many of WireGuard's packets that carry something pass in this direction."""
    return sum(packet.outgoing is outgoing and is_wireguard(packet) and packet.body[8:12] == _DATA for packet in packets)


def is_wireguard(packet: Packet) -> bool:
    return packet.protocol == socket.IPPROTO_UDP and PORT in (packet.source_port, packet.destination_port)


def is_of_the_link(packet: Packet) -> bool:
    """Whether neighbours ask for each other, or for multicast."""
    if packet.protocol == 0:  # hop-by-hop options: those of a multicast report
        return packet.body[:1] == bytes([socket.IPPROTO_ICMPV6])
    return packet.protocol == socket.IPPROTO_ICMPV6 and (packet.body[0] in _NEIGHBOURS or packet.body[0] in _REPORTS)


def strangers(packets: list[Packet]) -> list[str]:
    """What is neither WireGuard's nor the link's own, in words that tell all of it: a test's report cuts long values."""
    return [
        f"{packet.source} {packet.source_port} → {packet.destination} {packet.destination_port}, {packet.protocol}: {packet.body.hex()}"
        for packet in packets
        if not (is_wireguard(packet) or is_of_the_link(packet))
    ]


def in_clear(packets: list[Packet], cluster: Cluster) -> list[Packet]:
    """What an uplink should not show: packets of or for pods and overlay addresses, and an overlay's outer ones."""
    inner = (*cluster.pod_prefixes, *cluster.internal_prefixes)

    def is_inner(address: str) -> bool:
        return any(prefix.covers(Address(address)) for prefix in inner)

    return [
        packet
        for packet in packets
        if not is_of_the_link(packet)
        and (is_inner(packet.source) or is_inner(packet.destination) or packet.destination_port in OVERLAY_PORTS.values())
    ]


def counted(site: Site, node: str) -> dict[str, int]:
    """The packets in clear that a node has counted, by the words of its rules: ``pods: left in clear``, ``overlay: arrived in clear``."""
    found = {}
    for line in site.run(f"rome.{node}", "nft", "list", "table", "inet", TABLE).splitlines():
        if "counter packets" in line and " plaintext " in line:
            words = line.split(" plaintext ")[1].split(", strict ")[0]
            found[words] = found.get(words, 0) + int(line.split("counter packets ")[1].split()[0])
    return found
