"""Numbers that others use on a host: bits of packet marks, route tables, priorities of policy rules, UDP ports.

A host says them in its report, and the planner keeps what would collide with them out. Nothing of meshmark's own is ever among them.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from schemas.values import wire_name

Kind = Literal["mark", "table", "priority", "port"]

USES_MAX = 128
"""Of each kind, at most, in one report: the lowest ones."""
BY_CHARACTERS = 120

_WIRE = {"frozen": True, "omit_defaults": True, "rename": wire_name}
_WORDS: dict[Kind, str] = {"mark": "mark bits {:#x}", "table": "table {}", "priority": "priority {}", "port": "UDP port {}"}


class Use(Struct, **_WIRE):
    """A number that somebody else uses; of marks a mask. `by` is who or what, for people; `family` is 4 or 6, 0: both, or neither."""

    number: int
    by: str
    family: int = 0


class Number(Struct, frozen=True):
    """A number that something of ours takes or is to take on a host; of marks the bits that it writes."""

    kind: Kind
    number: int
    family: int = 0

    @property
    def words(self) -> str:
        """As people call it."""
        return _WORDS[self.kind].format(self.number)


class InUse(Struct, **_WIRE):
    """What others use on one host, as far as it can be seen: sorted, each number once a family, at most `USES_MAX` of each kind."""

    marks: tuple[Use, ...] = ()
    tables: tuple[Use, ...] = ()
    priorities: tuple[Use, ...] = ()
    ports: tuple[Use, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.marks or self.tables or self.priorities or self.ports)

    def met(self, ours: Number) -> Use | None:
        """Somebody else's use of a number of ours; None when nobody is known to use it."""
        if ours.kind == "mark":
            return next((use for use in self.marks if use.number & ours.number), None)
        uses = {"table": self.tables, "priority": self.priorities, "port": self.ports}[ours.kind]
        return next((use for use in uses if use.number == ours.number and (not use.family or ours.family in (0, use.family))), None)
