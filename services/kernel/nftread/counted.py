"""What the rules of an own table have counted, and their comments. No listing, no libnftables.

Owns nothing: attributes of rules in, values out. Counts are of rules with a comment and a counter. A handle is a rule's for its whole
life, and no other rule of the table ever has it: what a rule with a new handle has counted began at 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from services.kernel.netlink import attributes, each_attribute, text_of
from services.kernel.port import RuleCount

_CHAIN, _HANDLE, _EXPRESSIONS, _USERDATA = 2, 3, 4, 7
_NAME, _DATA = 1, 2
_BYTES, _PACKETS = 1, 2
_COMMENT_KIND = 0


def rule_counts(rules: Iterable[bytes]) -> Iterator[RuleCount]:
    """The counts of rules, which are given as attributes."""
    for rule in rules:
        found = attributes(rule)
        comment = comment_of(found.get(_USERDATA, b""))
        counted = _counted(found.get(_EXPRESSIONS, b"")) if comment else None
        if counted is not None:
            handle = int.from_bytes(found.get(_HANDLE, b""))
            yield RuleCount(text_of(found.get(_CHAIN, b"")), handle, comment, *counted)


def comments(rules: Iterable[bytes]) -> Iterator[str]:
    """The comment of each rule; empty for one without."""
    return (comment_of(attributes(rule).get(_USERDATA, b"")) for rule in rules)


def comment_of(userdata: bytes) -> str:
    """The comment among what nft keeps beside a rule: kind, length and value, a byte for each of the first two."""
    place = 0
    while place + 2 <= len(userdata):
        kind, length = userdata[place], userdata[place + 1]
        if kind == _COMMENT_KIND:
            return text_of(userdata[place + 2 : place + 2 + length])
        place += 2 + length
    return ""


def _counted(expressions: bytes) -> tuple[int, int] | None:
    """Packets and bytes of the first counter."""
    for _, expression in each_attribute(expressions):
        found = attributes(expression)
        if text_of(found.get(_NAME, b"")) == "counter":
            inner = attributes(found.get(_DATA, b""))
            return int.from_bytes(inner.get(_PACKETS, b"")), int.from_bytes(inner.get(_BYTES, b""))
    return None
