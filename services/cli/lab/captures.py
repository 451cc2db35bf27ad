"""IP packets on a link of a network namespace, as values."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from schemas.values import IPV4, Address
from services.cli.lab import namespaces

_POLL_S = 0.05
_PORTS = struct.Struct("!HH")
_ETH_P_ALL = 3
_ETHER_TYPES = {0x0800: 20, 0x86DD: 40}
"""The lengths of the headers of IPv4 and IPv6, in bytes, by what Ethernet calls them."""
_OUTGOING = 4  # PACKET_OUTGOING of linux/if_packet.h


class Packet(NamedTuple):
    """A packet on a link. `outgoing` as seen from the host; ports are 0 for what is neither UDP nor TCP; `body` is what it carries."""

    outgoing: bool
    source: str
    destination: str
    protocol: int
    source_port: int
    destination_port: int
    body: bytes


@contextlib.contextmanager
def capture(namespace: str, interface: str) -> Iterator[list[Packet]]:
    """What passes the link while the body runs; the list grows, and is complete when the body is left."""
    packets: list[Packet] = []
    opened = packet_socket(namespace, interface)
    opened.settimeout(_POLL_S)
    ended = threading.Event()
    thread = threading.Thread(target=_collect, args=(opened, packets, ended), name=f"capture {namespace}")
    thread.start()
    try:
        yield packets
    finally:
        ended.set()
        thread.join()
        opened.close()


def packet_socket(namespace: str, interface: str) -> socket.socket:
    """A non-blocking socket that hears what passes the link. Made without a protocol, or it would hear all links until bound."""
    wide = (socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
    return namespaces.bound_socket(namespace, socket.AF_PACKET, socket.SOCK_DGRAM, (interface, _ETH_P_ALL), [wide])


def _collect(opened: socket.socket, packets: list[Packet], ended: threading.Event) -> None:
    """Read until the end was said and nothing is left to read."""
    while True:
        last = ended.is_set()
        try:
            raw, (_, kind, direction, *_) = opened.recvfrom(65535)
        except TimeoutError:
            if last:
                return
            continue
        if kind in _ETHER_TYPES and len(raw) >= _ETHER_TYPES[kind]:
            packets.append(_packet(raw, outgoing=direction == _OUTGOING))


def _packet(raw: bytes, *, outgoing: bool) -> Packet:
    if raw[0] >> 4 == IPV4:
        body, protocol, whole = raw[(raw[0] & 0xF) * 4 :], raw[9], not struct.unpack("!H", raw[6:8])[0] & 0x1FFF
        ends = raw[12:16], raw[16:20]
    else:
        body, protocol, whole = raw[40:], raw[6], True  # a fragment has the number of its header for a protocol
        ends = raw[8:24], raw[24:40]
    ports: Sequence[int] = (0, 0)
    if protocol in (socket.IPPROTO_UDP, socket.IPPROTO_TCP) and len(body) >= _PORTS.size and whole:
        ports = _PORTS.unpack_from(body)
    source, destination = map(Address.of, ends)
    return Packet(outgoing, source, destination, protocol, ports[0], ports[1], body)
