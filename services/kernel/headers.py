"""Packet headers, as many bytes of them as the kernel shows of a traced packet. Pure.

What is not there or not known is None or 0, never a guess: headers come cut off (40 bytes of the network's, 20 of the transport's) and a
fragment that is not the first has no transport header at all.
"""

from __future__ import annotations

import struct
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from schemas.values import IPV4, IPV6, Address, Family

WireguardMessage = Literal["initiation", "response", "cookie", "data"]
OverlayProtocol = Literal["VXLAN", "GENEVE"]

ICMP, TCP, UDP, ICMPV6, SCTP = 1, 6, 17, 58, 132
_PORTED = (TCP, UDP, SCTP)
_PORTS = struct.Struct("!HH")
_WIREGUARD = struct.Struct("<B3xI")
_COUNTER = struct.Struct("<I")
_UDP_BYTES = _OVERLAY_BYTES = 8
_MESSAGES: dict[int, WireguardMessage] = {1: "initiation", 2: "response", 3: "cookie", 4: "data"}
_TCP_FLAGS_AT = 13
_ECHO = struct.Struct("!BBxxHH")
ECHO = {8: "EchoRequest", 0: "EchoReply", 128: "EchoRequest", 129: "EchoReply"}
"""ICMP types that carry an identifier and a sequence number. No number means one thing in one family and another in the other."""
_IPV4_BYTES, _IPV6_BYTES = 20, 40
_IPV4_FIELDS = struct.Struct("!HHH")  # total length, identification, flags and offset
_IPV6_FIELDS = struct.Struct("!H")
_OFFSET, _MORE = 0x1FFF, 0x2000
_FRAGMENT = 44
_FRAGMENT_HEADER = struct.Struct("!BxHI")  # next header, offset and flags, identification
_OFFSET_BITS = 3
_EXTENSIONS = (0, 43, _FRAGMENT, 60)  # hop-by-hop, routing, fragment, destination options


class Packet(Struct, frozen=True):
    """The headers of one packet. `length` is that of the whole packet in bytes, from the network header on.

    `protocol` is the transport's number, None behind IPv6 extension headers that were cut off. `ident` is IPv4's identification; IPv6 has
    one in fragments alone. Ports are 0 where the protocol has none, or a fragment does not carry them. `kind` and `code` are ICMP's,
    `flags` TCP's.
    """

    source: Address
    destination: Address
    protocol: int | None
    length: int
    ident: int = 0
    fragment: bool = False
    source_port: int = 0
    destination_port: int = 0
    kind: int | None = None
    code: int | None = None
    flags: int = 0
    echo_id: int | None = None
    echo_sequence: int | None = None
    transport: bytes = b""

    @property
    def family(self) -> Family:
        return self.source.family


class WireguardHeader(Struct, frozen=True):
    """What an outer packet says in clear. `index` is the receiver's (for an initiation the sender's), `counter` its low 32 bits.

    Both are the same bytes on both hosts, so that they name one packet.
    """

    message: WireguardMessage
    index: int
    counter: int | None = None


class TunnelHeader(Struct, frozen=True):
    """The overlay header of an outer packet: its kind, and the network identifier."""

    protocol: OverlayProtocol
    vni: int


def packet(network: bytes, transport: bytes) -> Packet | None:
    """The packet behind these headers; None for what is neither IPv4 nor IPv6, or too short to say."""
    version = network[0] >> 4 if network else 0
    if version == IPV4 and len(network) >= _IPV4_BYTES:
        length, ident, offset = _IPV4_FIELDS.unpack_from(network, 2)
        protocol = network[9]
        # Of a fragment that is not the first, what follows the network header is the middle of something.
        carried = b"" if offset & _OFFSET else transport
        more = _transport(protocol, carried)
        return Packet(
            Address.of(network[12:16]), Address.of(network[16:20]), protocol, length, ident, bool(offset & (_OFFSET | _MORE)), **more
        )
    if version == IPV6 and len(network) >= _IPV6_BYTES:
        (payload,) = _IPV6_FIELDS.unpack_from(network, 4)
        following = network[6]
        known = None if following in _EXTENSIONS else following
        source, destination = Address.of(network[8:24]), Address.of(network[24:40])
        is_fragment = following == _FRAGMENT
        return Packet(source, destination, known, payload + _IPV6_BYTES, fragment=is_fragment, **_transport(known, transport))
    return None


def piece(item: Packet, data: bytes) -> Packet:
    """An IPv6 fragment with what its extension header says, and the transport's behind it; `data` is what follows the network header.

    Any other packet as it is, and one whose header was cut off.
    """
    if item.family == IPV4 or not item.fragment or len(data) < _FRAGMENT_HEADER.size:
        return item
    protocol, offset, ident = _FRAGMENT_HEADER.unpack_from(data)
    known = None if protocol in _EXTENSIONS else protocol
    carried = b"" if offset >> _OFFSET_BITS else data[_FRAGMENT_HEADER.size :]
    return replace(item, protocol=known, ident=ident, **_transport(known, carried))


def wireguard(item: Packet) -> WireguardHeader | None:
    """The WireGuard header of a UDP packet, None for what cannot be one. Whether the port is WireGuard's is the caller's to know."""
    data = item.transport[_UDP_BYTES:]
    if item.protocol != UDP or len(data) < _WIREGUARD.size or data[1:4] != b"\0\0\0":
        return None
    number, index = _WIREGUARD.unpack_from(data)
    if number not in _MESSAGES:
        return None
    kind = _MESSAGES[number]
    has_counter = kind == "data" and len(data) >= _WIREGUARD.size + _COUNTER.size
    return WireguardHeader(kind, index, _COUNTER.unpack_from(data, _WIREGUARD.size)[0] if has_counter else None)


def tunnel(item: Packet, protocol: OverlayProtocol) -> TunnelHeader | None:
    """The overlay header of a UDP packet to the port of `protocol`; None when it is cut off or none."""
    data = item.transport[_UDP_BYTES:]
    if item.protocol != UDP or len(data) < _OVERLAY_BYTES:
        return None
    is_valid = data[0] & 0x08 if protocol == "VXLAN" else not data[0] >> 6
    return TunnelHeader(protocol, int.from_bytes(data[4:7])) if is_valid else None


def _transport(protocol: int | None, data: bytes) -> dict[str, Any]:
    """What the transport header adds to a packet, by field."""
    found: dict[str, Any] = {"transport": data}
    if protocol in _PORTED and len(data) >= _PORTS.size:
        found["source_port"], found["destination_port"] = _PORTS.unpack_from(data)
    if protocol == TCP and len(data) > _TCP_FLAGS_AT:
        found["flags"] = data[_TCP_FLAGS_AT]
    if protocol in (ICMP, ICMPV6) and len(data) >= _ECHO.size:
        found["kind"], found["code"], found["echo_id"], found["echo_sequence"] = _ECHO.unpack_from(data)
        if found["kind"] not in ECHO:
            del found["echo_id"], found["echo_sequence"]
    return found
