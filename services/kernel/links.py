"""Links: overlay devices (VXLAN, Geneve), and who owns a device at all.

Owns every link whose alias (IFLA_IFALIAS) is ``meshmark``; that is also how they are found after a restart. The kernel cannot make a link
with its alias in one message, so a link is set up only after it has got its alias: one that is down, has no alias and is exactly what was
wanted is a remainder of a kill between the two messages, and is adopted. Any other link of that name is a Conflict.

MTU, MAC and ends change in place; kind, VNI, port, family and whether there is a far end cannot, the device is made again and loses its
addresses, neighbours and routes: write those again after it. A device that is down, has settings that no plan has, or is of another kind is
`Listed`, which is always a difference. What a kind is told and how it is read is in ``vxlan`` and ``geneve``.
"""

from __future__ import annotations

import errno

from msgspec import Struct
from pyroute2.iproute.linux import AsyncIPRoute
from pyroute2.netlink.rtnl import RTM_GETLINK, RTM_NEWLINK
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg

from schemas.host_objects import OWN_ALIAS, GeneveLink, OverlayLink, VxlanLink
from services.kernel import geneve, vxlan
from services.kernel.failures import mapped, missing_kind, unreadable
from services.kernel.netlink import NetlinkError
from services.kernel.pyroute import Connection, Library, Message, choosing
from services.kernel.transaction import Change, Held, Listed
from services.runtime.errors import Conflict, Permanent

_UP = 0x1
_DATA = {vxlan.KIND: vxlan.DATA, geneve.KIND: geneve.DATA}
_LINK_INFO = choosing(ifinfmsg.ifinfo, ("IFLA_INFO_KIND", "IFLA_INFO_DATA"), data_map=_DATA)
_LINK = choosing(ifinfmsg, ("IFLA_ADDRESS", "IFLA_IFNAME", "IFLA_MTU", "IFLA_LINKINFO", "IFLA_IFALIAS"), ifinfo=_LINK_INFO)


def rtnetlink(library: Library) -> Connection:
    """The socket for links and addresses."""

    def make() -> AsyncIPRoute:
        made = AsyncIPRoute(ext_ack=True)
        made.register_policy(RTM_NEWLINK, _LINK)
        return made

    async def bind(made: AsyncIPRoute) -> None:
        # A port that holds our process's number says in events whose change it was; 0: no multicast groups.
        await made.bind(groups=0)

    return Connection(library, make, bind)


class Device(Struct, frozen=True):
    """A link of any owner, as the kernel tells it. `overlay` is what a plan would say to have it; None where none can."""

    index: int
    name: str
    kind: str
    alias: str
    up: bool
    mtu: int
    overlay: OverlayLink | None = None

    @property
    def is_own(self) -> bool:
        return self.alias == OWN_ALIAS


