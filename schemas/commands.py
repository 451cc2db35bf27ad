"""Commands to a host's applier: request and reply on ``mesh.cmd.<cluster>.<host>.<verb>``, or from its auditor over a local socket."""

from __future__ import annotations

from msgspec import Struct

from schemas.host_objects import Layer


class Repair(Struct, frozen=True):
    """Verb ``repair``: read the kernel and bring it back to the plan, but for the layers of `leave`."""

    leave: tuple[Layer, ...] = ()


class Settled(Struct, frozen=True):
    """Answer to verb ``settle``, given while no turn is under way: turns since the applier started, and the digest of each unit it holds.

    `withdrawn` are the links of dead tunnels, whose hops the held routes lack. Two equal answers have no turn between them.
    """

    turns: int
    held: dict[str, str]
    withdrawn: tuple[str, ...] = ()
