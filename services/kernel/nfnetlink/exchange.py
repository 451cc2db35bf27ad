"""The socket that transactions go through, and what the kernel answers.

Owns a netlink socket in the network namespace of the thread that made it. One send is one transaction: the kernel has made it, or nothing
of it, when the send returns. No message asks to be acknowledged, so that nothing is answered but refusals; a question for the generation
comes behind the batch, and all refusals are there when that is answered. When the buffer for answers runs over, refusals are lost, not
their fact: what is left of them says that the batch was refused. Fails with NetlinkError when the kernel cannot be asked.
"""

from __future__ import annotations

import errno
import socket
import struct
import sys
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from services.kernel.netlink import BE32, HEADER, NETLINK_NETFILTER, U32, NetlinkError, attributes, message, messages, text_of
from services.kernel.nfnetlink import wire
from services.kernel.nfnetlink.wire import Message

FIRST = 2
"""The number of a batch's first message; the one before it opens the batch."""
_QUESTIONS = 1 << 31
_SOL_NETLINK, _CAP_ACK, _EXT_ACK = 270, 10, 11
_SO_SNDBUFFORCE = 32
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


class Exchange:
    """A persistent socket. One thread at a time."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_NETFILTER)
        self._socket.bind((0, 0))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEOUT)
        for option in (_EXT_ACK, _CAP_ACK):
            self._socket.setsockopt(_SOL_NETLINK, option, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * _ANSWER_BYTES)
        self._room = 0
        self._asked = 0

    @property
    def port(self) -> int:
        """The number by which events name this socket as the sender."""
        return int(self._socket.getsockname()[0])

    def send(self, batch: list[bytes], generation: int | None) -> Outcome:
        """Send messages, which are numbered from ``FIRST`` on, as one transaction.

        With `generation`, the kernel refuses all if it has another one: ERESTART, for the number before the first.
        """
        last = FIRST + len(batch)
        number = self._question()
        asked = message(wire.SUBSYSTEM | Message.GET_GENERATION, _NETWORK_WIDE, wire.REQUEST, number)
        data = b"".join((wire.begin(FIRST - 1, generation), *batch, wire.end(last)))
        self._make_room(len(data))
        self._write(data)
        self._write(asked)
        refusals: list[Refusal] = []
        handles: dict[int, int] = {}
        overrun = is_draining = False
        while True:
            try:
                answers = self._answers(wait=not is_draining)
            except NetlinkError as error:
                if error.errno == errno.ENOBUFS:
                    overrun = is_draining = True
                    continue
                if not is_draining or error.errno != errno.EAGAIN:
                    raise
                is_draining = False  # what was lost may have been the answer: ask again, now that there is room for it
                self._write(asked)
                continue
            for kind, flags, sequence, body in answers:
                if sequence == number:
                    return Outcome(tuple(refusals), _generation(kind, flags, body), overrun, handles)
                if sequence <= last and kind == _NLMSG_ERROR:
                    refusals.append(_refusal(sequence, flags, body))
                elif sequence <= last and kind == _TOLD_RULE:
                    handles[sequence] = int.from_bytes(attributes(body, len(_NETWORK_WIDE))[wire.RULE_HANDLE])

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
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, size + _SPARE_BYTES)
        except PermissionError:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size + _SPARE_BYTES)
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
