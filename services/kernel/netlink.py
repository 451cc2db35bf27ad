"""Netlink: sockets, messages and attributes, as bytes.

Owns a socket in the network namespace of the thread that made it. For what comes in bulk: routes, rules and events, on which pyroute2
(``pyroute``, for the rest) costs 60 times the kernel's own time. Requests carry a sequence number, dumps are repeated while the kernel
says that they were disturbed. Fails with NetlinkError, which carries the errno and the kernel's own words where it gives some.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import sys
from collections.abc import Iterator

NETLINK_ROUTE = 0
NETLINK_NETFILTER = 12
NETLINK_GENERIC = 16

REQUEST = 0x1
ACK = 0x4
DUMP = 0x300
REPLACE = 0x100
EXCL = 0x200
CREATE = 0x400

_DUMP_INTR = 0x10
_ACK_TLVS = 0x200
_NOOP, _ERROR, _DONE = 1, 2, 3
_SOL_NETLINK, _EXT_ACK, _CAP_ACK, _STRICT_CHECK = 270, 11, 10, 12
_EXT_ACK_TEXT = 1
_TYPE_MASK, _NESTED = 0x3FFF, 0x8000
_TIMEOUT_S = 10.0
_BUFFER_BYTES = 1 << 20
_DUMP_TRIES = 8

HEADER = struct.Struct("=IHHII")
_ATTRIBUTE = struct.Struct("=HH")
U8, U16, U32, U64 = struct.Struct("=B"), struct.Struct("=H"), struct.Struct("=I"), struct.Struct("=Q")
BE32 = struct.Struct(">I")
Attributes = dict[int, bytes]


class NetlinkError(OSError):
    """The kernel refused a request. `text` is its own explanation, often empty."""

    def __init__(self, number: int, text: str = "") -> None:
        super().__init__(number, text or os.strerror(number))
        self.text = text


class NetlinkSocket:
    """A request-and-answer socket of one netlink protocol. One thread at a time."""

    def __init__(self, protocol: int) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol)
        self._socket.bind((0, 0))
        self._socket.settimeout(_TIMEOUT_S)
        self._sequence = 0
        for option in (_EXT_ACK, _CAP_ACK):
            self._socket.setsockopt(_SOL_NETLINK, option, 1)
        if protocol == NETLINK_ROUTE:
            with contextlib.suppress(OSError):  # absent before Linux 4.20; dumps are filtered here as well
                self._socket.setsockopt(_SOL_NETLINK, _STRICT_CHECK, 1)
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            self._socket.setsockopt(socket.SOL_SOCKET, option, 4 * _BUFFER_BYTES)

    def request(self, kind: int, body: bytes, flags: int = 0) -> None:
        """Send one message and wait for its acknowledgement."""
        self.ask(kind, body, flags)

    def ask(self, kind: int, body: bytes, flags: int = 0) -> list[bytes]:
        """Send one message and wait for its acknowledgement; the bodies of what came before that."""
        sequence = self._send(kind, body, REQUEST | ACK | flags)
        return [payload for _, payload in self._answers(sequence)]

    def dump(self, kind: int, body: bytes) -> list[bytes]:
        """All objects of a table as bodies, from one undisturbed pass."""
        for _ in range(_DUMP_TRIES):
            sequence = self._send(kind, body, REQUEST | DUMP)
            found, disturbed = [], False
            for flags, payload in self._answers(sequence):
                disturbed |= bool(flags & _DUMP_INTR)
                found.append(payload)
            if not disturbed:
                return found
        raise NetlinkError(errno.EINTR, f"{_DUMP_TRIES} dumps in a row were disturbed by writers")

    def close(self) -> None:
        self._socket.close()

    def _send(self, kind: int, body: bytes, flags: int) -> int:
        self._sequence += 1
        try:
            self._socket.send(message(kind, body, flags, self._sequence))
        except OSError as error:
            raise NetlinkError(error.errno or errno.EIO, "the request could not be sent") from error
        return self._sequence

    def _answers(self, sequence: int) -> Iterator[tuple[int, bytes]]:
        while True:
            try:
                data = self._socket.recv(_BUFFER_BYTES)
            except TimeoutError as error:
                raise NetlinkError(errno.ETIMEDOUT, "no answer from the kernel") from error
            except OSError as error:
                raise NetlinkError(error.errno or errno.EIO, "the answer was lost") from error
            for kind, flags, number, payload in messages(data):
                if number != sequence or kind == _NOOP:
                    continue
                if kind == _ERROR:
                    _check(payload, flags)
                    return
                if kind == _DONE:
                    code = int.from_bytes(payload[:4], sys.byteorder, signed=True)
                    if code < 0:
                        raise NetlinkError(-code)
                    yield flags, b""
                    return
                yield flags, payload


def _check(payload: bytes, flags: int) -> None:
    code = -int.from_bytes(payload[:4], sys.byteorder, signed=True)
    if not code:
        return
    text = b""
    if flags & _ACK_TLVS:
        # 4 bytes of error code and the header of the request; with CAP_ACK its body is not repeated
        text = attributes(payload, 4 + HEADER.size).get(_EXT_ACK_TEXT, b"")
    raise NetlinkError(code, text.rstrip(b"\0").decode(errors="replace"))


def message(kind: int, body: bytes, flags: int, sequence: int = 0) -> bytes:
    return HEADER.pack(HEADER.size + len(body), kind, flags, sequence, 0) + body


def messages(data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    """Kind, flags, sequence number and body of each message in a datagram."""
    offset = 0
    while offset + HEADER.size <= len(data):
        length, kind, flags, sequence, _ = HEADER.unpack_from(data, offset)
        if length < HEADER.size:
            return
        yield kind, flags, sequence, data[offset + HEADER.size : offset + length]
        offset += (length + 3) & ~3


def messages_with_sender(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Kind, the sender's port and body of each message in a datagram."""
    offset = 0
    while offset + HEADER.size <= len(data):
        length, kind, _, _, port = HEADER.unpack_from(data, offset)
        if length < HEADER.size:
            return
        yield kind, port, data[offset + HEADER.size : offset + length]
        offset += (length + 3) & ~3


def attribute(kind: int, value: bytes) -> bytes:
    length = _ATTRIBUTE.size + len(value)
    return _ATTRIBUTE.pack(length, kind) + value + b"\0" * (-length % 4)


def nested(kind: int, value: bytes) -> bytes:
    """An attribute that holds others."""
    return attribute(kind | _NESTED, value)


def text_attribute(kind: int, value: str) -> bytes:
    return attribute(kind, value.encode() + b"\0")


def attributes(data: bytes, offset: int = 0) -> Attributes:
    """The value of each kind of attribute from `offset` on."""
    return dict(each_attribute(data, offset))


def each_attribute(data: bytes, offset: int = 0) -> Iterator[tuple[int, bytes]]:
    """Kind and value of every attribute from `offset` on, as an array needs it: there all are of one kind."""
    while offset + _ATTRIBUTE.size <= len(data):
        length, kind = _ATTRIBUTE.unpack_from(data, offset)
        if length < _ATTRIBUTE.size:
            break
        yield kind & _TYPE_MASK, data[offset + _ATTRIBUTE.size : offset + length]
        offset += (length + 3) & ~3


def text_of(value: bytes) -> str:
    return value.rstrip(b"\0").decode(errors="replace")


def number_of(value: bytes) -> int:
    """An integer of any width in the host's order."""
    return int.from_bytes(value, sys.byteorder)
