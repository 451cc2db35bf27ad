"""Policy rules of both families.

Owns every rule of protocol 77 (FRA_PROTOCOL); that is how they are found after a restart. A rule is made with NLM_F_EXCL, since the
kernel would double it silently; it takes a rule with a prefix more for the same one (EEXIST), and then it is made without. Where a key
occurs twice (someone added the same rule for another table) it is `Listed`; writing the wanted rule then adds it first and deletes the
others after. The kernel deletes the first rule of a priority that has all that is told, and perhaps more: rules that would go by mistake
are appended once more before. Rules are written many at a time, in few system calls. What no plan can say (a type of service, ports,
another action) is `Listed` under a key of its own.
"""

from __future__ import annotations

import errno
import struct
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from schemas.host_objects import OWN_PROTOCOL, PlanObject, PolicyRule
from schemas.values import FAMILIES, SOCKET_FAMILY, Prefix
from services.kernel.failures import Failures, blamed, mapped, unreadable
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
_OWN_MARK = attribute(_PROTOCOL, U8.pack(OWN_PROTOCOL))[:5]
"""Every rule of ours has these bytes, and few others do."""
_UNSET = b"\xff\xff\xff\xff"


class Rules:
    """Own policy rules."""

    def __init__(self, netlink: NetlinkSocket) -> None:
        self._netlink = netlink
        self.seen: bytes | None = None
        """The fingerprint of what was read last."""

    def read(self) -> dict[str, Held]:
        self.seen = None
        found: dict[str, Held] = {}
        dumps = [self._dump(SOCKET_FAMILY[family]) for family in FAMILIES]
        for _, item in _own(body for bodies, _ in dumps for body in bodies):
            other = found.get(item.key)
            found[item.key] = item if other is None else Listed("rule", item.key, "the same rule more than once")
        self.seen = b"".join(digest for _, digest in dumps)
        return found

    def fingerprint(self) -> bytes:
        """Of all rules, anybody's."""
        found = []
        for family in FAMILIES:
            try:
                found.append(self._netlink.digest(_GETRULE, _all(SOCKET_FAMILY[family])))
            except OSError as error:
                if error.errno not in _NO_FAMILY:
                    raise unreadable(error, "policy rules") from error
        return b"".join(found)

    def write_all(self, changes: Sequence[Change]) -> Failures:
        """Make the changes; the errors of those that could not be made, by their place.

        What is wanted is added first, in its order. What else has the keys of the changes goes after that, in the kernel's order.
        """
        failures: Failures = {}
        places = range(len(changes))
        with blamed(failures, places):
            self._add([(place, change.new) for place, change in enumerate(changes) if isinstance(change.new, PolicyRule)], failures)
            self._delete_others({changes[place].key: (place, changes[place].new) for place in places if place not in failures}, failures)
        return failures

    def _add(self, wanted: Sequence[tuple[int, PolicyRule]], failures: Failures) -> None:
        bodies: list[tuple[int, PolicyRule, bytes]] = []
        for place, item in wanted:
            with blamed(failures, [place]):
                bodies.append((place, item, _rule_body(item)))
        refused = self._sent(bodies, EXCL)
        taken = {place for place, error in refused.items() if error.errno == errno.EEXIST}
        if taken:
            held = {item for _, item in _own(self._dumped())}
            alike = [entry for entry in bodies if entry[0] in taken and entry[1] not in held]
            refused = {place: error for place, error in refused.items() if place not in taken} | self._sent(alike, 0)
        failures.update(
            (place, mapped(refused[place], f"add {item.key} lookup {item.table}")) for place, item, _ in bodies if place in refused
        )

    def _sent(self, wanted: Sequence[tuple[int, PolicyRule, bytes]], flags: int) -> dict[int, NetlinkError]:
        refused = self._netlink.request_all(_NEWRULE, [body for _, _, body in wanted], CREATE | flags)
        return {wanted[index][0]: error for index, error in refused.items()}

    def _delete_others(self, kept: Mapping[str, tuple[int, PlanObject | None]], failures: Failures) -> None:
        """Delete what has one of these keys but is not the wanted rule, or is it once more."""
        bodies = self._dumped()
        unwanted: list[tuple[int, str, bytes]] = []
        seen: set[str] = set()
        for body, item in _own(bodies):
            if item.key not in kept:
                continue
            place, wanted = kept[item.key]
            if item == wanted and item.key not in seen:
                seen.add(item.key)
            else:
                unwanted.append((place, item.key, body))
        plain: list[_Deletion] = []
        for deletion in _deletions(bodies, unwanted):
            if not deletion.again:
                plain.append(deletion)
                continue
            self._delete(plain, failures)
            plain.clear()
            refused = self._netlink.request_all(_NEWRULE, deletion.again, CREATE)
            if refused:  # what would go now is not only the unwanted one
                failures[deletion.place] = mapped(next(iter(refused.values())), f"remove {deletion.key}")
            else:
                self._delete([deletion], failures)
        self._delete(plain, failures)

    def _delete(self, deletions: Sequence[_Deletion], failures: Failures) -> None:
        asked = [deletion for deletion in deletions for _ in range(len(deletion.again) + 1)]
        for index, error in self._netlink.request_all(_DELRULE, [deletion.body for deletion in asked]).items():
            if error.errno != errno.ENOENT:
                failures[asked[index].place] = mapped(error, f"remove {asked[index].key}")

    def _dumped(self) -> list[bytes]:
        """Bodies of all rules, anybody's, in the kernel's order: nothing but the family can be asked for."""
        return [body for family in FAMILIES for body in self._dump(SOCKET_FAMILY[family])[0]]

    def _dump(self, family: int) -> tuple[list[bytes], bytes]:
        """Bodies of all rules of a family, and the dump's digest."""
        try:
            bodies, digest = self._netlink.dump_digested(_GETRULE, _all(family))
        except OSError as error:
            if error.errno in _NO_FAMILY:
                return [], b""
            raise unreadable(error, "policy rules") from error
        return [body for body in bodies if body[0] == family], digest


def _all(family: int) -> bytes:
    return _INFO.pack(family, 0, 0, 0, 0, 0, 0, 0, 0)


def _own(bodies: Iterable[bytes]) -> Iterator[tuple[bytes, Held]]:
    """Rules of ours with their bodies."""
    for body in bodies:
        item = _decode(body) if _OWN_MARK in body else None
        if item is not None:
            yield body, item


class _Deletion(NamedTuple):
    """How a rule is deleted: what is to be appended before, and then by telling it so many times and once more."""

    place: int
    key: str
    body: bytes
    again: list[bytes]


def _deletions(bodies: Sequence[bytes], unwanted: Sequence[tuple[int, str, bytes]]) -> Iterator[_Deletion]:
    """How to delete these rules and no others, given all rules there are, both in the kernel's order.

    The kernel deletes the first rule of a family and priority that has all that is told. Those of `unwanted` before it have gone by then,
    so it can only mistake one that stays, and that is appended once more before.
    """
    staying: dict[tuple[int, bytes], list[bytes]] = {}
    left = deque(unwanted)
    for body in bodies:
        if not left:
            return
        near = staying.setdefault((body[0], attributes(body, _INFO.size).get(_PRIORITY, b"")), [])
        if body != left[0][2]:
            near.append(body)
            continue
        place, key, _ = left.popleft()
        mistaken = [other for other in near if _is_taken_for(other, body)]
        yield _Deletion(place, key, body, [_without_flags(other) for other in mistaken])
        for other in mistaken:
            near.remove(other)


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
