"""Netlink: sockets, messages and attributes, as bytes.

Owns a socket in the network namespace of the thread that made it. For what comes in bulk: routes, rules and events, on which pyroute2
(``pyroute``, for the rest) costs 60 times the kernel's own time. Requests carry a sequence number, dumps are repeated while the kernel
says that they were disturbed. Fails with NetlinkError, which carries the errno and the kernel's own words where it gives some.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import socket
import struct
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeVar

from services.kernel.buffers import widen
from services.kernel.rows import FLAGS_AT, Mixed, Row, pieces
from services.kernel.rows import HEADER as HEADER  # noqa: PLC0414 - the form in which mypy takes a name as passed on

T = TypeVar("T")

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
_LAST = (_ERROR, _DONE)
_SOL_NETLINK, _EXT_ACK, _CAP_ACK, _STRICT_CHECK = 270, 11, 10, 12
_EXT_ACK_TEXT = 1
_TYPE_MASK, _NESTED = 0x3FFF, 0x8000
_TIMEOUT_S = 10.0
_BUFFER_BYTES = 1 << 20
_ANSWER_BYTES = 1 << 10
"""What one refusal takes of a receive buffer at most: the kernel counts its own memory, not only what is in it."""
_DUMP_TRIES = 8
_BEGIN_BYTES = 8
"""Of a message: length, kind and flags."""
_DIGEST_BYTES = 16
_DIGEST_SEQUENCE = (1 << 32) - 1
"""The same for each digest, since it is in what is digested; downwards from here, far from those of requests."""

_ATTRIBUTE = struct.Struct("=HH")
U8, U16, U32, U64 = struct.Struct("=B"), struct.Struct("=H"), struct.Struct("=I"), struct.Struct("=Q")
BE32 = struct.Struct(">I")
BE64 = struct.Struct(">Q")
Attributes = dict[int, bytes]


class Run(NamedTuple):
    """Messages in a row that have one length, kind and flags, and where each begins in its datagram."""

    places: range
    length: int
    kind: int
    flags: int


class NetlinkError(OSError):
    """The kernel refused a request. `text` is its own explanation, often empty."""

    def __init__(self, number: int, text: str = "") -> None:
        super().__init__(number, text or os.strerror(number))
        self.text = text


class Disturbed(NetlinkError):
    """What a dump told is of no one moment: somebody wrote meanwhile."""

    def __init__(self) -> None:
        super().__init__(errno.EINTR, "disturbed by a writer")


class NetlinkSocket:
    """A request-and-answer socket of one netlink protocol. One thread at a time."""

    def __init__(self, protocol: int) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol)
        self._socket.bind((0, 0))
        self._socket.settimeout(_TIMEOUT_S)
        self._sequence = 0
        self._digest_sequence = _DIGEST_SEQUENCE
        for option in (_EXT_ACK, _CAP_ACK):
            self._socket.setsockopt(_SOL_NETLINK, option, 1)
        if protocol == NETLINK_ROUTE:
            with contextlib.suppress(OSError):  # absent before Linux 4.20; dumps are filtered here as well
                self._socket.setsockopt(_SOL_NETLINK, _STRICT_CHECK, 1)
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            widen(self._socket, option, 4 * _BUFFER_BYTES)
        self._refusals_max = max(1, self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) // _ANSWER_BYTES)
        self._bytes_max = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 2

    def request(self, kind: int, body: bytes, flags: int = 0) -> None:
        """Send one message and wait for its acknowledgement."""
        self.ask(kind, body, flags)

    def ask(self, kind: int, body: bytes, flags: int = 0) -> list[bytes]:
        """Send one message and wait for its acknowledgement; the bodies of what came before that."""
        sequence = self._send(kind, body, REQUEST | ACK | flags)
        return [payload for _, payload in self._answers(sequence)]

    def request_all(self, kind: int, bodies: list[bytes], flags: int = 0) -> dict[int, NetlinkError]:
        """Send many messages of a kind, thousands in a system call, and return what was said against them, by their place.

        The kernel takes one after the other, and goes on after one that it refuses. Where its refusals did not fit into the receive
        buffer, each message of that call whose refusal is not known has ENOBUFS: it may have been taken or not.
        """
        return self.request_rows(kind, [Mixed(bodies)], flags)

    def request_rows(self, kind: int, rows: Iterable[Row], flags: int = 0) -> dict[int, NetlinkError]:
        """As ``request_all``; places are counted over all rows."""
        refused: dict[int, NetlinkError] = {}
        place = 0
        for piece in pieces(rows, self._refusals_max, self._bytes_max):
            first = self._sequence + 1
            data = bytearray()
            for row in piece:
                data += row.train(kind, REQUEST | flags, self._sequence + 1)
                self._sequence += len(row)
            last = len(data) - HEADER.size - len(piece[-1].body(len(piece[-1]) - 1))
            U16.pack_into(data, last + FLAGS_AT, REQUEST | ACK | flags)
            found = self._refusals(data, first)
            refused.update((place + number - first, error) for number, error in found.items())
            place += self._sequence - first + 1
        return refused

    def _refusals(self, data: bytes | bytearray, first: int) -> dict[int, NetlinkError]:
        """Send messages of which the last, and it alone, is to be acknowledged; the errors by sequence number."""
        numbers = range(first, self._sequence + 1)
        try:
            self._socket.send(data)
        except OSError as error:
            number = errno.ENOMEM if error.errno == errno.ENOBUFS else error.errno or errno.EIO
            return dict.fromkeys(numbers, NetlinkError(number, "the request could not be sent"))
        found: dict[int, NetlinkError] = {}
        try:
            while not self._take_refusals(numbers, found):
                pass
        except OSError as error:
            lost = errno.ETIMEDOUT if isinstance(error, TimeoutError) else error.errno or errno.EIO
        else:
            return found
        self._socket.settimeout(0)  # by now there is all that there will be
        try:
            while True:
                self._take_refusals(numbers, found)
        except OSError:
            return {number: found.get(number) or NetlinkError(lost, "the answer was lost") for number in numbers}
        finally:
            self._socket.settimeout(_TIMEOUT_S)

    def _take_refusals(self, numbers: range, found: dict[int, NetlinkError]) -> bool:
        """Read one datagram; True when the last message was answered."""
        is_last = False
        for kind, flags, number, payload in messages(self._socket.recv(_BUFFER_BYTES)):
            if number in numbers and kind == _ERROR:
                is_last |= number == numbers[-1]
                try:
                    _check(payload, flags)
                except NetlinkError as error:
                    found[number] = error
        return is_last

    def dump(self, kind: int, body: bytes) -> list[bytes]:
        """All objects of a table as bodies, from one undisturbed pass."""
        return _undisturbed(lambda: list(self.stream(kind, body)))

    def stream(self, kind: int, body: bytes) -> Iterator[bytes]:
        """Objects of a table as bodies, as they come, however many. Raises Disturbed at the end when they are of no one moment."""
        for bodies in self.batches(kind, body):
            yield from bodies

    def batches(self, kind: int, body: bytes, skip: int = 0) -> Iterator[list[bytes]]:
        """As ``stream``, several at a time, and without the first `skip` bytes of each body."""
        begin = HEADER.size + skip
        sequence = self._send(kind, body, REQUEST | DUMP)
        disturbed = 0
        for data, runs in self._datagrams(sequence):
            for run in runs:
                disturbed |= run.flags & _DUMP_INTR
                if run.kind > _DONE:
                    yield [data[place + begin : place + run.length] for place in run.places]
        if disturbed:
            raise Disturbed

    def digest(self, kind: int, body: bytes) -> bytes:
        """A digest of a dump as it comes, from one undisturbed pass: equal ones of one socket are of equal dumps."""
        return _undisturbed(lambda: self._digested(kind, body, None))

    def dump_digested(self, kind: int, body: bytes) -> tuple[list[bytes], bytes]:
        """All objects of a table as bodies, and the digest of that very dump."""
        found: list[bytes] = []

        def work() -> bytes:
            found.clear()
            return self._digested(kind, body, found)

        digest = _undisturbed(work)
        return found, digest

    def _digested(self, kind: int, body: bytes, bodies: list[bytes] | None) -> bytes:
        sequence, self._digest_sequence = self._digest_sequence, self._digest_sequence - 1
        self._transmit(message(kind, body, REQUEST | DUMP, sequence))
        hashed = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        disturbed = 0
        for data, runs in self._datagrams(sequence):
            hashed.update(data)
            for run in runs:
                disturbed |= run.flags & _DUMP_INTR
                if bodies is not None and run.kind > _DONE:
                    bodies += [data[place + HEADER.size : place + run.length] for place in run.places]
        self._digest_sequence = sequence  # one that broke off leaves answers behind, which the next is not to take for its own
        if disturbed:
            raise Disturbed
        return hashed.digest()

    def close(self) -> None:
        self._socket.close()

    def _send(self, kind: int, body: bytes, flags: int) -> int:
        self._sequence += 1
        self._transmit(message(kind, body, flags, self._sequence))
        return self._sequence

    def _transmit(self, data: bytes) -> None:
        try:
            self._socket.send(data)
        except OSError as error:
            raise NetlinkError(error.errno or errno.EIO, "the request could not be sent") from error

    def _datagrams(self, sequence: int) -> Iterator[tuple[bytes, list[Run]]]:
        """The answer to a dump, up to the message that ends it."""
        is_last = False
        while not is_last:
            data = self._received()
            if HEADER.unpack_from(data)[3] != sequence:
                continue
            runs = _runs(data)
            last = runs[-1]
            is_last = last.kind in _LAST
            if is_last:
                _check(data[last.places[-1] + HEADER.size : last.places[-1] + last.length], last.flags)
            yield data, runs

    def _received(self) -> bytes:
        try:
            return self._socket.recv(_BUFFER_BYTES)
        except TimeoutError as error:
            raise NetlinkError(errno.ETIMEDOUT, "no answer from the kernel") from error
        except OSError as error:
            raise NetlinkError(error.errno or errno.EIO, "the answer was lost") from error

    def _answers(self, sequence: int) -> Iterator[tuple[int, bytes]]:
        while True:
            for kind, flags, number, payload in messages(self._received()):
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


def _undisturbed(work: Callable[[], T]) -> T:
    for _ in range(_DUMP_TRIES):
        with contextlib.suppress(Disturbed):
            return work()
    raise NetlinkError(errno.EINTR, f"{_DUMP_TRIES} dumps in a row were disturbed by writers")


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


def _runs(data: bytes) -> list[Run]:
    """The messages of a datagram. Objects of a kind mostly have one length: such are told apart in a few steps for all of them."""
    found = []
    offset, end = 0, len(data) - HEADER.size
    while offset <= end:
        length, kind, flags, _, _ = HEADER.unpack_from(data, offset)
        step = max(HEADER.size, (length + 3) & ~3)
        count = _alike(data, offset, step)
        found.append(Run(range(offset, offset + count * step, step), length, kind, flags))
        offset += count * step
    return found


def _alike(data: bytes, offset: int, step: int) -> int:
    """How many messages from `offset` on begin with the same length, kind and flags."""
    begin = data[offset : offset + _BEGIN_BYTES]
    most = (len(data) - offset) // step
    rest = data[offset : offset + most * step]
    if all(rest[place::step] == begin[place : place + 1] * most for place in range(_BEGIN_BYTES)):
        return max(1, most)
    count = 1
    while count < most and data.startswith(begin, offset + count * step):
        count += 1
    return count


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
