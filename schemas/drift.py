"""Drift: differences between the plan and what the kernel really holds, and packets that went in clear all the same."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from schemas.encryption import Direction, Traffic
from schemas.host_objects import Layer
from schemas.values import Address, Name, wire_name

DriftState = Literal["raised", "changed", "contested", "resolved", "unknown"]
DriftLayer = Layer
"""Every layer that a plan has objects in."""
AlertLayer = Literal["plaintext"]
PLAINTEXT: AlertLayer = "plaintext"
"""What is told beside differences: packets between encrypted prefixes, seen on the uplink in clear."""


class Suspect(Struct, frozen=True, omit_defaults=True):
    """The process that the kernel named as the author of the last change of the layer."""

    pid: int
    name: str = ""


class Tunnel(Struct, frozen=True, omit_defaults=True):
    """The overlay's outer packet around one that was seen: its protocol, addresses and network identifier."""

    protocol: Literal["VXLAN", "GENEVE"]
    source: Address
    destination: Address
    vni: int


class ClearPacket(Struct, frozen=True, omit_defaults=True, rename=wire_name):
    """The last of the packets that a plaintext alert is about: whose it was, which way it went, its 5-tuple.

    Of an overlay's packet, the addresses are the inner packet's and `tunnel` has the outer ones; where the inner packet could not be seen,
    they are the outer's and there is no `tunnel`. Ports are 0 where the protocol has none. `link` is the uplink. `dropped` says whether
    strict mode dropped it. `at_point` is how many packets of this kind and direction were counted, all flows together, since the alert.
    """

    direction: Direction
    traffic: Traffic
    protocol: str
    source: Address
    destination: Address
    source_port: int = 0
    destination_port: int = 0
    length: int = 0
    link: str = ""
    dropped: bool = False
    tunnel: Tunnel | None = None
    at_point: int = 0


class DriftEvent(Struct, frozen=True, omit_defaults=True, rename=wire_name):
    """One difference, from the moment it was seen until it is gone.

    `key` is the plan object's; a table that is missing stands for all that was in it, and a link that is gone, down, or was so, for the
    addresses, neighbours, peers, routes and sysctls that went with it (``link NAME`` also where it is not ours but routes of ours lead
    through it). `wanted` and `found` are as the kernel lists them, empty when there is none. Times are Unix time in seconds. State
    ``unknown`` says that the layer could not be read. `count` is how often it came within a minute, a repair that somebody undid before
    it was seen included. `next_repair_s` is when it is repaired next, 0 where that is at once, or not at all. `leaves_open`
    says that something of the layer is open after it, or may be, as something that an earlier auditor told; never said of ``plaintext``.

    Of layer ``plaintext``, `key` is direction, whose packets, source and destination; `packet` is the last one, and `count` how many were
    seen of those that the kernel showed, which are a few a second. It is ``changed`` while more come, and ``resolved`` when none did for a
    while. State ``unknown`` then says that nobody shows packets; they are counted all the same.

    ``resolved`` of key ``layer LAYER`` and with a `first_seen_s` says that what an earlier auditor of the host told of that layer before
    that, and has not been raised since, is over.
    """

    cluster: Name
    host: Name
    layer: DriftLayer | AlertLayer
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
    packet: ClearPacket | None = None
    next_repair_s: float = 0.0
    leaves_open: bool = False
