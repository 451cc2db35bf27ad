"""Sets without names, which one rule each knows: what is in them, as bytes that are equal when they hold the same.

Owns what it found of one table. Such a set does not change while a rule uses it, and the next one has another handle, so what was found
in it at an earlier read still is. An end before all values, with which libnftables begins most sets of intervals, says nothing and is left
out.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

from services.kernel.netlink import Attributes, attribute, attributes, each_attribute
from services.kernel.nftread import sets
from services.kernel.nftread.dumps import Dumps, Table
from services.kernel.nftread.sets import Head

_HEAD, _ITEM = 1, 2
_NUMBERS = struct.Struct("=5I")
_LIST_ITEM, _KEY, _FLAGS, _VALUE, _IS_END = 1, 1, 3, 1, 1

Contents = dict[tuple[bytes, bytes, bytes], bytes]
"""What is in sets, by the handle of the table, the set's name and its handle."""


class _Place(NamedTuple):
    head: Head
    key: tuple[bytes, bytes, bytes]


class Nameless:
    """The sets without names of one table. `before` is what is known, `found` what will be."""

    def __init__(self, dumps: Dumps, table: Table, before: Contents, found: Contents) -> None:
        self._dumps = dumps
        self._table = table
        self._before = before
        self._found = found
        self._places: dict[bytes, _Place] = {}

    def __len__(self) -> int:
        return len(self._places)

    def add(self, head: Head, attributes_of: Attributes) -> None:
        name = attributes_of[sets.NAME]
        place = self._places[name] = _Place(head, (self._table.handle, name, attributes_of.get(sets.HANDLE, b"")))
        if (known := self._before.get(place.key)) is not None:
            self._found[place.key] = known

    def content(self, name: bytes) -> bytes | None:
        """What is in the set with this name; None where it is no set without a name of its own."""
        place = self._places.get(name)
        if place is None:
            return None
        content = self._found.get(place.key)
        if content is None:
            content = self._found[place.key] = self._read(place.head)
        return content

    def _read(self, head: Head) -> bytes:
        items = [item for data in self._dumps.elements(self._table.name, head.name) for _, item in each_attribute(data)]
        numbers = _NUMBERS.pack(head.flags, head.key_type, head.key_bytes, head.data_type or 0, head.data_bytes)
        return attribute(_HEAD, numbers) + b"".join(attribute(_ITEM, item) for item in sorted(items) if not _is_end_before_all(item))


def _is_end_before_all(item: bytes) -> bool:
    found = attributes(item)
    flags = int.from_bytes(found.get(_FLAGS, b""))
    return bool(flags & _IS_END) and not any(attributes(found.get(_KEY, b"")).get(_VALUE, b""))


def members(content: bytes, read: Callable[[bytes], str]) -> Iterator[tuple[str, str]]:
    """Key and value of each element, as in named sets; `read` says keys of other types than those have."""
    head: Head | None = None
    items = []
    for kind, data in each_attribute(content):
        if kind == _HEAD:
            flags, key_type, key_bytes, data_type, data_bytes = _NUMBERS.unpack(data)
            head = Head("", flags, key_type, key_bytes, data_type or None, data_bytes, ())
        else:
            items.append(attribute(_LIST_ITEM, data))
    assert head is not None
    return sets.members(head, [b"".join(items)], read)
