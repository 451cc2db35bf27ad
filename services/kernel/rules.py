"""Policy rules of both families.

Owns every rule of protocol 77 (FRA_PROTOCOL); that is how they are found after a restart. A rule is made with NLM_F_EXCL, since the
kernel would double it silently; it takes a rule with a prefix more for the same one (EEXIST), and then it is made without. Where a key
occurs twice (someone added the same rule for another table) it is `Listed`; writing the wanted rule then adds it first and deletes the
others after. The kernel deletes the first rule of a priority that has all that is told, and perhaps more: rules that would go by mistake
are appended once more before. What no plan can say (a type of service, ports, another action) is `Listed` under a key of its own.
"""

from __future__ import annotations

import errno
import struct

from schemas.host_objects import OWN_PROTOCOL, PolicyRule
from schemas.values import FAMILIES, SOCKET_FAMILY, Prefix
from services.kernel.failures import mapped, unreadable
from services.kernel.netlink import (
    CREATE,
    EXCL,
    U8,
    U32,
    NetlinkError,
    NetlinkSocket,
    attribute,
    attributes,
    number_of,
    text_attribute,
    text_of,
)
from services.kernel.transaction import Change, Held, Listed
from services.runtime.errors import Permanent

_NEWRULE, _DELRULE, _GETRULE = 32, 33, 34
_INFO = struct.Struct("=BBBBBBBBI")
_DST, _SRC, _IIFNAME, _PRIORITY, _FWMARK, _TABLE, _FWMASK, _OIFNAME, _PROTOCOL = 1, 2, 3, 6, 10, 15, 16, 17, 21
_KNOWN = {_DST, _SRC, _IIFNAME, _PRIORITY, _FWMARK, _TABLE, _FWMASK, _OIFNAME, _PROTOCOL}
_DETACHED = 0x8 | 0x10
"""Flags of a rule whose incoming (0x8) or outgoing interface is not there now."""
_SUPPRESS_PREFIXLEN = 14
_TO_TABLE = 1
_NO_FAMILY = (errno.EAFNOSUPPORT, errno.EOPNOTSUPP)
_UNSET = b"\xff\xff\xff\xff"


class Rules:
    """Own policy rules."""

    def __init__(self, netlink: NetlinkSocket) -> None:
        self._netlink = netlink

    def read(self) -> dict[str, Held]:
        found: dict[str, Held] = {}
        for _, item in self._held():
            other = found.get(item.key)
            found[item.key] = item if other is None else Listed("rule", item.key, "the same rule more than once")
        return found

    def write(self, change: Change) -> None:
        if isinstance(change.new, PolicyRule):
            self._add(change.new)
        is_there = False
        for body, item in self._held():
            if item.key != change.key:
                continue
            if item == change.new and not is_there:
                is_there = True
            else:
                self._delete(body, change.key)

    def _add(self, wanted: PolicyRule) -> None:
        body = _rule_body(wanted)
        try:
            try:
                self._netlink.request(_NEWRULE, body, CREATE | EXCL)
            except NetlinkError as error:
                if error.errno != errno.EEXIST:
                    raise
                if not any(item == wanted for _, item in self._held()):
                    self._netlink.request(_NEWRULE, body, CREATE)
        except NetlinkError as error:
            raise mapped(error, f"add {wanted.key} lookup {wanted.table}") from error

    def _delete(self, body: bytes, key: str) -> None:
        bodies = self._dump(body[0])
        mistaken = [other for other in bodies[: bodies.index(body)] if _is_taken_for(other, body)] if body in bodies else []
        try:
            for other in mistaken:
                self._netlink.request(_NEWRULE, _without_flags(other), CREATE)
            for _ in range(len(mistaken) + 1):
                self._netlink.request(_DELRULE, body)
        except NetlinkError as error:
            if error.errno != errno.ENOENT:
                raise mapped(error, f"remove {key}") from error

    def _held(self) -> list[tuple[bytes, Held]]:
        bodies = [body for family in FAMILIES for body in self._dump(SOCKET_FAMILY[family])]
        return [(body, item) for body in bodies if (item := _decode(body)) is not None]

    def _dump(self, family: int) -> list[bytes]:
        try:
            bodies = self._netlink.dump(_GETRULE, _INFO.pack(family, 0, 0, 0, 0, 0, 0, 0, 0))
        except OSError as error:
            if error.errno in _NO_FAMILY:
                return []
            raise unreadable(error, "policy rules") from error
        return [body for body in bodies if body and body[0] == family]


