"""Policy rules, routes, links and default routes of anybody, of both families, as the kernel tells them by rtnetlink.

Read only. Raises NetlinkError where the kernel does not answer; a family that it does not have is empty.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from schemas.host_objects import MAIN_TABLE, OWN_ALIAS, OWN_PROTOCOL
from services.kernel.netlink import U32, Attributes, NetlinkError, NetlinkSocket, attribute, attributes, number_of, text_of
from services.kernel.survey.values import ForeignRoutes, ForeignRule, LinkSeen, Uplink

_GETLINK, _GETROUTE, _GETRULE = 18, 26, 34
_LINK, _INFO = struct.Struct("=BxHiII"), struct.Struct("=BBBBBBBBI")
_IFNAME, _LINKINFO, _IFALIAS, _KIND, _DATA = 3, 18, 20, 1, 2
_PORTS = {"vxlan": 15, "geneve": 5}  # IFLA_VXLAN_PORT, IFLA_GENEVE_PORT
_RULE_PRIORITY, _RULE_MARK, _RULE_TABLE, _RULE_MASK, _RULE_PROTOCOL = 6, 10, 15, 16, 21
_ROUTE_OIF, _ROUTE_MULTIPATH, _ROUTE_TABLE = 4, 9, 15
_TABLE_AT, _PROTOCOL_AT = 4, 5
_HOP = struct.Struct("=HBBi")
_BY_KERNEL = 2
USUAL_TABLES = frozenset((0, 253, MAIN_TABLE, 255))
"""No table, ``default``, ``main`` and ``local``: everybody's."""
_FAMILIES = {socket.AF_INET: 4, socket.AF_INET6: 6}
_NO_FAMILY = (errno.EAFNOSUPPORT, errno.EOPNOTSUPP, errno.ENOENT)
_ASKED_OTHERWISE = ("wireguard", "tun")


def rules(netlink: NetlinkSocket) -> tuple[ForeignRule, ...]:
    """Policy rules that are neither ours nor the kernel's own three."""
    return tuple(
        item
        for family in _FAMILIES
        for body in _dump(netlink, _GETRULE, _INFO.pack(family, 0, 0, 0, 0, 0, 0, 0, 0))
        if (item := _rule(body)) is not None
    )


def routes(netlink: NetlinkSocket, tables: Iterable[range]) -> tuple[ForeignRoutes, ...]:
    """Routes in these tables, none of them a usual one, that are not ours, counted."""
    spans = list(tables)
    counts = Counter(place for place in _filled(netlink) if any(place[1] in span for span in spans))
    return tuple(ForeignRoutes(*key, count) for key, count in sorted(counts.items()))


def tables(netlink: NetlinkSocket) -> list[tuple[int, int]]:
    """Family and number of each table, but the usual ones, that has routes which are not ours, in order."""
    return sorted(set(_filled(netlink)))


def _filled(netlink: NetlinkSocket) -> Iterator[tuple[int, int]]:
    """Family and table of each route that is not ours, but for the usual tables'."""
    for family, number in _FAMILIES.items():
        for body in _dump(netlink, _GETROUTE, _INFO.pack(family, 0, 0, 0, 0, 0, 0, 0, 0)):
            # A router's main table may have a million routes: they are told by their headers alone.
            if body[_TABLE_AT] in USUAL_TABLES or body[_PROTOCOL_AT] == OWN_PROTOCOL:
                continue
            table = number_of(attributes(body, _INFO.size).get(_ROUTE_TABLE, b""))
            if table not in USUAL_TABLES:
                yield number, table


def links(netlink: NetlinkSocket) -> dict[int, LinkSeen]:
    """All links by index. The port of WireGuard devices is left open (None): rtnetlink does not tell it."""
    return {_LINK.unpack_from(body)[2]: _link(body) for body in _dump(netlink, _GETLINK, _LINK.pack(socket.AF_UNSPEC, 0, 0, 0, 0))}


def uplinks(netlink: NetlinkSocket, names: Mapping[int, LinkSeen], proc: Path) -> tuple[Uplink, ...]:
    """The links of IPv4 default routes in main, with their rp_filter."""
    found: dict[str, None] = {}
    for body, route in _routes(netlink, socket.AF_INET, MAIN_TABLE):
        if body[1] == 0:
            found |= {names[index].name: None for index in _interfaces(route) if index in names}
    return tuple(Uplink(name, _rp_filter(proc, name)) for name in found)


def _rp_filter(proc: Path, name: str) -> int | None:
    try:
        return max(int((proc / "net/ipv4/conf" / part / "rp_filter").read_text()) for part in ("all", name))
    except (OSError, ValueError):
        return None


def _rule(body: bytes) -> ForeignRule | None:
    found = attributes(body, _INFO.size)
    if number_of(found.get(_RULE_PROTOCOL, b"")) in (OWN_PROTOCOL, _BY_KERNEL):
        return None
    family, compact = body[0], body[4]
    table = number_of(found.get(_RULE_TABLE, U32.pack(compact)))
    mark, mask = number_of(found.get(_RULE_MARK, b"")), number_of(found.get(_RULE_MASK, b""))
    return ForeignRule(_FAMILIES[socket.AddressFamily(family)], number_of(found.get(_RULE_PRIORITY, b"")), table, mark, mask)


def _link(body: bytes) -> LinkSeen:
    found = attributes(body, _LINK.size)
    info = attributes(found.get(_LINKINFO, b""))
    kind = text_of(info.get(_KIND, b""))
    port = None if kind in _ASKED_OTHERWISE else int.from_bytes(attributes(info.get(_DATA, b"")).get(_PORTS.get(kind, 0), b""), "big")
    return LinkSeen(text_of(found.get(_IFNAME, b"")), kind, text_of(found.get(_IFALIAS, b"")) == OWN_ALIAS, port)


def _routes(netlink: NetlinkSocket, family: int, table: int) -> Iterator[tuple[bytes, Attributes]]:
    """Routes of one table; the kernel filters where it can, and here it is looked at again."""
    for body in _dump(netlink, _GETROUTE, _INFO.pack(family, 0, 0, 0, 0, 0, 0, 0, 0) + attribute(_ROUTE_TABLE, U32.pack(table))):
        found = attributes(body, _INFO.size)
        if number_of(found.get(_ROUTE_TABLE, b"")) == table:
            yield body, found


def _interfaces(route: Attributes) -> Iterator[int]:
    if _ROUTE_OIF in route:
        yield number_of(route[_ROUTE_OIF])
    data, offset = route.get(_ROUTE_MULTIPATH, b""), 0
    while offset + _HOP.size <= len(data):
        length, _, _, index = _HOP.unpack_from(data, offset)
        yield index
        offset += (length + 3) & ~3


def _dump(netlink: NetlinkSocket, kind: int, body: bytes) -> list[bytes]:
    try:
        return [found for found in netlink.dump(kind, body) if found]
    except NetlinkError as error:
        if error.errno in _NO_FAMILY:
            return []
        raise
