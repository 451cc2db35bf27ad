"""Sets and maps as the kernel dumps them, as plan objects.

Owns nothing. The types of keys and values are known by libnftables' numbers (``nfnetlink.values``), which whoever makes a set notes down.
What no plan can have (a type that is not known here, a flag, a timeout of all elements) makes the header a difference; elements of unknown
types are hexadecimal numbers.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from socket import AF_INET, AF_INET6, inet_ntop
from typing import NamedTuple

from schemas.host_objects import NftElement, NftSet, PlanObject
from services.kernel.netlink import BE32, Attributes, attribute, attributes, text_of
from services.kernel.nfnetlink import values
from services.kernel.nfnetlink.wire import SetFlag
from services.kernel.transaction import Held, Listed

NAME, FLAGS = 2, 3
_KEY_TYPE, _KEY_BYTES, _DATA_TYPE, _DATA_BYTES, _TIMEOUT, _GC_INTERVAL, _POLICY = 4, 5, 6, 7, 11, 12, 8
HANDLE = 16
_ODD_FLAGS = {SetFlag.CONSTANT: "constant", 32: "dynamic", 64: "objects as values", 128: "concatenated keys", 256: "expressions"}
_ODD_ATTRIBUTES = {_TIMEOUT: "timeout", _GC_INTERVAL: "gc-interval", _POLICY: "policy"}
_ELEMENT_KEY, _ELEMENT_DATA, _ELEMENT_FLAGS, _ELEMENT_OBJECT, _KEY_END = 1, 2, 3, 9, 10
_IS_END, _IS_ALL = 1, 2
_VALUE, _VERDICT, _CODE, _CHAIN = 1, 2, 1, 2
_VERDICTS = {0: "drop", 1: "accept", -1: "continue", -3: "jump", -4: "goto", -5: "return"}
_LENGTH = struct.Struct("=H")
_HEAD_BYTES, _BEFORE_KEY = 4, 12
_END = attribute(_ELEMENT_FLAGS, BE32.pack(_IS_END))


def hexadecimal(data: bytes) -> str:
    return f"0x{data.hex()}"


class Head(NamedTuple):
    """A set's header. Types are libnftables' numbers, lengths bytes; `data_type` is None for a plain set."""

    name: str
    flags: int
    key_type: int
    key_bytes: int
    data_type: int | None
    data_bytes: int
    odd: tuple[str, ...]

    @property
    def is_anonymous(self) -> bool:
        return bool(self.flags & SetFlag.ANONYMOUS)

    @property
    def is_interval(self) -> bool:
        return bool(self.flags & SetFlag.INTERVAL)

    @property
    def has_timeouts(self) -> bool:
        return bool(self.flags & SetFlag.TIMEOUT)

    @property
    def has_ranges(self) -> bool:
        """Whether the values of a map are pairs: the first and the last of a range."""
        kind = values.KINDS_BY_NUMBER.get(self.data_type or 0)
        return kind is not None and self.data_bytes == 2 * kind.size


def head_of(found: Attributes) -> Head:
    flags = _number(found, FLAGS)
    odd = [word for flag, word in _ODD_FLAGS.items() if flags & flag] + [word for kind, word in _ODD_ATTRIBUTES.items() if kind in found]
    data_type = _number(found, _DATA_TYPE) if flags & SetFlag.MAP else None
    lengths = _number(found, _KEY_BYTES), _number(found, _DATA_BYTES)
    return Head(text_of(found[NAME]), flags, _number(found, _KEY_TYPE), lengths[0], data_type, lengths[1], tuple(odd))


def held_set(table: str, head: Head) -> Held:
    """The header as an object."""
    key, data = _kind(head.key_type), None if head.data_type is None else _kind(head.data_type)
    odd = list(head.odd)
    if key is None or key.size != head.key_bytes:
        odd.append(f"keys of type {head.key_type}")
    if head.data_type is not None and (data is None or head.data_bytes not in (data.size, 2 * data.size)):
        odd.append(f"values of type {head.data_type}")
    if odd or key is None:
        return Listed("nft", f"set {table} {head.name}", f"a {'set' if head.data_type is None else 'map'} with {', '.join(odd)}")
    value = None if data is None else data.name
    return NftSet(table, head.name, key.name, value, head.is_interval, head.has_ranges, head.has_timeouts)  # type: ignore[arg-type]


def held_elements(table: str, head: Head, lists: Iterable[bytes], wanted: Mapping[str, PlanObject]) -> dict[str, Held]:
    """Elements as objects by key; equal ones of `wanted` in their place, so that none is in memory twice."""
    found: dict[str, Held] = {}
    name = head.name
    begin = f"element {table} {name} "
    for text, value in members(head, lists):
        key = begin + text
        planned = wanted.get(key)
        if planned is None or planned.value != value:  # type: ignore[union-attr]
            planned = NftElement(table, name, text, value)
        found[key] = planned
    return found


def members(head: Head, lists: Iterable[bytes], read: Callable[[bytes], str] = hexadecimal) -> Iterator[tuple[str, str]]:
    """Key and value of each element in the form that plans use: 10.61.0.0/16, 10.61.0.1, 80-90, mo.*, 0xff00 for marks, ``jump CHAIN``.

    `read` says single keys of a type that is not known here.
    """
    is_interval = head.is_interval
    key_text, value_text = _READERS.get(head.key_type, read), _value_reader(head)
    items = _items(head, lists)
    if not is_interval:
        for key, value, _, is_all in items:
            yield "*" if is_all else key_text(key), value_text(value)
        return
    kind = _kind(head.key_type)
    last = (1 << head.key_bytes * 8) - 1
    # An end at a key comes before what begins there, and what stands for all other keys behind all.
    ordered = sorted(items, key=lambda item: (item[3], item[0], not item[2]))
    for (key, value, is_end, is_all), behind in zip(ordered, [*ordered[1:], None], strict=False):
        if is_all:
            yield "*", value_text(value)
        elif not is_end:
            high = int.from_bytes(behind[0]) - 1 if behind is not None and not behind[3] else last
            yield span_text(kind, int.from_bytes(key), high, head.key_bytes), value_text(value)


_Item = tuple[bytes, bytes, bool, bool]
"""A key, the nested attributes of its value, whether it is the end of an interval, and whether it stands for all other keys."""


def _items(head: Head, lists: Iterable[bytes]) -> Iterator[_Item]:
    """Nearly all items begin with the same heads around a key of the same length, so that the rest is told apart first."""
    size = head.key_bytes
    key_head = attribute(_ELEMENT_KEY, attribute(_VALUE, bytes(size)))[: _BEFORE_KEY - _HEAD_BYTES]
    key_end = _BEFORE_KEY + size
    rest_begin = (key_end + 3) & ~3
    for data in lists:
        at, end = 0, len(data)
        while at < end:
            length = _LENGTH.unpack_from(data, at)[0]
            if not data.startswith(key_head, at + _HEAD_BYTES):
                yield _item(data[at + _HEAD_BYTES : at + length])
            else:
                rest = data[at + rest_begin : at + length]
                key = data[at + _BEFORE_KEY : at + key_end]
                if not rest:
                    yield key, b"", False, False
                elif rest == _END:
                    yield key, b"", True, False
                elif len(rest) == _LENGTH.unpack_from(rest)[0] and rest[2] == _ELEMENT_DATA:
                    yield key, rest[_HEAD_BYTES:], False, False
                else:
                    yield _item(data[at + _HEAD_BYTES : at + length])
            at += (length + 3) & ~3


def _item(data: bytes) -> _Item:
    found = attributes(data)
    flags = _number(found, _ELEMENT_FLAGS)
    key = attributes(found.get(_ELEMENT_KEY, b"")).get(_VALUE, b"")
    if _KEY_END in found and (end := attributes(found[_KEY_END]).get(_VALUE, b"")) != key:
        key += end
    value = found.get(_ELEMENT_DATA, found.get(_ELEMENT_OBJECT, b""))
    return key, value, bool(flags & _IS_END), bool(flags & _IS_ALL)


def _value_reader(head: Head) -> Callable[[bytes], str]:
    """What reads the nested attributes of a value."""
    if head.data_type is None:
        return text_of
    if head.has_ranges:
        kind = _kind(head.data_type)
        size = head.data_bytes // 2

        def ranged(data: bytes) -> str:
            value = attributes(data).get(_VALUE, b"")
            return span_text(kind, int.from_bytes(value[:size]), int.from_bytes(value[size:]), size)

        return ranged
    read = _reader(head.data_type)

    head_of_value, size = attribute(_VALUE, bytes(head.data_bytes))[:_HEAD_BYTES], head.data_bytes

    def single(data: bytes) -> str:
        if data.startswith(head_of_value):
            return read(data[_HEAD_BYTES : _HEAD_BYTES + size])
        found = attributes(data)
        return verdict_text(found[_VERDICT]) if _VERDICT in found else read(found[_VALUE]) if _VALUE in found else text_of(data)

    return single


def verdict_text(data: bytes) -> str:
    """A verdict's nested attributes as nft says it."""
    found = attributes(data)
    code = int.from_bytes(found.get(_CODE, b""), signed=True)
    return f"{_VERDICTS.get(code, f'verdict {code}')} {text_of(found.get(_CHAIN, b''))}".rstrip()


