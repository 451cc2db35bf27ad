"""Allocations that others than the planner may read, on ``mesh.allocation.<what>.<cluster>.<name>``."""

from __future__ import annotations

from msgspec import Struct

from schemas.values import Name, Prefix


class Remap(Struct, frozen=True):
    """In `cluster`, one end of the peering, the other end's `real` prefix is seen as `seen`: same length, host parts kept."""

    cluster: Name
    real: Prefix
    seen: Prefix


class Remaps(Struct, frozen=True):
    """What a peering got from its clusters' pools; kept when it goes, until somebody else needs a prefix.

    One counts while the peering is in force and its end gives no remap of its own for that prefix.
    """

    remaps: tuple[Remap, ...] = ()

    def seen(self, cluster: str, real: Prefix) -> Prefix | None:
        """How a cluster sees a prefix of the other one; None when no pool had to be asked."""
        return next((one.seen for one in self.remaps if one.cluster == cluster and one.real == real), None)
