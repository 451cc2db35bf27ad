"""Sockets in the network namespaces of a lab, to say something and to hear what comes of it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

from schemas.values import IPV4, IPV6, SOCKET_FAMILY, Family
from services.cli.lab import namespaces
from services.cli.lab.layout import PREFIX

PATIENCE_S = 2.0


@contextlib.contextmanager
def opened(
    place: str, family: Family = IPV4, kind: socket.SocketKind = socket.SOCK_DGRAM, port: int = 0, address: str = ""
) -> Iterator[socket.socket]:
    """A socket on a host or in a pod (``milan.worker-1``, ``turin.pod.bank``, ``underlay``), bound to a port and address."""

    options = [(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(kind == socket.SOCK_STREAM))]
    if family == IPV6:  # beside one of IPv4 at the same port
        options.append((socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1))
    with namespaces.bound_socket(f"{PREFIX}{place}", SOCKET_FAMILY[family], kind, (address, port), options) as found:
        yield found


async def received(at: socket.socket, patience_s: float = PATIENCE_S) -> tuple[bytes, tuple[str, int]]:
    """The next datagram, and who sent it; TimeoutError when none comes in time."""
    async with asyncio.timeout(patience_s):
        data, sender = await asyncio.get_running_loop().sock_recvfrom(at, 2048)
    return data, (sender[0], sender[1])
