"""WireGuard in the kernel, by generic netlink (include/uapi/linux/wireguard.h).

Owns nothing of its own: devices and peers belong to ``wireguard``. Whether the kernel has the module is asked by the name of its generic
netlink family, which loads it where that is allowed. Fails with OSError; a change of many peers goes in as few messages as fit, each of
them applied attribute by attribute, in order.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable, Iterator, Sequence

from msgspec.structs import replace

from schemas.values import SOCKET_FAMILY, Address, Endpoint, Prefix
from services.kernel.netlink import (
    U8,
    U16,
    U32,
    Attributes,
    NetlinkSocket,
    attribute,
    attributes,
    each_attribute,
    nested,
    number_of,
    text_attribute,
)
from services.kernel.pyroute import Connection
from services.kernel.wireguard_device import DeviceState, PeerChange, PeerState, Settings

_CONTROLLER, _GET_FAMILY, _FAMILY_ID, _FAMILY_NAME = 0x10, 3, 1, 2
_GET_DEVICE, _SET_DEVICE = 0, 1
_HEAD = struct.Struct("=BBxx")  # command, version
_IFNAME, _PRIVATE_KEY, _PUBLIC_KEY, _LISTEN_PORT, _FWMARK, _PEERS = 2, 3, 4, 6, 7, 8
_PEER_KEY, _PEER_FLAGS, _ENDPOINT, _KEEPALIVE, _HANDSHAKE, _RX_BYTES, _TX_BYTES, _ALLOWED_IPS = 1, 3, 4, 5, 6, 7, 8, 9
_REMOVE_ME = U32.pack(1)
_FAMILY, _ADDRESS, _LENGTH = 1, 2, 3
_TIMESPEC = struct.Struct("=qq")
_SOCKADDR: dict[int, struct.Struct] = {socket.AF_INET: struct.Struct("=H2s4s8x"), socket.AF_INET6: struct.Struct("=H2s4x16s4x")}
_MESSAGE_BYTES = 32 << 10
"""How much goes into one message: an array's length is 16 bits, and a socket's buffer has its bounds."""
_ALLOWED_PER_PART = 500


class KernelModule:
    """Devices of the kernel module, over a socket of generic netlink and one for links."""

    def __init__(self, generic: NetlinkSocket, rtnetlink: Connection) -> None:
        self._generic = generic
        self._rtnetlink = rtnetlink

    def is_available(self) -> bool:
        """True when the kernel has WireGuard, loading the module if need be."""
        try:
            self._family()
        except OSError:
            return False
        return True

    def create(self, name: str) -> None:
        self._rtnetlink.call("link", "add", ifname=name, kind="wireguard")

    def get(self, name: str) -> DeviceState:
        return decode_device(self._generic.dump(self._family(), _HEAD.pack(_GET_DEVICE, 1) + text_attribute(_IFNAME, name)))

    def set(self, name: str, settings: Settings, peers: Sequence[PeerChange]) -> None:
        family = self._family()
        for body in encode_changes(name, settings, peers):
            self._generic.request(family, body)

    def _family(self) -> int:
        """The number of WireGuard's family, which is another one after the module was loaded anew."""
        [answer] = self._generic.ask(_CONTROLLER, _HEAD.pack(_GET_FAMILY, 1) + text_attribute(_FAMILY_NAME, "wireguard"))
        return number_of(attributes(answer, _HEAD.size)[_FAMILY_ID])


def encode_changes(name: str, settings: Settings, peers: Iterable[PeerChange]) -> Iterator[bytes]:
    """The messages that make these changes, in this order."""
    head = _HEAD.pack(_SET_DEVICE, 1) + text_attribute(_IFNAME, name)
    body = b""
    if settings.private_key is not None:
        body += attribute(_PRIVATE_KEY, settings.private_key)
    if settings.listen_port is not None:
        body += attribute(_LISTEN_PORT, U16.pack(settings.listen_port))
    if settings.fwmark is not None:
        body += attribute(_FWMARK, U32.pack(settings.fwmark))
    if body:
        yield head + body
    parts = b""
    for part in (part for peer in peers for part in _peer_parts(peer)):
        if parts and len(parts) + len(part) > _MESSAGE_BYTES:
            yield head + nested(_PEERS, parts)
            parts = b""
        parts += part
    if parts:
        yield head + nested(_PEERS, parts)


