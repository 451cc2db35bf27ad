"""A transaction as messages, each of which is known by the step that it came from.

Owns what it collects. The messages are numbered from ``exchange.FIRST`` on, so that the number in a refusal says which message it is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from schemas.host_objects import NftChain, NftSet
from services.kernel.netlink import BE32, HEADER, text_attribute
from services.kernel.nfnetlink import elements, wire
from services.kernel.nfnetlink.edits import Edit, Handles
from services.kernel.nfnetlink.elements import Header
from services.kernel.nfnetlink.exchange import FIRST
from services.kernel.nfnetlink.rules import Encoders, placed
from services.kernel.nfnetlink.sets import AnonymousSet, anonymous_messages, header_of, new_set
from services.kernel.nfnetlink.values import Inexpressible
from services.kernel.nfnetlink.wire import Message, be32, nest
from services.kernel.nft.steps import Path, Step
from services.runtime.errors import MeshmarkError

_HOOKS = {"prerouting": 0, "input": 1, "forward": 2, "output": 3, "postrouting": 4}
_POLICIES = {"drop": 0, "accept": 1}
_GOING = {
    ("delete", "table"): (Message.DEL_TABLE, wire.TABLE_NAME, 0),
    ("delete", "chain"): (Message.DEL_CHAIN, wire.CHAIN_TABLE, wire.CHAIN_NAME),
    ("delete", "set"): (Message.DEL_SET, wire.SET_TABLE, wire.SET_NAME),
    ("flush", "rules"): (Message.DEL_RULE, wire.RULE_TABLE, wire.RULE_CHAIN),
    ("flush", "elements"): (Message.DEL_ELEMENTS, wire.ELEMENTS_TABLE, wire.ELEMENTS_SET),
}
"""What goes as a whole: the message, and by which attributes it is named."""
_OF = {"rules": "chain", "elements": "set"}
"""The kind of object that is changed with what is in it."""
_ECHOED = 64
"""Rules of whose handles the kernel is to tell: what it tells, a kilobyte for a long one, must fit into the socket's usual buffer."""


class Culprit(NamedTuple):
    """Which object a message is about (empty: all of them), and what was to be done, in words."""

    key: str
    deed: str


