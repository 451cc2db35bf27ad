"""The socket that transactions go through, and what the kernel answers.

Owns a netlink socket in the network namespace of the thread that made it. One send is one transaction: the kernel has made it, or nothing
of it, when the send returns. No message asks to be acknowledged, so that nothing is answered but refusals, and new rules
that are to be echoed; all of it is there when the send returns. A question for the generation comes behind the batch where it matters. When
the buffer for answers runs over, refusals are lost, not their fact: what is left of them says that the batch was refused. Fails with
NetlinkError when the kernel cannot be asked.
"""

from __future__ import annotations

import errno
import socket
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from services.kernel.buffers import widen
from services.kernel.netlink import BE32, HEADER, NETLINK_NETFILTER, U32, NetlinkError, attributes, message, messages, text_of
from services.kernel.nfnetlink import wire
from services.kernel.nfnetlink.wire import Message

FIRST = 2
"""The number of a batch's first message; the one before it opens the batch."""
_QUESTIONS = 1 << 31
_SOL_NETLINK, _CAP_ACK, _EXT_ACK = 270, 10, 11
_NLMSG_ERROR, _ACK_TLVS = 2, 0x200
_TEXT, _OFFSET = 1, 2  # NLMSGERR_ATTR_MSG, NLMSGERR_ATTR_OFFS
_GENERATION_ID = 1
_ANSWER_BYTES = 1 << 20
_SPARE_BYTES = 1 << 16
_TIMEOUT = struct.pack("@ll", 10, 0)  # of an answer, in seconds and microseconds; the socket itself stays a blocking one
_TOLD_RULE = wire.SUBSYSTEM | Message.NEW_RULE
_NETWORK_WIDE = bytes(4)  # nfgenmsg of a question that is about no family


class NotSent(NetlinkError):
    """The kernel did not take what was to be sent: nothing was done."""


class Refusal(NamedTuple):
    """A message that the kernel refused: its number, errno, the kernel's own words, and where in it the fault is (0: not said)."""

    sequence: int
    number: int
    text: str = ""
    offset: int = 0


class Outcome(NamedTuple):
    """What came of a batch: nothing refused, or what was, in the kernel's order; and the generation after it.

    `overrun` says that answers were lost. `handles` are those of rules that were to be told, by their messages' numbers.
    """

    refusals: tuple[Refusal, ...]
    generation: int
    overrun: bool = False
    handles: Mapping[int, int] = {}


class _Told:
    """What the kernel has said of a batch, whose last message has the number `last`."""

    def __init__(self, last: int) -> None:
        self._last = last
        self.refusals: list[Refusal] = []
        self.handles: dict[int, int] = {}
        self.overrun = False

    def note(self, answers: Iterable[tuple[int, int, int, bytes]], question: int = 0) -> tuple[int, int, bytes] | None:
        """Keep what is said of the batch; returns the answer to the question with this number, if it is there."""
        for kind, flags, sequence, body in answers:
            if question and sequence == question:
                return kind, flags, body
            if sequence <= self._last and kind == _NLMSG_ERROR:
                self.refusals.append(_refusal(sequence, flags, body))
            elif sequence <= self._last and kind == _TOLD_RULE:
                self.handles[sequence] = int.from_bytes(attributes(body, len(_NETWORK_WIDE))[wire.RULE_HANDLE])
        return None


