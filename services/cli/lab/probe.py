"""Packets between pods, from nodes and to mapped addresses, and what the receiver saw: the check of the data path that trusts nobody.

One process holds sockets in all their namespaces and drives them all from one event loop. A server answers each request with
the addresses that it saw, so that a client learns both whether a packet got through and how it was translated on the way.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import struct
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Literal

import msgspec
from msgspec import Struct

from schemas.topology import IpMapping, Node, Pod, Topology
from schemas.values import FAMILIES, IPV4, IPV6, SOCKET_FAMILY, Address, Family
from services.cli.lab import namespaces
from services.cli.lab.chosen import Chosen
from services.cli.lab.crossing import from_node, to_mapping
from services.cli.lab.expected import Walk, expected
from services.cli.lab.layout import host_namespace, pod_namespace
from services.runtime.errors import MeshmarkError, Permanent

Protocol = Literal["udp", "tcp"]
_PROTOCOLS: tuple[Protocol, ...] = ("udp", "tcp")
_ANY = {IPV4: Address("0.0.0.0"), IPV6: Address("::")}  # noqa: S104 - as a sender: the kernel chooses
Place = tuple[str, Family]
"""A network namespace, and the family of what is to be served there."""

_TRIES = 6
_PATIENCE_S = 0.3
_TOGETHER = 64
"""Probes at one time, so that neither open files nor the two cores of a small machine are what fails."""
_IP_PKTINFO = 8
_SERVED = {
    IPV4: [(socket.IPPROTO_IP, _IP_PKTINFO, 1)],
    IPV6: [(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1), (socket.IPPROTO_IPV6, socket.IPV6_RECVPKTINFO, 1)],
}


class Check(Struct, frozen=True):
    """One thing that was looked at: what, whether it holds, and what was seen."""

    name: str
    ok: bool
    detail: str


class Party(Struct, frozen=True):
    """Who speaks or is spoken to: how it is called, its namespace, and the address that it speaks from (None: as its kernel chooses)."""

    name: str
    namespace: str
    address: Address | None = None


class Probe(Struct, frozen=True):
    """One pair of parties, protocol and family, and what has to be seen; `walk` is None where the topology gives no way."""

    client: Party
    server: Party
    protocol: Protocol
    walk: Walk | None
    family: Family = IPV4

    @property
    def name(self) -> str:
        protocol = f"{self.protocol}6" if self.family == IPV6 else self.protocol
        return f"{protocol} {self.client.name} → {self.server.name}"


class Seen(Struct, frozen=True):
    """What the server saw of a request."""

    source: str
    destination: str


def probes(topology: Iterable[Topology]) -> list[Probe]:
    """Every ordered pod pair, by UDP and by TCP, in each family that both pods have."""
    items = list(topology)
    return [
        Probe(_pod(client, family), _pod(server, family), protocol, expected(items, client, server, family), family)
        for client, server in itertools.permutations(_pods(items), 2)
        for family in FAMILIES
        if all(any(address.family == family for address in pod.addresses) for pod in (client, server))
        for protocol in _PROTOCOLS
    ]


def crossings(topology: Iterable[Topology], chosen: Chosen) -> Iterator[Probe]:
    """Every node to the first pod of each peer, and the first pod of each peer to every mapping, where there is a way."""
    items = list(topology)
    firsts = list({pod.cluster: pod for pod in reversed(_pods(items))}.values())
    for node in sorted((item for item in items if isinstance(item, Node)), key=lambda node: node.ref):
        client = Party(f"{node.cluster}/node/{node.name}", host_namespace(node.cluster, node.name))
        for pod, family, protocol in itertools.product(firsts, FAMILIES, _PROTOCOLS):
            if (walk := from_node(items, chosen, node, pod, family)) is not None:
                yield Probe(client, _pod(pod, family), protocol, walk, family)
    for item in sorted((item for item in items if isinstance(item, IpMapping)), key=lambda item: item.ref):
        for pod in firsts:
            if (way := to_mapping(items, chosen, pod, item)) is not None:
                server = Party(f"{item.cluster}/mapping/{item.name}", way[1])
                yield from (Probe(_pod(pod, item.real.family), server, protocol, way[0], item.real.family) for protocol in _PROTOCOLS)


def _pods(items: Iterable[Topology]) -> list[Pod]:
    return sorted((item for item in items if isinstance(item, Pod)), key=lambda pod: pod.ref)


def _pod(pod: Pod, family: Family) -> Party:
    address = next((address for address in pod.addresses if address.family == family), None)
    return Party(f"{pod.cluster}/{pod.name}", pod_namespace(pod.cluster, pod.name), address)


async def check(topology: Iterable[Topology], chosen: Chosen | None = None) -> list[Check]:
    """Make the probes that are ``wanted`` of a topology."""
    return await run(wanted(topology, chosen))


def wanted(topology: Iterable[Topology], chosen: Chosen | None = None) -> list[Probe]:
    """The probes of every pod pair that the topology joins; other pairs are not part of the answer.

    With what the planner has `chosen`, those of nodes and mapped addresses, too.
    """
    items = list(topology)
    found = [probe for probe in probes(items) if probe.walk is not None]
    return found + list(crossings(items, chosen) if chosen is not None else ())


async def run(wanted: Sequence[Probe]) -> list[Check]:
    """Make these probes, of which each has a walk, and compare with what that says; in their order."""
    gate = asyncio.Semaphore(_TOGETHER)

    async def one(probe: Probe, ports: dict[Place, int]) -> Check:
        async with gate:
            return await _check(probe, ports)

    async with _servers({(probe.server.namespace, probe.family) for probe in wanted}) as ports:
        return list(await asyncio.gather(*(one(probe, ports) for probe in wanted)))


async def _check(probe: Probe, ports: dict[Place, int]) -> Check:
    assert probe.walk is not None
    walk = probe.walk
    try:
        port = ports[probe.server.namespace, probe.family]
        ask = _ask_udp if probe.protocol == "udp" else _ask_tcp
        seen = await ask(probe.client.namespace, (probe.client.address or _ANY[probe.family], walk.dial, port))
    except (MeshmarkError, OSError) as error:  # the latter from a pod that is being made: its address is not there yet
        return Check(probe.name, ok=False, detail=str(error))
    except KeyError:
        return Check(probe.name, ok=False, detail=f"no network namespace {probe.server.namespace}")
    if seen is None:
        return Check(probe.name, ok=False, detail=f"dialled {walk.dial}: no answer in {_TRIES} tries of {_PATIENCE_S} s")
    ok = walk.fits(seen.source, seen.destination)
    wanted = "" if ok else f"; expected {' or '.join((walk.seen_source, *walk.or_source))} → {walk.seen_destination}"
    return Check(probe.name, ok=ok, detail=f"dialled {walk.dial}, server saw {seen.source} → {seen.destination}{wanted}")


@contextlib.asynccontextmanager
async def _servers(places: Iterable[Place]) -> AsyncIterator[dict[Place, int]]:
    """A UDP and a TCP server in each place; the port of each, which is the same for both. A namespace that is gone has none."""
    loop = asyncio.get_running_loop()
    ports = {}
    async with contextlib.AsyncExitStack() as stack:
        for name, family in places:
            try:
                listener = stack.enter_context(_server_socket(name, family, socket.SOCK_STREAM))
                port = listener.getsockname()[1]
                datagrams = stack.enter_context(_server_socket(name, family, socket.SOCK_DGRAM, port))
            except Permanent:
                continue
            ports[name, family] = port
            loop.add_reader(datagrams, _answer_udp, datagrams)
            stack.callback(loop.remove_reader, datagrams)
            await stack.enter_async_context(await asyncio.start_server(_answer_tcp, sock=listener, backlog=1024))
        yield ports


def _server_socket(namespace: str, family: Family, kind: socket.SocketKind, port: int = 0) -> socket.socket:
    """A socket of this family alone, which tells to what address each datagram was sent."""
    return namespaces.bound_socket(namespace, SOCKET_FAMILY[family], kind, ("", port), _SERVED[family])


def _answer_udp(datagrams: socket.socket) -> None:
    """Answer every datagram that waits, from the address that it was sent to."""
    with contextlib.suppress(OSError):
        while True:
            token, ancillary, _, sender = datagrams.recvmsg(64, 128)
            for level, kind, data in ancillary:
                if (level, kind) == (socket.IPPROTO_IP, _IP_PKTINFO):
                    _, local, destination = struct.unpack("=i4s4s", data)
                    back = struct.pack("=i4s4s", 0, local, bytes(4))
                elif (level, kind) == (socket.IPPROTO_IPV6, socket.IPV6_PKTINFO):
                    destination = data[:16]
                    back = data[:16] + bytes(4)  # from that address, by any link
                else:
                    continue
                answer = token + msgspec.json.encode(Seen(sender[0], str(Address.of(destination))))
                datagrams.sendmsg([answer], [(level, kind, back)], 0, sender)


async def _answer_tcp(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    source, destination = writer.get_extra_info("peername"), writer.get_extra_info("sockname")
    writer.write(msgspec.json.encode(Seen(source[0], destination[0])))
    writer.close()


async def _ask_udp(namespace: str, walk: tuple[str, str, int]) -> Seen | None:
    """Ask from `walk`'s first address its second one at its port. A lost packet is asked again: neighbours are still to be found."""
    loop = asyncio.get_running_loop()
    source, destination, port = walk
    with _client(namespace, socket.SOCK_DGRAM, source) as client:
        for number in range(_TRIES):
            token = b"%04d" % number
            with contextlib.suppress(OSError):
                await loop.sock_sendto(client, token, (destination, port))
                async with asyncio.timeout(_PATIENCE_S):
                    answer, _ = await loop.sock_recvfrom(client, 512)
                return msgspec.json.decode(answer[len(token) :], type=Seen)
            await asyncio.sleep(_PATIENCE_S / 3)
    return None


async def _ask_tcp(namespace: str, walk: tuple[str, str, int]) -> Seen | None:
    loop = asyncio.get_running_loop()
    source, destination, port = walk
    for _ in range(_TRIES):
        with _client(namespace, socket.SOCK_STREAM, source) as client, contextlib.suppress(OSError):
            async with asyncio.timeout(2 * _PATIENCE_S):
                await loop.sock_connect(client, (destination, port))
                answer = await loop.sock_recv(client, 512)
            if answer:
                return msgspec.json.decode(answer, type=Seen)
        await asyncio.sleep(_PATIENCE_S / 3)
    return None


def _client(namespace: str, kind: socket.SocketKind, source: str) -> socket.socket:
    return namespaces.bound_socket(namespace, SOCKET_FAMILY[Address(source).family], kind, (source, 0))
