"""Packets that rules show (``log group``), as the kernel's NFLOG tells them: listening, decoding.

Owns one socket for one group, in the network namespace of the thread that enters it. A group has one listener at a time; the kernel says
EPERM to another. Each packet is told at once. Messages are numbered: what is missing, the kernel dropped for want of room, which is said
with the next one. Fails with `Conflict` when somebody else listens to the group, with `Permanent` without the right to.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import struct
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from msgspec import Struct

from services.kernel.headers import OverlayProtocol, Packet, TunnelHeader, packet, piece, tunnel
from services.kernel.listening import datagrams, listening
from services.kernel.netlink import (
    ACK,
    BE32,
    NETLINK_NETFILTER,
    REQUEST,
    attribute,
    attributes,
    message,
    messages,
    text_of,
)
from services.runtime.errors import Conflict, MeshmarkError, Permanent, Transient

_SUBSYSTEM = 4 << 8  # NFNL_SUBSYS_ULOG
_PACKET, _CONFIG = _SUBSYSTEM | 0, _SUBSYSTEM | 1
_NFGEN = struct.Struct(">BBH")
_MARK, _INDEV, _OUTDEV, _PAYLOAD, _PREFIX, _SEQUENCE = 2, 4, 5, 9, 10, 12
_COMMAND, _MODE, _THRESHOLD, _FLAGS = 1, 2, 5, 6
_BIND = b"\1"
_NUMBERED = (1).to_bytes(2, "big")
_COPY_PACKET = 2
_MODE_OF = struct.Struct(">IBx")
_LISTENERS = Path("/proc/thread-self/net/netfilter/nfnetlink_log")
_NLMSG_ERROR = 2
_TIMEOUT_S = 10.0
_BUFFER_BYTES = 4 << 20
_DATAGRAM_BYTES = 1 << 18
_QUEUE = 4096
_IPV4_WORDS, _IPV4, _IPV6, _IPV6_BYTES, _WORD = 0x0F, 4, 6, 40, 4
_UDP_BYTES, _OVERLAY_BYTES, _ETHERNET_BYTES, _GENEVE_OPTIONS = 8, 8, 14, 0x3F
_ETHERTYPES = {0x0800, 0x86DD}
_GENEVE_ETHERNET = 0x6558
"""The protocol that a Geneve header names where an Ethernet frame follows."""
_ADVICE = "give the cluster's `wireguard.auditGroup` another number"


class Shown(Struct, frozen=True):
    """A packet that a rule showed: the rule's prefix, and the packet's first bytes from its network header on.

    Links are by number, 0 for none. `lost` is how many messages before this one were dropped.
    """

    prefix: str
    data: bytes
    iif: int = 0
    oif: int = 0
    mark: int = 0
    lost: int = 0


class NflogSource:
    """An asynchronous iterator over what rules show to a group, open inside ``async with``.

    `advice` is what to do when somebody else listens to it.
    """

    def __init__(self, group: int, buffer_bytes: int = _BUFFER_BYTES, queue: int = _QUEUE, *, advice: str = _ADVICE) -> None:
        self._group = group
        self._advice = advice
        self._buffer_bytes = buffer_bytes
        self._waiting: deque[Shown] = deque()
        self._limit = queue
        self._arrived = asyncio.Event()
        self._socket: socket.socket | None = None
        self._next: int | None = None
        self._dropped = 0

    async def __aenter__(self) -> Self:
        self._socket = group_socket(self._group, self._buffer_bytes, self._advice)
        asyncio.get_running_loop().add_reader(self._socket, self._drain, self._socket)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Shown:
        while not self._waiting:
            self._arrived.clear()
            await self._arrived.wait()
        return self._waiting.popleft()

    def taken(self) -> list[Shown]:
        """All that the kernel has shown until now and nobody took, without waiting."""
        if self._socket is not None:
            self._drain(self._socket)
        found = list(self._waiting)
        self._waiting.clear()
        return found

    def _drain(self, listener: socket.socket) -> None:
        """Take what the socket holds now. What an overrun dropped is found by the numbers."""
        for data in datagrams(listener, _DATAGRAM_BYTES):
            for item, number in shown(data or b""):
                self._put(item, number)

    def _put(self, item: Shown, number: int | None) -> None:
        """Queue a packet; those beyond the limit count as dropped."""
        if number is not None:
            self._dropped += (number - self._next) % (1 << 32) if self._next is not None else 0
            self._next = (number + 1) % (1 << 32)
        if len(self._waiting) >= self._limit:
            self._dropped += 1
            return
        self._waiting.append(Shown(item.prefix, item.data, item.iif, item.oif, item.mark, self._dropped))
        self._dropped = 0
        self._arrived.set()


def group_socket(group: int, buffer_bytes: int = _BUFFER_BYTES, advice: str = _ADVICE) -> socket.socket:
    """A non-blocking socket to which the kernel tells what rules show to a group. Fails as ``NflogSource`` does."""
    listener = listening(NETLINK_NETFILTER, (), buffer_bytes)
    try:
        _bind(listener, group, advice)
    except BaseException:
        listener.close()
        raise
    return listener


def shown(data: bytes) -> Iterator[tuple[Shown, int | None]]:
    """The packets that a datagram tells, each with its number in the group."""
    for kind, _, _, body in messages(data):
        if kind != _PACKET or len(body) < _NFGEN.size:
            continue
        found = attributes(body, _NFGEN.size)
        number = found.get(_SEQUENCE)
        item = Shown(
            text_of(found.get(_PREFIX, b"")),
            found.get(_PAYLOAD, b""),
            *(int.from_bytes(found.get(each, b"")) for each in (_INDEV, _OUTDEV, _MARK)),
        )
        yield item, int.from_bytes(number) if number is not None else None


def packet_of(data: bytes) -> Packet | None:
    """The packet whose first bytes these are; None for what is neither IPv4 nor IPv6, or cut off too early."""
    version = data[0] >> 4 if data else 0
    length = _WORD * (data[0] & _IPV4_WORDS) if version == _IPV4 else _IPV6_BYTES
    found = packet(data[:length], data[length:]) if version in (_IPV4, _IPV6) else None
    return piece(found, data[length:]) if found is not None else None


def inner_of(outer: Packet, protocol: OverlayProtocol) -> tuple[TunnelHeader, Packet] | None:
    """What an overlay's packet carries; None for what carries none, or was cut off before its addresses."""
    header = tunnel(outer, protocol)
    if header is None:
        return None
    options = 0
    if protocol == "GENEVE":
        options = _WORD * (outer.transport[_UDP_BYTES] & _GENEVE_OPTIONS)
        if int.from_bytes(outer.transport[_UDP_BYTES + 2 : _UDP_BYTES + 4]) != _GENEVE_ETHERNET:
            return None
    frame = outer.transport[_UDP_BYTES + _OVERLAY_BYTES + options :]
    if int.from_bytes(frame[_ETHERNET_BYTES - 2 : _ETHERNET_BYTES]) not in _ETHERTYPES:
        return None
    inner = packet_of(frame[_ETHERNET_BYTES:])
    return (header, inner) if inner is not None else None


