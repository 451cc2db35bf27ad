"""The transaction as a value: changes of keyed objects, from what is held to what is wanted.

Rendering a change (to nft text, netlink or UAPI lines) and ordering changes into steps happen elsewhere; here is only what changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from msgspec import Struct

from schemas.plan import NftElement, NftSet, NftTable, PlanObject


class ListedChain(Struct, frozen=True):
    """A chain as the kernel lists it: every rule in the kernel's own normal form, counters and handles masked.

    The wanted form of a chain cannot be computed here, since the kernel prints rules differently from how they were written;
    ``Kernel.reference`` asks the kernel for it.
    """

    table: str
    name: str
    rules: tuple[str, ...]
    type: str | None = None
    hook: str | None = None
    priority: int = 0

    layer = "nft"

    @property
    def key(self) -> str:
        return f"chain {self.table} {self.name}"


Held = PlanObject | ListedChain
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
        """The change that undoes this one. A chain known only by its listing cannot be restored: ValueError."""
        if isinstance(self.old, ListedChain):
            msg = f"{self.key} is known by its listing only"
            raise ValueError(msg)
        return Change(self.new, self.old)


class Marker(Struct, frozen=True):
    """Which plan the kernel holds: written in the same nft batch as the plan itself. `units` is digest by unit name's tag (``unit_tag``)."""

    epoch: int
    generation: int
    units: Mapping[str, str]


def changes(old: Mapping[str, PlanObject], new: Mapping[str, PlanObject]) -> list[Change]:
    """What turns one set of objects into another, by key; equal sets give none."""
    found = [Change(value, new.get(key)) for key, value in old.items() if new.get(key) != value]
    found.extend(Change(None, value) for key, value in new.items() if key not in old)
    return found


def repairs(wanted: Mapping[str, PlanObject], reference: Observed, observed: Observed) -> list[Change]:
    """What turns the observed kernel into the wanted one, where `reference` is how the kernel would list `wanted`.

    An element of a map is replaced, not added, when its value differs; elements of sets that go away with their set are left out
    by the renderer, not here.
    """
    found = [
        Change(observed.get(key), value) for key, value in wanted.items() if not same(reference[key], observed.get(key))
    ]
    found.extend(Change(value, None) for key, value in observed.items() if key not in wanted)
    return found


def same(wanted: Held, observed: Held | None) -> bool:
    """True when the kernel holds what is wanted. Objects that the kernel completes by itself decide by ``matches``."""
    return observed is not None and (wanted == observed or _matches(wanted, observed))


def _matches(wanted: Held, observed: Held) -> bool:
    return False


def tables(objects: Iterable[Held]) -> set[str]:
    """Names of the nft tables among the objects."""
    return {item.name for item in objects if isinstance(item, NftTable)}


__all__ = ["Change", "Held", "ListedChain", "Marker", "NftElement", "NftSet", "Observed", "changes", "repairs", "same", "tables"]
