"""What the planner chose once and keeps: host numbers, remaps from pools, and external addresses of mappings that were given none."""

from __future__ import annotations

from schemas import codec, subjects
from schemas.allocation import Remaps
from schemas.topology import IpMapping
from schemas.values import Address
from services.planner.allocate import EXTERNAL, NUMBER, REMAPS, External, Number


class Chosen:
    """By cluster and name."""

    def __init__(self) -> None:
        self.numbers: dict[tuple[str, str], int] = {}
        self.externals: dict[tuple[str, str], Address] = {}
        self.remaps: dict[tuple[str, str], Remaps] = {}

    def tell(self, subject: str, data: bytes) -> None:
        """Take an allocation in."""
        what, cluster, name = subjects.parse(subject).tokens
        if what == NUMBER and data:
            self.numbers[cluster, name] = codec.decode(data, Number).number
        elif what == REMAPS:
            self.remaps[cluster, name] = codec.decode(data, Remaps) if data else Remaps()
        elif what == EXTERNAL and data:
            self.externals[cluster, name] = codec.decode(data, External).address

    def external(self, item: IpMapping) -> Address | None:
        """What peers reach a mapping by; None while it is not known."""
        return item.external or self.externals.get((item.cluster, item.name))
