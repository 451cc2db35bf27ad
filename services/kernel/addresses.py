"""IPv4 addresses on own links.

Owns every IPv4 address on a link of ours: found after a restart through the link's alias. An address on anybody else's link is
never listed, and writing one is a Conflict. Fails with Waiting while the link is not there.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping

from pyroute2.netlink.rtnl import RTM_GETADDR
from pyroute2.netlink.rtnl.ifaddrmsg import ifaddrmsg

from schemas.plan import LinkAddress
from schemas.values import Address
from services.kernel.failures import mapped, unreadable
from services.kernel.links import Device
from services.kernel.netlink import NetlinkError
from services.kernel.pyroute import Connection
from services.kernel.transaction import Change
from services.runtime.errors import Conflict, Permanent, Waiting


class Addresses:
    """IPv4 addresses of the devices given with each call."""

    def __init__(self, netlink: Connection) -> None:
        self._netlink = netlink

    def read(self, devices: Mapping[str, Device]) -> dict[str, LinkAddress]:
        names = {device.index: device.name for device in devices.values() if device.is_own}
        try:
            messages = self._netlink.dump(_ipv4, RTM_GETADDR)
        except NetlinkError as error:
            raise unreadable(error, "addresses") from error
        found = {}
        for message in messages:
            index = message.field("index")
            if index in names:
                address = message.text("IFA_LOCAL") or message.text("IFA_ADDRESS")
                item = LinkAddress(names[index], Address(address), message.field("prefixlen"))
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
        verb = "del" if change.new is None else "replace"
        try:
            self._netlink.call("addr", verb, index=device.index, address=item.address, local=item.address, prefixlen=item.length)
        except NetlinkError as error:
            if change.new is not None or error.errno not in (errno.EADDRNOTAVAIL, errno.ENODEV):
                raise mapped(error, f"{change.verb} {change.key}", f"link {item.link}") from error


def _ipv4() -> ifaddrmsg:
    message = ifaddrmsg()
    message["family"] = socket.AF_INET
    return message
