"""How much a netlink socket holds: more than the machine's usual limit where we may."""

from __future__ import annotations

import socket

_FORCED = {
    socket.SO_RCVBUF: getattr(socket, "SO_RCVBUFFORCE", 33),
    socket.SO_SNDBUF: getattr(socket, "SO_SNDBUFFORCE", 32),
}


def widen(opened: socket.socket, option: int, size_bytes: int) -> None:
    """Set SO_RCVBUF or SO_SNDBUF; who may not pass the limit (net.core.rmem_max, wmem_max) gets as much as that."""
    try:
        opened.setsockopt(socket.SOL_SOCKET, _FORCED[option], size_bytes)
    except PermissionError:
        opened.setsockopt(socket.SOL_SOCKET, option, size_bytes)
