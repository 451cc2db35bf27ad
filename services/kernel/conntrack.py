"""Connection tracking: IPv4 entries read, and deleted by what they are.

Owns nothing: entries belong to their flows. An entry is deleted by its original direction and zone; one that went away meanwhile is not
counted. Fails with Transient when the table cannot be read; a kernel without connection tracking has no entries.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Iterable, Iterator

from schemas.values import Address
from services.kernel.failures import mapped, unreadable
from services.kernel.netlink import BE16, NETLINK_NETFILTER, U8, Attributes, NetlinkError, NetlinkSocket, attribute, attributes, nested
from services.kernel.port import Flow

_GET, _DELETE = 0x101, 0x102
_NFGEN = struct.Struct("=BBH")
_ORIGINAL, _REPLY, _ZONE = 1, 2, 18
_IP, _PROTO = 1, 2
_SOURCE, _DESTINATION = 1, 2
_NUMBER, _SOURCE_PORT, _DESTINATION_PORT, _ICMP_ID, _ICMP_TYPE, _ICMP_CODE = 1, 2, 3, 4, 5, 6
_ABSENT = (errno.EINVAL, errno.EOPNOTSUPP, errno.EPROTONOSUPPORT)
_ICMP = 1


class Conntrack:
    """The connection-tracking table of the namespace."""

    def __init__(self) -> None:
        self._netlink = NetlinkSocket(NETLINK_NETFILTER)

    def flows(self) -> Iterator[Flow]:
        try:
            bodies = self._netlink.dump(_GET, _NFGEN.pack(socket.AF_INET, 0, 0))
        except OSError as error:
            if error.errno in _ABSENT:
                return
            raise unreadable(error, "connection tracking") from error
        yield from (flow for body in bodies if (flow := _decode(body)) is not None)

    def drop(self, flows: Iterable[Flow]) -> int:
        return sum(self._drop(flow) for flow in flows)

    def close(self) -> None:
        self._netlink.close()

    def _drop(self, flow: Flow) -> bool:
        try:
            self._netlink.request(_DELETE, _NFGEN.pack(socket.AF_INET, 0, 0) + _original(flow))
        except NetlinkError as error:
            if error.errno == errno.ENOENT:
                return False
            raise mapped(error, f"drop flow {flow.source} to {flow.destination}") from error
        return True


def _original(flow: Flow) -> bytes:
    addresses = nested(_IP, attribute(_SOURCE, socket.inet_aton(flow.source)), attribute(_DESTINATION, socket.inet_aton(flow.destination)))
    number = attribute(_NUMBER, U8.pack(flow.protocol))
    if flow.protocol == _ICMP:
        # An ICMP entry's identifier stands in the source port, its type and code in the destination port.
        kind, code = flow.destination_port >> 8, flow.destination_port & 0xFF
        ports = (
            attribute(_ICMP_ID, BE16.pack(flow.source_port)) + attribute(_ICMP_TYPE, U8.pack(kind)) + attribute(_ICMP_CODE, U8.pack(code))
        )
    else:
        ports = attribute(_SOURCE_PORT, BE16.pack(flow.source_port)) + attribute(_DESTINATION_PORT, BE16.pack(flow.destination_port))
    zone = attribute(_ZONE, BE16.pack(flow.zone)) if flow.zone else b""
    return nested(_ORIGINAL, addresses, nested(_PROTO, number, ports)) + zone


def _decode(body: bytes) -> Flow | None:
    found = attributes(body, _NFGEN.size)
    original, reply = attributes(found.get(_ORIGINAL, b"")), attributes(found.get(_REPLY, b""))
    source, destination = _addresses(original)
    reply_source, reply_destination = _addresses(reply)
    if not (source and destination and reply_source and reply_destination):
        return None
    proto = attributes(original.get(_PROTO, b""))
    protocol = proto[_NUMBER][0]
    if protocol == _ICMP:
        ports = _port(proto, _ICMP_ID), proto.get(_ICMP_TYPE, b"\0")[0] << 8 | proto.get(_ICMP_CODE, b"\0")[0]
    else:
        ports = _port(proto, _SOURCE_PORT), _port(proto, _DESTINATION_PORT)
    zone = BE16.unpack(found[_ZONE])[0] if _ZONE in found else 0
    return Flow(protocol, source, destination, reply_source, reply_destination, *ports, zone)


def _addresses(direction: Attributes) -> tuple[Address | None, Address | None]:
    found = attributes(direction.get(_IP, b""))
    if _SOURCE not in found or _DESTINATION not in found:
        return None, None
    return Address(socket.inet_ntoa(found[_SOURCE])), Address(socket.inet_ntoa(found[_DESTINATION]))


def _port(proto: Attributes, kind: int) -> int:
    return int(BE16.unpack(proto[kind])[0]) if kind in proto else 0
