"""Allocations that others than the planner may read, on ``mesh.allocation.<what>.<cluster>.<name>``."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from schemas.values import Key, Name, Prefix


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


RotationStage = Literal["queued", "beside", "moved", "rekeyed", "back", "leaving", "done"]
"""How far a host's key is changed; what each means is told in ``services.planner.rotation``."""


class Rotation(Struct, frozen=True):
    """A host's change of keys, from `old` to `new`. `retired` are keys that it had: never to be taken again, and the last ones only.

    It waits for `waiting` hosts, or for one reason; `reasons` are the first of them, in words. Of a gateway, `peering` is the reference of
    that whose tunnels have the key, and `tunnel` the number of the one that is in turn.
    """

    old: Key
    new: Key
    stage: RotationStage = "queued"
    waiting: int = 0
    reasons: tuple[str, ...] = ()
    retired: tuple[Key, ...] = ()
    peering: str = ""
    tunnel: int = 0