def _rule_body(item: PolicyRule) -> bytes:
    matched = [prefix for prefix in (item.source, item.to) if prefix]
    if any(prefix.family != item.family for prefix in matched):
        msg = f"{item.key}: the rule is of another family than what it matches"
        raise Permanent(msg)
    if any(not prefix.length for prefix in matched) or item.fwmark & ~item.mask:
        msg = f"{item.key}: the kernel keeps no prefix of length 0, and matches no bit outside of the mask; leave these out"
        raise Permanent(msg)
    lengths = [prefix.length if prefix else 0 for prefix in (item.to, item.source)]
    compact = item.table if item.table < 256 else 0  # noqa: PLR2004 - the header's table number is one byte
    body = _INFO.pack(SOCKET_FAMILY[item.family], *lengths, 0, compact, 0, 0, _TO_TABLE, 0)
    body += (
        attribute(_PRIORITY, U32.pack(item.priority))
        + attribute(_TABLE, U32.pack(item.table))
        + attribute(_PROTOCOL, U8.pack(OWN_PROTOCOL))
    )
    if item.to:
        body += attribute(_DST, item.to.packed)
    if item.source:
        body += attribute(_SRC, item.source.packed)
    for kind, name in ((_IIFNAME, item.iif), (_OIFNAME, item.oif)):
        if name:
            body += text_attribute(kind, name)
    if item.fwmark or item.mask:
        body += attribute(_FWMARK, U32.pack(item.fwmark)) + attribute(_FWMASK, U32.pack(item.mask))
    return body


def _is_taken_for(other: bytes, wanted: bytes) -> bool:
    """Whether the kernel would delete the rule `other` where `wanted` is told: what `wanted` does not have is not looked at."""
    lengths = zip(_INFO.unpack_from(other)[1:4], _INFO.unpack_from(wanted)[1:4], strict=True)
    there, told = attributes(other, _INFO.size), attributes(wanted, _INFO.size)
    return all(asked in (0, found) for found, asked in lengths) and all(there.get(kind) == value for kind, value in told.items())


def _without_flags(body: bytes) -> bytes:
    """A rule as it is added: whether its interfaces are there is the kernel's to say."""
    *head, flags = _INFO.unpack_from(body)
    return _INFO.pack(*head, flags & ~_DETACHED) + body[_INFO.size :]


def _decode(body: bytes) -> Held | None:
    """A rule of ours; None for anybody else's."""
    found = attributes(body, _INFO.size)
    if number_of(found.get(_PROTOCOL, b"")) != OWN_PROTOCOL:
        return None
    number, to_length, from_length, tos, compact, _, _, action, flags = _INFO.unpack_from(body)
    if found.get(_SUPPRESS_PREFIXLEN) == _UNSET:
        del found[_SUPPRESS_PREFIXLEN]
    to = Prefix.of(found[_DST], to_length) if _DST in found else None
    item = PolicyRule(
        number_of(found.get(_PRIORITY, b"")),
        number_of(found.get(_TABLE, U32.pack(compact))),
        number_of(found.get(_FWMARK, b"")),
        number_of(found.get(_FWMASK, b"")),
        text_of(found.get(_IIFNAME, b"")),
        to,
        next(family for family in FAMILIES if SOCKET_FAMILY[family] == number),
        Prefix.of(found[_SRC], from_length) if _SRC in found else None,
        text_of(found.get(_OIFNAME, b"")),
    )
    odd = sorted(set(found) - _KNOWN)
    if odd or tos or action != _TO_TABLE or flags & ~_DETACHED:
        return Listed("rule", f"{item.key} with {odd} tos {tos} action {action}", f"a rule with attributes {odd}")
    return item
