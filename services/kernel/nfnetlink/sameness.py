"""When a rule that the kernel tells of is the very one that we would write: both brought to one form. Owns what it has seen of one chain.

The kernel tells a rule nearly in the bytes in which it was written: without marks at attributes that hold others, with some zeros that
nobody wrote, and with what counters have counted. Sets without a name are told by a number of the kernel's own, so their content stands in
the form. What is not known to be the same is not: such a rule is written anew, which is always right.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable, Iterator, Mapping

from services.kernel.netlink import HEADER, attributes
from services.kernel.nfnetlink import wire
from services.kernel.nfnetlink.sets import ANONYMOUS, AnonymousSet
from services.kernel.nfnetlink.wire import SetFlag

_ATTRIBUTE = struct.Struct("=HH")
_FAMILY_BYTES = 4
_ZEROS = {b"bitwise\0": 6, b"lookup\0": 5, b"exthdr\0": 5}
"""By expression the attribute that the kernel tells as zero where it was not written: an operation, flags."""
_ZERO = bytes(4)
_COUNTER, _LOOKUP = b"counter\0", b"lookup\0"
_LOOKUP_OF_BATCH = b"lookup by number"
"""Of a set that is made in the same batch."""
_LOOKUP_SET, _LOOKUP_SET_ID = 1, 4
_ANONYMOUS_PREFIX = ANONYMOUS.removesuffix("%d").encode()
_CONTENT_FLAGS = SetFlag.INTERVAL | SetFlag.MAP

Form = Hashable
_Expression = tuple[bytes, tuple[tuple[int, Form], ...]]
_ANY_COUNTER: _Expression = _COUNTER, ()


class Sameness:
    """Forms of the rules of one chain. `content` says what is in a set without a name, as ``content_form`` gives it."""

    def __init__(self, content: Callable[[bytes], Form]) -> None:
        self._content = content
        self._seen: dict[bytes, _Expression] = {}

    def told(self, body: bytes) -> tuple[int, Form]:
        """The handle of a rule that the kernel told of, and its form."""
        found = attributes(body, _FAMILY_BYTES)
        known, expression = self._seen.get, self._expression
        items = tuple([known(item) or expression(item) for item in _items(found)])
        return int.from_bytes(found[wire.RULE_HANDLE]), (items, found.get(wire.RULE_USERDATA, b""))

    def written(self, message: bytes, sets: Iterator[AnonymousSet]) -> Form:
        """The form of a rule's message. `sets` are those without a name that it looks up, in their order."""
        found = attributes(message, HEADER.size + _FAMILY_BYTES)
        known, expression = self._seen.get, self._expression
        items = [known(item) or expression(item) for item in _items(found)]
        for place, item in enumerate(items):
            if item[0] == _LOOKUP_OF_BATCH:
                inside = dict(item[1])
                del inside[_LOOKUP_SET_ID]
                items[place] = _form(_LOOKUP, {**inside, _LOOKUP_SET: set_form(next(sets))})
        return tuple(items), found.get(wire.RULE_USERDATA, b"")

    def _expression(self, item: bytes) -> _Expression:
        parts = attributes(unmarked(item))
        name = parts[wire.EXPRESSION_NAME]
        if name == _COUNTER:  # each is another one
            return _ANY_COUNTER
        inside: dict[int, Form] = dict(attributes(parts.get(wire.EXPRESSION_DATA, b"")))
        if name == _LOOKUP and _LOOKUP_SET_ID in inside:
            name = _LOOKUP_OF_BATCH
        elif name == _LOOKUP and parts[wire.EXPRESSION_DATA].startswith(_ANONYMOUS_PREFIX, _ATTRIBUTE.size):
            inside[_LOOKUP_SET] = self._content(inside[_LOOKUP_SET])  # type: ignore[arg-type]
        found = self._seen[item] = _form(name, inside)
        return found


def _items(rule: Mapping[int, bytes]) -> list[bytes]:
    """A rule's expressions."""
    data = rule.get(wire.RULE_EXPRESSIONS, b"")
    found = []
    place, end, size, unpack = 0, len(data), _ATTRIBUTE.size, _ATTRIBUTE.unpack_from
    while place < end:
        length = unpack(data, place)[0]
        found.append(data[place + size : place + length])
        place += max(size, (length + 3) & ~3)
    return found


def _form(name: bytes, inside: dict[int, Form]) -> _Expression:
    unsaid = _ZEROS.get(name)
    if unsaid is not None and inside.get(unsaid) == _ZERO:
        del inside[unsaid]
    return name, tuple(sorted(inside.items(), key=_kind))


def _kind(item: tuple[int, Form]) -> int:
    return item[0]


def content_form(flags: int, key_type: int, notes: bytes, items: list[bytes]) -> Form:
    """The form of a set without a name. `items` are its elements, in any order."""
    return flags & _CONTENT_FLAGS, key_type, notes, frozenset(tuple(sorted(attributes(unmarked(item)).items())) for item in items)


def set_form(item: AnonymousSet) -> Form:
    """The form of such a set as it is written."""
    return content_form(item.flags, item.kind.number, item.notes, [found[_ATTRIBUTE.size :] for found in item.items])


def unmarked(data: bytes) -> bytes:
    """Attributes without the mark that an attribute holds others, at every depth."""
    parts: list[bytes] = []
    place = 0
    while place + _ATTRIBUTE.size <= len(data):
        length, kind = _ATTRIBUTE.unpack_from(data, place)
        if length < _ATTRIBUTE.size:
            break
        inside = data[place + _ATTRIBUTE.size : place + length]
        if kind & wire.NESTED:
            inside = unmarked(inside)
        parts += (_ATTRIBUTE.pack(length, kind & ~wire.NESTED), inside, bytes(-length % 4))
        place += (length + 3) & ~3
    return b"".join(parts)
