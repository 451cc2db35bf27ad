"""Rules as bytes that are equal when the rules are: the kernel's own, without what it gives to each rule or counts by itself.

Owns nothing. A form is attributes: a rule's expressions and notes as they were dumped, with zeros for what counters have counted. A set
without a name has another number each time, so it has none here, and what is in it comes behind the rule. All that nobody here knows
stays in the form as it is, and differs where the kernel's form of the wanted rule has not got it.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator

from services.kernel.netlink import attribute, attributes, each_attribute, nested, text_of

EXPRESSIONS, USERDATA = 4, 7
_TABLE, _CHAIN, _HANDLE, _POSITION, _PAD, _ID, _POSITION_ID, _CHAIN_ID = 1, 2, 3, 6, 8, 9, 10, 11
_GIVEN = frozenset((_TABLE, _CHAIN, _HANDLE, _POSITION, _PAD, _ID, _POSITION_ID, _CHAIN_ID))
ITEM, NAME, DATA = 1, 1, 2
ANONYMOUS = 0x100
"""Of a form only: what is in a set without a name. One for each that the rule names, in order."""
_ATTRIBUTE, _LENGTH = struct.Struct("=HH"), struct.Struct("=H")
_NUMBER_BYTES = 12
_HANDLE_HEAD, _POSITION_HEAD = _ATTRIBUTE.pack(_NUMBER_BYTES, _HANDLE), _ATTRIBUTE.pack(_NUMBER_BYTES, _POSITION)
_STATES = {b"counter\0": (1, 2), b"quota\0": (4,), b"last\0": (1, 2)}
"""Attributes of expressions that change by themselves."""
_SETS = {b"lookup\0": 1, b"dynset\0": 1, b"objref\0": 4}
"""Expressions that name a set, and the attribute that does."""
_NAMELESS = b"__set\0"

Anonymous = Callable[[bytes], bytes | None]
"""What is in a set without a name, by the name's bytes; None for a set that has one."""


def by_chain(pieces: Iterable[list[bytes]]) -> Iterator[tuple[str, list[bytes]]]:
    """Each chain's name and rules. A piece is all rules of some chains, a chain's in a row."""
    for rules in pieces:
        begin = 0
        while begin < len(rules):
            name, prefix = _place(rules[begin])
            end = bisect_left(rules, 1, begin + 1, key=lambda rule, prefix=prefix: not rule.startswith(prefix))  # type: ignore[misc]
            yield name, rules[begin:end]
            begin = end


def forms(rules: list[bytes], anonymous: Anonymous | None) -> tuple[bytes, ...]:
    """The forms of a chain's rules; there is one at least. Without `anonymous` the table has no sets without names."""
    return _settled(_without_given(rules, _place(rules[0])[1]), anonymous)


def _without_given(rules: list[bytes], prefix: bytes) -> list[bytes]:
    """Rules of one chain without what only one rule can have: mostly the chain, a handle, and in all but the first a position."""
    head, handle_end = prefix + _HANDLE_HEAD, len(prefix) + _NUMBER_BYTES
    behind = handle_end + _NUMBER_BYTES
    found = [rule[behind:] for rule in rules if rule.startswith(_POSITION_HEAD, handle_end) and rule.startswith(head)]
    if len(found) == len(rules) - 1 and not rules[0].startswith(_POSITION_HEAD, handle_end):
        return [_kept(rules[0]), *found]
    return list(map(_kept, rules))


def _place(rule: bytes) -> tuple[str, bytes]:
    """The name of a rule's chain, and what all rules of the chain begin with."""
    found = attributes(rule)
    return text_of(found[_CHAIN]), attribute(_TABLE, found[_TABLE]) + attribute(_CHAIN, found[_CHAIN])


def _kept(rule: bytes) -> bytes:
    """The attributes of a rule but for those."""
    return b"".join(rule[begin - _ATTRIBUTE.size : _padded(end)] for kind, begin, end in _walked(rule, 0, len(rule)) if kind not in _GIVEN)


def _settled(rules: list[bytes], anonymous: Anonymous | None) -> tuple[bytes, ...]:
    whole = b"".join(rules)
    words = tuple(word for word in (*_STATES, *(_SETS if anonymous else ())) if word in whole)
    if not words:
        return tuple(rules)
    return tuple(_form(rule, anonymous) if any(word in rule for word in words) else rule for rule in rules)


def _form(rule: bytes, anonymous: Anonymous | None) -> bytes:
    """A rule without what changes by itself, looked for where expressions are: the same bytes in a comment are left as they are."""
    data = bytearray(rule)
    contents: list[bytes] = []
    for kind, begin, end in _walked(rule, 0, len(rule)):
        if kind != EXPRESSIONS:
            continue
        for name, at, behind in _expressions(rule, begin, end):
            if name in _STATES:
                for inner, first, last in _walked(rule, at, behind):
                    if inner in _STATES[name]:
                        data[first:last] = bytes(last - first)
            elif name in _SETS and anonymous is not None:
                content = anonymous(attributes(rule[at:behind]).get(_SETS[name], b""))
                contents += [] if content is None else [attribute(ANONYMOUS, content)]
    return bytes(data) if anonymous is None or not contents else b"".join((_nameless(bytes(data), anonymous), *contents))


def _expressions(rule: bytes, offset: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """The name of each expression, which is what it begins with, and where its attributes begin and end."""
    while offset < end:
        length = _LENGTH.unpack_from(rule, offset)[0]
        name_begin = offset + 2 * _ATTRIBUTE.size
        name_end = name_begin - _ATTRIBUTE.size + _LENGTH.unpack_from(rule, offset + _ATTRIBUTE.size)[0]
        yield rule[name_begin:name_end], _padded(name_end) + _ATTRIBUTE.size, offset + length
        offset += _padded(length)


def _nameless(rule: bytes, anonymous: Anonymous) -> bytes:
    """The rule with one and the same name for all sets that have none."""
    return b"".join(
        nested(kind, b"".join(_expression(item, anonymous) for _, item in each_attribute(value)))
        if kind == EXPRESSIONS
        else attribute(kind, value)
        for kind, value in each_attribute(rule)
    )


def _expression(item: bytes, anonymous: Anonymous) -> bytes:
    parts = attributes(item)
    named = _SETS.get(parts[NAME])
    if named is None or DATA not in parts:
        return nested(ITEM, item)
    inside = [
        attribute(kind, _NAMELESS if kind == named and anonymous(value) is not None else value)
        for kind, value in each_attribute(parts[DATA])
    ]
    return nested(ITEM, attribute(NAME, parts[NAME]) + nested(DATA, b"".join(inside)))


def _padded(length: int) -> int:
    return (length + 3) & ~3


def _walked(data: bytes, offset: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Each attribute's kind, and where its value begins and ends."""
    while offset + _ATTRIBUTE.size <= end:
        length, kind = _ATTRIBUTE.unpack_from(data, offset)
        if length < _ATTRIBUTE.size:
            return
        yield kind & 0x3FFF, offset + _ATTRIBUTE.size, min(offset + length, end)
        offset += _padded(length)
