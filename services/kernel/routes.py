"""Routes of both families, in any table.

Owns every route of protocol 77; that is how they are found after a restart. A route is made with NLM_F_EXCL: where one of the same table,
prefix and metric is there already, it is replaced (one message, no packet lost) if it is ours, and is a Conflict if it is not.
Fails with Waiting while a link is missing or down, a next hop cannot be reached, or the source is not an address of this host. A route
of ours with something that no plan can say (a metric on the MTU, a type of service) is `Listed`. An address that goes takes the IPv4
routes of main with that source along, without a message, and its trace out of IPv6 routes (Linux 6.1: of those by
the address's own link only); IPv4 routes of other tables keep it.

What IPv6 does otherwise: a route without a metric gets one; several routes of one prefix and metric may be there (appended by somebody),
which is `Listed`, and writing the wanted one removes the others after it; a route that does not forward names ``lo``; a link that goes
takes only its own hop out of a route.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Mapping

from msgspec.structs import replace

from schemas.host_objects import OWN_PROTOCOL, NextHop, Route
from schemas.routes import RouteType, Scope
from schemas.values import FAMILIES, IPV4, IPV6, SOCKET_FAMILY, Address, Family, Prefix
from services.kernel.failures import mapped, unreadable
from services.kernel.links import Device
from services.kernel.netlink import (
    CREATE,
    EXCL,
    REPLACE,
    U32,
    Attributes,
    NetlinkError,
    NetlinkSocket,
    attribute,
    attributes,
    number_of,
)
from services.kernel.transaction import Change, Held, Listed
from services.runtime.errors import Conflict, Permanent, Waiting

_NEWROUTE, _DELROUTE, _GETROUTE = 24, 25, 26
_INFO = struct.Struct("=BBBBBBBBI")
_HOP = struct.Struct("=HBBi")
_DST, _OIF, _GATEWAY, _PRIORITY, _SOURCE, _MULTIPATH, _TABLE, _NEXT_HOP_ID = 1, 4, 5, 6, 7, 9, 15, 30
_KNOWN = {_DST, _OIF, _GATEWAY, _PRIORITY, _SOURCE, _MULTIPATH, _TABLE, 12, 20}  # RTA_CACHEINFO, RTA_PREF
_ANYWHERE = {socket.AF_INET: bytes(4), socket.AF_INET6: bytes(16)}
_ONLINK = 0x4
_SCOPES: dict[Scope, int] = {"global": 0, "site": 200, "link": 253, "host": 254}
_SCOPE_NAMES = {number: name for name, number in _SCOPES.items()}
_SCOPE_NOWHERE = 255
_TYPES: dict[RouteType, int] = {"unicast": 1, "blackhole": 6, "unreachable": 7, "throw": 9}
_TYPE_NAMES = {number: name for name, number in _TYPES.items()}


class Routes:
    """Own routes. The devices given with each call turn names into interface numbers and back; a write needs those of its hops."""

    def __init__(self, netlink: NetlinkSocket) -> None:
        self._netlink = netlink

    def read(self, devices: Mapping[str, Device]) -> dict[str, Held]:
        names = {device.index: device.name for device in devices.values()}
        found: dict[str, Held] = {}
        for family in FAMILIES:
            for item in (_decode(body, names) for body in self._dump(family)):
                found[item.key] = Listed("route", item.key, "the same route more than once") if item.key in found else item
        return found

    def _held(self, wanted: Route, devices: Mapping[str, Device]) -> list[tuple[bytes, Held]]:
        """The own routes with the key of the wanted one."""
        names = {device.index: device.name for device in devices.values()}
        length, packed = wanted.prefix.length, wanted.prefix.packed
        near = (body for body in self._dump(wanted.prefix.family, wanted.table) if body[1] == length and (not length or packed in body))
        return [(body, item) for body, item in ((body, _decode(body, names)) for body in near) if item.key == wanted.key]

    def write(self, change: Change, devices: Mapping[str, Device]) -> None:
        if isinstance(change.new, Route):
            self._put(change.new, devices)
        elif isinstance(change.old, Route):
            self._remove(change.old, devices)
        else:
            names = {device.index: device.name for device in devices.values()}
            for family in FAMILIES:
                for body in self._dump(family):
                    if _decode(body, names).key == change.key:
                        self._delete(body, change.key)

    def _put(self, wanted: Route, devices: Mapping[str, Device]) -> None:
        missing = [hop.link for hop in wanted.hops if hop.link not in devices or not devices[hop.link].up]
        if missing:
            state = "down" if missing[0] in devices else "not there"
            msg = f"{wanted.key}: link {missing[0]} is {state}"
            raise Waiting(msg, f"link {missing[0]}")
        body = _route_body(wanted, devices)
        waiting_for = f"link {wanted.hops[0].link}" if wanted.hops else ""
        try:
            self._netlink.request(_NEWROUTE, body, CREATE | EXCL)
        except NetlinkError as error:
            if error.errno != errno.EEXIST:
                raise _explained(error, wanted, waiting_for) from error
            self._replace(wanted, body, devices, waiting_for)

    def _replace(self, wanted: Route, body: bytes, devices: Mapping[str, Device], waiting_for: str) -> None:
        held = [item for _, item in self._held(wanted, devices)]
        if not held:
            msg = f"{wanted.key}: there is a route of another owner; remove it or give ours another metric"
            raise Conflict(msg)
        if held == [in_kernel_form(wanted)]:
            return
        try:
            self._netlink.request(_NEWROUTE, body, CREATE | REPLACE)
        except NetlinkError as error:
            raise _explained(error, wanted, waiting_for) from error
        if len(held) > 1:
            self._delete_others(wanted, devices)

    def _delete_others(self, wanted: Route, devices: Mapping[str, Device]) -> None:
        """Leave the wanted route alone under its key."""
        for body, item in self._held(wanted, devices):
            if item != in_kernel_form(wanted):
                self._delete(body, wanted.key)

    def _remove(self, held: Route, devices: Mapping[str, Device]) -> None:
        """Remove a route of ours whatever its hops.

        No metric means any to the kernel: so an IPv4 route without one is told by its hops, and if that finds none, looked for.
        """
        bare = _route_body(held, {}, bare=True)
        if held.kernel_metric:
            self._delete(bare, held.key)
            return
        whole = bool(held.hops) and all(hop.link in devices for hop in held.hops)
        if not (whole and self._delete(_route_body(held, devices), held.key)) and self._held(held, devices):
            self._delete(bare, held.key)

    def _delete(self, body: bytes, key: str) -> bool:
        """Whether there was such a route."""
        try:
            self._netlink.request(_DELROUTE, _by_one_name(body))
        except NetlinkError as error:
            if error.errno not in (errno.ESRCH, errno.ENODEV):
                raise mapped(error, f"remove {key}") from error
            return False
        return True

    def _dump(self, family: Family, table: int = 0) -> list[bytes]:
        """Bodies of all own routes of a family, or of one table's; the kernel filters where it can."""
        number = SOCKET_FAMILY[family]
        body = _INFO.pack(number, 0, 0, 0, 0, OWN_PROTOCOL, 0, 0, 0)
        if table:
            body += attribute(_TABLE, U32.pack(table))
        try:
            found = self._netlink.dump(_GETROUTE, body)
        except NetlinkError as error:
            if table and error.errno == errno.ENOENT:  # no such table yet
                return []
            raise unreadable(error, "routes") from error
        except OSError as error:
            raise unreadable(error, "routes") from error
        # Without IPv6 in it, a kernel answers for all families.
        return [body for body in found if body and body[0] == number and _INFO.unpack_from(body)[5] == OWN_PROTOCOL]


