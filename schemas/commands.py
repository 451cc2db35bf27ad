"""Commands to a host's applier, as request and reply on ``mesh.cmd.<cluster>.<host>.<verb>``."""

from __future__ import annotations

from msgspec import Struct

from schemas.plan import Layer


class Repair(Struct, frozen=True):
    """Verb ``repair``: read the kernel and bring it back to the plan, but for the layers of `leave`."""

    leave: tuple[Layer, ...] = ()
