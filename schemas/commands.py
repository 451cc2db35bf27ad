"""Commands to a host's applier: request and reply on ``mesh.cmd.<cluster>.<host>.<verb>``, or from its auditor over a local socket."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from schemas.encryption import Direction, PointName, PointState, Traffic
from schemas.host_objects import Layer
from schemas.values import Address, Endpoint, Key, Name, wire_name


class Repair(Struct, frozen=True):
    """Verb ``repair``: read the kernel and bring it back to the plan, but for the layers of `leave`."""

    leave: tuple[Layer, ...] = ()


class Rotate(Struct, frozen=True):
    """Verb ``rotate``: make the key that is to follow the host's own, and publish it; with `abort`, take it back.

    Asked again before that is in force, it is the same key. Refused by a host that encrypts nothing, and, with `abort`, by one whose
    traffic has moved already.
    """

    abort: bool = False


class Rotating(Struct, frozen=True):
    """Answer to verb ``rotate``: the host's public key, and the one that is to follow it, None after it was taken back.

    `withdrawn` is the one that was taken back, until no device has it any more; None where there was nothing to take back.
    """

    key: Key
    next: Key | None = None
    withdrawn: Key | None = None


class Settled(Struct, frozen=True):
    """Answer to verb ``settle``, given while no turn is under way: turns since the applier started, and the digest of each unit it holds.

    `withdrawn` are the links of dead tunnels, whose hops the held routes lack. Two equal answers have no turn between them.
    """

    turns: int
    held: dict[str, str]
    withdrawn: tuple[str, ...] = ()


class PeerNow(Struct, frozen=True, omit_defaults=True, rename=wire_name):
    """Another node as a peer of the host's WireGuard device `link`. `node` is empty for one that is not planned.

    `is_there` is False for one that is planned and that the device does not have. `handshake_s` is the last one's Unix time, 0 for never.
    The bytes are what went through the tunnel since the peer was made.
    """

    node: str
    link: str
    public_key: Key
    is_there: bool = True
    endpoint: Endpoint | None = None
    handshake_s: float = 0.0
    received_bytes: int = 0
    sent_bytes: int = 0


class PointNow(Struct, frozen=True, rename=wire_name):
    """What was counted at a point of a node's encryption since its rules were last written."""

    point: PointName
    state: PointState
    direction: Direction
    traffic: Traffic
    packets: int
    bytes: int


class EncryptionNow(Struct, frozen=True, rename=wire_name):
    """Answer to verb ``encryption``: the host's part of its cluster's encryption, read at `at_s` (Unix time).

    `device` is the WireGuard link, empty for a host that has no part in it, and `port` its own; while a node of the cluster changes its key
    there is a second one, with peers of its own. `peers` are the first of `peer_count`, by node.
    """

    cluster: Name
    host: Name
    at_s: float
    device: str = ""
    port: int = 0
    peer_count: int = 0
    peers: tuple[PeerNow, ...] = ()
    points: tuple[PointNow, ...] = ()


TRACE_SECONDS_MAX = 600
TRACE_SAMPLE_MAX = 128
TraceProtocol = Literal["tcp", "udp", "sctp", "icmp"]
_Seconds = Annotated[int, Meta(ge=1, le=TRACE_SECONDS_MAX)]
_Port = Annotated[int, Meta(ge=1, le=65535)]
_Some = Meta(max_length=256)


class TraceFlow(Struct, frozen=True):
    """Verb ``trace``: have the kernel tell of packets between any two of `flow`, and of outer packets between any two of `outer`.

    Of the flow's packets, only those of one of the `protocols` (icmp of either family), and from or to one of `flow_ports`; empty ones are
    any. Of IPv4 packets one of `sample` is told of, the same ones by each host. Outer packets are those to one of the UDP `ports`; of those
    to one of the `overlay_ports` among these, what is inside is shown as well. The kernel forgets all of it after `seconds`, but for what
    somebody asked for longer.
    """

    flow: Annotated[tuple[Address, ...], _Some]
    outer: Annotated[tuple[Address, ...], _Some] = ()
    ports: Annotated[tuple[_Port, ...], _Some] = ()
    seconds: _Seconds = 30
    protocols: Annotated[tuple[TraceProtocol, ...], _Some] = ()
    flow_ports: Annotated[tuple[_Port, ...], _Some] = ()
    sample: Annotated[int, Meta(ge=1, le=TRACE_SAMPLE_MAX)] = 1
    overlay_ports: Annotated[tuple[_Port, ...], _Some] = ()


class Tracing(Struct, frozen=True):
    """Answer to verb ``trace``: how many addresses and ports the kernel was given, and for how long."""

    elements: int
    seconds: int
