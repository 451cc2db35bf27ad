"""Netlink sockets that only listen: to multicast groups, or to what rules show. Not for requests; those are ``netlink``'s."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator

from services.kernel.buffers import widen

_SOL_NETLINK, _ADD_MEMBERSHIP = 270, 1


def listening(protocol: int, groups: tuple[int, ...], buffer_bytes: int) -> socket.socket:
    """A non-blocking netlink socket in these multicast groups, with a receive buffer as large as we are allowed."""
    listener = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK, protocol)
    try:
        widen(listener, socket.SO_RCVBUF, buffer_bytes)
        listener.bind((0, 0))
        for group in groups:
            listener.setsockopt(_SOL_NETLINK, _ADD_MEMBERSHIP, group)
    except OSError:
        listener.close()
        raise
    return listener


def datagrams(listener: socket.socket, size_bytes: int) -> Iterator[bytes | None]:
    """What a non-blocking socket holds now, datagram by datagram; None where the kernel had no room for some, and dropped them."""
    while True:
        try:
            data = listener.recv(size_bytes)
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno != errno.ENOBUFS:
                raise
            yield None
        else:
            yield data
