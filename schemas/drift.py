"""Drift: differences between the plan and what the kernel really holds."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from schemas.host_objects import Layer
from schemas.values import Name, wire_name

DriftState = Literal["raised", "changed", "contested", "resolved", "unknown"]
DriftLayer = Layer
"""Every layer that a plan has objects in."""


class Suspect(Struct, frozen=True, omit_defaults=True):
    """The process that the kernel named as the author of the last change of the layer."""

    pid: int
    name: str = ""


class DriftEvent(Struct, frozen=True, omit_defaults=True, rename=wire_name):
    """One difference, from the moment it was seen until it is gone.

    `key` is the plan object's; a table that is missing stands for all that was in it, and a link that is gone, down, or was so, for the
    addresses, neighbours, peers, routes and sysctls that went with it (``link NAME`` also where it is not ours but routes of ours lead
    through it). `wanted` and `found` are as the kernel lists them, empty when there is none. Times are Unix time in seconds. State
    ``unknown`` says that the layer could not be read.
    """

    cluster: Name
    host: Name
    layer: DriftLayer
    key: str
    state: DriftState
    wanted: str = ""
    found: str = ""
    unit: str = ""
    because: tuple[str, ...] = ()
    suspect: Suspect | None = None
    first_seen_s: float = 0.0
    at_s: float = 0.0
    count: int = 1
    generation: int = 0
