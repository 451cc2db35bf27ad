"""The elements of sets as items of a message's list, and the messages around them.

Owns nothing. An element of an interval set is two for the kernel: where the interval begins, and where the next value after it begins
(none after the last value there is, which libnftables notes down at the first of the two). libnftables begins most interval sets with an
end at zero, which says that nothing is before. That is left out: of a set that is there already it is not known whether it has one.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from schemas.host_objects import NftElement
from services.kernel.netlink import HEADER, attribute, attributes
from services.kernel.nfnetlink import wire
from services.kernel.nfnetlink.selectors import user_number
from services.kernel.nfnetlink.values import VERDICT, Inexpressible, Kind
from services.kernel.nfnetlink.wire import Message, be32, nest
from services.kernel.nft.steps import Path

_NEST_BYTES = 60_000
"""An attribute's length has 16 bits; what is around the items is small."""
_END = be32(wire.ELEMENT_FLAGS, 1)
_OPEN = attribute(wire.ELEMENT_USERDATA, user_number(1, 1))
_BEFORE_KEY = 12  # the heads of three attributes around each other
_FAMILY_BYTES = 4
_ATTRIBUTE = struct.Struct("=HH")


class Header(NamedTuple):
    """What a set's elements depend on: the types of keys and values, and which of them are intervals. No `data` in a plain set."""

    key: Kind
    data: Kind | None = None
    interval: bool = False
    ranged_data: bool = False


def added(header: Header, elements: Sequence[NftElement]) -> list[bytes]:
    """Items for new elements."""
    if header.data is None and any(item.value for item in elements):
        raise Inexpressible(elements[0].key, "an element without a value")
    data = [_data(header, item.value) for item in elements] if header.data is not None else []
    if header.interval:
        return interval_items(header.key, [header.key.span(item.element) for item in elements], data)
    return _plain_items(header.key, elements, data)


def deleted(header: Header, elements: Sequence[NftElement]) -> list[bytes]:
    """Items for elements that go, which are known by their keys."""
    if header.interval:
        return interval_items(header.key, [header.key.span(item.element) for item in elements], ())
    return _plain_items(header.key, elements, ())


def item(key: bytes, *more: bytes) -> bytes:
    return nest(wire.LIST_ITEM, nest(wire.ELEMENT_KEY, attribute(wire.DATA_VALUE, key)), *more)


def zero_end(kind: Kind) -> bytes:
    """An end before all values."""
    return item(bytes(kind.size), _END)


def interval_items(kind: Kind, spans: Sequence[tuple[int, int]], data: Sequence[bytes]) -> list[bytes]:
    """Begin and end of each span. `data` is the value of each, if they have some."""
    found = []
    middle, last = _around(kind.size, len(_END)), kind.last
    for place, (low, high) in enumerate(spans):
        found.append(item(low.to_bytes(kind.size, "big"), data[place] if data else b"", _OPEN if high == last else b""))
        if high != last:
            found.append(middle[0] + (high + 1).to_bytes(kind.size, "big") + middle[1] + _END)
    return found


def _plain_items(kind: Kind, elements: Sequence[NftElement], data: Sequence[bytes]) -> list[bytes]:
    read = kind.read
    if not data:
        head, tail = _around(kind.size, 0)
        return [head + read(element.element) + tail for element in elements]
    arounds = {length: _around(kind.size, length) for length in set(map(len, data))}
    found = []
    for element, value in zip(elements, data, strict=True):
        head, tail = arounds[len(value)]
        found.append(head + read(element.element) + tail + value)
    return found


def _around(size: int, more: int) -> tuple[bytes, bytes]:
    """What is before and after a key of `size` bytes in an item that has `more` bytes after the key."""
    whole = item(bytes(size), bytes(more))
    return whole[:_BEFORE_KEY], whole[_BEFORE_KEY + size : len(whole) - more]


def _data(header: Header, text: str) -> bytes:
    kind = header.data
    assert kind is not None
    if kind is VERDICT:
        code, _, chain = text.partition(" ")
        if code not in wire.VERDICTS or (code == "jump") != bool(chain):
            raise Inexpressible(text, "a verdict")
        return nest(wire.ELEMENT_DATA, wire.verdict(code, chain))
    if not header.ranged_data:
        return nest(wire.ELEMENT_DATA, attribute(wire.DATA_VALUE, kind.read(text)))
    low, high = kind.span(text)
    return nest(wire.ELEMENT_DATA, attribute(wire.DATA_VALUE, low.to_bytes(kind.size, "big") + high.to_bytes(kind.size, "big")))


def messages(kind: Message, at: Path, items: Sequence[bytes], sequence: int, number: int = 0) -> Iterator[bytes]:
    """The items in as many messages as they need, numbered from `sequence` on; `number` is the set's within the batch."""
    each = max(1, _NEST_BYTES // max(map(len, items), default=1))
    table, name = at
    where = wire.text(wire.ELEMENTS_TABLE, table) + wire.text(wire.ELEMENTS_SET, name)
    if number:
        where += be32(wire.ELEMENTS_SET_ID, number)
    flags = wire.CREATE if kind is Message.NEW_ELEMENTS else 0
    for start in range(0, len(items), each):
        yield wire.request(kind, flags, sequence, where, nest(wire.ELEMENTS_LIST, *items[start : start + each]))
        sequence += 1


def count(message: bytes) -> int:
    """How many elements a message is about; an end belongs to what began before it."""
    return sum(begins for _, begins in _items(message))


def place_of(message: bytes, offset: int) -> int:
    """Which of them, counted from 0, the item at this offset of the message belongs to; the first for an offset before all items."""
    return max(sum(begins for at, begins in _items(message) if at <= offset) - 1, 0)


def _items(message: bytes) -> Iterator[tuple[int, bool]]:
    """Where each item is in a message, and whether an element begins there."""
    listed = next(at for at, kind, _ in _walked(message, HEADER.size + _FAMILY_BYTES, len(message)) if kind == wire.ELEMENTS_LIST)
    length = _ATTRIBUTE.unpack_from(message, listed)[0]
    for at, _, end in _walked(message, listed + _ATTRIBUTE.size, listed + length):
        yield at, wire.ELEMENT_FLAGS not in attributes(message[at:end], _ATTRIBUTE.size)


def _walked(message: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Where each attribute begins, its kind, and where it ends."""
    while at < end:
        length, kind = _ATTRIBUTE.unpack_from(message, at)
        yield at, kind & ~wire.NESTED, at + length
        at += (length + 3) & ~3