def _by_one_name(body: bytes) -> bytes:
    """A route's body for its removal: where a next hop object stands for the hops, the kernel will not have them told as well."""
    found = attributes(body, _INFO.size)
    if _NEXT_HOP_ID not in found:
        return body
    return body[: _INFO.size] + b"".join(attribute(kind, found[kind]) for kind in (_DST, _TABLE, _PRIORITY, _NEXT_HOP_ID) if kind in found)


def in_kernel_form(item: Route) -> Route:
    """A route as ``read`` would show it: a single next hop has no weight, and the usual scope goes without saying."""
    hops = (replace(item.hops[0], weight=1),) if len(item.hops) == 1 else item.hops
    unusual = item.prefix.family == IPV4 and item.scope != item.usual_scope
    return replace(item, metric=item.kernel_metric, hops=hops, scope=item.scope if unusual else None)


def check(item: Route) -> None:
    """Permanent for a route that contradicts itself, and that the kernel would refuse for good."""
    wrong = ""
    if item.type != "unicast" and item.hops:
        wrong = "only a unicast route has next hops"
    elif item.type == "unicast" and not item.hops:
        wrong = "a unicast route needs a next hop"
    elif item.prefix.family == IPV6 and len(item.hops) > 1 and not all(hop.via for hop in item.hops):
        wrong = "each of several IPv6 next hops needs an address"
    elif item.scope in ("link", "host") and any(hop.via for hop in item.hops):
        wrong = f"no route of scope {item.scope} has a next hop with an address"
    elif item.scope == "host" and len(item.hops) > 1:
        wrong = "a route of scope host has one next hop"
    if wrong:
        msg = f"{item.key}: {wrong}"
        raise Permanent(msg)


