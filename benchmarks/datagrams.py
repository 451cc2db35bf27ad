"""UDP datagrams in IPv4, as bytes with right checksums (RFC 768, RFC 791), bare or inside VXLAN (RFC 7348). Pure."""

from __future__ import annotations

import socket
import struct

_HEADER = struct.Struct("!BBHHHBBH4s4s")
_UDP = struct.Struct("!HHHH")
_VXLAN = struct.Struct("!II")
_VNI_IS_VALID = 0x08000000
_ETHERTYPE_IPV4 = b"\x08\x00"
_VERSION_AND_LENGTH = 0x45
_TTL = 64


def datagram(source: str, destination: str, ports: tuple[int, int], payload: bytes) -> bytes:
    """One packet from its IP header on; `ports` are source and destination."""
    ends = socket.inet_aton(source) + socket.inet_aton(destination)
    length = _UDP.size + len(payload)
    pseudo = ends + struct.pack("!BBH", 0, socket.IPPROTO_UDP, length)
    checksum = internet_checksum(pseudo + _UDP.pack(*ports, length, 0) + payload) or 0xFFFF
    fixed = (_VERSION_AND_LENGTH, 0, _HEADER.size + length, 0, 0, _TTL, socket.IPPROTO_UDP)
    header = _HEADER.pack(*fixed, internet_checksum(_HEADER.pack(*fixed, 0, ends[:4], ends[4:])), ends[:4], ends[4:])
    return header + _UDP.pack(*ports, length, checksum) + payload


def in_vxlan(packet: bytes, vni: int, macs: tuple[str, str]) -> bytes:
    """The payload of the datagram that carries this IPv4 packet; `macs` are the inner frame's source and destination."""
    source, destination = (bytes.fromhex(mac.replace(":", "")) for mac in macs)
    return _VXLAN.pack(_VNI_IS_VALID, vni << 8) + destination + source + _ETHERTYPE_IPV4 + packet


def ends_of(packet: bytes) -> tuple[str, str]:
    """The source and destination of an IPv4 packet; OSError when it is too short to have any."""
    return socket.inet_ntoa(packet[12:16]), socket.inet_ntoa(packet[16:20])


def internet_checksum(data: bytes) -> int:
    """The ones' complement sum over 16-bit words (RFC 1071); 0 over data that holds its own checksum."""
    padded = data + b"\0" * (len(data) % 2)
    total: int = sum(struct.unpack(f"!{len(padded) // 2}H", padded))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF
