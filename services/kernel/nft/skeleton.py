"""A table's set headers and chains, as they are loaded where they move no packet. Owns nothing."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from schemas.host_objects import NftChain, NftSet
from services.kernel.nft.statements import rule_text
from services.kernel.nft.steps import Step
from services.kernel.nft.text import chain_line, set_line


class Skeleton(NamedTuple):
    """What decides how a table's chains look: its set headers and chains, by name."""

    sets: tuple[NftSet, ...]
    chains: tuple[NftChain, ...]

    @property
    def table(self) -> str:
        return self.chains[0].table

    def moved(self, table: str) -> Skeleton:
        """The same in another table."""
        replace = msgspec.structs.replace
        return Skeleton(tuple(replace(item, table=table) for item in self.sets), tuple(replace(item, table=table) for item in self.chains))

    def text(self, *, dormant: bool) -> str:
        """As nft text, without elements; a dormant table is owned by who loads it."""
        flags = " { flags dormant; flags owner; }" if dormant else ""
        lines = [f"add table inet {self.table}{flags}"]
        lines += [f"add {set_line(item)}" for item in self.sets]
        lines += [f"add {chain_line(item)}" for item in self.chains]
        lines += [f"add rule inet {item.table} {item.name} {rule_text(rule)}" for item in self.chains for rule in item.rules]
        return "\n".join(lines) + "\n"

    def steps(self) -> Iterator[Step]:
        """As steps of a transaction, the table's first."""
        yield Step("add", "table", self.table)
        yield from (Step("add", "chain", item.table, item.name, item) for item in self.chains)
        yield from (Step("add", "set", item.table, item.name, item) for item in self.sets)
        yield from (Step("add", "rules", item.table, item.name, item) for item in self.chains)

    def is_very(self, other: Skeleton) -> bool:
        """Whether both are of the very same objects."""
        return all(len(mine) == len(theirs) and all(map(operator.is_, mine, theirs)) for mine, theirs in zip(self, other, strict=True))