def span_text(kind: values.Kind | None, low: int, high: int, size: int) -> str:
    """From the first to the last number of an interval."""
    if kind is not None and kind.shape == "name":
        return _name_text(low, high, size)
    read = _reader(kind.number if kind else 0, big=True)
    if low == high:
        return read(low.to_bytes(size))
    width = (low ^ high).bit_length()
    if kind in (values.IPV4_ADDRESS, values.IPV6_ADDRESS) and low ^ high == (1 << width) - 1 and not low & (low ^ high):
        return f"{read(low.to_bytes(size))}/{size * 8 - width}"
    return f"{read(low.to_bytes(size))}-{read(high.to_bytes(size))}"


def _name_text(low: int, high: int, size: int) -> str:
    """One name, or those that begin alike."""
    if low == high:
        return read_name(low.to_bytes(size))
    free = (low ^ high).bit_length()
    return f"{text_of((low >> free << free).to_bytes(size))}*"


def read_name(data: bytes) -> str:
    r"""An interface's name; one that ends in a star itself has ``\*`` there."""
    found = text_of(data)
    return f"{found[:-1]}\\*" if found.endswith("*") else found


def _reader(number: int, *, big: bool = False) -> Callable[[bytes], str]:
    """What reads single values of a type; `big` where those that are in the host's order elsewhere are in the network's."""
    found = _READERS.get(number, hexadecimal)
    return _read_mark_big if big and number == values.MARK.number else found


def _read_mark(data: bytes) -> str:
    return f"{int.from_bytes(data, sys.byteorder):#x}"


def _read_mark_big(data: bytes) -> str:
    return f"{int.from_bytes(data):#x}"


def _read_address4(data: bytes) -> str:
    return inet_ntop(AF_INET, data)


def _read_address6(data: bytes) -> str:
    return inet_ntop(AF_INET6, data)


_READERS: dict[int, Callable[[bytes], str]] = {
    values.IPV4_ADDRESS.number: _read_address4,
    values.IPV6_ADDRESS.number: _read_address6,
    values.PORT.number: lambda data: str(int.from_bytes(data)),
    values.MARK.number: _read_mark,
    values.NAME.number: read_name,
}


def _kind(number: int) -> values.Kind | None:
    return values.KINDS_BY_NUMBER.get(number)


def _number(found: Attributes, kind: int) -> int:
    return int.from_bytes(found.get(kind, b""))
