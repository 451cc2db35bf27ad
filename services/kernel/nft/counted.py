"""What the rules of an own table have counted, as the kernel dumps them: no listing, no libnftables.

Owns nothing: bodies of messages in, values out. Only rules with a comment and a counter are looked at. A handle is a rule's for its whole
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
_HEAD = 4


def rule_counts(bodies: Iterable[bytes]) -> Iterator[RuleCount]:
    """The counts of rules, which are given as bodies of messages."""
    for body in bodies:
        found = attributes(body, _HEAD)
        comment = _comment(found.get(_USERDATA, b""))
        counted = _counted(found.get(_EXPRESSIONS, b"")) if comment else None
        if counted is not None:
            handle = int.from_bytes(found.get(_HANDLE, b""))
            yield RuleCount(text_of(found.get(_CHAIN, b"")), handle, comment, *counted)


def _counted(expressions: bytes) -> tuple[int, int] | None:
    """Packets and bytes of the first counter."""
    for _, expression in each_attribute(expressions):
        found = attributes(expression)
        if text_of(found.get(_NAME, b"")) == "counter":
            inner = attributes(found.get(_DATA, b""))
            return int.from_bytes(inner.get(_PACKETS, b"")), int.from_bytes(inner.get(_BYTES, b""))
    return None


def _comment(userdata: bytes) -> str:
    """The comment among what nft keeps beside a rule: kind, length and value, a byte for each of the first two."""
    place = 0
    while place + 2 <= len(userdata):
        kind, length = userdata[place], userdata[place + 1]
        if kind == _COMMENT_KIND:
            return text_of(userdata[place + 2 : place + 2 + length])
        place += 2 + length
    return ""
