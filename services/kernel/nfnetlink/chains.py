"""What own chains hold, rule by rule with handles, at one generation of the kernel: so that a change of a chain is one of its rules.

Owns a netlink socket, from the first question on, and what it learned of the last chains that changed. What was written here is known,
handles from the kernel's echo, as long as nobody else touched an own table; what is not known is asked for and compared by its bytes
(``sameness``). Nothing here is needed: after a restart it is asked for, and a chain of which nothing is known is written as a whole.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from typing import NamedTuple

from schemas.host_objects import NftChain
from schemas.nft import Rule
from services.kernel.netlink import BE32, NETLINK_NETFILTER, NetlinkSocket, attributes, each_attribute
from services.kernel.nfnetlink import wire
from services.kernel.nfnetlink.edits import Edit, Handles, edit, handles_of
from services.kernel.nfnetlink.rules import Encoders, Rules
from services.kernel.nfnetlink.sameness import Form, Sameness, content_form
from services.kernel.nfnetlink.sets import AnonymousSet
from services.kernel.nfnetlink.wire import SUBSYSTEM, Message
from services.kernel.nft.steps import Path
from services.kernel.transaction import Change

_INET = bytes((wire.FAMILY_INET, 0, 0, 0))
_KEPT = 64
"""Chains that are remembered: 8 bytes a rule."""
_STEPS = 1 << 26
"""For each rule that comes or goes the kernel walks the chain: beyond so many steps the chain is written as a whole."""


class _Held(NamedTuple):
    rules: tuple[Rule, ...]
    handles: Handles[int]


class Chains:
    """One thread at a time, in the namespace of the engine's socket."""

    def __init__(self, encoders: Encoders) -> None:
        self._encoders = encoders
        self._netlink: NetlinkSocket | None = None
        self._held: dict[Path, _Held] = {}
        self.generation: int | None = None
        """At which what is remembered was so."""

    def edit(self, change: Change, *, is_certain: bool) -> Edit | None:
        """How a chain gets to its new form; None for one that is written as a whole, as one of which no rule stays.

        `is_certain` says that what is remembered is so now. What was known by its listing only has surprised somebody, and is asked for.
        Raises NetlinkError when the kernel does not answer.
        """
        wanted = change.new
        assert isinstance(wanted, NftChain)
        if isinstance(change.old, NftChain) and not _shares(change.old.rules, wanted.rules):
            return None
        held = self._held.get((wanted.table, wanted.name)) if is_certain and isinstance(change.old, NftChain) else None
        if held is not None:
            found = edit(held.rules, held.handles, wanted.rules)
        else:
            forms, handles, wanted_forms = self._asked(wanted)
            found = edit(forms, handles, wanted_forms)
        of_all = len(found.gone) + len(found.handles) - len(found.coming)
        is_small = (len(found.gone) + len(found.coming)) * of_all <= _STEPS
        return found if of_all and is_small else None

    def note(self, generation: int | None, edited: Mapping[Path, tuple[NftChain, Handles[int]]], changed: Collection[Path]) -> None:
        """What is so at `generation`: `edited` chains with their handles; of others that `changed` nothing is known.

        A path without the name of a chain is a table.
        """
        tables = {table for table, name in changed if not name}
        for at in [at for at in self._held if at in changed or at[0] in tables]:
            del self._held[at]
        for at, (chain, handles) in edited.items():
            self._held[at] = _Held(chain.rules, handles)
        while len(self._held) > _KEPT:
            del self._held[next(iter(self._held))]
        self.generation = generation

    def forget(self) -> None:
        self._held.clear()
        self.generation = None

    def close(self) -> None:
        self.forget()
        if self._netlink is not None:
            self._netlink.close()
            self._netlink = None

    def _asked(self, wanted: NftChain) -> tuple[list[Form], Handles[int], list[Form]]:
        """The forms of the rules that the kernel tells of, their handles, and the forms of what is wanted."""
        named = _INET + wire.text(wire.RULE_TABLE, wanted.table) + wire.text(wire.RULE_CHAIN, wanted.name)
        forms = Sameness(lambda name: self._content(wanted.table, name))
        told = [forms.told(body) for body in self._asking().dump(SUBSYSTEM | Message.GET_RULE, named)]
        if not told:
            return [], handles_of(()), []
        rules = self._encoders.of(wanted.table, wanted.name)
        handles = handles_of(handle for handle, _ in told)
        return [form for _, form in told], handles, [_written(forms, rules, rule) for rule in wanted.rules]

    def _content(self, table: str, name: bytes) -> Form:
        """What is in a set without a name, as ``sameness`` compares it."""
        named = _INET + wire.text(wire.SET_TABLE, table) + wire.text(wire.SET_NAME, name.rstrip(b"\0").decode())
        [header] = self._asking().ask(SUBSYSTEM | Message.GET_SET, named)
        found = attributes(header, len(_INET))
        items = [
            item
            for body in self._asking().dump(SUBSYSTEM | Message.GET_ELEMENTS, named)
            for _, item in each_attribute(attributes(body, len(_INET)).get(wire.ELEMENTS_LIST, b""))
        ]
        flags, key = (int(BE32.unpack(found[kind])[0]) for kind in (wire.SET_FLAGS, wire.SET_KEY_TYPE))
        return content_form(flags, key, found.get(wire.SET_USERDATA, b""), items)

    def _asking(self) -> NetlinkSocket:
        if self._netlink is None:
            self._netlink = NetlinkSocket(NETLINK_NETFILTER)
        return self._netlink


def _shares(ones: tuple[Rule, ...], others: tuple[Rule, ...]) -> bool:
    """Whether any rule is among both: mostly at the same place, which is the cheaper question."""
    return any(map(operator.eq, ones, others)) or not set(ones).isdisjoint(others)


def _written(forms: Sameness, rules: Rules, rule: Rule) -> Form:
    bound, holes = rules.taken_apart(rule)
    sets = [hole for hole in holes if isinstance(hole, AnonymousSet)]
    plain = [bytes(4) if isinstance(hole, AnonymousSet) else hole for hole in holes]
    return forms.written(bound.message(plain, 0), iter(sets))
