"""What changes in the kernel, as it changes: netlink multicast, decoded as far as a hint needs.

Owns two sockets in the network namespace of the thread that enters it, with receive buffers as large as allowed. Events are hints: they
say that a layer is to be read, and who was seen changing it. After a restart there is nothing to find: read everything once. Events are
lost when the kernel's buffer or the queue here runs over; that is said by an event with `overrun`, after which all layers are to be read.

nftables names the committing process (NEWGEN), once for each transaction; transactions that touch no own table are left out. rtnetlink
carries the sender's port, which is the process's number for its first socket, and holds it for sockets of libnl and pyroute2: a suspicion,
no proof. A link that goes down takes its IPv4 routes along without a message (IPv6 ones with one): an event of layer ``link`` concerns
routes too.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from msgspec import Struct

from services.kernel.listening import datagrams, listening
from services.kernel.netlink import BE32, NETLINK_NETFILTER, NETLINK_ROUTE, U32, attributes, messages_with_sender, text_of
from services.kernel.nft.steps import is_heeded

EventLayer = Literal["nft", "link", "address", "rule", "route", "all"]

NFT_GROUP = 7
_ROUTE_GROUPS = (1, 5, 7, 8, 9, 11, 19)  # RTNLGRP_LINK, IPV4_IFADDR, IPV4_ROUTE, IPV4_RULE, IPV6_IFADDR, IPV6_ROUTE, IPV6_RULE
_ROUTE_LAYERS: dict[int, tuple[EventLayer, str]] = {
    16: ("link", "new"),
    17: ("link", "delete"),
    20: ("address", "new"),
    21: ("address", "delete"),
    24: ("route", "new"),
    25: ("route", "delete"),
    32: ("rule", "new"),
    33: ("rule", "delete"),
}
_IFINFO_BYTES, _FLAGS_AT, _INDEX_AT, _IFNAME, _UP = 16, 8, 4, 3, 0x1  # struct ifinfomsg and ifaddrmsg, IFLA_IFNAME, IFF_UP
_LEAST_BYTES = 8  # of the fixed part of any of these messages: struct ifaddrmsg
_AF_BRIDGE = 7
_NFT_SUBSYSTEM, _NEWGEN = 10, 15
_NFGEN_BYTES = 4
_GEN_PID, _GEN_NAME = 2, 3
_BUFFER_BYTES = 64 << 20
_DATAGRAM_BYTES = 1 << 18
_QUEUE = 4096
_PID_MAX = 1 << 22
_CHOSEN_PORTS = 1 << 31


class KernelEvent(Struct, frozen=True):
    """One change that was seen. `pid` is 0 when nobody is suspected.

    `kind` is ``new``, ``delete``, ``transaction`` or ``overrun``, and of a link that is not up ``down``. `link` is the name of the link
    that changed, or whose address did; empty for other layers, and where an address went with its link.
    """

    layer: EventLayer
    pid: int = 0
    process_name: str | None = None
    overrun: bool = False
    kind: str = ""
    link: str = ""


class EventSource:
    """An asynchronous iterator over kernel events, open inside ``async with``. `queue` bounds what may wait to be taken."""

    def __init__(self, buffer_bytes: int = _BUFFER_BYTES, queue: int = _QUEUE) -> None:
        self._buffer_bytes = buffer_bytes
        self._limit = queue
        self._waiting: deque[KernelEvent] = deque()
        self._arrived = asyncio.Event()
        self._sockets: list[socket.socket] = []
        self._touched: set[str] = set()

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for protocol, groups in ((NETLINK_NETFILTER, (NFT_GROUP,)), (NETLINK_ROUTE, _ROUTE_GROUPS)):
            listener = listening(protocol, groups, self._buffer_bytes)
            self._sockets.append(listener)
            loop.add_reader(listener, self._drain, listener, protocol)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        loop = asyncio.get_running_loop()
        for listener in self._sockets:
            loop.remove_reader(listener)
            listener.close()
        self._sockets.clear()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> KernelEvent:
        while not self._waiting:
            self._arrived.clear()
            await self._arrived.wait()
        return self._waiting.popleft()

    def _drain(self, listener: socket.socket, protocol: int) -> None:
        """Take what the socket holds now."""
        for data in datagrams(listener, _DATAGRAM_BYTES):
            if data is None:
                self._touched.clear()
                self._put(KernelEvent("all", overrun=True, kind="overrun"))
                continue
            for event in self._nft_events(data) if protocol == NETLINK_NETFILTER else route_events(data):
                self._put(event)

    def _put(self, event: KernelEvent) -> None:
        """Queue an event; repeated ones and those beyond the limit are folded, the latter into one overrun."""
        if self._waiting and self._waiting[-1] == event:
            return
        if len(self._waiting) >= self._limit:
            self._waiting.clear()
            event = KernelEvent("all", overrun=True, kind="overrun")
        self._waiting.append(event)
        self._arrived.set()

    def _nft_events(self, data: bytes) -> Iterator[KernelEvent]:
        """One event at the end of each transaction that touched a table of ours."""
        for kind, _, body in messages_with_sender(data):
            if kind >> 8 != _NFT_SUBSYSTEM:
                continue
            found = attributes(body, _NFGEN_BYTES)
            if kind & 0xFF != _NEWGEN:
                self._touched.add(text_of(found.get(1, b"")))  # the table's name is attribute 1 of every kind of object
                continue
            own = any(map(is_heeded, self._touched))
            self._touched.clear()
            if own:
                number = found.get(_GEN_PID, b"")
                pid = BE32.unpack(number)[0] if len(number) == BE32.size else 0
                yield KernelEvent("nft", pid, text_of(found.get(_GEN_NAME, b"")) or process_name(pid), kind="transaction")


def route_events(data: bytes) -> Iterator[KernelEvent]:
    """The rtnetlink changes in one datagram."""
    for kind, sender, body in messages_with_sender(data):
        if kind in _ROUTE_LAYERS and len(body) >= _LEAST_BYTES:
            layer, verb = _ROUTE_LAYERS[kind]
            # Ports that the kernel chose have the first bit; those of libnl and pyroute2 count their process's sockets above its number.
            pid = sender % _PID_MAX if sender < _CHOSEN_PORTS else 0
            if layer == "link" and len(body) >= _IFINFO_BYTES:
                verb = _link_verb(verb, body)
            yield KernelEvent(layer, pid, process_name(pid), kind=verb, link=_link_of(layer, body))


def _link_verb(verb: str, body: bytes) -> str:
    if body[0] == _AF_BRIDGE:  # a port that came to a bridge or left one: the link itself is where it was
        return "new"
    return "down" if verb == "new" and not U32.unpack_from(body, _FLAGS_AT)[0] & _UP else verb


def _link_of(layer: EventLayer, body: bytes) -> str:
    """The link that an rtnetlink message of links or addresses is about; addresses name it by number."""
    if layer == "link":
        return text_of(attributes(body, _IFINFO_BYTES).get(_IFNAME, b""))
    if layer != "address":
        return ""
    try:
        return socket.if_indextoname(U32.unpack_from(body, _INDEX_AT)[0])
    except OSError:
        return ""


def process_name(pid: int) -> str | None:
    """The name of a running process; None when it is gone, or nobody's."""
    if not pid:
        return None
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return None
