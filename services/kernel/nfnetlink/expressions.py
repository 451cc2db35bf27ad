"""Expressions of nf_tables: what a rule is made of, as attributes. Each is one item of a rule's list.

Owns nothing. A value that differs from rule to rule is a hole: its size in bytes stands where its bytes would, so that a rule's form is
encoded once and then only filled in. Registers: 1 is the first of 16 bytes, 2 the second; 9 is the 4 bytes after the first 4 of register 1.
"""

from __future__ import annotations

from collections.abc import Iterable

from services.kernel.netlink import attribute
from services.kernel.nfnetlink.wire import (
    DATA_VALUE,
    EXPRESSION_DATA,
    EXPRESSION_NAME,
    LIST_ITEM,
    be32,
    nest,
    nested,
    text,
    verdict,
)

Piece = bytes | int
"""Bytes, or the size of a hole."""
Pieces = tuple[Piece, ...]

EQUAL, UNEQUAL, AT_MOST, AT_LEAST = 0, 1, 3, 5
OPERATORS = {"==": EQUAL, "!=": UNEQUAL}
REGISTER, SECOND, AFTER_FOUR = 1, 2, 9
VERDICT_REGISTER = 0
META_MARK, META_IIFNAME, META_OIFNAME, META_NFTRACE, META_NFPROTO, META_L4PROTO = 3, 6, 7, 12, 15, 16
CT_STATE, CT_DIRECTION, CT_STATUS, CT_MARK = 0, 1, 2, 3
NETWORK, TRANSPORT = 1, 2
FIB_OIF, FIB_OIFNAME, FIB_ADDRTYPE = 1, 2, 3
FIB_SADDR, FIB_DADDR, FIB_MARK, FIB_IIF, FIB_PRESENT = 1, 2, 4, 8, 32
NAT_ADDRESS, NAT_PORT, NAT_NETMAP = 1, 2, 64
_TO_NETWORK_ORDER = 1
_TCP_OPTION, _MAXSEG, _MAXSEG_OFFSET, _MAXSEG_BYTES = 1, 2, 2, 2
_RT_TCPMSS = 3
_UNREACHABLE, _EITHER = 0, 2
_PORT_CODES = {2: 3, 10: 4}
_PORT_CODE = 1
_LIMIT_PACKETS = 0


def size(pieces: Iterable[Piece]) -> int:
    return sum(piece if isinstance(piece, int) else len(piece) for piece in pieces)


def holder(kind: int, pieces: Iterable[Piece]) -> Pieces:
    """An attribute around pieces, with what pads it to a multiple of 4."""
    inside = tuple(pieces)
    length = size(inside)
    head = attribute(kind, bytes(length))[:4]
    return (head, *inside, bytes(-length % 4))


def expression(name: str, *parts: Piece) -> Pieces:
    return holder(nested(LIST_ITEM), (text(EXPRESSION_NAME, name), *holder(nested(EXPRESSION_DATA), parts)))


def value(kind: int, *holes: Piece) -> Pieces:
    """A value as nf_tables nests it."""
    return holder(nested(kind), holder(DATA_VALUE, holes))


def load_meta(key: int, register: int = REGISTER) -> Pieces:
    return expression("meta", be32(2, key), be32(1, register))


def set_meta(key: int) -> Pieces:
    return expression("meta", be32(2, key), be32(3, REGISTER))


def load_ct(key: int) -> Pieces:
    return expression("ct", be32(2, key), be32(1, REGISTER))


def set_ct(key: int) -> Pieces:
    return expression("ct", be32(2, key), be32(4, REGISTER))


def load_payload(base: int, offset: int, length: int) -> Pieces:
    return expression("payload", be32(1, REGISTER), be32(2, base), be32(3, offset), be32(4, length))


def load_fib(result: int, flags: int) -> Pieces:
    return expression("fib", be32(1, REGISTER), be32(2, result), be32(3, flags))


def load_tcpmss() -> Pieces:
    return expression("rt", be32(1, REGISTER), be32(2, _RT_TCPMSS))


def compare(operator: int, *holes: Piece) -> Pieces:
    return expression("cmp", be32(1, REGISTER), be32(2, operator), *value(3, *holes))


def not_between(low: Piece, high: Piece) -> Pieces:
    return expression("range", be32(1, REGISTER), be32(2, UNEQUAL), *value(3, low), *value(4, high))


def bitwise(length: int, mask: Piece, xor: Piece) -> Pieces:
    return expression("bitwise", be32(1, REGISTER), be32(2, REGISTER), be32(3, length), *value(4, mask), *value(5, xor))


def to_network_order(length: int) -> Pieces:
    return expression("byteorder", be32(1, REGISTER), be32(2, REGISTER), be32(3, _TO_NETWORK_ORDER), be32(4, length), be32(5, length))


def lookup(name: str, *, set_id: int | None = None, inverted: bool = False, destination: int | None = None) -> Pieces:
    """A look into a set; `set_id` is the size of the hole for the number of one that is made in the same batch and has no name."""
    into = (be32(3, destination),) if destination is not None else ()
    identified = holder(4, (set_id,)) if set_id is not None else ()
    flags = (be32(5, 1),) if inverted else ()
    return expression("lookup", text(1, name), be32(2, REGISTER), *into, *identified, *flags)


def immediate(register: int, hole: Piece) -> Pieces:
    return expression("immediate", be32(1, register), *value(2, hole))


def verdict_of(code: str, chain: str) -> Pieces:
    return expression("immediate", be32(1, VERDICT_REGISTER), nest(2, verdict(code, chain)))


def translate(kind: int, family: int, registers: tuple[int, int], flags: int, port: int | None = None) -> Pieces:
    """Source (0) or destination (1) translation to between what two registers hold, and to the port that a third one holds."""
    low, high = registers
    ports = (be32(5, port), be32(6, port)) if port is not None else ()
    return expression("nat", be32(1, kind), be32(2, family), be32(3, low), be32(4, high), *ports, be32(7, flags))


def reject(family: int | None) -> Pieces:
    """Port unreachable, in the words of the packet's family where the rule has made sure of it."""
    if family is None:
        return expression("reject", be32(1, _EITHER), attribute(2, bytes((_PORT_CODE,))))
    return expression("reject", be32(1, _UNREACHABLE), attribute(2, bytes((_PORT_CODES[family],))))


def write_maxseg() -> Pieces:
    """Write register 1 into the TCP option."""
    where = (attribute(2, bytes((_MAXSEG,))), be32(3, _MAXSEG_OFFSET), be32(4, _MAXSEG_BYTES), be32(6, _TCP_OPTION))
    return expression("exthdr", be32(7, REGISTER), *where)


def limit(rate: Piece, burst: Piece) -> Pieces:
    """Packets a second."""
    second = attribute(2, (1).to_bytes(8, "big"))
    return expression("limit", *holder(1, (rate,)), second, *holder(3, (burst,)), be32(4, _LIMIT_PACKETS), be32(5, 0))


def log(group: int, prefix: str, snaplen: int) -> Pieces:
    return expression("log", attribute(1, group.to_bytes(2, "big")), text(2, prefix), be32(3, snaplen))


def counter() -> Pieces:
    return expression("counter")


def plain(name: str) -> Pieces:
    """An expression that has nothing to say: notrack, masq."""
    return expression(name)
