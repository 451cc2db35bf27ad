"""When a rule that the kernel tells of is the very one that we would write: both brought to one form. Owns what it has seen of one chain.

The kernel tells a rule nearly in the bytes in which it was written: without marks at attributes that hold others, with some zeros that
nobody wrote, and with what counters have counted. Sets without a name are told by a number of the kernel's own, so their content stands in
the form. What is not known to be the same is not: such a rule is written anew, which is always right.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable, Iterator

from services.kernel.netlink import HEADER, attributes, each_attribute
from services.kernel.nfnetlink import wire
from services.kernel.nfnetlink.sets import ANONYMOUS, AnonymousSet
from services.kernel.nfnetlink.wire import SetFlag

_ATTRIBUTE = struct.Struct("=HH")
_FAMILY_BYTES = 4
_ZEROS = {b"bitwise\0": 6, b"lookup\0": 5, b"exthdr\0": 5}
"""By expression the attribute that the kernel tells as zero where it was not written: an operation, flags."""
_ZERO = bytes(4)
_COUNTER, _LOOKUP = b"counter\0", b"lookup\0"
_LOOKUP_SET, _LOOKUP_SET_ID = 1, 4
_ANONYMOUS_PREFIX = ANONYMOUS.removesuffix("%d").encode()
_CONTENT_FLAGS = SetFlag.INTERVAL | SetFlag.MAP

Form = Hashable


class Sameness:
    """Forms of the rules of one chain. `content` says what is in a set without a name, as ``content_form`` gives it."""

    def __init__(self, content: Callable[[bytes], Form]) -> None:
        self._content = content
        self._seen: dict[bytes, Form] = {}

    def told(self, body: bytes) -> tuple[int, Form]:
        """The handle of a rule that the kernel told of, and its form."""
        found = attributes(body, _FAMILY_BYTES)
        items = tuple(self._expression(item) for _, item in each_attribute(found.get(wire.RULE_EXPRESSIONS, b"")))
        return int.from_bytes(found[wire.RULE_HANDLE]), (items, found.get(wire.RULE_USERDATA, b""))

    def written(self, message: bytes, sets: Iterator[AnonymousSet]) -> Form:
        """The form of a rule's message. `sets` are those without a name that it looks up, in their order."""
        found = attributes(message, HEADER.size + _FAMILY_BYTES)
        items = (self._written(item, sets) for _, item in each_attribute(found.get(wire.RULE_EXPRESSIONS, b"")))
        return tuple(items), found.get(wire.RULE_USERDATA, b"")

    def _written(self, item: bytes, sets: Iterator[AnonymousSet]) -> Form:
        parts = attributes(item)
        if parts[wire.EXPRESSION_NAME] == _LOOKUP and _LOOKUP_SET_ID in attributes(parts[wire.EXPRESSION_DATA]):
            inside = attributes(parts[wire.EXPRESSION_DATA])
            del inside[_LOOKUP_SET_ID]
            inside[_LOOKUP_SET] = set_form(next(sets))  # type: ignore[assignment]
            return _form(_LOOKUP, inside)
        return self._expression(item)

    def _expression(self, item: bytes) -> Form:
        found = self._seen.get(item)
        if found is None:
            parts = attributes(unmarked(item))
            name = parts[wire.EXPRESSION_NAME]
            if name == _COUNTER:  # each is another one
                return name
            inside = attributes(parts.get(wire.EXPRESSION_DATA, b""))
            if name == _LOOKUP and inside[_LOOKUP_SET].startswith(_ANONYMOUS_PREFIX):
                inside[_LOOKUP_SET] = self._content(inside[_LOOKUP_SET])  # type: ignore[assignment]
            found = self._seen[item] = _form(name, inside)
        return found


def _form(name: bytes, inside: dict[int, bytes]) -> Form:
    unsaid = _ZEROS.get(name)
    if unsaid is not None and inside.get(unsaid) == _ZERO:
        del inside[unsaid]
    return name, tuple(sorted(inside.items()))


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