class Batch:
    """Messages in the order of `steps`. `header` says what a set is like that the steps do not make. Raises Inexpressible.

    `edits` are for the chains of which only some rules change.
    """

    def __init__(
        self, steps: Iterable[Step], encoders: Encoders, header: Callable[[str, str], Header], edits: Mapping[Path, Edit] | None = None
    ) -> None:
        self.messages: list[bytes] = []
        self.edits = edits or {}
        self.edited: dict[Path, NftChain] = {}
        self._is_echoed = sum(len(edit.coming) for edit in self.edits.values()) <= _ECHOED
        self._coming: dict[Path, list[int]] = {}
        self._encoders = encoders
        self._header = header
        self._made: dict[Path, tuple[Header, int]] = {}
        self._set_ids = 0
        self._starts: list[int] = []
        self._steps: list[Step] = []
        for step in steps:
            self._starts.append(len(self.messages))
            self._steps.append(step)
            self._add(step)

    def culprit(self, sequence: int, offset: int = 0) -> Culprit:
        """What the message with this number was about; `offset` is where in the message the kernel found fault."""
        place = sequence - FIRST
        if not 0 <= place < len(self.messages):
            return Culprit("", "the whole transaction")
        index = bisect_right(self._starts, place) - 1
        step = self._steps[index]
        at = f"{step.table} {step.name}".rstrip()
        if step.elements:
            before = sum(elements.count(message) for message in self.messages[self._starts[index] : place])
            item = step.elements[before + elements.place_of(self.messages[place], offset)]
            return Culprit(item.key, f"{step.verb} {item.key}")
        if step.verb == "add" and step.what == "rules":
            before = sum(kind_of(message) == Message.NEW_RULE for message in self.messages[self._starts[index] : place])
            edit = self.edits.get((step.table, step.name))
            return Culprit(f"chain {at}", f"add rule {1 + (edit.coming[before][0] if edit else before)} of chain {at}")
        if step.verb == "delete" and step.what == "rules":
            handle = self.edits[step.table, step.name].gone[place - self._starts[index]]
            return Culprit(f"chain {at}", f"delete rule {handle} of chain {at}")
        key = f"{_OF.get(step.what, step.what)} {at}"
        return Culprit(key, f"{step.verb} {key}")

    def handles(self, told: Mapping[int, int]) -> dict[Path, tuple[NftChain, Handles[int]]]:
        """Chains of which some rules changed, with their handles, where those of all new rules were `told`, by message number."""
        found = {}
        for at, chain in self.edited.items():
            sequences = self._coming[at]
            if told.keys() >= set(sequences):
                handles = self.edits[at].handles[:]
                for (place, _), sequence in zip(self.edits[at].coming, sequences, strict=True):
                    handles[place] = told[sequence]
                found[at] = chain, handles
        return found

    @property
    def _next(self) -> int:
        return FIRST + len(self.messages)

    def _add(self, step: Step) -> None:
        match step.verb, step.what, step.item:
            case "add", "rules", NftChain() as chain if (step.table, step.name) in self.edits:
                self._edit_rules(chain)
            case "add", "rules", NftChain() as chain:
                self._add_rules(chain)
            case "delete", "rules", _:
                where = text_attribute(wire.RULE_TABLE, step.table) + text_attribute(wire.RULE_CHAIN, step.name)
                for handle in self.edits[step.table, step.name].gone:
                    self._request(Message.DEL_RULE, 0, where, wire.be64(wire.RULE_HANDLE, handle))
            case "add", "chain", NftChain() as chain:
                self._request(Message.NEW_CHAIN, wire.CREATE, *_chain(chain))
            case "add", "set", NftSet() as item:
                self._set_ids += 1
                self._made[step.table, step.name] = header_of(item), self._set_ids
                self.messages.append(new_set(item, self._set_ids, self._next))
            case "add", "table", _:
                self._request(Message.NEW_TABLE, wire.CREATE, text_attribute(wire.TABLE_NAME, step.table), be32(wire.TABLE_FLAGS, 0))
            case (("add" | "delete"), "elements", _):
                self._change_elements(step)
            case verb, what, _ if (verb, what) in _GOING:
                kind, table, name = _GOING[verb, what]
                self._request(kind, 0, text_attribute(table, step.table), text_attribute(name, step.name) if step.name else b"")
            case _:
                raise Inexpressible(step.what, f"what to {step.verb}")

    def _request(self, kind: Message, flags: int, *parts: bytes) -> None:
        self.messages.append(wire.request(kind, flags, self._next, *parts))

    def _change_elements(self, step: Step) -> None:
        header, number = self._made.get((step.table, step.name)) or (self._known_header(step), 0)
        if step.verb == "add":
            kind, items = Message.NEW_ELEMENTS, elements.added(header, step.elements)
        else:
            kind, items = Message.DEL_ELEMENTS, elements.deleted(header, step.elements)
        self.messages += elements.messages(kind, (step.table, step.name), items, self._next, number)

    def _known_header(self, step: Step) -> Header:
        """That of the set that the step is about; where there is none, the first of its elements is what cannot be written."""
        try:
            return self._header(step.table, step.name)
        except MeshmarkError as error:
            error.key = step.elements[0].key
            raise

    def _add_rules(self, chain: NftChain) -> None:
        rules, messages = self._encoders.of(chain.table, chain.name), self.messages
        for rule in chain.rules:
            bound, holes = rules.taken_apart(rule)
            if bound.has_sets:
                holes = [self._add_anonymous(chain.table, hole) if isinstance(hole, AnonymousSet) else hole for hole in holes]
            messages.append(bound.message(holes, FIRST + len(messages)))  # type: ignore[arg-type]

    def _edit_rules(self, chain: NftChain) -> None:
        at = chain.table, chain.name
        rules, messages = self._encoders.of(*at), self.messages
        self.edited[at], sequences = chain, self._coming.setdefault(at, [])
        for place, before in self.edits[at].coming:
            bound, holes = rules.taken_apart(chain.rules[place])
            filled = [self._add_anonymous(chain.table, hole) if isinstance(hole, AnonymousSet) else hole for hole in holes]
            sequences.append(self._next)
            messages.append(placed(bound.message(filled, self._next), before, echoed=self._is_echoed))

    def _add_anonymous(self, table: str, item: AnonymousSet) -> bytes:
        """The set's messages come before the rule's, which names it by a number only."""
        self._set_ids += 1
        self.messages += anonymous_messages(table, item, self._set_ids, self._next)
        return BE32.pack(self._set_ids)


def kind_of(message: bytes) -> int:
    """The kind of an nftables message."""
    return int(HEADER.unpack_from(message)[1]) & 0xFF


def _chain(item: NftChain) -> tuple[bytes, ...]:
    named = text_attribute(wire.CHAIN_TABLE, item.table) + text_attribute(wire.CHAIN_NAME, item.name)
    if item.hook is None:
        return (named,)
    if item.hook not in _HOOKS or item.type is None:
        raise Inexpressible(item.hook, "a hook")
    hook = nest(wire.CHAIN_HOOK, be32(wire.HOOK_NUMBER, _HOOKS[item.hook]), be32(wire.HOOK_PRIORITY, item.priority))
    return named, text_attribute(wire.CHAIN_TYPE, item.type), be32(wire.CHAIN_POLICY, _POLICIES[item.policy]), hook
