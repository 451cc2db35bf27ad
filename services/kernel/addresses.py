"""Addresses of both families on own links.

Owns every address on a link of ours, found after a restart through the link's alias, but for IPv6 link-local ones that no plan names: those
are the kernel's. An address on anybody else's link is never listed, and writing one is a Conflict. Fails with Waiting while the link is
not there. IPv6 addresses are made without the search for duplicates, in which they would be of no use for a second or more. An IPv4
address that goes takes all later ones of its subnet along, and the last one the link's routes, unless the link promotes them
(``promote_secondaries``): it is told to before.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Container, Mapping

from pyroute2.netlink.rtnl import RTM_GETADDR
from pyroute2.netlink.rtnl.ifaddrmsg import IFA_F_NODAD, ifaddrmsg

from schemas.host_objects import LinkAddress
from schemas.values import IPV4, IPV6, SOCKET_FAMILY, Address, Prefix
from services.kernel.failures import mapped, unreadable
from services.kernel.links import Device
from services.kernel.netlink import U32, NetlinkError, NetlinkSocket, attribute
from services.kernel.pyroute import Connection
from services.kernel.transaction import Change
from services.runtime.errors import Conflict, Permanent, Waiting

_LINK_LOCAL = Prefix("fe80::/10")
_SETLINK = 19
_IFINFO = struct.Struct("=BxHiII")
_AF_SPEC, _INET_CONF, _PROMOTE_SECONDARIES = 26, 1, 20  # IFLA_AF_SPEC, IFLA_INET_CONF, IPV4_DEVCONF_PROMOTE_SECONDARIES


class Addresses:
    """Addresses of the devices given with each call."""

    def __init__(self, netlink: Connection, raw: NetlinkSocket) -> None:
        self._netlink = netlink
        self._raw = raw

    def read(self, devices: Mapping[str, Device], wanted: Container[str]) -> dict[str, LinkAddress]:
        """Own addresses by key; link-local ones only where their key is wanted."""
        names = {device.index: device.name for device in devices.values() if device.is_own}
        try:
            messages = self._netlink.dump(ifaddrmsg, RTM_GETADDR)
        except NetlinkError as error:
            raise unreadable(error, "addresses") from error
        found = {}
        for message in messages:
            index = message.field("index")
            if index in names and message.field("family") in SOCKET_FAMILY.values():
                address = Address(message.text("IFA_LOCAL") or message.text("IFA_ADDRESS"))
                item = LinkAddress(names[index], address, message.field("prefixlen"))
                if item.key in wanted or not _LINK_LOCAL.covers(address):
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
        named = {"index": device.index, "address": item.address, "prefixlen": item.length, "family": SOCKET_FAMILY[item.address.family]}
        named |= {"flags": IFA_F_NODAD} if item.address.family == IPV6 else {"local": item.address}
        try:
            if change.new is None and item.address.family == IPV4:
                self._promote_secondaries(device)
            self._netlink.call("addr", verb, **named)
        except NetlinkError as error:
            if change.new is not None and error.errno == errno.EACCES and item.address.family == IPV6:
                msg = f"{change.key}: IPv6 is switched off on {item.link}; set net/ipv6/conf/default/disable_ipv6 to 0"
                raise Permanent(msg) from error
            if change.new is not None or error.errno not in (errno.EADDRNOTAVAIL, errno.ENODEV):
                raise mapped(error, f"{change.verb} {change.key}", f"link {item.link}") from error

    def _promote_secondaries(self, device: Device) -> None:
        """By netlink: /proc/sys is read-only in many containers."""
        conf = attribute(_INET_CONF, attribute(_PROMOTE_SECONDARIES, U32.pack(1)))
        head = _IFINFO.pack(socket.AF_UNSPEC, 0, device.index, 0, 0)
        self._raw.request(_SETLINK, head + attribute(_AF_SPEC, attribute(socket.AF_INET, conf)))
