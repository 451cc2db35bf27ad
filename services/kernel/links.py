"""Links: VXLAN devices, and who owns a device at all.

Owns every link whose alias (IFLA_IFALIAS) is ``meshmark``; that is also how they are found after a restart. The kernel cannot make a link
with its alias in one message, so a link is set up only after it has got its alias: one that is down, has no alias and is exactly what was
wanted is a remainder of a kill between the two messages, and is adopted. Any other link of that name is a Conflict.

MTU, MAC and the two ends change in place; VNI and port cannot, the device is made again and loses its addresses and routes: write those
again after it. A device that is down, learns, or is of another kind is `Listed`, which is always a difference.
"""

from __future__ import annotations

import errno
import socket
import struct

from msgspec import Struct

from schemas.plan import OWN_ALIAS, VxlanLink
from schemas.values import Address, Mac
from services.kernel.failures import mapped, unreadable
from services.kernel.netlink import (
    BE16,
    CREATE,
    EXCL,
    U8,
    U32,
    Attributes,
    NetlinkError,
    NetlinkSocket,
    attribute,
    attributes,
    nested,
    number_of,
    text_attribute,
    text_of,
)
from services.kernel.transaction import Change, Held, Listed
from services.runtime.errors import Conflict

_NEWLINK, _DELLINK, _GETLINK = 16, 17, 18
_INFO = struct.Struct("=BxHiII")
_UP = 0x1
_ADDRESS, _IFNAME, _MTU, _LINKINFO, _IFALIAS = 1, 3, 4, 18, 20
_INFO_KIND, _INFO_DATA = 1, 2
_VXLAN_ID, _VXLAN_REMOTE, _VXLAN_LOCAL, _VXLAN_LEARNING, _VXLAN_PORT = 1, 2, 4, 7, 15


class Device(Struct, frozen=True):
    """A link of any owner, as the kernel tells it. `data` are the attributes of its kind."""

    index: int
    name: str
    kind: str
    alias: str
    up: bool
    mtu: int
    mac: str
    data: Attributes

    @property
    def is_own(self) -> bool:
        return self.alias == OWN_ALIAS


class Links:
    """All devices by name, and the VXLAN devices of ours."""

    def __init__(self, netlink: NetlinkSocket) -> None:
        self._netlink = netlink

    def devices(self) -> dict[str, Device]:
        """Every link of the namespace by name."""
        try:
            found = self._netlink.dump(_GETLINK, _INFO.pack(socket.AF_UNSPEC, 0, 0, 0, 0))
        except OSError as error:
            raise unreadable(error, "links") from error
        return {device.name: device for device in map(_decode, filter(None, found))}

    def device(self, name: str) -> Device | None:
        try:
            found = self._netlink.ask(_GETLINK, _INFO.pack(0, 0, 0, 0, 0) + text_attribute(_IFNAME, name))
        except NetlinkError as error:
            if error.errno == errno.ENODEV:
                return None
            raise unreadable(error, f"link {name}") from error
        return _decode(found[0]) if found else None

    def write(self, change: Change) -> None:
        """Make one VXLAN device what is wanted, or remove an own device of any kind."""
        wanted = change.new
        if isinstance(wanted, VxlanLink):
            self._put(wanted)
        else:
            self.remove(change.key.split(" ")[1])

    def remove(self, name: str) -> None:
        device = self.device(name)
        if device is None or not device.is_own:
            return
        try:
            self._netlink.request(_DELLINK, _INFO.pack(0, 0, device.index, 0, 0))
        except NetlinkError as error:
            if error.errno != errno.ENODEV:
                raise mapped(error, f"remove link {name}") from error

    def finish(self, name: str, mtu: int, mac: str = "") -> None:
        """Give a device that is there its alias, MTU and MAC, then set it up."""
        device = self.device(name)
        if device is None:
            msg = f"link {name} went away while it was being made"
            raise Conflict(msg)
        if not device.is_own:
            self._set(device, text_attribute(_IFALIAS, OWN_ALIAS))
        if mac and device.mac != mac:
            self._set(device, attribute(_ADDRESS, bytes.fromhex(mac.replace(":", ""))))
        if device.mtu != mtu:
            self._set(device, attribute(_MTU, U32.pack(mtu)))
        if not device.up:
            self._set(device, b"", _UP)

    def _put(self, wanted: VxlanLink) -> None:
        device = self.device(wanted.name)
        if device is not None and device.kind == "vxlan" and _is_adoptable(device, wanted):
            self._move_ends(device, wanted)
        elif device is not None and not device.is_own:
            msg = (
                f"link {wanted.name} is there and not ours (kind {device.kind or 'physical'}, alias {device.alias!r}); rename or remove it"
            )
            raise Conflict(msg)
        else:
            if device is not None:
                self.remove(wanted.name)
            self._create(wanted)
        self.finish(wanted.name, wanted.mtu, wanted.mac)

    def _create(self, wanted: VxlanLink) -> None:
        body = (
            _INFO.pack(0, 0, 0, 0, 0)
            + text_attribute(_IFNAME, wanted.name)
            + attribute(_ADDRESS, bytes.fromhex(wanted.mac.replace(":", "")))
            + attribute(_MTU, U32.pack(wanted.mtu))
            + _vxlan_info(wanted)
        )
        try:
            self._netlink.request(_NEWLINK, body, CREATE | EXCL)
        except NetlinkError as error:
            raise mapped(error, f"make link {wanted.name} (VXLAN {wanted.vni} to {wanted.remote})") from error

    def _move_ends(self, device: Device, wanted: VxlanLink) -> None:
        held = _vxlan(device)
        if held is None or (held.local, held.remote) == (wanted.local, wanted.remote):
            return
        self._set(device, _vxlan_info(wanted, with_port=False))  # the kernel refuses to be told the port again

    def _set(self, device: Device, body: bytes, flags: int = 0) -> None:
        try:
            self._netlink.request(_NEWLINK, _INFO.pack(0, 0, device.index, flags, flags) + body)
        except NetlinkError as error:
            raise mapped(error, f"change link {device.name}", f"link {device.name}") from error