class Links:
    """All devices by name, and the overlay devices of ours."""

    def __init__(self, netlink: Connection) -> None:
        self._netlink = netlink

    def devices(self) -> dict[str, Device]:
        """Every link of the namespace by name."""
        try:
            found = self._netlink.dump(ifinfmsg, RTM_GETLINK)
        except NetlinkError as error:
            raise unreadable(error, "links") from error
        return {device.name: device for device in map(_decode, found)}

    def device(self, name: str) -> Device | None:
        try:
            found = self._netlink.call("link", "get", ifname=name)
        except NetlinkError as error:
            if error.errno == errno.ENODEV:
                return None
            raise unreadable(error, f"link {name}") from error
        return _decode(found[0]) if found else None

    def write(self, change: Change) -> None:
        """Make one overlay device what is wanted, or remove an own device of any kind."""
        wanted = change.new
        if isinstance(wanted, OverlayLink):
            self._put(wanted)
        else:
            self.remove(change.key.split(" ")[1])

    def remove(self, name: str) -> None:
        device = self.device(name)
        if device is None or not device.is_own:
            return
        try:
            self._netlink.call("link", "del", index=device.index)
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
            self._set(device, ifalias=OWN_ALIAS)
        if mac and (device.overlay is None or device.overlay.mac != mac):
            self._set(device, address=mac)
        if device.mtu != mtu:
            self._set(device, mtu=mtu)
        if not device.up:
            self._set(device, state="up")

    def _put(self, wanted: OverlayLink) -> None:
        device = self.device(wanted.name)
        if device is not None and _is_adoptable(device, wanted):
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

    def _create(self, wanted: OverlayLink) -> None:
        fixed = geneve.fixed(wanted) if isinstance(wanted, GeneveLink) else vxlan.fixed(wanted)
        changeable = _changeable(wanted)
        try:
            self._netlink.call("link", "add", ifname=wanted.name, address=wanted.mac, mtu=wanted.mtu, **fixed, **changeable)
        except NetlinkError as error:
            if error.errno == errno.EOPNOTSUPP:
                raise Permanent(missing_kind(wanted.name, str(changeable["kind"]))) from error
            what = f"make link {wanted.name} ({changeable['kind']} {wanted.vni} to {wanted.remote or 'many'})"
            if error.errno in (errno.EEXIST, errno.EBUSY):  # of VXLAN and of Geneve
                msg = f"{what}: another link has the same VNI, port and far end; remove it"
                raise Conflict(msg) from error
            raise mapped(error, what) from error

    def _move_ends(self, device: Device, wanted: OverlayLink) -> None:
        if device.overlay is not None and _ends(device.overlay) != _ends(wanted):
            self._set(device, **_changeable(wanted))

    def _set(self, device: Device, **values: object) -> None:
        try:
            self._netlink.call("link", "set", index=device.index, **values)
        except NetlinkError as error:
            raise mapped(error, f"change link {device.name}", f"link {device.name}") from error


def held_overlay(device: Device) -> Held | None:
    """An own device of this driver as a plan object, or as `Listed` when no plan can ask for it; None for another driver's."""
    if device.kind not in _DATA:
        return None
    key = f"link {device.name}"
    if not device.up:
        return Listed("link", key, "down")
    return device.overlay or Listed("link", key, f"a {device.kind} device with settings that no plan has")


def _is_adoptable(device: Device, wanted: OverlayLink) -> bool:
    """True for a device that can become what is wanted in place: ours, or a half-made one that nobody else can have meant."""
    held = device.overlay
    if held is None or not changes_in_place(held, wanted):
        return False
    return device.is_own or (not device.up and not device.alias and _ends(held) == _ends(wanted) and held.mac == wanted.mac)


def changes_in_place(held: OverlayLink, wanted: OverlayLink) -> bool:
    """Whether the kernel can make one device of the other."""
    return type(held) is type(wanted) and _fixed(held) == _fixed(wanted)


def _fixed(item: OverlayLink) -> tuple[object, ...]:
    return item.vni, item.port, item.remote.family if item.remote else None, item.local.family if isinstance(item, VxlanLink) else None


def _ends(item: OverlayLink) -> tuple[str | None, ...]:
    return (item.local, item.remote) if isinstance(item, VxlanLink) else (item.remote,)


def _changeable(wanted: OverlayLink) -> dict[str, object]:
    return geneve.changeable(wanted) if isinstance(wanted, GeneveLink) else vxlan.changeable(wanted)


def _decode(message: Message) -> Device:
    info = message.inner("IFLA_LINKINFO")
    name, kind, mtu = message.text("IFLA_IFNAME"), info.text("IFLA_INFO_KIND"), message.number("IFLA_MTU")
    overlay: OverlayLink | None = None
    if kind in _DATA:  # the library takes every link's address for six bytes, which is right for these kinds
        read = geneve.decoded if kind == geneve.KIND else vxlan.decoded
        overlay = read(info.inner("IFLA_INFO_DATA"), name, message.text("IFLA_ADDRESS"), mtu)
    return Device(message.field("index"), name, kind, message.text("IFLA_IFALIAS"), bool(message.field("flags") & _UP), mtu, overlay)
