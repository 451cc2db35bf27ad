"""Interface numbers and names: which links there are, of any owner, and which of them are up.

Owns nothing. Routes name interfaces by number. A message asks for one interface (0.04 ms), a dump for all; what else the kernel tells of a
link is left to ``links``. Fails with Transient when it cannot be read.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Collection, Mapping

from msgspec import Struct

from services.kernel.failures import unreadable
from services.kernel.netlink import U32, NetlinkError, NetlinkSocket, attribute, attributes, text_attribute, text_of

_GETLINK = 18
_INFO = struct.Struct("=BxHiII")  # ifinfomsg: family, type, index, flags, change
_NAME, _EXT_MASK = 3, 29  # IFLA_IFNAME, IFLA_EXT_MASK
_SKIP_STATS = attribute(_EXT_MASK, U32.pack(0x8))  # RTEXT_FILTER_SKIP_STATS
_UP = 0x1
_ASKED_ONE_BY_ONE = 16


class Interface(Struct, frozen=True):
    """A link by number and name."""

    index: int
    name: str
    up: bool


class Interfaces:
    """The links of the namespace that the socket is in."""

    def __init__(self, netlink: NetlinkSocket) -> None:
        self._netlink = netlink

    def all(self) -> dict[str, Interface]:
        """Every link by name."""
        try:
            bodies = self._netlink.dump(_GETLINK, _INFO.pack(0, 0, 0, 0, 0) + _SKIP_STATS)
        except NetlinkError as error:
            raise unreadable(error, "links") from error
        return {item.name: item for item in map(_decode, bodies)}

    def named(self, names: Collection[str]) -> Mapping[str, Interface]:
        """The links of these names, and perhaps others; one that is not there is absent."""
        if len(names) > _ASKED_ONE_BY_ONE:
            return self.all()
        return {name: item for name in names if (item := self._one(name)) is not None}

    def _one(self, name: str) -> Interface | None:
        try:
            bodies = self._netlink.ask(_GETLINK, _INFO.pack(0, 0, 0, 0, 0) + text_attribute(_NAME, name) + _SKIP_STATS)
        except NetlinkError as error:
            if error.errno == errno.ENODEV:
                return None
            raise unreadable(error, f"link {name}") from error
        item = _decode(bodies[0])
        return item if item.name == name else None  # the kernel takes alternative names, too, which no listing of routes has


def _decode(body: bytes) -> Interface:
    _, _, index, flags, _ = _INFO.unpack_from(body)
    return Interface(index, text_of(attributes(body, _INFO.size)[_NAME]), bool(flags & _UP))
