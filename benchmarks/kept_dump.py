"""Dumps of nftables from memory: what the kernel answers once it holds some objects, made of the messages that put them there.

With it a reader's own work is timed without a kernel. Rules have the handle and the position that the kernel gives each, attributes have no
marks, and messages come some in a datagram, as from the kernel; the rest is as it was sent.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence

from schemas.host_objects import PlanObject
from services.kernel.netlink import HEADER, NetlinkSocket, attribute, attributes, message
from services.kernel.nfnetlink import wire
from services.kernel.nfnetlink.batch import Batch, kind_of
from services.kernel.nfnetlink.elements import Header
from services.kernel.nfnetlink.rules import Encoders
from services.kernel.nfnetlink.wire import Message, be32, be64
from services.kernel.nft.steps import steps
from services.kernel.nftread.dumps import Dumps
from services.kernel.transaction import changes

_FAMILY = bytes((wire.FAMILY_INET, 0, 0, 0))
_GET_TABLE, _GET_CHAIN, _GET_RULE, _GET_SET, _GET_ELEMENTS = (wire.SUBSYSTEM | number for number in (1, 4, 7, 10, 13))
_CHAIN_USES = 6
_ATTRIBUTE = struct.Struct("=HH")
_SEQUENCE, _MULTI, _DONE = 1, 0x2, 3
_DATAGRAM_BYTES = 32 << 10
_END = message(_DONE, bytes(4), _MULTI, _SEQUENCE)

Question = tuple[int, bytes]
"""The kind and the body of a request for a dump."""
Answers = Mapping[Question, Sequence[bytes]]
"""Datagrams by what is asked for."""


class KeptDumps(Dumps):
    """Dumps of what never changes. Without an answer there is nothing of what is asked for."""

    def __init__(self, answers: Answers) -> None:
        super().__init__()
        self._netlink.close()
        self._netlink = _Kept(answers)

    def generation(self) -> int:
        return 1


class _Kept(NetlinkSocket):
    """A socket that nothing is sent by."""

    def __init__(self, answers: Answers) -> None:
        self._kept = answers
        self._coming: Iterator[bytes] = iter(())

    def _send(self, kind: int, body: bytes, flags: int) -> int:
        del flags
        self._coming = iter((*self._kept.get((kind, body), ()), _END))
        return _SEQUENCE

    def _received(self) -> bytes:
        return next(self._coming)

    def close(self) -> None:
        """There is nothing to close."""


def answers_of(objects: Mapping[str, PlanObject]) -> Answers:
    """What a reader of tables with these objects is answered.

    There are to be so many rules that it asks for each chain's (``Dumps.rules``). They may name no sets without names.
    """
    bodies: dict[Question, list[bytes]] = {}
    rules: dict[bytes, list[int]] = {}
    chains: list[bytes] = []
    made = Batch(steps(changes({}, objects), None), Encoders(), _no_header).messages
    for number, sent in enumerate(made, 1):
        kind, body = kind_of(sent), _unmarked(sent[HEADER.size + len(_FAMILY) :])
        found = attributes(body)
        of_table = _FAMILY + attribute(wire.RULE_TABLE, found[wire.RULE_TABLE])
        of_name = of_table + attribute(wire.RULE_CHAIN, found.get(wire.RULE_CHAIN, b""))
        match kind:
            case Message.NEW_TABLE:
                bodies.setdefault((_GET_TABLE, _FAMILY), []).append(body)
            case Message.NEW_CHAIN:
                chains.append(body)
            case Message.NEW_SET:
                bodies.setdefault((_GET_SET, of_table), []).append(body)
            case Message.NEW_ELEMENTS:
                bodies.setdefault((_GET_ELEMENTS, of_name), []).append(body)
            case Message.NEW_RULE:
                before = rules.setdefault(of_name, [])
                placed = _placed(body, len(of_name) - len(_FAMILY), number, before[-1] if before else 0)
                before.append(number)
                bodies.setdefault((_GET_RULE, of_name), []).append(placed)
    for body in chains:
        found = attributes(body)
        of_name = _FAMILY + attribute(wire.RULE_TABLE, found[wire.CHAIN_TABLE]) + attribute(wire.RULE_CHAIN, found[wire.CHAIN_NAME])
        uses = be32(_CHAIN_USES, len(rules.get(of_name, ())))
        bodies.setdefault((_GET_CHAIN, _FAMILY), []).append(body + uses)
    return {asked: _datagrams(asked[0], found) for asked, found in bodies.items()}


def _placed(rule: bytes, behind: int, handle: int, before: int) -> bytes:
    """A rule's attributes with its handle, and its position where there is one before it. `behind` is where table and chain end."""
    position = be64(wire.RULE_POSITION, before) if before else b""
    return rule[:behind] + be64(wire.RULE_HANDLE, handle) + position + rule[behind:]


def _unmarked(body: bytes) -> bytes:
    """The same attributes without the mark of those that hold others: dumps of nftables have it nowhere, and readers compare bytes."""
    data = bytearray(body)
    waiting = [(0, len(data))]
    while waiting:
        at, end = waiting.pop()
        while at < end:
            length, kind = _ATTRIBUTE.unpack_from(data, at)
            if kind & wire.NESTED:
                _ATTRIBUTE.pack_into(data, at, length, kind & ~wire.NESTED)
                waiting.append((at + _ATTRIBUTE.size, at + length))
            at += (length + 3) & ~3
    return bytes(data)


def _datagrams(kind: int, bodies: Sequence[bytes]) -> list[bytes]:
    """Answers to a request of this kind; a datagram has one message at least."""
    found: list[bytes] = []
    open_bytes = bytearray()
    for body in bodies:
        answer = message(kind, _FAMILY + body, _MULTI, _SEQUENCE)
        if open_bytes and len(open_bytes) + len(answer) > _DATAGRAM_BYTES:
            found.append(bytes(open_bytes))
            open_bytes.clear()
        open_bytes += answer
    return [*found, bytes(open_bytes)]


def _no_header(table: str, name: str) -> Header:
    """All sets are made by the same messages, so nobody asks."""
    raise KeyError(table, name)
