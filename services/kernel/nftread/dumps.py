"""nftables as the kernel dumps it: what own tables hold, as bodies of messages, and which transaction was the last.

Owns a netlink socket in the network namespace of the thread that made it. Of each dump it is made sure that it is of one moment; that
several are, the generation tells. Fails with Transient when there is no answer, and with Disturbed when somebody wrote meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from schemas.host_objects import TRACE_TABLE
from services.kernel.netlink import (
    BE32,
    NETLINK_NETFILTER,
    Attributes,
    Disturbed,
    NetlinkError,
    NetlinkSocket,
    attributes,
    text_attribute,
    text_of,
)
from services.kernel.nft.marks import marker_of
from services.kernel.nft.steps import MARKER_TABLE, is_heeded
from services.kernel.nftread.counted import comments, rule_counts
from services.kernel.port import RuleCount
from services.kernel.transaction import Marker
from services.runtime.errors import Transient

_GET_TABLE, _GET_CHAIN, _GET_RULE, _GET_SET, _GET_ELEMENTS, _GET_GENERATION, _GET_OBJECT, _GET_FLOWTABLE = (
    10 << 8 | kind for kind in (1, 4, 7, 10, 13, 16, 19, 23)
)
_INET = bytes((1, 0, 0, 0))  # nfgenmsg: NFPROTO_INET, version, resource
_ANY = bytes(4)
_HEAD = len(_INET)
_TABLE, _NAME = 1, 2  # the same in every kind of object; a table's name is 1
_TABLE_FLAGS, _TABLE_HANDLE = 2, 4
_CHAIN_NAME, _CHAIN_USE = 3, 6
_OBJECT_TYPE = 3
_ELEMENTS = 3
OWNED = 0x2
"""The flag of a table that is its maker's socket's: NFT_TABLE_F_OWNER."""
_GENERATION_ID = 1
_OBJECTS = {
    1: "counter",
    2: "quota",
    3: "ct helper",
    4: "limit",
    6: "tunnel",
    7: "ct timeout",
    8: "ct expectation",
    9: "secmark",
    10: "synproxy",
}
_MANY_RULES, _RULES_PER_DUMP = 4096, 32
_PATIENT_TRIES = 8


class Table(NamedTuple):
    """A table. `handle` is its own as long as it lives, and no other's."""

    name: str
    flags: int
    handle: bytes


class Chain(NamedTuple):
    """A chain's attributes, and its number of users: its rules, and those of others that jump to it."""

    name: str
    uses: int
    found: Attributes


