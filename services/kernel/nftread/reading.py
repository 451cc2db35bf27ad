"""Own tables, read again and again: what has not changed since the last time is not made anew.

Owns nothing but what it remembers of the last read: each chain, as an object that holds the kernel's own bytes, and each named set's
elements, with a digest of what they were made from. What is remembered was read within one generation; with a writer who never pauses
nothing is remembered. After a restart everything is read once, a chain and a set at a time. `known` gives the equal chain that is in
memory already.

Of tables with flags (dormant ones, ones that a socket owns) nothing is looked at but that: no plan has one. Fails with Transient.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Mapping
from typing import NamedTuple

from schemas.host_objects import NftTable, PlanObject
from services.kernel.netlink import Disturbed
from services.kernel.nftread import sets
from services.kernel.nftread.chains import Path, ReadChain, read_chains
from services.kernel.nftread.dumps import Chain, Dumps, Table
from services.kernel.nftread.nameless import Contents, Nameless
from services.kernel.nftread.sets import Head
from services.kernel.transaction import Held, Listed, ListedChain, Observed
from services.runtime.errors import Transient

_TRIES = 3
_DIGEST_BYTES = 16

Known = Callable[[ListedChain], ListedChain]


class _Set(NamedTuple):
    digest: bytes
    elements: dict[str, Held]


class Memory(NamedTuple):
    """What was read, at which generation: all objects, and chains, named sets and unnamed ones by where they are."""

    generation: int
    objects: dict[str, Held]
    chains: dict[Path, ReadChain]
    sets: dict[Path, _Set]
    nameless: Contents


_NOTHING = Memory(0, {}, {}, {}, {})


class Reading:
    """The reader. One that does not remember reads everything each time."""

    def __init__(self, dumps: Dumps, *, remembers: bool, known: Known = lambda chain: chain) -> None:
        self._dumps = dumps
        self._remembers = remembers
        self._known = known
        self._memory: Memory | None = None

    def read(self, wanted: Mapping[str, PlanObject]) -> Observed:
        """Own objects of all tables by key; nobody is to change them.

        Equal objects of `wanted` stand for those that were read, so that none is held twice.
        """
        before, self._memory = self._memory or _NOTHING, None
        for _ in range(_TRIES):
            generation = self._dumps.generation()
            if before.generation == generation and before is not _NOTHING:
                self._memory = before
                return before.objects
            with contextlib.suppress(Disturbed):
                found = self._found(generation, before, wanted)
                if self._dumps.generation() == generation:
                    self._memory = found if self._remembers else None
                    return found.objects
        return self._found_amid_writers(before, wanted)

    def _found_amid_writers(self, before: Memory, wanted: Mapping[str, PlanObject]) -> dict[str, Held]:
        """Each part as it is at some moment."""
        with self._dumps.patiently():
            for _ in range(_TRIES):
                with contextlib.suppress(Disturbed):  # what was there is gone
                    return self._found(0, before, wanted).objects
        msg = "nft: own tables come and go faster than they can be read"
        raise Transient(msg)

    def _found(self, generation: int, before: Memory, wanted: Mapping[str, PlanObject]) -> Memory:
        found = Memory(generation, {}, {}, {}, {})
        tables = self._dumps.tables()
        chains = self._dumps.chains() if tables else {}
        for table in tables:
            if table.flags:
                item = Listed("nft", f"table {table.name}", "a table with flags (dormant or owned)")
                found.objects[item.key] = item
                continue
            found.objects[f"table {table.name}"] = NftTable(table.name)
            nameless = self._read_sets(table, before, found, wanted)
            self._read_chains(table, chains.get(table.name, []), before, found, nameless)
        plain = {table.name for table in tables if not table.flags}
        for kind, name, other in self._dumps.others() if plain else ():
            if name in plain:
                item = Listed("nft", f"{kind} {name} {other}", f"a {kind}")
                found.objects[item.key] = item
        return found

    def _read_chains(self, table: Table, chains: list[Chain], before: Memory, found: Memory, nameless: Nameless) -> None:
        for read in read_chains(self._dumps, table, chains, nameless, before.chains):
            at = table.name, read.chain.name
            last = before.chains.get(at, read)
            item = self._known(last.chain if last.chain == read.chain else read.chain)
            found.chains[at] = ReadChain(read.digest, item)
            found.objects[item.key] = item

    def _read_sets(self, table: Table, before: Memory, found: Memory, wanted: Mapping[str, PlanObject]) -> Nameless:
        nameless = Nameless(self._dumps, table, before.nameless, found.nameless)
        for attributes_of in self._dumps.sets(table.name):
            head = sets.head_of(attributes_of)
            if head.is_anonymous:
                nameless.add(head, attributes_of)
                continue
            item = sets.held_set(table.name, head)
            planned = wanted.get(item.key)
            found.objects[item.key] = planned if planned == item and planned is not None else item
            if head.has_timeouts:  # those elements come and go by themselves
                continue
            lists = self._dumps.elements(table.name, head.name)
            digest = _digest(head, lists)
            last = before.sets.get((table.name, head.name))
            if last is None or last.digest != digest:
                last = _Set(digest, sets.held_elements(table.name, head, lists, wanted))
            found.sets[table.name, head.name] = last
            found.objects.update(last.elements)
        return nameless


def _digest(head: Head, lists: list[bytes]) -> bytes:
    hashed = hashlib.blake2b(repr(head).encode(), digest_size=_DIGEST_BYTES)
    for data in lists:
        hashed.update(data)
    return hashed.digest()
