"""WireGuard in the kernel, by generic netlink (include/uapi/linux/wireguard.h).

Owns nothing of its own: devices and peers belong to ``wireguard``. Whether the kernel has the module is asked by the name of its generic
netlink family, which loads it where that is allowed. Fails with OSError; one message is one change of one device, applied attribute by
attribute.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import struct
from collections.abc import Iterable

from services.kernel.netlink import (
    BE16,
    CREATE,
    EXCL,
    NETLINK_GENERIC,
    U8,
    U16,
    U32,
    NetlinkError,
    NetlinkSocket,
    attribute,
    attribute_list,
    attributes,
    nested,
    number_of,
    text_attribute,
)
from services.kernel.wireguard_device import DeviceState, PeerChange, PeerState

_GENL = struct.Struct("=BBxx")
_CTRL_ID, _GETFAMILY, _FAMILY_ID, _FAMILY_NAME = 0x10, 3, 1, 2
_GET_DEVICE, _SET_DEVICE = 0, 1
_IFNAME, _PRIVATE_KEY, _PUBLIC_KEY, _LISTEN_PORT, _PEERS = 2, 3, 4, 6, 8
_PEER_KEY, _PEER_FLAGS, _PEER_ENDPOINT, _PEER_KEEPALIVE, _PEER_HANDSHAKE, _PEER_ALLOWED = 1, 3, 4, 5, 6, 9
_REMOVE, _REPLACE_ALLOWED = 1, 2
_ALLOWED_FAMILY, _ALLOWED_ADDRESS, _ALLOWED_LENGTH = 1, 2, 3
_NEWLINK = 16
_LINK_INFO = struct.Struct("=BxHiII")
_LINK_NAME, _LINK_LINKINFO, _LINK_KIND = 3, 18, 1
_ALLOWED_PER_MESSAGE = 500


class KernelModule:
    """Devices of the kernel module."""

    def __init__(self, rtnetlink: NetlinkSocket) -> None:
        self._rtnetlink = rtnetlink
        self._socket: NetlinkSocket | None = None
        self._family = 0

    def is_available(self) -> bool:
        """True when the kernel has WireGuard, loading the module if need be."""
        try:
            self._generic()
        except OSError:
            return False
        return True

    def create(self, name: str) -> None:
        body = _LINK_INFO.pack(0, 0, 0, 0, 0) + text_attribute(_LINK_NAME, name)
        body += nested(_LINK_LINKINFO, text_attribute(_LINK_KIND, "wireguard"))
        self._rtnetlink.request(_NEWLINK, body, CREATE | EXCL)

    def get(self, name: str) -> DeviceState:
        generic = self._generic()
        bodies = generic.dump(self._family, _GENL.pack(_GET_DEVICE, 1) + text_attribute(_IFNAME, name))
        return decode_device(bodies)

    def set(self, name: str, private_key: bytes | None, listen_port: int | None, peers: tuple[PeerChange, ...]) -> None:
        head = b""
        if private_key is not None:
            head += attribute(_PRIVATE_KEY, private_key)
        if listen_port is not None:
            head += attribute(_LISTEN_PORT, U16.pack(listen_port))
        if head:
            self._send(name, head)
        for peer in peers:
            for part in encode_peer(peer):
                self._send(name, nested(_PEERS, nested(0, part)))

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, name: str, body: bytes) -> None:
        self._generic().request(self._family, _GENL.pack(_SET_DEVICE, 1) + text_attribute(_IFNAME, name) + body)

    def _generic(self) -> NetlinkSocket:
        if self._socket is None:
            generic = NetlinkSocket(NETLINK_GENERIC)
            try:
                [answer] = generic.ask(_CTRL_ID, _GENL.pack(_GETFAMILY, 1) + text_attribute(_FAMILY_NAME, "wireguard"))
            except (NetlinkError, ValueError) as error:
                generic.close()
                raise NetlinkError(errno.ENOENT, "this kernel has no WireGuard") from error
            self._family = number_of(attributes(answer, _GENL.size)[_FAMILY_ID])
            self._socket = generic
        return self._socket


def encode_peer(peer: PeerChange) -> list[bytes]:
    """The attributes of one peer, over several messages when it has many AllowedIPs."""
    key = attribute(_PEER_KEY, peer.public_key)
    if peer.remove:
        return [key + attribute(_PEER_FLAGS, U32.pack(_REMOVE))]
    first = b""
    if peer.endpoint:
        host, _, port = peer.endpoint.rpartition(":")
        first += attribute(_PEER_ENDPOINT, struct.pack("=H", socket.AF_INET) + BE16.pack(int(port)) + socket.inet_aton(host) + bytes(8))
    if peer.keepalive_seconds is not None:
        first += attribute(_PEER_KEEPALIVE, U16.pack(peer.keepalive_seconds))
    if peer.allowed_ips is None:
        return [key + first]
    prefixes = sorted(peer.allowed_ips)
    chunks = [prefixes[start : start + _ALLOWED_PER_MESSAGE] for start in range(0, len(prefixes), _ALLOWED_PER_MESSAGE)] or [[]]
    flags = attribute(_PEER_FLAGS, U32.pack(_REPLACE_ALLOWED))
    return [key + (flags + first if not number else b"") + _allowed(chunk) for number, chunk in enumerate(chunks)]


def _allowed(prefixes: Iterable[str]) -> bytes:
    members = []
    for prefix in prefixes:
        network = ipaddress.ip_network(prefix)
        family = socket.AF_INET if network.version == 4 else socket.AF_INET6  # noqa: PLR2004 - the two families of IP
        fields = attribute(_ALLOWED_FAMILY, U16.pack(family)) + attribute(_ALLOWED_ADDRESS, network.network_address.packed)
        members.append(nested(0, fields, attribute(_ALLOWED_LENGTH, U8.pack(network.prefixlen))))
    return nested(_PEER_ALLOWED, *members) if members else b""


def decode_device(bodies: Iterable[bytes]) -> DeviceState:
    """A device from the messages of its dump; a peer with many AllowedIPs goes on in the next message."""
    private, public, port = b"", b"", 0
    peers: dict[bytes, PeerState] = {}
    for body in bodies:
        found = attributes(body, _GENL.size)
        private, public = found.get(_PRIVATE_KEY, private), found.get(_PUBLIC_KEY, public)
        port = number_of(found[_LISTEN_PORT]) if _LISTEN_PORT in found else port
        for _, value in attribute_list(found.get(_PEERS, b"")):
            key, peer = _peer(value)
            earlier = peers.get(key)
            if earlier is not None:
                peer = PeerState(earlier.endpoint, earlier.allowed_ips | peer.allowed_ips, earlier.keepalive_seconds, earlier.handshake_s)
            peers[key] = peer
    return DeviceState(private if any(private) else b"", public, port, peers)


def _peer(value: bytes) -> tuple[bytes, PeerState]:
    found = attributes(value)
    seconds, nanoseconds = struct.unpack("=qq", found[_PEER_HANDSHAKE]) if _PEER_HANDSHAKE in found else (0, 0)
    allowed = frozenset(_prefix(member) for _, member in attribute_list(found.get(_PEER_ALLOWED, b"")))
    keepalive = number_of(found.get(_PEER_KEEPALIVE, b""))
    return found[_PEER_KEY], PeerState(_endpoint(found.get(_PEER_ENDPOINT, b"")), allowed, keepalive, seconds + nanoseconds / 1e9)


def _prefix(member: bytes) -> str:
    found = attributes(member)
    return f"{ipaddress.ip_address(found[_ALLOWED_ADDRESS])}/{number_of(found[_ALLOWED_LENGTH])}"


def _endpoint(value: bytes) -> str:
    if len(value) < 8:  # noqa: PLR2004 - family, port and an IPv4 address
        return ""
    port = BE16.unpack_from(value, 2)[0]
    if number_of(value[:2]) == socket.AF_INET:
        return f"{socket.inet_ntoa(value[4:8])}:{port}"
    return f"[{ipaddress.ip_address(value[8:24])}]:{port}"
