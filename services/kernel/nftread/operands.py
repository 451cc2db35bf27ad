"""What a rule's registers hold, in words: fields of packets, and values beside them in the form that plans use. Owns nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from schemas.firewall_values import PROTOCOLS
from services.kernel.nfnetlink import values
from services.kernel.nftread.sets import hexadecimal, read_name, span_text

_LINK, _NETWORK, _TRANSPORT, _INNER = 0, 1, 2, 3
_BASES = {_LINK: "@ll", _NETWORK: "@nh", _TRANSPORT: "@th", _INNER: "@ih"}
_HEADERS = {(12, 4): "ip saddr", (16, 4): "ip daddr", (8, 16): "ip6 saddr", (24, 16): "ip6 daddr"}
_ADDRESSES = {4: values.IPV4_ADDRESS, 16: values.IPV6_ADDRESS}
_PORTS = {0: "sport", 2: "dport"}
_FLAGS_OFFSET = 13
_META = {
    0: "meta length",
    1: "meta protocol",
    2: "meta priority",
    3: "meta mark",
    4: "iif",
    5: "oif",
    6: "iifname",
    7: "oifname",
    10: "meta skuid",
    11: "meta skgid",
    12: "meta nftrace",
    15: "meta nfproto",
    16: "meta l4proto",
    19: "meta pkttype",
    20: "meta cpu",
    23: "meta cgroup",
}
_CT = {0: "ct state", 1: "ct direction", 2: "ct status", 3: "ct mark", 5: "ct expiration", 6: "ct helper", 7: "ct l3proto", 22: "ct zone"}
_FIB_FLAGS = {1: "saddr", 2: "daddr", 4: "mark", 8: "iif", 16: "oif"}
_FIB_RESULTS = {1: "oif", 2: "oifname", 3: "type"}
_IS_PRESENT = 32
_OTHER_HEADERS = {"icmp": "icmp", "ipv6-icmp": "icmpv6"}

Read = Callable[[bytes], str]


class Operand(NamedTuple):
    """What a register holds, in words. `read` says a value that it is compared with; `kind` is the type of its intervals, if it has one.

    Values may be `bits`; one under a mask is `tested` for having one of these. A register may hold a `constant`.
    """

    text: str
    read: Read
    kind: values.Kind | None = None
    bits: bool = False
    tested: str = ""
    constant: bytes = b""

    def say(self, data: bytes) -> str:
        """A value; one of another length, of which the operand is a part only, as a number."""
        try:
            return self.read(data)
        except (ValueError, OSError):
            return hexadecimal(data)

    def span(self, low: bytes, high: bytes) -> str:
        if self.kind is None:
            return f"{self.read(low)}-{self.read(high)}"
        return span_text(self.kind, int.from_bytes(low), int.from_bytes(high), len(low))


def _decimal(data: bytes) -> str:
    return str(int.from_bytes(data))


def _mark(data: bytes) -> str:
    return f"{int.from_bytes(data, sys.byteorder):#x}"


def _words(known: Mapping[str, int], *, bits: bool = False, big: bool = False) -> Read:
    """The word for a number, or the words for its bits; a number that has none is said as that."""
    by_number = {number: word for word, number in known.items()}

    def read(data: bytes) -> str:
        number = int.from_bytes(data, "big" if big else sys.byteorder)
        if number in by_number:
            return by_number[number]
        found = [word for bit, word in by_number.items() if bits and bit & number]
        return ",".join(found) if found and sum(known[word] for word in found) == number else f"{number:#x}"

    return read


_READ_META: dict[int, tuple[Read, values.Kind | None]] = {
    3: (_mark, None),
    6: (read_name, None),
    7: (read_name, None),
    15: (_words(values.FAMILY), None),
    16: (_words(PROTOCOLS), None),
}
_READ_CT: dict[int, tuple[Read, bool]] = {
    0: (_words(values.STATE, bits=True), True),
    1: (_words(values.DIRECTION), False),
    2: (_words(values.STATUS, bits=True), True),
    3: (_mark, False),
}


def meta_operand(key: int) -> Operand:
    read, kind = _READ_META.get(key, (_mark, None))
    return Operand(_META.get(key, f"meta {key}"), read, kind)


def meta_name(key: int) -> str:
    """The name of what a rule writes."""
    return _META.get(key, f"meta {key}")


def ct_operand(key: int, direction: str = "") -> Operand:
    read, bits = _READ_CT.get(key, (hexadecimal, False))
    return Operand(f"{_CT.get(key, f'ct {key}')}{direction}", read, bits=bits)


def ct_name(key: int) -> str:
    return _CT.get(key, f"ct {key}")


def fib_operand(result: int, flags: int) -> Operand:
    keys = " . ".join(word for flag, word in _FIB_FLAGS.items() if flags & flag)
    read: Read = read_name if result == 2 else _words(values.ADDRESS_TYPE) if result == 3 else _mark  # noqa: PLR2004 - as in the kernel
    if flags & _IS_PRESENT:
        read = _words(values.PRESENCE)
    return Operand(f"fib {keys} {_FIB_RESULTS.get(result, result)}", read)


def payload_operand(base: int, offset: int, length: int, transport: str) -> Operand:
    """A part of the packet. A prefix of whole bytes is a shorter part of an address."""
    found: Operand | None = None
    if base == _NETWORK:
        found = _of_addresses(offset, length)
    elif base == _TRANSPORT:
        found = _of_transport(offset, length, transport)
    return found or Operand(f"{_BASES.get(base, base)},{offset * 8},{length * 8}", hexadecimal)


def _of_addresses(offset: int, length: int) -> Operand | None:
    for (begin, size), name in _HEADERS.items():
        if begin == offset and length <= size:
            kind = _ADDRESSES[size]
            return Operand(name, partial(_short, kind), kind if length == size else None)
    return None


def _of_transport(offset: int, length: int, transport: str) -> Operand | None:
    header = transport or "th"
    if offset in _PORTS and length == values.PORT.size:
        return Operand(f"{header} {_PORTS[offset]}", _decimal, values.PORT)
    if offset == 0 and length == 2 * values.PORT.size:
        return Operand(f"{header} sport . dport", lambda data: f"{_decimal(data[:2])} . {_decimal(data[2:])}")
    if transport == "tcp" and (offset, length) == (_FLAGS_OFFSET, 1):
        return Operand("tcp flags", _words(values.TCP_FLAGS, bits=True), bits=True)
    if transport in _OTHER_HEADERS and (offset, length) == (0, 1):
        return Operand(f"{_OTHER_HEADERS[transport]} type", _decimal)
    return None


def _short(kind: values.Kind, data: bytes) -> str:
    """An address, of which only the first bytes may count."""
    low = int.from_bytes(data.ljust(kind.size, b"\0"))
    return span_text(kind, low, low | (1 << (kind.size - len(data)) * 8) - 1, kind.size)
