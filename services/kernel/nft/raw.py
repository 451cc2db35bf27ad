"""nftables as the kernel dumps it: what there is in own tables, as digests by part, and which transaction was the last.

Owns a netlink socket in the network namespace of the thread that made it. A part is a chain with its rules, a named set with its elements,
or what else a table has. Equal digests of a part mean that it lists the same: everything that the kernel tells is in them, attributes that
nobody here knows too, but for what changes by itself (packets counted, users of an object). Anonymous sets cannot change while a rule uses
them, and a rule that uses another one has another handle.

A digest may change though nothing did: where the kernel orders a hash table anew. Fails with Transient when there is no answer, and with
Disturbed when somebody wrote meanwhile.
"""

from __future__ import annotations

import errno
import hashlib
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from schemas.host_objects import TRACE_TABLE
from services.kernel.netlink import (
    BE32,
    NETLINK_NETFILTER,
    Disturbed,
    NetlinkError,
    NetlinkSocket,
    attribute,
    attributes,
    text_attribute,
    text_of,
)
from services.kernel.nft.counted import rule_counts
from services.kernel.nft.steps import MARKER_TABLE, is_heeded
from services.kernel.port import RuleCount
from services.runtime.errors import Transient

_GET_TABLE, _GET_CHAIN, _GET_RULE, _GET_SET, _GET_ELEMENTS, _GET_GENERATION, _GET_OBJECT, _GET_FLOWTABLE = (
    10 << 8 | kind for kind in (1, 4, 7, 10, 13, 16, 19, 23)
)
_INET = bytes((1, 0, 0, 0))  # nfgenmsg: NFPROTO_INET, version, resource
_ANY = bytes(4)
_HEAD = len(_INET)
_TABLE, _NAME = 1, 2  # the same in every kind of object; a table's name is 1
_TABLE_FLAGS, _TABLE_USE = 2, 3
_CHAIN_NAME, _CHAIN_USE, _CHAIN_COUNTERS = 3, 6, 8
_SET_FLAGS, _ANONYMOUS, _MAP, _TIMEOUT = 3, 0x1, 0x8, 0x10
_EXPRESSIONS = 4
OWNED = 0x2
"""The flag of a table that is its maker's socket's: NFT_TABLE_F_OWNER."""
_GENERATION_ID = 1
_TYPE_MASK = 0x3FFF
_ATTRIBUTE = struct.Struct("=HH")
_COUNTER = attribute(1, b"counter\0")
_COUNTED = 2
_DIGEST_BYTES = 16
_MANY_RULES, _RULES_PER_DUMP = 4096, 32

PartKey = tuple[str, str]
"""``("chain", NAME)``, ``("set", NAME)``, ``("map", NAME)``, or ``("table", "")`` for the rest."""
REST: PartKey = ("table", "")


class Parts(NamedTuple):
    """Digests of a table's parts. `is_plain` is False where it has what is neither chain nor set."""

    digests: dict[PartKey, bytes]
    is_plain: bool


class _Hash(Protocol):
    def update(self, data: bytes, /) -> None: ...

    def digest(self) -> bytes: ...


