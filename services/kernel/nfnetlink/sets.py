"""Named and anonymous sets as messages: their headers. What is in them is in ``elements``. Owns nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from schemas.host_objects import NftSet
from schemas.nft import Selector
from services.kernel.netlink import attribute
from services.kernel.nfnetlink import elements, wire
from services.kernel.nfnetlink.elements import Header
from services.kernel.nfnetlink.selectors import SELECTORS, user_number
from services.kernel.nfnetlink.values import KINDS, VERDICT, Inexpressible, Kind
from services.kernel.nfnetlink.wire import Message, SetFlag, be32, nest
from services.kernel.nft.steps import Path

ANONYMOUS = "__set%d"
"""Of which the kernel makes a name, for a set that only one rule knows."""
_KEY_ORDER, _DATA_ORDER, _MERGED, _RANGED_DATA = 0, 1, 2, 6


class AnonymousSet(NamedTuple):
    """A set that one rule looks up: its type, flags and notes, the size that the kernel makes room for, and its elements as items."""

    kind: Kind
    flags: int
    notes: bytes
    size: int
    items: tuple[bytes, ...]


def header_of(item: NftSet) -> Header:
    return Header(KINDS[item.key_type], None if item.value_type is None else KINDS[item.value_type], item.interval, item.value_interval)


def new_set(item: NftSet, number: int, sequence: int) -> bytes:
    """A named set, empty; `number` is its identity within the batch."""
    found = header_of(item)
    if found.key is VERDICT or (found.ranged_data and found.data in (None, VERDICT)):
        raise Inexpressible(item.key, "a set")
    flags = (SetFlag.INTERVAL if found.interval else 0) | (SetFlag.TIMEOUT if item.timeout else 0)
    notes = user_number(_KEY_ORDER, found.key.order)
    data = b""
    if found.data is not None:
        flags |= SetFlag.MAP
        width = found.data.size * (2 if found.ranged_data else 1)
        data = be32(wire.SET_DATA_TYPE, found.data.number) + be32(wire.SET_DATA_LENGTH, width)
        notes += user_number(_DATA_ORDER, 0 if found.data is VERDICT else found.data.order)
        notes += user_number(_RANGED_DATA, int(found.ranged_data))
    return _new_set((item.table, item.name), flags, found.key, (number, sequence), data, attribute(wire.SET_USERDATA, notes))


def anonymous_messages(table: str, item: AnonymousSet, number: int, sequence: int) -> Iterator[bytes]:
    """The set and its elements."""
    flags = SetFlag.ANONYMOUS | SetFlag.CONSTANT | item.flags
    size = nest(wire.SET_DESCRIPTION, be32(wire.DESCRIPTION_SIZE, item.size))
    yield _new_set((table, ANONYMOUS), flags, item.kind, (number, sequence), size, attribute(wire.SET_USERDATA, item.notes))
    yield from elements.messages(Message.NEW_ELEMENTS, (table, ANONYMOUS), item.items, sequence + 1, number)


def _new_set(at: Path, flags: int, key: Kind, numbers: tuple[int, int], *more: bytes) -> bytes:
    """`numbers` are the set's identity and the message's number."""
    (table, name), (number, sequence) = at, numbers
    return wire.request(
        Message.NEW_SET,
        wire.CREATE,
        sequence,
        wire.text(wire.SET_TABLE, table),
        wire.text(wire.SET_NAME, name),
        be32(wire.SET_FLAGS, flags),
        be32(wire.SET_KEY_TYPE, key.number),
        be32(wire.SET_KEY_LENGTH, key.size),
        be32(wire.SET_ID, number),
        *more,
    )


def anonymous_set(selector: Selector, texts: Sequence[str], *, masked: bool) -> AnonymousSet:
    """The values of a match as a set. Values that meet or touch become one interval."""
    field = SELECTORS[selector]
    kind = field.kind
    notes, typeof = user_number(_KEY_ORDER, kind.order), b"" if masked else field.typeof
    if not any(kind.is_interval(text) for text in texts):
        keys = dict.fromkeys(kind.read(text.removesuffix(f"/{kind.size * 8}")) for text in texts)
        return AnonymousSet(kind, 0, notes + typeof, len(keys), tuple(elements.item(key) for key in keys))
    spans = _merged(kind.span(text) for text in texts)
    size = 2 * len(spans) + bool(spans[0][0])
    items = ((elements.zero_end(kind),) if spans[0][0] else ()) + tuple(elements.interval_items(kind, spans, [b""] * len(spans)))
    return AnonymousSet(kind, SetFlag.INTERVAL, notes + user_number(_MERGED, 1) + typeof, size, items)


def _merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for low, high in sorted(spans):
        if found and low <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(high, found[-1][1])
        else:
            found.append((low, high))
    return found
