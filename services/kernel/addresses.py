"""IPv4 addresses on own links.

Owns every IPv4 address on a link of ours: found after a restart through the link's alias. An address on anybody else's link is
never listed, and writing one is a Conflict. Fails with Waiting while the link is not there.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Mapping

from schemas.plan import LinkAddress
from schemas.values import Address
from services.kernel.failures import mapped, unreadable
from services.kernel.links import Device
from services.kernel.netlink import CREATE, REPLACE, NetlinkError, NetlinkSocket, attribute, attributes
from services.kernel.transaction import Change
from services.runtime.errors import Conflict, Permanent, Waiting

_NEWADDR, _DELADDR, _GETADDR = 20, 21, 22
_INFO = struct.Struct("=BBBBI")
_ADDRESS, _LOCAL = 1, 2


class Addresses:
    """IPv4 addresses of the devices given with each call."""

    def __init__(self, netlink: NetlinkSocket) -> None:
        self._netlink = netlink

    def read(self, devices: Mapping[str, Device]) -> dict[str, LinkAddress]:
        names = {device.index: device.name for device in devices.values() if device.is_own}
        try:
            bodies = self._netlink.dump(_GETADDR, _INFO.pack(socket.AF_INET, 0, 0, 0, 0))
        except OSError as error:
            raise unreadable(error, "addresses") from error
        found = {}
        for body in filter(None, bodies):
            _, length, _, _, index = _INFO.unpack_from(body)
            values = attributes(body, _INFO.size)
            if index in names:
                item = LinkAddress(names[index], Address(socket.inet_ntoa(values.get(_LOCAL, values[_ADDRESS]))), length)
                found[item.key] = item
        return found

    def write(self, change: Change, device: Device | None) -> None:
        item = change.subject
        if not isinstance(item, LinkAddress):
            msg = f"{change.key} is not an address"
            raise Permanent(msg)
        if device is None or not device.is_own:
            if change.new is None:
                return
            if device is None:
                msg = f"{change.key}: there is no link {item.link}"
                raise Waiting(msg, f"link {item.link}")
            msg = f"{change.key}: link {item.link} is not ours"
            raise Conflict(msg)
        packed = socket.inet_aton(item.address)
        body = _INFO.pack(socket.AF_INET, item.length, 0, 0, device.index) + attribute(_LOCAL, packed) + attribute(_ADDRESS, packed)
        kind, flags = (_DELADDR, 0) if change.new is None else (_NEWADDR, CREATE | REPLACE)
        try:
            self._netlink.request(kind, body, flags)
        except NetlinkError as error:
            if change.new is not None or error.errno not in (errno.EADDRNOTAVAIL, errno.ENODEV):
                raise mapped(error, f"{change.verb} {change.key}", f"link {item.link}") from error