# Listening --------------------------------------------------------------------------------------------------------------------------------


def _bind(listener: socket.socket, group: int, advice: str) -> None:
    """Have the kernel tell packets of a group to this socket, one by one and numbered."""
    head = _NFGEN.pack(0, 0, group)
    asked = (
        attribute(_COMMAND, _BIND),
        attribute(_MODE, _MODE_OF.pack(0xFFFF, _COPY_PACKET)),
        attribute(_THRESHOLD, BE32.pack(1)) + attribute(_FLAGS, _NUMBERED),
    )
    listener.settimeout(_TIMEOUT_S)
    try:
        for sequence, body in enumerate(asked, 1):
            listener.send(message(_CONFIG, head + body, REQUEST | ACK, sequence))
            if number := _refusal(listener, sequence):
                raise _refused(number, group, advice)
    except OSError as error:
        raise _refused(error.errno or errno.EIO, group, advice) from error
    finally:
        listener.settimeout(0)


def _refusal(listener: socket.socket, sequence: int) -> int:
    """The errno with which a request was answered. What is told before the answer is left to be missed: nobody listened yet."""
    while True:
        for kind, _, number, answer in messages(listener.recv(_DATAGRAM_BYTES)):
            if kind == _NLMSG_ERROR and number == sequence:
                return -int.from_bytes(answer[:4], sys.byteorder, signed=True)


def listeners() -> dict[int, int]:
    """The groups that somebody listens to in this thread's network namespace, with the socket's port: mostly its process's number."""
    try:
        lines = _LISTENERS.read_text().splitlines()
    except OSError:  # without the module there are none; without the right to, nobody can say
        return {}
    return {int(words[0]): int(words[1]) for line in lines if len(words := line.split()) > 1 and words[0].isdigit()}


def _refused(number: int, group: int, advice: str) -> MeshmarkError:
    reason = f"NFLOG group {group} cannot be listened to: {os.strerror(number)}"
    if number == errno.EBUSY or group in listeners():  # to the second one the kernel says EPERM
        return Conflict(f"NFLOG group {group} has another listener; {advice}")
    if number in (errno.EPERM, errno.EACCES):
        return Permanent(f"{reason}; CAP_NET_ADMIN is needed in this network namespace")
    return Transient(reason)
