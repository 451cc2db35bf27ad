"""Routes as rtnetlink messages, both ways. Pure.

Routes of a plan differ in their prefixes and in little else. So what is around the prefix is made once for all routes that have it in
common, in either direction, and put together with each prefix: a tenth of the time that building and taking apart every attribute takes.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from socket import inet_pton
from typing import NamedTuple

from msgspec.structs import replace

from schemas.host_objects import OWN_PROTOCOL, NextHop, Route
from schemas.routes import RouteType, Scope
from schemas.values import IPV4, IPV6, SOCKET_FAMILY, Address, Prefix
from services.kernel.interfaces import Interface
from services.kernel.netlink import U32, Attributes, attribute, attributes, number_of
from services.kernel.rows import Alike, Mixed, Row
from services.kernel.transaction import Held, Listed
from services.runtime.errors import MeshmarkError, Permanent, Waiting

NEWROUTE, DELROUTE, GETROUTE = 24, 25, 26
INFO = struct.Struct("=BBBBBBBBI")
"""rtmsg: family, length, length of the source, type of service, table, protocol, scope, type, flags."""
DST, TABLE = 1, 15
_OIF, _GATEWAY, _PRIORITY, _SOURCE, _MULTIPATH, _NEXT_HOP_ID = 4, 5, 6, 7, 9, 30
_HOP = struct.Struct("=HBBi")
_KNOWN = {DST, _OIF, _GATEWAY, _PRIORITY, _SOURCE, _MULTIPATH, TABLE, 12, 20}  # RTA_CACHEINFO, RTA_PREF
_ANYWHERE = {socket.AF_INET: bytes(4), socket.AF_INET6: bytes(16)}
_ONLINK = 0x4
_FEW = 8
"""Fewer routes alike than this are made one by one."""
_SCOPES: dict[Scope, int] = {"global": 0, "site": 200, "link": 253, "host": 254}
_SCOPE_NAMES = {number: name for name, number in _SCOPES.items()}
_SCOPE_NOWHERE = 255
_TYPES: dict[RouteType, int] = {"unicast": 1, "blackhole": 6, "unreachable": 7, "prohibit": 8, "throw": 9}
_TYPE_NAMES = {number: name for name, number in _TYPES.items()}
_PREFIX_AT: dict[int, tuple[int, bytes, int]] = {  # where a dump has the prefix, and its attribute's first bytes
    socket.AF_INET: (INFO.size + 8, attribute(DST, bytes(4))[:4], 4),
    socket.AF_INET6: (INFO.size + 8, attribute(DST, bytes(16))[:4], 16),
}


class Encoded(NamedTuple):
    """The bodies of those routes that have one, in their order, and why the others have none, by their place."""

    rows: list[Row]
    refused: dict[int, MeshmarkError]


class Encoder:
    """Bodies of messages for routes, given the interfaces that their hops name."""

    def __init__(self, interfaces: Mapping[str, Interface]) -> None:
        self._interfaces = interfaces
        self._around: dict[tuple[object, ...], tuple[int, bytes, bytes]] = {}

    def rows(self, items: Iterable[Route]) -> Encoded:
        """Many routes. Those alike mostly come in a row, with the very same hops: what is around their prefixes is looked for once."""
        found = Encoded([], {})
        last: Route | None = None
        bits, is_ipv6 = "", False
        around = 0, b"", b""
        texts: list[str] = []
        for place, item in enumerate(items):
            text, _, length = item.prefix.partition("/")
            if length != bits or last is None or (":" in text) is not is_ipv6 or not _is_alike(item, last):
                _add_row(found.rows, around, texts)
                texts = []
                last, bits, is_ipv6 = item, length, ":" in text
                try:
                    around = self._found_around(item, length)
                except MeshmarkError as error:
                    found.refused[place] = error
                    last = None
                    continue
            texts.append(text)
        _add_row(found.rows, around, texts)
        return found

    def body(self, item: Route) -> bytes:
        """The whole route. Waiting where a link is missing or down, Permanent where the route contradicts itself."""
        text, _, length = item.prefix.partition("/")
        family, before, after = self._found_around(item, length)
        return before + inet_pton(family, text) + after if family else before

    def _found_around(self, item: Route, length: str) -> tuple[int, bytes, bytes]:
        """The socket family and what comes before and after the prefix; 0 and all of it for a route to anywhere, which has none."""
        alike = (item.table, item.type, item.metric, item.hops, item.source, item.scope, length, item.prefix.family)
        around = self._around.get(alike)
        if around is None:
            check(item)
            self._need_links(item)
            before, after = self._parts(item)
            around = (SOCKET_FAMILY[item.prefix.family], before, after) if item.prefix.length else (0, before + after, b"")
            self._around[alike] = around
        return around

    def _need_links(self, item: Route) -> None:
        for hop in item.hops:
            interface = self._interfaces.get(hop.link)
            if interface is None or not interface.up:
                msg = f"{item.key}: link {hop.link} is {'not there' if interface is None else 'down'}"
                raise Waiting(msg, f"link {hop.link}")

    def _parts(self, item: Route) -> tuple[bytes, bytes]:
        """What comes before and after the prefix."""
        single = item.hops[0] if len(item.hops) == 1 else None
        before = head(item, _SCOPES[item.scope or item.usual_scope], _ONLINK if single and single.onlink else 0)
        after = _tail(item)
        if item.source:
            after += attribute(_SOURCE, item.source.packed)
        if single:
            after += attribute(_OIF, U32.pack(self._interfaces[single.link].index)) + _gateway(single)
        elif item.hops:
            after += attribute(_MULTIPATH, b"".join(_hop(hop, self._interfaces[hop.link].index) for hop in item.hops))
        return before, after


def _add_row(rows: list[Row], around: tuple[int, bytes, bytes], texts: Sequence[str]) -> None:
    """Add the bodies of routes alike, whose prefixes begin with these addresses."""
    family, before, after = around
    if family and len(texts) >= _FEW:
        packed = list(map(inet_pton, repeat(family), texts))
        rows.append(Alike(before + packed[0] + after, len(before), len(packed[0]), b"".join(packed)))
    elif texts:
        bodies = [before + inet_pton(family, text) + after if family else before for text in texts]
        if rows and isinstance(rows[-1], Mixed):
            rows[-1].bodies += bodies
        else:
            rows.append(Mixed(bodies))


def _is_alike(one: Route, other: Route) -> bool:
    """Whether two routes say the same but for the prefix; hops that are equal but not the very same count as others."""
    return (
        one.hops is other.hops
        and one.table == other.table
        and one.metric == other.metric
        and one.type == other.type
        and one.source == other.source
        and one.scope == other.scope
    )


def bare_body(item: Route) -> bytes:
    """A body that names a route of ours whatever its hops."""
    return head(item, _SCOPE_NOWHERE, 0) + (item.prefix.packed if item.prefix.length else b"") + _tail(item)


def head(item: Route, scope: int, flags: int) -> bytes:
    """A body up to where the prefix comes."""
    compact = item.table if item.table < 256 else 0  # noqa: PLR2004 - the header's table number is one byte
    family, length = SOCKET_FAMILY[item.prefix.family], item.prefix.length
    fixed = INFO.pack(family, length, 0, 0, compact, OWN_PROTOCOL, scope, _TYPES[item.type], flags)
    return fixed + _PREFIX_AT[family][1] if length else fixed


def _tail(item: Route) -> bytes:
    return attribute(TABLE, U32.pack(item.table)) + attribute(_PRIORITY, U32.pack(item.kernel_metric))


def _gateway(hop: NextHop) -> bytes:
    return attribute(_GATEWAY, hop.via.packed) if hop.via else b""


def _hop(hop: NextHop, index: int) -> bytes:
    tail = _gateway(hop)
    return _HOP.pack(_HOP.size + len(tail), _ONLINK if hop.onlink else 0, hop.weight - 1, index) + tail


def by_one_name(body: bytes) -> bytes:
    """A listed route's body for its removal: where a next hop object stands for the hops, the kernel will not have them told as well."""
    found = attributes(body, INFO.size)
    if _NEXT_HOP_ID not in found:
        return body
    return body[: INFO.size] + b"".join(attribute(kind, found[kind]) for kind in (DST, TABLE, _PRIORITY, _NEXT_HOP_ID) if kind in found)


