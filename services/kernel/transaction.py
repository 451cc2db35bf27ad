"""The transaction as a value: changes of keyed objects, from what is held to what is wanted.

Rendering a change (to nft text, netlink or UAPI lines) and ordering changes into steps happen elsewhere; here is only what changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import Struct

from schemas.host_objects import Layer, NftChain, NftElement, NftSet, PlanObject
from schemas.nft import Match, Nat, Rule, VerdictMap


class ListedChain(Struct, frozen=True):
    """A chain as the kernel holds it: every rule in the kernel's own normal form, counters and handles masked.

    A rule is bytes where the kernel's own messages were read (``nftread.rules``; ``nftread.words`` says them to people), and text where
    libnftables listed it. The wanted form of a chain cannot be computed here, since the kernel has rules differently from how they were
    written; ``Kernel.reference`` asks the kernel for it.
    """

    table: str
    name: str
    rules: tuple[str | bytes, ...]
    type: str | None = None
    hook: str | None = None
    priority: int = 0
    policy: str = ""

    layer = "nft"

    @property
    def key(self) -> str:
        return f"chain {self.table} {self.name}"


class Listed(Struct, frozen=True):
    """An own object that is in a state which no plan can ask for: a link that is down or of another kind, a doubled rule, a named counter.

    `text` says what was found. It equals no plan object, so it is always a difference, and it can be removed or replaced like any other.
    """

    layer: Layer
    key: str
    text: str


Held = PlanObject | ListedChain | Listed
Observed = Mapping[str, Held]
"""Own objects as the kernel holds them, by key."""


class Change(Struct, frozen=True):
    """One object goes from `old` (None: not there) to `new` (None: to be removed). Both have the same key."""

    old: Held | None
    new: PlanObject | None

    @property
    def key(self) -> str:
        return self.subject.key

    @property
    def subject(self) -> Held:
        """The object, in its new form if it has one."""
        found = self.new or self.old
        if found is None:
            msg = "a change needs an old or a new object"
            raise ValueError(msg)
        return found

    @property
    def verb(self) -> Literal["add", "replace", "remove"]:
        return "add" if self.old is None else "remove" if self.new is None else "replace"

    def inverse(self) -> Change:
        """The change that undoes this one. What is known only by its listing cannot be restored: ValueError."""
        if isinstance(self.old, ListedChain | Listed):
            msg = f"{self.key} is known by its listing only"
            raise ValueError(msg)
        return Change(self.new, self.old)


class Marker(Struct, frozen=True):
    """Which plan the kernel holds, written in the same nft batch as the plan. `units` is digest by ``unit_tag`` (schemas.plan)."""

    epoch: int
    generation: int
    units: Mapping[str, str]


def changes(old: Mapping[str, PlanObject], new: Mapping[str, PlanObject]) -> list[Change]:
    """What turns one set of objects into another, by key; equal sets give none."""
    # Most values are the very same objects, and identity is the cheaper question.
    found = [Change(value, wanted) for key, value in old.items() if (wanted := new.get(key)) is not value and wanted != value]
    found.extend(Change(None, value) for key, value in new.items() if key not in old)
    return found


def repairs(wanted: Mapping[str, PlanObject], reference: Observed, observed: Observed) -> list[Change]:
    """What turns the observed kernel into the wanted one, where `reference` is how the kernel would list `wanted`.

    An element of a map is replaced, not added, when its value differs; elements of sets that go away with their set are left out
    by the renderer, not here.
    """
    found = [Change(observed.get(key), value) for key, value in wanted.items() if not same(reference[key], observed.get(key))]
    found.extend(Change(value, None) for key, value in observed.items() if key not in wanted)
    return found


def same(wanted: Held, observed: Held | None) -> bool:
    """True when the kernel holds what is wanted. `wanted` is in the form of ``Kernel.reference``."""
    return wanted is observed or wanted == observed


def with_dependents(batch: Sequence[Change], wanted: Mapping[str, PlanObject]) -> list[Change]:
    """The batch, completed where the header of a set changes.

    The kernel cannot change a set's header: the set is made anew, empty, and only when no rule names it. So all its wanted elements
    and all wanted chains that name it go into the same batch, as changes from themselves to themselves. Any other batch is unchanged.
    """
    recreated = {(item.subject.table, item.subject.name) for item in batch if is_recreated_set(item)}  # type: ignore[union-attr]
    if not recreated:
        return list(batch)
    present = {item.key for item in batch}
    found = list(batch)
    for key, value in wanted.items():
        member = isinstance(value, NftElement) and (value.table, value.set) in recreated
        user = isinstance(value, NftChain) and any((value.table, name) in recreated for rule in value.rules for name in named_sets(rule))
        if (member or user) and key not in present:
            found.append(Change(value, value))
    return found


def is_recreated_set(change: Change) -> bool:
    """True for a set that must be made anew since its header changes."""
    return isinstance(change.new, NftSet) and change.old is not None and change.old != change.new


def named_sets(rule: Rule) -> set[str]:
    """Names of the sets and maps that a rule looks up."""
    found = {item.map for item in rule if isinstance(item, VerdictMap | Nat)}
    found.update(value[1:] for item in rule if isinstance(item, Match) for value in item.values if value.startswith("@"))
    return found


__all__ = [
    "Change",
    "Held",
    "Listed",
    "ListedChain",
    "Marker",
    "Observed",
    "changes",
    "is_recreated_set",
    "named_sets",
    "repairs",
    "same",
    "with_dependents",
]
