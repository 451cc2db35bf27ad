"""A rule taken apart: its form, which many rules share, and what fills the form's holes.

Owns nothing. The form of a statement is a tuple that says all but the values that differ from rule to rule; ``rules`` encodes each form
once. Words that decide what the rest of a rule may look at (protocols, families) are part of the form, and so are names of sets and chains.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from socket import inet_pton
from typing import Any

from schemas.nft import (
    ClampMss,
    Comment,
    CopyMark,
    Counter,
    Limit,
    Log,
    Masquerade,
    Match,
    Nat,
    NatTo,
    Notrack,
    Reject,
    SetCtMark,
    SetMark,
    Statement,
    Trace,
    Verdict,
    VerdictMap,
)
from schemas.values import IPV4, IPV6, SOCKET_FAMILY
from services.kernel.nfnetlink import values
from services.kernel.nfnetlink.selectors import SELECTORS, Field
from services.kernel.nfnetlink.sets import AnonymousSet, anonymous_set
from services.kernel.nfnetlink.values import IPV4_ADDRESS, IPV6_ADDRESS, PORT, Inexpressible, Kind, host32

Hole = bytes | AnonymousSet
Said = tuple[Any, ...]
"""The kind of form, then what it says: plain values that compare."""
_Taken = tuple[Said, tuple[Hole, ...]]

COMMENT_BYTES = 128
_ALL = 0xFFFFFFFF
_KEPT = 4096
_ADDRESS_BYTES = {IPV4: 4, IPV6: 16}
_NONE: tuple[Hole, ...] = ()


def _match(item: Match) -> _Taken:
    field = SELECTORS.get(item.selector)
    if field is None:
        raise Inexpressible(item.selector, "a selector")
    if len(item.values) != 1:
        return _several(item, field)
    (text,) = item.values
    if field.literal or item.mask is not None or text.startswith("@"):
        return _special(item, field, text)
    kind = field.kind
    if kind.shape == "number":
        if "/" in text:
            return _prefix(item, field, text)
        if "-" in text:
            return ("range", item.selector, item.op), tuple(number.to_bytes(kind.size, "big") for number in kind.span(text))
    elif kind.shape == "name" and values.is_pattern(text):
        found = values.stem(text)
        return ("stem", item.selector, item.op, len(found)), (found,)
    return ("plain", item.selector, item.op), (kind.read(text),)


def _several(item: Match, field: Field) -> _Taken:
    """A set of values. None at all, or names of sets among them, is nothing that nft has a word for."""
    if not item.values or field.mask or any(text.startswith("@") for text in item.values):
        raise Inexpressible(item.values, f"values of {item.selector}")
    found = anonymous_set(item.selector, item.values, masked=item.mask is not None)
    if item.mask is None:
        return ("set", item.selector, item.op, bool(found.flags)), (found,)
    if field.kind is not values.MARK or found.flags:
        raise Inexpressible(item.values, f"masked values of {item.selector}")
    return ("masked set", item.selector, item.op), (host32(item.mask), found)


def _special(item: Match, field: Field, text: str) -> _Taken:
    """A named set, a word that decides what else there is to see, or a value under a mask."""
    if text.startswith("@"):
        if item.mask is not None or field.mask:
            raise Inexpressible(text, "a masked value")
        return ("lookup", item.selector, item.op, text[1:]), _NONE
    if field.literal:
        return ("literal", item.selector, item.op, field.kind.read(text)), _NONE
    if field.kind is not values.MARK or item.mask is None:
        raise Inexpressible(item.selector, "a masked selector")
    return ("masked", item.selector, item.op), (host32(item.mask), values.mark(text))


def _prefix(item: Match, field: Field, text: str) -> _Taken:
    """A prefix of whole bytes is compared without the rest; another one under a mask; one of full length is an address."""
    kind = field.kind
    first, _, written = text.partition("/")
    length = values.decimal(written, kind.size * 8)
    found = kind.read(first)
    if length == kind.size * 8:
        return ("plain", item.selector, item.op), (found,)
    if field.place is None or kind.in_host_order:
        raise Inexpressible(text, f"a value of {item.selector}")
    if length and not length % 8:
        return ("short", item.selector, item.op, length // 8), (found[: length // 8],)
    return ("bits", item.selector, item.op, length), (kind.span(text)[0].to_bytes(kind.size, "big"),)


def _set_mark(item: SetMark | SetCtMark) -> _Taken:
    whose = "meta" if type(item) is SetMark else "ct"
    if item.mask == _ALL:
        return ("mark", whose), (host32(item.value),)
    return ("masked mark", whose), (host32(~item.mask & _ALL), host32(item.value & item.mask))


def _copy(item: CopyMark) -> _Taken:
    return (("copy", item.to), _NONE) if item.mask == _ALL else (("masked copy", item.to), (host32(item.mask),))


def _nat_to(item: NatTo) -> _Taken:
    kind: Kind = IPV4_ADDRESS if item.family == "ip" else IPV6_ADDRESS
    if "-" in item.to or ("/" in item.to and item.port is not None):
        raise Inexpressible(item.to, "where to translate")
    is_prefix = kind.is_interval(item.to)
    holes: list[Hole] = [number.to_bytes(kind.size, "big") for number in kind.span(item.to)[: 1 + is_prefix]]
    if item.port is not None:
        holes.append(PORT.read(str(item.port)))
    return ("nat to", item.nat, item.family, is_prefix, item.port is not None), tuple(holes)


def _mss(item: ClampMss) -> _Taken:
    return (("mss", True), (PORT.read(str(item.size)),)) if item.size else (("mss", False), _NONE)


def _limit(item: Limit) -> _Taken:
    return ("limit",), (item.rate.to_bytes(8, "big"), item.burst.to_bytes(4, "big"))


def _log(item: Log) -> _Taken:
    return ("log", item.group, item.prefix, item.snaplen), _NONE


def _comment(item: Comment) -> _Taken:
    found = item.text.encode()
    if len(found) > COMMENT_BYTES or b'"' in found or b"\n" in found:
        raise Inexpressible(item.text, "a comment")
    return ("comment", len(found)), (found,)


_FORMS: dict[type, Callable[[Any], _Taken]] = {
    Match: _match,
    Counter: lambda _: (("counter",), _NONE),
    Verdict: lambda item: (("verdict", item.verdict, item.target), _NONE),
    VerdictMap: lambda item: (("vmap", item.selector, item.map), _NONE),
    SetMark: _set_mark,
    SetCtMark: _set_mark,
    CopyMark: _copy,
    Nat: lambda item: (("nat", item.nat, item.map, item.prefix, item.family), _NONE),
    NatTo: _nat_to,
    Masquerade: lambda _: (("plain statement", "masq"), _NONE),
    Notrack: lambda _: (("plain statement", "notrack"), _NONE),
    Reject: lambda _: (("reject",), _NONE),
    ClampMss: _mss,
    Limit: _limit,
    Log: _log,
    Trace: lambda _: (("trace",), _NONE),
    Comment: _comment,
}


class Form:
    """What a statement says but for the values in it. Made by ``Forms`` alone, so that equal forms are one object, which compares fast."""

    __slots__ = ("kind", "says")

    def __init__(self, said: Said) -> None:
        self.kind: str = said[0]
        self.says = said[1:]


Taken = tuple[Form, tuple[Hole, ...]]


@lru_cache(maxsize=_KEPT)
def _form(said: Said) -> Form:
    return Form(said)


_Address = tuple[int, Form, dict[str, tuple[Form, int]]]
_ADDRESSES: dict[tuple[str, str], _Address] = {
    (selector, op): (
        SOCKET_FAMILY[family],
        _form(("plain", selector, op)),
        {str(8 * count): (_form(("short", selector, op, count)), count) for count in range(1, _ADDRESS_BYTES[family])},
    )
    for family, selectors in ((IPV4, ("ip saddr", "ip daddr")), (IPV6, ("ip6 saddr", "ip6 daddr")))
    for selector in selectors
    for op in ("==", "!=")
}
"""Of a match on an address: its socket family, its form, and the form and number of bytes of a prefix that ends with a byte, by length."""
_COMMENTS = [_form(("comment", length)) for length in range(COMMENT_BYTES + 1)]


class Forms:
    """Takes statements apart. Owns what it found of the last few thousand of those that many rules share: `known` by statement.

    Addresses and comments are what rules do not share, so those are taken apart each time, and by a shorter way.
    """

    def __init__(self) -> None:
        self.known: dict[Statement, Taken] = {}

    def of(self, item: Statement) -> Taken:
        """A statement's form, and what fills its holes. Raises Inexpressible."""
        if type(item) is Match:
            address = _ADDRESSES.get((item.selector, item.op))
            if address is not None and (found := _address(address, item)) is not None:
                return found
        elif type(item) is Comment:
            (_, length), holes = _comment(item)
            return _COMMENTS[length], holes
        found = self.known.get(item)
        if found is None:
            if len(self.known) >= _KEPT:
                self.known.clear()
            said, holes = _FORMS[type(item)](item)
            found = self.known[item] = _form(said), holes
        return found


def _address(known: _Address, item: Match) -> Taken | None:
    """A match on an address, or on a prefix that ends with a byte; None for all else."""
    family, plain, short = known
    try:
        (text,) = item.values
        if item.mask is not None:
            return None
        if "/" not in text:
            return plain, (inet_pton(family, text),)
        first, _, length = text.partition("/")
        form, count = short[length]
        return form, (inet_pton(family, first)[:count],)
    except (OSError, ValueError, KeyError):
        return None