class Exchange:
    """A persistent socket. One thread at a time."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_NETFILTER)
        self._socket.bind((0, 0))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEOUT)
        for option in (_EXT_ACK, _CAP_ACK):
            self._socket.setsockopt(_SOL_NETLINK, option, 1)
        widen(self._socket, socket.SO_RCVBUF, 4 * _ANSWER_BYTES)
        self._room = 0
        self._asked = 0

    @property
    def port(self) -> int:
        """The number by which events name this socket as the sender."""
        return int(self._socket.getsockname()[0])

    def send(self, batch: list[bytes], generation: int | None, *, asks: bool = True) -> Outcome:
        """Send messages, which are numbered from ``FIRST`` on, as one transaction.

        With `generation`, the kernel refuses all if it has another one: ERESTART, for the number before the first. A batch that is sure to
        change something and is not refused makes of it the next one: where that is enough, and not whether there are more by now, nothing
        is asked.
        """
        last = FIRST + len(batch)
        data = b"".join((wire.begin(FIRST - 1, generation), *batch, wire.end(last)))
        self._make_room(len(data))
        self._write(data)
        told = _Told(last)
        if generation is not None and not asks:
            self._drain(told)
            if not told.refusals and not told.overrun:
                return Outcome((), generation + 1, handles=told.handles)
        found = self._asked_behind(told)
        return Outcome(tuple(told.refusals), found, told.overrun, told.handles)

    def _drain(self, told: _Told) -> None:
        """Take what the kernel has said up to now."""
        while True:
            try:
                told.note(self._answers(wait=False))
            except NetlinkError as error:
                if error.errno == errno.EAGAIN:
                    return
                if error.errno != errno.ENOBUFS:
                    raise
                told.overrun = True

    def _asked_behind(self, told: _Told) -> int:
        """The generation after a batch; all that the kernel has to say of the batch comes before."""
        number = self._question()
        asked = message(wire.SUBSYSTEM | Message.GET_GENERATION, _NETWORK_WIDE, wire.REQUEST, number)
        self._write(asked)
        while True:
            try:
                found = told.note(self._answers(), number)
            except NetlinkError as error:
                if error.errno != errno.ENOBUFS:
                    raise
                told.overrun = True
                self._drain(told)
                self._write(asked)  # what was lost may have been the answer: ask again, now that there is room for it
                continue
            if found is not None:
                return _generation(*found)

    def generation(self) -> int:
        """The kernel's count of transactions in this network namespace."""
        return _generation(Message.NEW_GENERATION, 0, self.ask(Message.GET_GENERATION, _NETWORK_WIDE))

    def ask(self, kind: Message, body: bytes) -> bytes:
        """The one answer to a question, as the body of a message."""
        asked = self._question()
        self._write(message(wire.SUBSYSTEM | kind, body, wire.REQUEST, asked))
        while True:
            for found, flags, sequence, answer in self._answers():
                if sequence != asked:
                    continue
                if found == _NLMSG_ERROR:
                    refusal = _refusal(sequence, flags, answer)
                    raise NetlinkError(refusal.number, refusal.text)
                return answer

    def close(self) -> None:
        self._socket.close()

    def _question(self) -> int:
        """A number that no message of a batch has, and no question before."""
        self._asked = (self._asked + 1) % _QUESTIONS
        return _QUESTIONS + self._asked

    def _make_room(self, size: int) -> None:
        """A batch must fit into the send buffer as a whole; the kernel takes twice the number for its own bookkeeping."""
        if size + _SPARE_BYTES <= self._room:
            return
        widen(self._socket, socket.SO_SNDBUF, size + _SPARE_BYTES)
        self._room = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 2

    def _write(self, data: bytes) -> None:
        try:
            self._socket.send(data)
        except OSError as error:
            raise NotSent(error.errno or errno.EIO, f"{len(data)} bytes could not be sent: {error.strerror}") from error

    def _answers(self, *, wait: bool = True) -> Iterator[tuple[int, int, int, bytes]]:
        try:
            return messages(self._socket.recv(_ANSWER_BYTES, 0 if wait else socket.MSG_DONTWAIT))
        except BlockingIOError as error:
            raise NetlinkError(errno.ETIMEDOUT if wait else errno.EAGAIN, "no answer from the kernel") from error
        except OSError as error:
            raise NetlinkError(error.errno or errno.EIO, "the answer was lost") from error


def _generation(kind: int, flags: int, body: bytes) -> int:
    if kind == _NLMSG_ERROR:
        raise NetlinkError(_refusal(0, flags, body).number, "the generation could not be asked")
    return int(BE32.unpack(attributes(body, len(_NETWORK_WIDE))[_GENERATION_ID])[0])


def _refusal(sequence: int, flags: int, body: bytes) -> Refusal:
    number = -int.from_bytes(body[:4], sys.byteorder, signed=True)
    # 4 bytes of error code and the header of the request, whose body is not repeated
    more = attributes(body, 4 + HEADER.size) if flags & _ACK_TLVS else {}
    return Refusal(sequence, number, text_of(more.get(_TEXT, b"")), U32.unpack(more[_OFFSET])[0] if _OFFSET in more else 0)
