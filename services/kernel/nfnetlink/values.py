"""Values as a plan writes them, as the bytes that the kernel compares: addresses, ports, marks, names, words.

Owns nothing. Each type of value has its number (those of libnftables, which reads our sets back by them), its size and the order of its
bytes: numbers that the kernel itself counts in (marks, states) are in the host's order, except in intervals, which are compared byte by
byte from the left. Raises Inexpressible for what is not known here.
"""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from schemas.firewall_values import PROTOCOLS

NAME_BYTES = 16
_HOST32 = struct.Struct("=I")
_PORT = struct.Struct(">H")
_PORT_LAST, _MARK_LAST, _PROTOCOL_LAST = 0xFFFF, 0xFFFFFFFF, 0xFF
_HOST_ORDER, _NETWORK_ORDER = 1, 2
_NO_LENGTH = 1 << 16
_LENGTHS = {str(length): length for length in range(129)}
"""Lengths of prefixes by their text: what is not here is none."""


class Inexpressible(Exception):
    """The engine has no form for `value` as `what`."""

    def __init__(self, value: object, what: str) -> None:
        super().__init__(f"no form for {value!r} as {what}")


class Kind(NamedTuple):
    """A type of values: libnftables' number for it, its size in bytes, and what reads a single value.

    `shape` says what may stand for several values: prefixes and ranges of numbers, patterns of names, nothing of words.
    """

    name: str
    number: int
    size: int
    read: Callable[[str], bytes]
    in_host_order: bool = False
    shape: Literal["number", "name", "word"] = "number"

    @property
    def order(self) -> int:
        """The word of libnftables for the order of the bytes."""
        return _HOST_ORDER if self.in_host_order else _NETWORK_ORDER

    @property
    def last(self) -> int:
        """The last number there is."""
        return (1 << self.size * 8) - 1

    def is_interval(self, text: str) -> bool:
        """Whether a value is more than one: a prefix, a range, a pattern."""
        if self.shape == "number":
            first, slash, length = text.partition("/")
            return decimal(length, self.size * 8) < self.size * 8 if slash else "-" in first
        return self.shape == "name" and is_pattern(text)

    def span(self, text: str) -> tuple[int, int]:
        """The first and the last number of a value, of a prefix, of a range, or of names that begin alike, as intervals are compared."""
        if self.shape == "name":
            return _name_span(text)
        first, slash, length = text.partition("/")
        if slash:
            free = self.size * 8 - _LENGTHS.get(length, _NO_LENGTH)
            if free < 0:
                raise Inexpressible(text, "a prefix")
            low = self._counted(first) >> free << free
            return low, low | (1 << free) - 1
        first, dash, last = text.partition("-")
        low = self._counted(first)
        return low, self._counted(last) if dash else low

    def _counted(self, text: str) -> int:
        return int.from_bytes(self.read(text), sys.byteorder if self.in_host_order else "big")


def address4(text: str) -> bytes:
    try:
        return socket.inet_pton(socket.AF_INET, text)
    except (OSError, ValueError):
        raise Inexpressible(text, "an IPv4 address") from None


def address6(text: str) -> bytes:
    try:
        return socket.inet_pton(socket.AF_INET6, text)
    except (OSError, ValueError):
        raise Inexpressible(text, "an IPv6 address") from None


def port(text: str) -> bytes:
    return _PORT.pack(decimal(text, _PORT_LAST))


def byte(text: str) -> bytes:
    return bytes((decimal(text, 0xFF),))


def mark(text: str) -> bytes:
    """A number, decimal or hexadecimal, in the host's order."""
    try:
        found = int(text, 16) if text.startswith("0x") else int(text)
        return _HOST32.pack(found)
    except (ValueError, struct.error):
        raise Inexpressible(text, "a mark") from None


def host32(number: int) -> bytes:
    return _HOST32.pack(number)


def name(text: str) -> bytes:
    r"""An interface's whole name. ``\*`` at its end is the star itself."""
    if text.endswith("\\*"):
        text = text[:-2] + "*"
    elif "*" in text or "\\" in text:
        raise Inexpressible(text, "the name of one interface")
    found = text.encode()
    if not 0 < len(found) < NAME_BYTES:
        raise Inexpressible(text, "the name of one interface")
    return found.ljust(NAME_BYTES, b"\0")


def stem(text: str) -> bytes:
    """What comes before the star of names that begin alike."""
    found = text[:-1].encode()
    if not 0 < len(found) < NAME_BYTES or b"*" in found or b"\\" in found:
        raise Inexpressible(text, "a pattern of interfaces")
    return found


def is_pattern(text: str) -> bool:
    return text.endswith("*") and not text.endswith("\\*")


def decimal(text: str, last: int) -> int:
    """A number from 0 to `last` in plain decimal digits."""
    if not (text.isascii() and text.isdigit()) or (len(text) > 1 and text[0] == "0") or int(text) > last:
        raise Inexpressible(text, f"a number up to {last}")
    return int(text)


def protocol(text: str) -> bytes:
    found = PROTOCOLS.get(text)
    return bytes((decimal(text, _PROTOCOL_LAST) if found is None else found,))


def words(known: Mapping[str, int], size: int) -> Callable[[str], bytes]:
    """What reads a word that stands for a number in the host's order."""
    encoded = {word: number.to_bytes(size, sys.byteorder) for word, number in known.items()}

    def read(text: str) -> bytes:
        try:
            return encoded[text]
        except KeyError:
            raise Inexpressible(text, "a word") from None

    return read


def _name_span(text: str) -> tuple[int, int]:
    if not is_pattern(text):
        low = int.from_bytes(name(text), "big")
        return low, low
    found = stem(text)
    free = (NAME_BYTES - len(found)) * 8
    low = int.from_bytes(found, "big") << free
    return low, low | (1 << free) - 1


def _no_value(text: str) -> bytes:
    raise Inexpressible(text, "anything but a verdict")


IPV4_ADDRESS = Kind("ipv4_addr", 7, 4, address4)
IPV6_ADDRESS = Kind("ipv6_addr", 8, 16, address6)
PORT = Kind("inet_service", 13, 2, port)
MARK = Kind("mark", 19, 4, mark, in_host_order=True)
NAME = Kind("ifname", 41, NAME_BYTES, name, in_host_order=True, shape="name")
VERDICT = Kind("verdict", 0xFFFFFF00, 16, _no_value, shape="word")
KINDS = {kind.name: kind for kind in (IPV4_ADDRESS, IPV6_ADDRESS, PORT, MARK, NAME, VERDICT)}
"""The types of named sets' keys and values, by the names that plans have for them."""
KINDS_BY_NUMBER = {kind.number: kind for kind in KINDS.values()}

STATE = {"invalid": 1, "established": 2, "related": 4, "new": 8, "untracked": 64}
STATUS = {"expected": 1, "seen-reply": 2, "assured": 4, "confirmed": 8, "snat": 16, "dnat": 32, "dying": 512}
DIRECTION = {"original": 0, "reply": 1}
TCP_FLAGS = {"fin": 1, "syn": 2, "rst": 4, "psh": 8, "ack": 16, "urg": 32, "ecn": 64, "cwr": 128}
ADDRESS_TYPE = {
    "unspec": 0,
    "unicast": 1,
    "local": 2,
    "broadcast": 3,
    "anycast": 4,
    "multicast": 5,
    "blackhole": 6,
    "unreachable": 7,
    "prohibit": 8,
}
FAMILY = {"ipv4": 2, "ipv6": 10}
PRESENCE = {"missing": 0, "exists": 1}
