"""The kernel's own word on routes: when one of our routing tables got a new one. And the cheapest way to add one, as a floor."""

from __future__ import annotations

import asyncio
import socket
import struct
import time

from services.cli.lab import namespaces
from services.kernel.listening import listening
from services.kernel.netlink import CREATE, EXCL, NETLINK_ROUTE, U32, NetlinkSocket, attribute, attributes, messages_with_sender

_NEWROUTE, _DELROUTE = 24, 25
_GROUP_IPV4_ROUTE = 7
_INFO = struct.Struct("=BBBBBBBBI")
_DST, _TABLE = 1, 15
_UNREACHABLE = 7
_BOOT = 3
_FLOOR_TABLE = 9999
_BUFFER_BYTES = 1 << 22


class RouteWatch:
    """Notes the time (Unix, seconds) at which each address first got a host route in `table` of a network namespace.

    A socket in the namespace hears the kernel's multicast, which the kernel sends before it answers whoever added the route.
    """

    def __init__(self, namespace: str, table: int) -> None:
        self._table = table
        self._seen: dict[str, float] = {}
        self._arrived = asyncio.Event()
        self._socket = namespaces.inside(namespace, lambda: listening(NETLINK_ROUTE, (_GROUP_IPV4_ROUTE,), _BUFFER_BYTES))
        asyncio.get_running_loop().add_reader(self._socket, self._drain)

    async def seen_s(self, address: str) -> float:
        """When the route came; waits for it. To be bounded by the caller's timeout."""
        while address not in self._seen:
            self._arrived.clear()
            await self._arrived.wait()
        return self._seen[address]

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()

    def _drain(self) -> None:
        now_s = time.time()
        data = self._socket.recv(1 << 16)
        for kind, _, body in messages_with_sender(data):
            if kind != _NEWROUTE:
                continue
            found = attributes(body, _INFO.size)
            if _INFO.unpack_from(body)[1] == 32 and U32.unpack(found[_TABLE])[0] == self._table:
                self._seen.setdefault(socket.inet_ntoa(found[_DST]), now_s)
        self._arrived.set()


class BareRoutes:
    """Adds and removes one host route in the calling thread's network namespace, by a netlink message each."""

    def __init__(self) -> None:
        self._netlink = NetlinkSocket(NETLINK_ROUTE)

    def add_ms(self, address: str) -> float:
        """Milliseconds that adding took, acknowledgement included; the route is gone afterwards."""
        body = _INFO.pack(socket.AF_INET, 32, 0, 0, 0, _BOOT, 0, _UNREACHABLE, 0)
        body += attribute(_DST, socket.inet_aton(address)) + attribute(_TABLE, U32.pack(_FLOOR_TABLE))
        began = time.perf_counter()
        self._netlink.request(_NEWROUTE, body, CREATE | EXCL)
        took_ms = (time.perf_counter() - began) * 1e3
        self._netlink.request(_DELROUTE, body)
        return took_ms

    def close(self) -> None:
        self._netlink.close()
