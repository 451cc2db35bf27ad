"""Rules as messages: the template of a rule's form in its chain, filled with the rule's values. Owns what it bound to one chain."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from schemas.nft import Rule
from services.kernel.netlink import HEADER
from services.kernel.nfnetlink import wire
from services.kernel.nfnetlink.forms import Form, Hole
from services.kernel.nfnetlink.templates import WITH_SETS, Templates
from services.kernel.nfnetlink.wire import Message

_U32 = struct.Struct("=I").pack
_KEPT = 64
_SENDER_BYTES = 4  # of what follows the sequence number, the rest of the message's header


class Bound:
    """A template in one chain: a message in parts, with the header up to its sequence number, that number, then literals and holes in turn.

    The parts are filled in again for each rule. `has_sets` tells of holes for what is a set and has no number yet.
    """

    __slots__ = ("_order", "_parts", "has_sets")

    def __init__(self, parts: list[bytes], order: tuple[int, ...] | None, *, has_sets: bool) -> None:
        self._parts = parts
        self._order = order
        self.has_sets = has_sets

    def message(self, holes: Sequence[bytes], sequence: int) -> bytes:
        """A rule at the end of the chain."""
        parts = self._parts
        parts[1] = _U32(sequence)
        parts[3::2] = holes if self._order is None else [holes[place] for place in self._order]
        return b"".join(parts)


def placed(message: bytes, before: int, *, echoed: bool) -> bytes:
    """A rule that comes before the one with a handle (0: at the end) in place of at the end; when `echoed`, the kernel tells its handle."""
    length, kind, flags, sequence, _ = HEADER.unpack_from(message)
    position = b""
    if before:
        position = wire.be64(wire.RULE_POSITION, before)
        flags &= ~wire.APPEND
    flags |= wire.ECHO if echoed else 0
    return HEADER.pack(length + len(position), kind, flags, sequence, 0) + message[HEADER.size :] + position


class Encoders:
    """The encoders of the last chains that were written. Each depends on the templates and its chain's name alone."""

    def __init__(self) -> None:
        self.templates = Templates()
        self._found: dict[tuple[str, str], Rules] = {}

    def of(self, table: str, chain: str) -> Rules:
        found = self._found.get((table, chain))
        if found is None:
            if len(self._found) >= _KEPT:
                self._found.clear()
            found = self._found[table, chain] = Rules(self.templates, table, chain)
        return found


class Rules:
    """Encodes the rules of one chain."""

    def __init__(self, templates: Templates, table: str, chain: str) -> None:
        self._templates = templates
        self._where = wire.ROUTING + wire.text(wire.RULE_TABLE, table) + wire.text(wire.RULE_CHAIN, chain)
        self._bound: dict[tuple[Form, ...], Bound] = {}
        self._known, self._of = templates.forms.known.get, templates.forms.of

    def taken_apart(self, rule: Rule) -> tuple[Bound, list[Hole]]:
        """The rule's form as it is in this chain, and what is to fill it. Raises Inexpressible."""
        forms: list[Form] = []
        holes: list[Hole] = []
        known, of = self._known, self._of
        for statement in rule:
            form, found = known(statement) or of(statement)
            forms.append(form)
            if found:
                holes += found
        key = tuple(forms)
        bound = self._bound.get(key)
        if bound is None:
            bound = self._bound[key] = self._bind(key, rule)
        return bound, holes

    def _bind(self, forms: tuple[Form, ...], rule: Rule) -> Bound:
        found = self._templates.of(forms, rule)
        length = len(self._where) - _SENDER_BYTES + found.length
        parts = [wire.preamble(Message.NEW_RULE, wire.CREATE | wire.APPEND, length), b"", self._where + found.literals[0]]
        for literal in found.literals[1:]:
            parts += (b"", literal)
        return Bound(parts, found.order, has_sets=any(form.kind in WITH_SETS for form in forms))