def _explained(error: NetlinkError, wanted: Route, waiting_for: str) -> Exception:
    if error.errno == errno.EINVAL and "exthop" in error.text:
        return Waiting(f"{wanted.key}: {error.text}", waiting_for)
    if error.errno == errno.EINVAL and wanted.source and ("prefsrc" in error.text or "source address" in error.text):
        return Waiting(f"{wanted.key}: this host does not have the source address {wanted.source}", f"address {wanted.source}")
    return mapped(error, f"write {wanted.key}", waiting_for)


def _route_body(item: Route, devices: Mapping[str, Device], *, bare: bool = False) -> bytes:
    """The message for a route; `bare` leaves the hops out, so that it names a route of ours whatever its hops."""
    check(item)
    scope = _SCOPE_NOWHERE if bare else _SCOPES[item.scope or item.usual_scope]
    single = item.hops[0] if len(item.hops) == 1 and not bare else None
    flags = _ONLINK if single and single.onlink else 0
    compact = item.table if item.table < 256 else 0  # noqa: PLR2004 - the header's table number is one byte
    length = item.prefix.length
    body = _INFO.pack(SOCKET_FAMILY[item.prefix.family], length, 0, 0, compact, OWN_PROTOCOL, scope, _TYPES[item.type], flags)
    if length:
        body += attribute(_DST, item.prefix.packed)
    body += attribute(_TABLE, U32.pack(item.table)) + attribute(_PRIORITY, U32.pack(item.kernel_metric))
    if item.source and not bare:
        body += attribute(_SOURCE, item.source.packed)
    if single:
        body += attribute(_OIF, U32.pack(devices[single.link].index)) + _gateway(single)
    elif item.hops and not bare:
        body += attribute(_MULTIPATH, b"".join(_hop(hop, devices[hop.link].index) for hop in item.hops))
    return body


def _gateway(hop: NextHop) -> bytes:
    return attribute(_GATEWAY, hop.via.packed) if hop.via else b""


def _hop(hop: NextHop, index: int) -> bytes:
    tail = _gateway(hop)
    return _HOP.pack(_HOP.size + len(tail), _ONLINK if hop.onlink else 0, hop.weight - 1, index) + tail


def _decode(body: bytes, names: Mapping[int, str]) -> Held:
    family, length, from_length, tos, compact, _, scope, kind, flags = _INFO.unpack_from(body)
    found = attributes(body, _INFO.size)
    prefix = Prefix.of(found.get(_DST, _ANYWHERE[family]), length)
    table = number_of(found.get(_TABLE, U32.pack(compact)))
    hops = _hops(found, flags, names) if kind == _TYPES["unicast"] else ()
    source = Address.of(found[_SOURCE]) if _SOURCE in found else None
    item = Route(table, prefix, metric=number_of(found.get(_PRIORITY, b"")), hops=hops, source=source)
    odd = sorted(set(found) - _KNOWN)
    if odd or from_length or tos or kind not in _TYPE_NAMES or scope not in _SCOPE_NAMES:
        suffix = f" tos {tos}" if tos else ""
        return Listed("route", item.key + suffix, f"a route of type {kind}, scope {scope}, with attributes {odd}")
    return in_kernel_form(replace(item, type=_TYPE_NAMES[kind], scope=_SCOPE_NAMES[scope]))


def _hops(found: Attributes, flags: int, names: Mapping[int, str]) -> tuple[NextHop, ...]:
    if _MULTIPATH in found:
        return tuple(_multipath(found[_MULTIPATH], names))
    if _OIF not in found:
        return ()
    return (_next_hop(number_of(found[_OIF]), found, flags, 1, names),)


def _multipath(data: bytes, names: Mapping[int, str]) -> list[NextHop]:
    hops, offset = [], 0
    while offset + _HOP.size <= len(data):
        length, flags, weight, index = _HOP.unpack_from(data, offset)
        hops.append(_next_hop(index, attributes(data[offset : offset + length], _HOP.size), flags, weight + 1, names))
        offset += (length + 3) & ~3
    return hops


def _next_hop(index: int, found: Attributes, flags: int, weight: int, names: Mapping[int, str]) -> NextHop:
    via = Address.of(found[_GATEWAY]) if _GATEWAY in found else None
    return NextHop(names.get(index, f"if{index}"), via, bool(flags & _ONLINK), weight)