def in_kernel_form(item: Route) -> Route:
    """A route as the kernel shows it: a single next hop has no weight, and the usual scope goes without saying."""
    hops = (replace(item.hops[0], weight=1),) if len(item.hops) == 1 and item.hops[0].weight != 1 else item.hops
    scope = item.scope if item.scope is not None and item.prefix.family == IPV4 and item.scope != item.usual_scope else None
    if hops is item.hops and item.scope == scope and item.metric == item.kernel_metric:
        return item
    return replace(item, metric=item.kernel_metric, hops=hops, scope=scope)


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


class Decoder:
    """Bodies of a dump as routes, given the interfaces' names by number."""

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names
        self._alike: dict[bytes, Route] = {}

    def route(self, body: bytes) -> Held:
        """A route of ours; `Listed` where it has what no plan can say."""
        at, begin, size = _PREFIX_AT[body[0]]
        start = at + len(begin)
        if body[at:start] != begin:
            return self._whole(body)
        around = body[:at] + body[start + size :]
        model = self._alike.get(around)
        if model is not None:
            prefix = _prefix(body[start : start + size], body[0], body[1])
            return Route(model.table, prefix, model.type, model.metric, model.hops, model.source, model.scope)
        item = self._whole(body)
        if isinstance(item, Route):
            self._alike[around] = item
        return item

    def _whole(self, body: bytes) -> Held:
        family, length, from_length, tos, compact, _, scope, kind, flags = INFO.unpack_from(body)
        found = attributes(body, INFO.size)
        prefix = _prefix(found.get(DST, _ANYWHERE[family]), family, length)
        table = number_of(found.get(TABLE, U32.pack(compact)))
        hops = self._hops(found, flags) if kind == _TYPES["unicast"] else ()
        source = Address.of(found[_SOURCE]) if _SOURCE in found else None
        item = Route(table, prefix, metric=number_of(found.get(_PRIORITY, b"")), hops=hops, source=source)
        odd = sorted(set(found) - _KNOWN)
        if odd or from_length or tos or kind not in _TYPE_NAMES or scope not in _SCOPE_NAMES:
            suffix = f" tos {tos}" if tos else ""
            return Listed("route", item.key + suffix, f"a route of type {kind}, scope {scope}, with attributes {odd}")
        return in_kernel_form(replace(item, type=_TYPE_NAMES[kind], scope=_SCOPE_NAMES[scope]))

    def _hops(self, found: Attributes, flags: int) -> tuple[NextHop, ...]:
        if _MULTIPATH in found:
            return tuple(self._multipath(found[_MULTIPATH]))
        if _OIF not in found:
            return ()
        return (self._next_hop(number_of(found[_OIF]), found, flags, 1),)

    def _multipath(self, data: bytes) -> list[NextHop]:
        hops, offset = [], 0
        while offset + _HOP.size <= len(data):
            length, flags, weight, index = _HOP.unpack_from(data, offset)
            hops.append(self._next_hop(index, attributes(data[offset : offset + length], _HOP.size), flags, weight + 1))
            offset += (length + 3) & ~3
        return hops

    def _next_hop(self, index: int, found: Attributes, flags: int, weight: int) -> NextHop:
        via = Address.of(found[_GATEWAY]) if _GATEWAY in found else None
        return NextHop(self._names.get(index, f"if{index}"), via, bool(flags & _ONLINK), weight)


def _prefix(packed: bytes, family: int, length: int) -> Prefix:
    text = socket.inet_ntop(family, packed)
    # The C library writes the end of some IPv6 addresses as an IPv4 one, which is not the canonical form.
    return Prefix.of(packed, length) if family == socket.AF_INET6 and "." in text else Prefix(f"{text}/{length}")
