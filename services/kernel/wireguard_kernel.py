"""WireGuard in the kernel, by generic netlink (include/uapi/linux/wireguard.h).

Owns nothing of its own: devices and peers belong to ``wireguard``. Whether the kernel has the module is asked by the name of its generic
netlink family, which loads it where that is allowed. Fails with OSError; one message is one change of one device, applied attribute by
attribute. Never `replace_peers`, which would cut every session of the device.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence

from pyroute2.netlink import CTRL_CMD_GETFAMILY, GENL_ID_CTRL, NLM_F_ACK, NLM_F_REQUEST, ctrlmsg
from pyroute2.netlink.generic import AsyncGenericNetlinkSocket
from pyroute2.netlink.generic.wireguard import WG_CMD_GET_DEVICE, WG_GENL_NAME, WG_GENL_VERSION, AsyncWireGuard, wgmsg

from services.kernel.pyroute import Connection, Library, Message
from services.kernel.wireguard_device import DeviceState, PeerChange, PeerState, Settings

_ALLOWED_PER_MESSAGE = 500


class KernelModule:
    """Devices of the kernel module."""

    def __init__(self, library: Library, rtnetlink: Connection) -> None:
        self._library = library
        self._rtnetlink = rtnetlink
        self._generic = Connection(library, AsyncWireGuard)

    def is_available(self) -> bool:
        """True when the kernel has WireGuard, loading the module if need be."""
        # The library's own look-up writes an error to the log, and sets the log up, where there is none.
        controller = Connection(self._library, AsyncGenericNetlinkSocket)
        try:
            controller.ask(_family, GENL_ID_CTRL, NLM_F_REQUEST | NLM_F_ACK)
        except OSError:
            return False
        finally:
            controller.close()
        return True

    def create(self, name: str) -> None:
        self._rtnetlink.call("link", "add", ifname=name, kind="wireguard")

    def get(self, name: str) -> DeviceState:
        def message() -> wgmsg:
            asked = wgmsg()
            asked["cmd"], asked["version"] = WG_CMD_GET_DEVICE, WG_GENL_VERSION
            asked["attrs"].append(["WGDEVICE_A_IFNAME", name])
            return asked

        return decode_device(self._generic.dump(message))

    def set(self, name: str, settings: Settings, peers: Sequence[PeerChange]) -> None:
        if settings != Settings():
            private = None if settings.private_key is None else base64.b64encode(settings.private_key)
            self._generic.call("set", name, private_key=private, listen_port=settings.listen_port, fwmark=settings.fwmark)
        for peer in peers:
            for part in peer_messages(peer):
                self._generic.call("set", name, peer=part)


def peer_messages(peer: PeerChange) -> list[dict[str, object]]:
    """One peer in the library's words, over several messages when it has many AllowedIPs."""
    key = {"public_key": base64.b64encode(peer.public_key)}
    if peer.remove:
        return [{**key, "remove": True}]
    first: dict[str, object] = {}
    if peer.endpoint:
        host, _, port = peer.endpoint.rpartition(":")
        first |= {"endpoint_addr": host.strip("[]"), "endpoint_port": int(port)}
    if peer.keepalive_seconds is not None:
        first["persistent_keepalive"] = peer.keepalive_seconds
    if peer.allowed_ips is None:
        return [{**key, **first}]
    prefixes = sorted(peer.allowed_ips)
    chunks = [prefixes[start : start + _ALLOWED_PER_MESSAGE] for start in range(0, len(prefixes), _ALLOWED_PER_MESSAGE)] or [[]]
    first["replace_allowed_ips"] = True
    return [{**key, **(first if not number else {}), "allowed_ips": chunk} for number, chunk in enumerate(chunks)]


def decode_device(messages: Iterable[Message]) -> DeviceState:
    """A device from the messages of its dump; a peer with many AllowedIPs goes on in the next message."""
    private, public, port, fwmark = b"", b"", 0, 0
    peers: dict[bytes, PeerState] = {}
    for message in messages:
        private = base64.b64decode(message.text("WGDEVICE_A_PRIVATE_KEY")) or private
        public = base64.b64decode(message.text("WGDEVICE_A_PUBLIC_KEY")) or public
        port = message.number("WGDEVICE_A_LISTEN_PORT") or port
        fwmark = message.number("WGDEVICE_A_FWMARK") or fwmark
        for found in message.inners("WGDEVICE_A_PEERS"):
            key, peer = base64.b64decode(found.text("WGPEER_A_PUBLIC_KEY")), _peer(found)
            earlier = peers.get(key)
            if earlier is not None:
                peer = PeerState(earlier.endpoint, earlier.allowed_ips | peer.allowed_ips, earlier.keepalive_seconds, earlier.handshake_s)
            peers[key] = peer
    return DeviceState(private if any(private) else b"", public, port, peers, fwmark)


def _family() -> ctrlmsg:
    asked = ctrlmsg()
    asked["cmd"], asked["version"] = CTRL_CMD_GETFAMILY, 1
    asked["attrs"].append(["CTRL_ATTR_FAMILY_NAME", WG_GENL_NAME])
    return asked


def _peer(found: Message) -> PeerState:
    time, end = found.record("WGPEER_A_LAST_HANDSHAKE_TIME"), found.record("WGPEER_A_ENDPOINT")
    handshake_s = time["tv_sec"] + time["tv_nsec"] / 1e9 if time else 0.0
    allowed = frozenset(member.field_text("addr") for member in found.inners("WGPEER_A_ALLOWEDIPS"))
    return PeerState(_endpoint(end), allowed, found.number("WGPEER_A_PERSISTENT_KEEPALIVE_INTERVAL"), handshake_s)


def _endpoint(end: dict[str, object]) -> str:
    if not end:
        return ""
    return f"[{end['addr']}]:{end['port']}" if ":" in str(end["addr"]) else f"{end['addr']}:{end['port']}"