def held_vxlan(device: Device) -> Held | None:
    """An own device of this driver as a plan object, or as `Listed` when no plan can ask for it; None for another driver's."""
    if device.kind != "vxlan":
        return None
    link = _vxlan(device)
    key = f"link {device.name}"
    if not device.up:
        return Listed("link", key, "down")
    return link or Listed("link", key, "a VXLAN device that learns, or without IPv4 ends")


def _vxlan(device: Device) -> VxlanLink | None:
    data = device.data
    if _VXLAN_LOCAL not in data or _VXLAN_REMOTE not in data or number_of(data.get(_VXLAN_LEARNING, b"")):
        return None
    local, remote = (Address(socket.inet_ntoa(data[kind])) for kind in (_VXLAN_LOCAL, _VXLAN_REMOTE))
    port = BE16.unpack(data[_VXLAN_PORT])[0]
    return VxlanLink(device.name, number_of(data[_VXLAN_ID]), local, remote, Mac(device.mac), device.mtu, port)


def _is_adoptable(device: Device, wanted: VxlanLink) -> bool:
    """True for a device that can become what is wanted in place: ours, or a half-made one that nobody else can have meant."""
    held = _vxlan(device)
    if held is None or (held.vni, held.port) != (wanted.vni, wanted.port):
        return False
    return device.is_own or (held == wanted and not device.up and not device.alias)


def _vxlan_info(wanted: VxlanLink, *, with_port: bool = True) -> bytes:
    return nested(
        _LINKINFO,
        text_attribute(_INFO_KIND, "vxlan"),
        nested(
            _INFO_DATA,
            attribute(_VXLAN_ID, U32.pack(wanted.vni)),
            attribute(_VXLAN_LOCAL, socket.inet_aton(wanted.local)),
            attribute(_VXLAN_REMOTE, socket.inet_aton(wanted.remote)),
            attribute(_VXLAN_LEARNING, U8.pack(0)),
            attribute(_VXLAN_PORT, BE16.pack(wanted.port)) if with_port else b"",
        ),
    )


def _decode(body: bytes) -> Device:
    _, _, index, flags, _ = _INFO.unpack_from(body)
    found = attributes(body, _INFO.size)
    info = attributes(found.get(_LINKINFO, b""))
    return Device(
        index,
        text_of(found.get(_IFNAME, b"")),
        text_of(info.get(_INFO_KIND, b"")),
        text_of(found.get(_IFALIAS, b"")),
        bool(flags & _UP),
        number_of(found.get(_MTU, b"")),
        found.get(_ADDRESS, b"").hex(":"),
        attributes(info.get(_INFO_DATA, b"")),
    )
