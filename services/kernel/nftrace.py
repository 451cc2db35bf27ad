"""Traced packets, as the kernel tells of them: one message for each rule that a packet with ``meta nftrace`` set meets.

Decoding is pure; ``services.kernel.tracing`` has the sockets. A message has the headers, interfaces and the tracked connection only when it
is the first of its chain, and no text: table, chain and handle name the rule. The mark is left out when it is 0. Trace ids are hashes that
recur: they hold a packet together on its way through one network stack, for a moment. The bit is lost where a packet is encapsulated or
leaves the namespace.

Numbers are those of ``linux/netfilter/nf_tables.h`` (``NFTA_TRACE_*``); those of the tracked connection are newer than most headers (2025).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from msgspec import Struct

from services.kernel.netlink import BE32, Attributes, attributes, messages_with_sender, text_of

GROUP = 9
"""NFNLGRP_NFTRACE."""
_MESSAGE = 10 << 8 | 17  # NFNL_SUBSYS_NFTABLES, NFT_MSG_TRACE
_NFGEN_BYTES = 4

_TABLE, _CHAIN, _HANDLE, _TYPE, _VERDICT, _ID, _LINK, _NETWORK, _TRANSPORT = range(1, 10)
_IIF, _OIF, _MARK, _POLICY = 10, 12, 14, 16
_CT_ID, _CT_DIRECTION, _CT_STATUS, _CT_STATE = range(18, 22)
_VERDICT_CODE, _VERDICT_CHAIN = 1, 2

TraceKind = Literal["policy", "return", "rule"]
TraceVerdict = Literal["drop", "accept", "continue", "break", "jump", "goto", "return", "stolen", "queue", "repeat", "unknown"]
CtState = Literal["invalid", "established", "related", "new", "untracked"]

_KINDS: dict[int, TraceKind] = {1: "policy", 2: "return", 3: "rule"}
_VERDICTS: dict[int, TraceVerdict] = {
    0: "drop",
    1: "accept",
    2: "stolen",
    3: "queue",
    4: "repeat",
    -1: "continue",
    -2: "break",
    -3: "jump",
    -4: "goto",
    -5: "return",
}
_STATES: dict[int, CtState] = {1: "invalid", 2: "established", 4: "related", 8: "new", 64: "untracked"}
_SNAT, _DNAT = 1 << 4, 1 << 5


class Tracked(Struct, frozen=True):
    """The tracked connection of a traced packet, where the kernel tells of it. `id` is what ``conntrack -o id`` prints."""

    id: int
    state: CtState | None
    is_reply: bool
    status: int = 0

    @property
    def is_translated(self) -> bool:
        """Whether the connection's source or destination is translated."""
        return bool(self.status & (_SNAT | _DNAT))


class TraceEvent(Struct, frozen=True):
    """One traced packet at one rule, policy or end of a chain.

    `handle` is 0 where there is no rule: at the end of a chain. `iif`, `oif`, `network`, `transport`, `link` and `tracked` are there in the
    first event of a chain only. `target` is the chain of a jump or goto. `family` is the table's.
    """

    id: int
    family: int
    table: str
    chain: str
    kind: TraceKind
    verdict: TraceVerdict
    handle: int = 0
    target: str = ""
    iif: int = 0
    oif: int = 0
    mark: int = 0
    link: bytes = b""
    network: bytes = b""
    transport: bytes = b""
    tracked: Tracked | None = None


def trace_events(data: bytes) -> Iterator[TraceEvent]:
    """The trace events of one datagram, in the kernel's order. Attributes and kinds that are not known are left out, not guessed."""
    for kind, _, body in messages_with_sender(data):
        if kind == _MESSAGE and len(body) >= _NFGEN_BYTES:
            found = attributes(body, _NFGEN_BYTES)
            if _ID in found and _number(found, _TYPE) in _KINDS:
                yield _event(found, body[0])


def _event(found: Attributes, family: int) -> TraceEvent:
    kind = _KINDS[_number(found, _TYPE)]
    inner = attributes(found.get(_VERDICT, b""))
    code = inner.get(_VERDICT_CODE, found.get(_POLICY, b""))
    return TraceEvent(
        _number(found, _ID),
        family,
        text_of(found.get(_TABLE, b"")),
        text_of(found.get(_CHAIN, b"")),
        kind,
        _VERDICTS.get(int.from_bytes(code, signed=True), "unknown"),
        int.from_bytes(found.get(_HANDLE, b"")),
        text_of(inner.get(_VERDICT_CHAIN, b"")),
        _number(found, _IIF),
        _number(found, _OIF),
        _number(found, _MARK),
        found.get(_LINK, b""),
        found.get(_NETWORK, b""),
        found.get(_TRANSPORT, b""),
        _tracked(found),
    )


def _tracked(found: Attributes) -> Tracked | None:
    if _CT_STATE not in found:
        return None
    state = _STATES.get(_number(found, _CT_STATE))
    return Tracked(_number(found, _CT_ID), state, found.get(_CT_DIRECTION, b"\0") != b"\0", _number(found, _CT_STATUS))


def _number(found: Attributes, kind: int) -> int:
    """A big-endian number of 4 bytes; 0 when it is not there."""
    value = found.get(kind, b"")
    return BE32.unpack(value)[0] if len(value) == BE32.size else 0
