"""Neighbours of both families and forwarding entries of VXLAN devices, both of which rtnetlink has as neighbours (linux/neighbour.h).

Owns every permanent neighbour on a link of ours, and every forwarding entry of a VXLAN device of ours, but the one for all addresses of a
link with a far end: that one is part of the link. Found after a restart through the link's alias. What the kernel learns itself is not
permanent and never listed; a planned neighbour takes its place. On anybody else's link nothing is listed, and writing is a Conflict. Fails
with Waiting while the link is not there. A link that gets another MAC, or is set down, loses its neighbours.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Iterator, Mapping

from msgspec import Struct

from schemas.host_objects import FdbEntry, Neighbour, VxlanLink
from schemas.values import SOCKET_FAMILY, Address, Mac
from services.kernel import vxlan
from services.kernel.failures import mapped, unreadable
from services.kernel.links import Device
from services.kernel.netlink import CREATE, REPLACE, Attributes, NetlinkError, NetlinkSocket, attribute, attributes
from services.kernel.transaction import Change, Held, Listed
from services.runtime.errors import Conflict, Permanent, Waiting

_NEWNEIGH, _DELNEIGH, _GETNEIGH = 28, 29, 30
_ND = struct.Struct("=BxxxiHBB")  # family, index of the link, state, flags, type
_DST, _LLADDR = 1, 2
_ODD = {6, 7, 8, 11, 13}  # a port, a VNI or an outgoing link other than the device's, a VNI that it came with, a group of next hops
_PERMANENT = 0x80
_SELF = 0x02
_AF_BRIDGE = 7
_MAC_BYTES = 6
_GROUP_BIT = 0x01
_EVERYBODY = Mac("00:00:00:00:00:00")
_ABSENT = (errno.ENOENT, errno.ENODEV, errno.EADDRNOTAVAIL)


class _Entry(Struct, frozen=True):
    """One entry as the kernel tells it. `found` are its attributes by number."""

    family: int
    index: int
    state: int
    flags: int
    found: Attributes


class Neighbours:
    """Neighbours and forwarding entries of the devices given with each call."""

    def __init__(self, netlink: NetlinkSocket) -> None:
        self._netlink = netlink

    def read(self, devices: Mapping[str, Device]) -> dict[str, Held]:
        """Own neighbours and forwarding entries by key."""
        own = {device.index: device for device in devices.values() if device.is_own}
        if not own:
            return {}
        found: dict[str, Held] = {item.key: item for item in self._neighbours(own)}
        # Every bridge of the host answers this question, too.
        if any(device.kind == vxlan.KIND for device in own.values()):
            for item in self._forwarding(own):
                found[item.key] = Listed("neighbour", item.key, "more than one entry") if item.key in found else item
        return found

    def write(self, change: Change, device: Device | None) -> None:
        """Put one entry in place, or take it away."""
        name = change.key.split(" ")[1]
        if device is None or not device.is_own:
            if change.new is None:
                return
            if device is None:
                msg = f"{change.key}: there is no link {name}"
                raise Waiting(msg, f"link {name}")
            msg = f"{change.key}: link {name} is not ours"
            raise Conflict(msg)
        if change.new is None or isinstance(change.old, Listed):
            self._remove(change.key, device)
        if isinstance(change.new, FdbEntry | Neighbour):
            self._put(change.new, device)

    def _put(self, wanted: FdbEntry | Neighbour, device: Device) -> None:
        if isinstance(wanted, FdbEntry):
            check(wanted, is_vxlan=device.kind == vxlan.KIND)
            entry = _Entry(_AF_BRIDGE, device.index, _PERMANENT, _SELF, {_DST: wanted.remote.packed, _LLADDR: _bytes(wanted.mac)})
        else:
            family = SOCKET_FAMILY[wanted.address.family]
            entry = _Entry(family, device.index, _PERMANENT, 0, {_DST: wanted.address.packed, _LLADDR: _bytes(wanted.mac)})
        try:
            self._netlink.request(_NEWNEIGH, _encode(entry), CREATE | REPLACE)
        except NetlinkError as error:
            raise mapped(error, f"write {wanted.key}", f"link {device.name}") from error

    def _remove(self, key: str, device: Device) -> None:
        kind, _, name = key.split(" ")
        if kind == "fdb":
            entry = _Entry(_AF_BRIDGE, device.index, 0, _SELF, {_LLADDR: _bytes(name)})
        else:
            address = Address(name)
            entry = _Entry(SOCKET_FAMILY[address.family], device.index, 0, 0, {_DST: address.packed})
        try:
            self._netlink.request(_DELNEIGH, _encode(entry))
        except NetlinkError as error:
            if error.errno not in _ABSENT:
                raise mapped(error, f"remove {key}") from error

    def _neighbours(self, own: Mapping[int, Device]) -> Iterator[Held]:
        for entry in self._dump(socket.AF_UNSPEC):
            if entry.index in own and entry.state & _PERMANENT and entry.family in SOCKET_FAMILY.values() and _DST in entry.found:
                yield Neighbour(own[entry.index].name, Address.of(entry.found[_DST]), _mac(entry.found.get(_LLADDR, b"")))

    def _forwarding(self, own: Mapping[int, Device]) -> Iterator[Held]:
        for entry in self._dump(_AF_BRIDGE):
            device = own.get(entry.index)
            if device is None or device.kind != vxlan.KIND or not entry.flags & _SELF:
                continue
            mac = _mac(entry.found.get(_LLADDR, b""))
            has_far_end = not isinstance(device.overlay, VxlanLink) or device.overlay.remote is not None
            if mac == _EVERYBODY and has_far_end:
                continue
            key = f"fdb {device.name} {mac}"
            if not entry.state & _PERMANENT or _DST not in entry.found or _ODD & entry.found.keys():
                yield Listed("neighbour", key, "an entry that ages, or with more than a far end")
            else:
                yield FdbEntry(device.name, mac, Address.of(entry.found[_DST]))

    def _dump(self, family: int) -> Iterator[_Entry]:
        try:
            bodies = self._netlink.dump(_GETNEIGH, _ND.pack(family, 0, 0, 0, 0))
        except OSError as error:
            raise unreadable(error, "neighbours") from error
        for body in bodies:
            if len(body) >= _ND.size:
                number, index, state, flags, _ = _ND.unpack_from(body)
                yield _Entry(number, index, state, flags, attributes(body, _ND.size))


def check(wanted: FdbEntry, *, is_vxlan: bool) -> None:
    """Permanent for what no device can hold."""
    if not is_vxlan:
        msg = f"{wanted.key}: only a VXLAN device has forwarding entries"
        raise Permanent(msg)
    if wanted.mac == _EVERYBODY or _bytes(wanted.mac)[0] & _GROUP_BIT:
        msg = f"{wanted.key}: a forwarding entry is for one Ethernet address, not for a group or for all"
        raise Permanent(msg)


def _encode(entry: _Entry) -> bytes:
    head = _ND.pack(entry.family, entry.index, entry.state, entry.flags, 0)
    return head + b"".join(attribute(kind, value) for kind, value in entry.found.items())


def _bytes(mac: str) -> bytes:
    return bytes.fromhex(mac.replace(":", ""))


def _mac(raw: bytes) -> Mac:
    return Mac(raw[:_MAC_BYTES].hex(":"))
