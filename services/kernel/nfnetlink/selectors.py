"""What a rule can look at: for each selector of a plan, how it is loaded, what it is compared with, and what it presumes.

Owns nothing. In a table of family inet, a field of a header means nothing before the rule has made sure of the header: `network` and
`transport` say of which. `typeof` is what libnftables notes down at an anonymous set, so that it can name the selector in a listing.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from schemas.firewall_values import PROTOCOLS
from schemas.nft import Selector
from services.kernel.nfnetlink import expressions as made
from services.kernel.nfnetlink import values
from services.kernel.nfnetlink.expressions import NETWORK, TRANSPORT, Pieces
from services.kernel.nfnetlink.values import Kind

_U32 = struct.Struct("=I")
_TYPEOF, _TYPEOF_EXPRESSION, _TYPEOF_DATA = 3, 0, 1
_PAYLOAD, _META, _CT, _FIB = 7, 9, 12, 26
_BOTH_DIRECTIONS = 0xFFFFFFFF
_ADDRESSES = {"ip": (2, values.IPV4_ADDRESS, 12, (12, 11, 12)), "ip6": (10, values.IPV6_ADDRESS, 8, (13, 8, 9))}
"""Of each family: its number, its addresses, where the first one is in the header; libnftables' numbers of header, source, destination."""
_PORTS = {"tcp": 8, "udp": 6, "udplite": 7, "sctp": 10, "dccp": 9, "th": 11}
"""libnftables' numbers of the headers that begin with two ports."""
_FLAGS_OFFSET = 13


class Field(NamedTuple):
    """A selector. `place` is the header (network or transport) and the offset of a field in it; a field whose values are bits is `bits`.

    `mask` is one that is part of the selector. The values of a `literal` selector decide what the rest of the rule may look at.
    """

    load: Pieces
    kind: Kind
    typeof: bytes
    place: tuple[int, int] | None = None
    network: int = 0
    transport: int = 0
    bits: bool = False
    mask: int = 0
    literal: bool = False


def user_data(kind: int, data: bytes) -> bytes:
    """One note of libnftables' own, which the kernel keeps and does not look at."""
    return bytes((kind, len(data))) + data


def user_number(kind: int, number: int) -> bytes:
    return user_data(kind, _U32.pack(number))


def _typeof(expression: int, *numbers: int) -> bytes:
    inside = b"".join(user_number(kind, number) for kind, number in enumerate(numbers))
    return user_data(_TYPEOF, user_number(_TYPEOF_EXPRESSION, expression) + user_data(_TYPEOF_DATA, inside))


def _meta(key: int, kind: Kind, *, literal: bool = False) -> Field:
    return Field(made.load_meta(key), kind, _typeof(_META, key), literal=literal)


def _ct(key: int, kind: Kind, *, bits: bool = False) -> Field:
    return Field(made.load_ct(key), kind, _typeof(_CT, key, _BOTH_DIRECTIONS), bits=bits)


def _fib(result: int, flags: int, kind: Kind, extra: int = 0) -> Field:
    return Field(made.load_fib(result, flags | extra), kind, _typeof(_FIB, result, flags))


def _address(family: str, *, is_source: bool) -> Field:
    number, kind, first, (header, source, destination) = _ADDRESSES[family]
    offset = first if is_source else first + kind.size
    typeof = _typeof(_PAYLOAD, header, source if is_source else destination)
    return Field(made.load_payload(NETWORK, offset, kind.size), kind, typeof, (NETWORK, offset), network=number)


def _port(protocol: str, *, is_source: bool) -> Field:
    typeof = _typeof(_PAYLOAD, _PORTS[protocol], 1 if is_source else 2)
    offset = 0 if is_source else 2
    load = made.load_payload(TRANSPORT, offset, values.PORT.size)
    return Field(load, values.PORT, typeof, (TRANSPORT, offset), transport=PROTOCOLS.get(protocol, 0))


def _tcp_flags(mask: int = 0) -> Field:
    kind = Kind("tcp_flag", 15, 1, values.words(values.TCP_FLAGS, 1), shape="word")
    load = made.load_payload(TRANSPORT, _FLAGS_OFFSET, 1)
    return Field(load, kind, _typeof(_PAYLOAD, _PORTS["tcp"], 7), transport=PROTOCOLS["tcp"], bits=not mask, mask=mask)


def _words(name: str, number: int, size: int, known: dict[str, int]) -> Kind:
    return Kind(name, number, size, values.words(known, size), in_host_order=True, shape="word")


_PROTOCOL = Kind("inet_proto", 12, 1, values.protocol, in_host_order=True, shape="word")
_FAMILY = _words("nf_proto", 2, 1, values.FAMILY)
_STATE = _words("ct_state", 26, 4, values.STATE)
_STATUS = _words("ct_status", 28, 4, values.STATUS)
_DIRECTION = _words("ct_dir", 27, 1, values.DIRECTION)
_ADDRESS_TYPE = _words("fib_addrtype", 38, 4, values.ADDRESS_TYPE)
_STRING = values.NAME._replace(name="string", number=5)
_PRESENCE = _words("boolean", 0, 4, values.PRESENCE)
_BYTE = Kind("integer", 4, 1, values.byte)
_WAY_BACK = made.FIB_SADDR | made.FIB_MARK | made.FIB_IIF

SELECTORS: dict[Selector, Field] = {
    "ip saddr": _address("ip", is_source=True),
    "ip daddr": _address("ip", is_source=False),
    "ip6 saddr": _address("ip6", is_source=True),
    "ip6 daddr": _address("ip6", is_source=False),
    "@nh,40,8": Field(made.load_payload(NETWORK, 5, 1), _BYTE, b"", (NETWORK, 5), network=_ADDRESSES["ip"][0]),
    "iifname": _meta(made.META_IIFNAME, values.NAME),
    "oifname": _meta(made.META_OIFNAME, values.NAME),
    "meta mark": _meta(made.META_MARK, values.MARK),
    "meta nfproto": _meta(made.META_NFPROTO, _FAMILY, literal=True),
    "meta l4proto": _meta(made.META_L4PROTO, _PROTOCOL, literal=True),
    "tcp flags": _tcp_flags(),
    "tcp flags & (syn | rst)": _tcp_flags(values.TCP_FLAGS["syn"] | values.TCP_FLAGS["rst"]),
    "ct state": _ct(made.CT_STATE, _STATE, bits=True),
    "ct status": _ct(made.CT_STATUS, _STATUS, bits=True),
    "ct direction": _ct(made.CT_DIRECTION, _DIRECTION),
    "ct mark": _ct(made.CT_MARK, values.MARK),
    "fib saddr type": _fib(made.FIB_ADDRTYPE, made.FIB_SADDR, _ADDRESS_TYPE),
    "fib daddr type": _fib(made.FIB_ADDRTYPE, made.FIB_DADDR, _ADDRESS_TYPE),
    "fib saddr . mark . iif oif": _fib(made.FIB_OIF, _WAY_BACK, _PRESENCE, made.FIB_PRESENT),
    "fib saddr . mark oifname": _fib(made.FIB_OIFNAME, made.FIB_SADDR | made.FIB_MARK, _STRING),
}
for _protocol in _PORTS:
    for _end in ("sport", "dport"):
        SELECTORS[f"{_protocol} {_end}"] = _port(_protocol, is_source=_end == "sport")  # type: ignore[index]