class Dumps:
    """Own tables as the kernel dumps them. One thread at a time."""

    def __init__(self) -> None:
        self._netlink = NetlinkSocket(NETLINK_NETFILTER)
        self._tries = 1

    def close(self) -> None:
        self._netlink.close()

    @contextlib.contextmanager
    def patiently(self) -> Iterator[None]:
        """Within it a dump that was disturbed is asked for again, several times; outside it raises Disturbed."""
        self._tries = _PATIENT_TRIES
        try:
            yield
        finally:
            self._tries = 1

    def generation(self) -> int:
        """The number of the namespace's last transaction, anybody's. 0.06 ms, whatever there is."""
        with _asking("the generation"):
            [body] = self._netlink.ask(_GET_GENERATION, _ANY)
        return int(BE32.unpack(attributes(body, _HEAD)[_GENERATION_ID])[0])

    def tables(self) -> list[Table]:
        """Own tables by name, without the marker's and scratch ones."""
        found = [attributes(body) for body in self._dump("tables", _GET_TABLE, _INET)]
        tables = [Table(text_of(item[_TABLE]), number(item, _TABLE_FLAGS), item.get(_TABLE_HANDLE, b"")) for item in found]
        return sorted(item for item in tables if is_own(item.name, item.flags))

    def chains(self) -> dict[str, list[Chain]]:
        """Every table's chains, in the kernel's order."""
        tables: dict[str, list[Chain]] = {}
        for body in self._dump("chains", _GET_CHAIN, _INET):
            found = attributes(body)
            tables.setdefault(text_of(found[_TABLE]), []).append(Chain(text_of(found[_CHAIN_NAME]), number(found, _CHAIN_USE), found))
        return tables

    def rules(self, table: str, uses: Mapping[str, int]) -> Iterator[list[bytes]]:
        """All rules of a table's chains as attributes, a chain's in a row, some at a time.

        For each piece of a dump the kernel goes through all rules before it, so many are asked for chain by chain.
        """
        of_table = _INET + text_attribute(_TABLE, table)
        if sum(uses.values()) < max(_MANY_RULES, _RULES_PER_DUMP * len(uses)):
            yield self._dump(f"rules of {table}", _GET_RULE, of_table)
            return
        for chain, users in uses.items():
            if users:
                yield self._dump(f"rules of {table} {chain}", _GET_RULE, of_table + text_attribute(_NAME, chain))

    def sets(self, table: str) -> list[Attributes]:
        """A table's sets and maps, named and anonymous ones."""
        return [attributes(body) for body in self._dump(f"sets of {table}", _GET_SET, _INET + text_attribute(_TABLE, table))]

    def elements(self, table: str, name: str) -> list[bytes]:
        """The elements of a set, as attributes each of which holds a list of some."""
        found = self._dump(f"the set {table} {name}", _GET_ELEMENTS, _INET + text_attribute(_TABLE, table) + text_attribute(_NAME, name))
        return [attributes(body).get(_ELEMENTS, b"") for body in found]

    def others(self) -> list[tuple[str, str, str]]:
        """What tables have that is neither chain nor set: kind, table and name of each, such as a counter."""
        found = [attributes(body) for body in self._dump("objects", _GET_OBJECT, _INET)]
        kinds = [(number(item, _OBJECT_TYPE), item) for item in found]
        others = [(_OBJECTS.get(kind, f"object{kind}"), text_of(item[_TABLE]), text_of(item[_NAME])) for kind, item in kinds]
        flows = [attributes(body) for body in self._dump("flow tables", _GET_FLOWTABLE, _INET)]
        return others + [("flowtable", text_of(item[_TABLE]), text_of(item[_NAME])) for item in flows]

    def marker(self) -> Marker | None:
        """The marker; None when there is none."""
        with self.patiently():
            return marker_of(comments(self._dump("the marker", _GET_RULE, _INET + text_attribute(_TABLE, MARKER_TABLE))))

    def counted(self, table: str) -> list[RuleCount]:
        """What the rules of a table that have a comment and a counter have counted; none for no such table."""
        with self.patiently():
            return list(rule_counts(self._dump(f"counters of {table}", _GET_RULE, _INET + text_attribute(_TABLE, table))))

    def _dump(self, what: str, kind: int, body: bytes) -> list[bytes]:
        """Bodies without their first four bytes, which say the family."""
        for left in reversed(range(self._tries)):
            try:
                with _asking(what):
                    return [item for items in self._netlink.batches(kind, body, _HEAD) for item in items]
            except Gone:
                raise
            except Disturbed:
                if not left and self._tries == 1:
                    raise
        msg = f"nft: cannot read {what}: somebody writes all the time"
        raise Transient(msg)


class Gone(Disturbed):
    """What was asked for is not there, or not any more."""


@contextlib.contextmanager
def _asking(what: str) -> Iterator[None]:
    try:
        yield
    except Disturbed:
        raise
    except NetlinkError as error:
        if error.errno == errno.ENOENT:
            raise Gone from error
        msg = f"nft: cannot read {what}: {error}"
        raise Transient(msg) from error


def is_own(table: str, flags: int) -> bool:
    """Whether a table is one of ours that a plan may have: neither the marker's, nor a scratch one, nor one by which flows are traced."""
    return (is_heeded(table) and table != MARKER_TABLE) or (table == TRACE_TABLE and not flags & OWNED)


def number(found: Attributes, kind: int) -> int:
    """A number in the network's order; 0 where there is none."""
    return int.from_bytes(found.get(kind, b""))