def _peer_parts(peer: PeerChange) -> Iterator[bytes]:
    """One peer, in several parts when it gets many AllowedIPs."""
    key = attribute(_PEER_KEY, peer.public_key)
    if peer.remove:
        yield nested(0, key + attribute(_PEER_FLAGS, _REMOVE_ME))
        return
    first = key
    if peer.endpoint:
        first += attribute(_ENDPOINT, _sockaddr(Endpoint(peer.endpoint)))
    if peer.keepalive_seconds is not None:
        first += attribute(_KEEPALIVE, U16.pack(peer.keepalive_seconds))
    prefixes = [_allowed_ip(Prefix(prefix)) for prefix in sorted(peer.allowed_ips)]
    yield nested(0, first + nested(_ALLOWED_IPS, b"".join(prefixes[:_ALLOWED_PER_PART])))
    for start in range(_ALLOWED_PER_PART, len(prefixes), _ALLOWED_PER_PART):
        yield nested(0, key + nested(_ALLOWED_IPS, b"".join(prefixes[start : start + _ALLOWED_PER_PART])))


def _allowed_ip(prefix: Prefix) -> bytes:
    family = SOCKET_FAMILY[prefix.family]
    return nested(0, attribute(_FAMILY, U16.pack(family)) + attribute(_ADDRESS, prefix.packed) + attribute(_LENGTH, U8.pack(prefix.length)))


def _sockaddr(endpoint: Endpoint) -> bytes:
    address = endpoint.address
    assert address is not None, "devices are told addresses, not names"
    family = SOCKET_FAMILY[address.family]
    return _SOCKADDR[family].pack(family, endpoint.port.to_bytes(2, "big"), address.packed)


def decode_device(bodies: Iterable[bytes]) -> DeviceState:
    """A device from the messages of its dump; a peer with many AllowedIPs goes on in the next message."""
    device: Attributes = {}
    peers: dict[bytes, PeerState] = {}
    for body in bodies:
        message = attributes(body, _HEAD.size)
        device = message | device
        for _, part in each_attribute(message.get(_PEERS, b"")):
            found = attributes(part)
            key, peer = found[_PEER_KEY], _peer(found)
            earlier = peers.get(key)
            peers[key] = peer if earlier is None else replace(earlier, allowed_ips=earlier.allowed_ips | peer.allowed_ips)
    private = device.get(_PRIVATE_KEY, b"")
    return DeviceState(
        private if any(private) else b"",
        device.get(_PUBLIC_KEY, b""),
        number_of(device.get(_LISTEN_PORT, b"")),
        peers,
        number_of(device.get(_FWMARK, b"")),
    )


def _peer(found: Attributes) -> PeerState:
    seconds, nanoseconds = _TIMESPEC.unpack(found[_HANDSHAKE]) if _HANDSHAKE in found else (0, 0)
    return PeerState(
        _endpoint(found.get(_ENDPOINT, b"")),
        frozenset(_prefix(attributes(part)) for _, part in each_attribute(found.get(_ALLOWED_IPS, b""))),
        number_of(found.get(_KEEPALIVE, b"")),
        seconds + nanoseconds / 1e9,
        number_of(found.get(_RX_BYTES, b"")),
        number_of(found.get(_TX_BYTES, b"")),
    )


def _prefix(found: Attributes) -> str:
    return f"{Address.of(found[_ADDRESS])}/{number_of(found[_LENGTH])}"


def _endpoint(raw: bytes) -> str:
    form = _SOCKADDR.get(number_of(raw[:2]))
    if form is None or len(raw) < form.size:
        return ""
    _, port, address = form.unpack_from(raw)
    return str(Endpoint.at(Address.of(address), int.from_bytes(port, "big")))