class RawTables:
    """Own tables as the kernel dumps them. One thread at a time."""

    def __init__(self) -> None:
        self._netlink = NetlinkSocket(NETLINK_NETFILTER)
        self._counts: dict[str, int] = {}
        """How many rules each table had last."""

    def close(self) -> None:
        self._netlink.close()

    def generation(self) -> int:
        """The number of the namespace's last transaction, anybody's. 0.06 ms, whatever there is."""
        try:
            [body] = self._netlink.ask(_GET_GENERATION, _ANY)
        except NetlinkError as error:
            msg = f"nft: cannot ask for the generation: {error}"
            raise Transient(msg) from error
        return int(BE32.unpack(attributes(body, _HEAD)[_GENERATION_ID])[0])

    def parts(self) -> dict[str, Parts]:
        """Own tables by name, without the marker's and scratch ones."""
        try:
            return self._parts()
        except Disturbed:
            raise
        except NetlinkError as error:
            msg = f"nft: cannot read tables: {error}"
            raise Transient(msg) from error

    def counted(self, table: str) -> list[RuleCount]:
        """What the rules of a table that have a comment and a counter have counted; none for no such table."""
        try:
            return list(rule_counts(self._netlink.dump(_GET_RULE, _INET + text_attribute(_TABLE, table))))
        except NetlinkError as error:
            if error.errno == errno.ENOENT:
                return []
            msg = f"nft: cannot read counters: {error}"
            raise Transient(msg) from error

    def _parts(self) -> dict[str, Parts]:
        tables: dict[str, dict[PartKey, _Hash]] = {}
        odd: set[str] = set()
        for body in self._netlink.stream(_GET_TABLE, _INET):
            found = attributes(body, _HEAD)
            name = text_of(found[_TABLE])
            if is_own(name, int.from_bytes(found.get(_TABLE_FLAGS, b""))):
                found.pop(_TABLE_USE, None)
                tables[name] = {REST: _hashed(repr(found).encode())}
        for body in self._netlink.stream(_GET_CHAIN, _INET):
            found = attributes(body, _HEAD)
            parts = tables.get(text_of(found[_TABLE]))
            if parts is not None:
                for changing in (_CHAIN_USE, _CHAIN_COUNTERS):
                    found.pop(changing, None)
                parts["chain", text_of(found[_CHAIN_NAME])] = _hashed(repr(found).encode())
        for name, parts in tables.items():
            self._add_rules(name, parts)
            self._add_sets(name, parts)
        for kind in (_GET_OBJECT, _GET_FLOWTABLE):
            odd.update(text_of(attributes(body, _HEAD)[_TABLE]) for body in self._netlink.stream(kind, _INET))
        self._counts = {name: count for name, count in self._counts.items() if name in tables}
        return {name: Parts({key: part.digest() for key, part in parts.items()}, name not in odd) for name, parts in tables.items()}

    def _add_rules(self, table: str, parts: dict[PartKey, _Hash]) -> None:
        prefix, into = b"", _hashed(b"")
        count = 0
        for rules in self._rules(table, [name for kind, name in parts if kind == "chain"]):
            count += len(rules)
            # A chain's rules come in a row: where the first and the last are of one chain, all are.
            if prefix and rules[0].startswith(prefix) and rules[-1].startswith(prefix):
                into.update(_uncounted(rules))
                continue
            for rule in rules:
                if not prefix or not rule.startswith(prefix):
                    prefix, chain = _place(rule)
                    into = parts.setdefault(("chain", chain), _hashed(b""))
                into.update(_uncounted([rule]))
        self._counts[table] = count

    def _rules(self, table: str, chains: Sequence[str]) -> Iterator[list[bytes]]:
        """All rules of a table, a chain's in a row, some at a time.

        For each piece of a dump the kernel goes through all rules before it, so many are asked for chain by chain.
        """
        of_table = _INET + text_attribute(_TABLE, table)
        if self._counts.get(table, 0) < max(_MANY_RULES, _RULES_PER_DUMP * len(chains)):
            yield from self._netlink.batches(_GET_RULE, of_table, _HEAD)
            return
        for chain in chains:
            yield from self._netlink.batches(_GET_RULE, of_table + text_attribute(_NAME, chain), _HEAD)

    def _add_sets(self, table: str, parts: dict[PartKey, _Hash]) -> None:
        named: list[PartKey] = []
        for body in self._netlink.stream(_GET_SET, _INET + text_attribute(_TABLE, table)):
            found = attributes(body, _HEAD)
            flags = BE32.unpack(found[_SET_FLAGS])[0] if _SET_FLAGS in found else 0
            if not flags & _ANONYMOUS:
                part = "map" if flags & _MAP else "set", text_of(found[_NAME])
                parts[part] = _hashed(body[_HEAD:])
                if not flags & _TIMEOUT:  # those elements come and go by themselves
                    named.append(part)
        for kind, name in named:
            into = parts[kind, name]
            for body in self._netlink.stream(_GET_ELEMENTS, _INET + text_attribute(_TABLE, table) + text_attribute(_NAME, name)):
                into.update(body[_HEAD:])


def is_own(table: str, flags: int) -> bool:
    """Whether a table is one of ours that a plan may have: neither the marker's, nor a scratch one, nor one by which flows are traced."""
    return (is_heeded(table) and table != MARKER_TABLE) or (table == TRACE_TABLE and not flags & OWNED)


def _hashed(data: bytes) -> _Hash:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES)


def _place(data: bytes) -> tuple[bytes, str]:
    """What the rules of a chain begin with, and the chain's name."""
    found = attributes(data)
    chain = found[_NAME]
    prefix = attribute(_TABLE, found[_TABLE]) + attribute(_NAME, chain)
    return prefix if data.startswith(prefix) else b"", text_of(chain)


def _uncounted(rules: Sequence[bytes]) -> bytes:
    """Rules in a row, without what their counters have counted."""
    data = b"".join(rules)
    return b"".join(map(without_counted, rules)) if _COUNTER in data else data


def without_counted(rule: bytes) -> bytes:
    """A rule's attributes with zeros for what its counters have counted.

    Counters are looked for where expressions are: the same bytes in a comment or a value are left as they are.
    """
    data = bytearray(rule)
    for kind, begin, end in _attributes_at(rule, 0, len(rule)):
        if kind != _EXPRESSIONS:
            continue
        for _, expression, behind in _attributes_at(rule, begin, end):
            if not rule.startswith(_COUNTER, expression):
                continue
            for inner, first, last in _attributes_at(rule, expression + len(_COUNTER), behind):
                if inner == _COUNTED:
                    data[first:last] = bytes(last - first)
    return bytes(data)


def _attributes_at(data: bytes, offset: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Each attribute's kind, and where its value begins and ends."""
    while offset + _ATTRIBUTE.size <= end:
        length, kind = _ATTRIBUTE.unpack_from(data, offset)
        if length < _ATTRIBUTE.size:
            return
        yield kind & _TYPE_MASK, offset + _ATTRIBUTE.size, min(offset + length, end)
        offset += (length + 3) & ~3
