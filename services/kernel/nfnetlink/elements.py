"""The elements of sets as items of a message's list, and the messages around them.

Owns nothing. An element of an interval set is two for the kernel: where the interval begins, and where the next value after it begins
(none after the last value there is, which libnftables notes down at the first of the two). libnftables begins most interval sets with an
end at zero, which says that nothing is before. That is left out: of a set that is there already it is not known whether it has one.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from schemas.host_objects import NftElement
from services.kernel.netlink import HEADER, attribute, attributes
from services.kernel.nfnetlink import wire
from services.kernel.nfnetlink.selectors import user_number
from services.kernel.nfnetlink.values import VERDICT, Inexpressible, Kind
from services.kernel.nfnetlink.wire import Message, be32, be64, nest
from services.kernel.nft.steps import Path

_NEST_BYTES = 60_000
"""An attribute's length has 16 bits; what is around the items is small."""
_END = be32(wire.ELEMENT_FLAGS, 1)
_OPEN = attribute(wire.ELEMENT_USERDATA, user_number(1, 1))
_BEFORE_KEY = 12  # the heads of three attributes around each other
_BEFORE_VALUE = 8  # of two
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
    if header.data is None and any(element.value for element in elements):
        raise Inexpressible(elements[0].key, "an element without a value")
    data = _data(header, elements) if header.data is not None else [b""] * len(elements)
    return _items_of(header, elements, data)


def lent(header: Header, elements: Sequence[NftElement], seconds: int) -> list[bytes]:
    """Items for elements that the kernel takes back by itself."""
    if header.interval or header.data is not None:
        raise Inexpressible(header.key.name, "a set of what is lent")
    timeout = be64(wire.ELEMENT_TIMEOUT, seconds * 1000)
    return [item(header.key.read(element.element), timeout) for element in elements]


def deleted(header: Header, elements: Sequence[NftElement]) -> list[bytes]:
    """Items for elements that go, which are known by their keys."""
    return _items_of(header, elements, [b""] * len(elements))


def _items_of(header: Header, elements: Sequence[NftElement], data: Sequence[bytes]) -> list[bytes]:
    kind = header.key
    if header.interval:
        span = kind.span
        return interval_items(kind, [span(element.element) for element in elements], data)
    read, around = kind.read, _around(kind.size, data)
    found = []
    for element, value in zip(elements, data, strict=True):
        head, tail = around[len(value)]
        found.append(head + read(element.element) + tail + value)
    return found


def item(key: bytes, *more: bytes) -> bytes:
    return nest(wire.LIST_ITEM, nest(wire.ELEMENT_KEY, attribute(wire.DATA_VALUE, key)), *more)


def zero_end(kind: Kind) -> bytes:
    """An end before all values."""
    return item(bytes(kind.size), _END)


def interval_items(kind: Kind, spans: Sequence[tuple[int, int]], data: Sequence[bytes]) -> list[bytes]:
    """Begin and end of each span. `data` is what comes after the key of each begin."""
    size, last = kind.size, kind.last
    around, (end_head, end_tail) = _around(size, data), _around(size, [_END])[len(_END)]
    end_tail += _END
    found = []
    for (low, high), value in zip(spans, data, strict=True):
        if high == last:
            found.append(item(low.to_bytes(size, "big"), value, _OPEN))
            continue
        head, tail = around[len(value)]
        found += (
            head + low.to_bytes(size, "big") + tail + value,
            end_head + (high + 1).to_bytes(size, "big") + end_tail,
        )
    return found


def _around(size: int, data: Iterable[bytes]) -> dict[int, tuple[bytes, bytes]]:
    """What is before and after a key of `size` bytes in an item, by the length of what comes after that."""
    found = {}
    for length in set(map(len, data)):
        whole = item(bytes(size), bytes(length))
        found[length] = whole[:_BEFORE_KEY], whole[_BEFORE_KEY + size : len(whole) - length]
    return found


def _data(header: Header, elements: Sequence[NftElement]) -> list[bytes]:
    """The values of elements as attributes, each encoded once."""
    kind = header.data
    assert kind is not None
    if kind is VERDICT:
        found = {text: _verdict(text) for text in {element.value for element in elements}}
        return [found[element.value] for element in elements]
    width = kind.size * (2 if header.ranged_data else 1)
    whole = nest(wire.ELEMENT_DATA, attribute(wire.DATA_VALUE, bytes(width)))
    head, tail = whole[:_BEFORE_VALUE], whole[_BEFORE_VALUE + width :]
    if not header.ranged_data:
        read = kind.read
        return [head + read(element.value) + tail for element in elements]
    size, spans = kind.size, [kind.span(element.value) for element in elements]
    return [head + low.to_bytes(size, "big") + high.to_bytes(size, "big") + tail for low, high in spans]


def _verdict(text: str) -> bytes:
    code, _, chain = text.partition(" ")
    if code not in wire.VERDICTS or (code == "jump") != bool(chain):
        raise Inexpressible(text, "a verdict")
    return nest(wire.ELEMENT_DATA, wire.verdict(code, chain))


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
