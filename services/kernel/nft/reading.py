"""Own tables, read again and again: what has not changed since the last time is not listed anew.

Owns nothing but what it remembers of the last read: of each part of a table a digest of the kernel's own bytes (``raw``), and the objects
that it was listed as. A part whose digest is the same lists the same; the others are listed by the engine. What is remembered was listed
and digested within one generation: with a writer who never pauses nothing is remembered, and everything listed each time. After a restart
everything is listed once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from schemas.host_objects import NftElement, NftSet, PlanObject
from services.kernel.netlink import Disturbed
from services.kernel.nft.raw import REST, PartKey, Parts
from services.kernel.transaction import Held, Listed, ListedChain

_TRIES = 3
_LISTED_ONE_BY_ONE = 4
"""Up to so many parts of a table are listed by themselves; the table as a whole costs little more than one."""


class Lister(Protocol):
    """Lists what own tables hold: the engine."""

    def tables(self) -> list[str]: ...

    def read(self, table: str, wanted: Mapping[str, PlanObject]) -> dict[str, Held]: ...

    def read_part(self, table: str, part: PartKey, wanted: Mapping[str, PlanObject]) -> dict[str, Held]: ...


class Source(Protocol):
    """Says what has changed: ``raw``."""

    def generation(self) -> int: ...

    def parts(self) -> dict[str, Parts]: ...


class _Part(NamedTuple):
    digest: bytes
    objects: dict[str, Held]


_Tables = dict[str, dict[PartKey, _Part]]


class Memory(NamedTuple):
    """What was read, at which generation, and which maps were wanted with ranges as values: of an empty one that cannot be listed."""

    generation: int
    ranged: frozenset[str]
    tables: _Tables


class Reading:
    """The reader that remembers."""

    def __init__(self, lister: Lister, source: Source) -> None:
        self._lister = lister
        self._source = source
        self._memory: Memory | None = None

    def read(self, wanted: Mapping[str, PlanObject]) -> dict[str, Held]:
        """Own objects of all tables by key. Equal objects of `wanted` stand for those that were listed, so that none is held twice."""
        ranged = frozenset(key for key, item in wanted.items() if isinstance(item, NftSet) and item.value_interval)
        before = self._memory if self._memory is not None and self._memory.ranged == ranged else None
        self._memory = None
        for _ in range(_TRIES):
            generation = self._source.generation()
            if before is None or before.generation != generation:
                with contextlib.suppress(Disturbed):
                    self._memory = self._settled(Memory(generation, ranged, before.tables if before else {}), wanted)
            else:
                self._memory = before
            if self._memory is not None:
                return _merged(self._memory.tables)
        return {key: item for table in self._lister.tables() for key, item in self._lister.read(table, wanted).items()}

    def _settled(self, before: Memory, wanted: Mapping[str, PlanObject]) -> Memory | None:
        """What there is now; None when somebody wrote meanwhile."""
        names = set(self._lister.tables())
        parts = {table: found for table, found in self._source.parts().items() if table in names}
        if self._source.generation() != before.generation:
            return None
        tables = {table: self._table(table, found, before.tables.get(table, {}), wanted) for table, found in parts.items()}
        if self._source.generation() != before.generation:
            return None
        return before._replace(tables=tables)

    def _table(self, table: str, parts: Parts, before: dict[PartKey, _Part], wanted: Mapping[str, PlanObject]) -> dict[PartKey, _Part]:
        differing = [key for key, digest in parts.digests.items() if key not in before or before[key].digest != digest]
        if not parts.is_plain or REST in differing or len(differing) > _LISTED_ONE_BY_ONE:
            listed = _by_part(self._lister.read(table, wanted), wanted)
            found = {key: _Part(digest, listed.pop(key, {})) for key, digest in parts.digests.items()}
            for objects in listed.values():  # what has no digest of its own
                found[REST].objects.update(objects)
            # A counter or a flow table by name has no digest here: the table is listed again each time.
            return found if parts.is_plain else {key: part._replace(digest=b"") for key, part in found.items()}
        found = {key: before[key] for key in parts.digests if key not in differing}
        for key in differing:
            objects = _shared(self._lister.read_part(table, key, wanted), wanted)
            found[key] = _Part(parts.digests[key], objects)
        return found


def _merged(tables: _Tables) -> dict[str, Held]:
    found: dict[str, Held] = {}
    for parts in tables.values():
        for part in parts.values():
            found.update(part.objects)
    return found


def _by_part(objects: Mapping[str, Held], wanted: Mapping[str, PlanObject]) -> dict[PartKey, dict[str, Held]]:
    found: dict[PartKey, dict[str, Held]] = {}
    for key, item in _shared(objects, wanted).items():
        found.setdefault(_part_of(item), {})[key] = item
    return found


def _part_of(item: Held) -> PartKey:
    match item:
        case ListedChain():
            return "chain", item.name
        case NftSet():
            return "map" if item.value_type else "set", item.name
        case NftElement():
            return "map" if item.value else "set", item.set
        case Listed() if item.key.startswith("set "):
            return "map" if item.text.startswith("a map") else "set", item.key.split(" ")[2]
    return REST


def _shared(objects: Mapping[str, Held], wanted: Mapping[str, PlanObject]) -> dict[str, Held]:
    """The same objects, equal ones of `wanted` in their place."""
    found: dict[str, Held] = {}
    for key, item in objects.items():
        planned = wanted.get(key)
        found[key] = planned if planned is not None and planned == item else item
    return found
