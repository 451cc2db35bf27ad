"""A node's change of WireGuard keys, in steps that lose no packet: what each step is, and what it waits for. Pure, without a clock.

A key that is changed in place loses packets: AllowedIPs belong to one peer of a device at a time, and both ends would have to switch at one
instant. So every node that encrypts gets a second device beside its first, with a port of its own, and packets go by that meanwhile:

stage    first device   second device   packets by   goes on when
queued   old key        none            first        no other node of the cluster changes its key, and none whose name comes before waits
beside   old key        new key         first        all hold it, and all have shaken hands on the second device
moved    old key        new key         second       all hold it
rekeyed  new key        new key         second       all hold it, and all have shaken hands on the first device
back     new key        new key         first        all hold it
leaving  new key        none            first        the node says that it has no other key than the new one
done     new key        none            first

These are the keys of the node itself; the others have their own on both devices, and on the second the node as their only peer. Both
devices take in the same all the time, so that it does not matter who follows a step first. *All* are those that are there: a node that
answers on neither device, in spite of keepalives, is away, and is waited for no more; when it comes back, it makes its plan as it is then.
Between two steps the one before holds everywhere, or the other does: whoever does not follow holds up the rotation, never the traffic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

from msgspec.structs import replace

from schemas.allocation import Rotation, RotationStage
from schemas.host_objects import PlanObject, Route, WireguardLink
from schemas.plan import mesh_unit
from schemas.status import ApplyReport, Greeted, Greetings
from schemas.topology import Node, PublicKey
from schemas.values import Key
from services.planner import layout, mesh, names
from services.planner.state import HostId, State

ROTATION: Literal["rotation"] = "rotation"
RETIRED_MAX = 16
_REASONS = 4
_FOLLOWING: Mapping[RotationStage, RotationStage] = {
    "queued": "beside",
    "beside": "moved",
    "moved": "rekeyed",
    "rekeyed": "back",
    "back": "leaving",
    "leaving": "done",
    "done": "done",
}


class Turn(NamedTuple):
    """What a rotation under way means for plans: the keys of the node's first and second device, and the one by which packets go.

    `second` is None where there is no second device.
    """

    node: str
    first: Key
    second: Key | None
    link: str


class Lane(NamedTuple):
    """A device by which two nodes know each other, and the key that the other one has on it."""

    link: str
    key: Key


def lanes(turn: Turn | None, node: str, key: Key) -> Iterator[Lane]:
    """How `node`, with this key, is known to another one. With `turn`, one of the two changes its key."""
    changes = turn is not None and turn.node == node
    yield Lane(names.ENCRYPTION_LINK, turn.first if turn is not None and changes else key)
    if turn is not None and turn.second is not None:
        yield Lane(names.ENCRYPTION_LINK_BESIDE, turn.second if changes else key)


def is_under_way(rotation: Rotation) -> bool:
    """Whether plans are others than before and after it."""
    return rotation.stage not in ("queued", "done")


def turn(node: str, rotation: Rotation) -> Turn:
    """What a rotation that is under way means for plans."""
    stage = rotation.stage
    first = rotation.old if stage in ("beside", "moved") else rotation.new
    link = names.ENCRYPTION_LINK_BESIDE if stage in ("moved", "rekeyed") else names.ENCRYPTION_LINK
    return Turn(node, first, None if stage == "leaving" else rotation.new, link)


def greeted_on(rotation: Rotation) -> str:
    """The device on which all have to shake hands with the new key before this stage ends; empty for none."""
    if rotation.peering:
        return {"beside": names.TUNNEL_BESIDE, "rekeyed": names.tunnel_link(rotation.tunnel)}.get(rotation.stage, "")
    return {"beside": names.ENCRYPTION_LINK_BESIDE, "rekeyed": names.ENCRYPTION_LINK}.get(rotation.stage, "")


def advance(rotation: Rotation, unmet: Iterator[str], tunnels: int = 1) -> Rotation:
    """The next step of a rotation that is under way; it stays where it is while anything is `unmet`, which are reasons.

    Of a gateway with more `tunnels` than one, they take turns in being moved and given the new key.
    """
    reasons = list(unmet)
    if reasons:
        return replace(rotation, waiting=len(reasons), reasons=tuple(reasons[:_REASONS]))
    if rotation.stage == "rekeyed" and rotation.tunnel + 1 < tunnels:
        return replace(rotation, stage="moved", tunnel=rotation.tunnel + 1, waiting=0, reasons=())
    moved = replace(rotation, stage=_FOLLOWING[rotation.stage], waiting=0, reasons=())
    return replace(moved, retired=retired(rotation)) if moved.stage == "done" else moved


def begun(key: PublicKey, before: Rotation | None, report: ApplyReport | None, peering: str = "") -> Rotation | None:
    """The rotation that a host asks for by its public key; `before` is what is known of its last one, `peering` that of a gateway.

    None where it asks for none, or has lost the key that is to come.
    """
    if key.next is None or key.next == key.key or _has_lost(key.next, report):
        return None
    kept = before.retired if before is not None else ()
    return Rotation(key.key, key.next, "beside", retired=kept, peering=peering)


def queued(rotation: Rotation, reason: str) -> Rotation:
    """A rotation that waits to begin."""
    return replace(rotation, stage="queued", waiting=1, reasons=(reason,))


def is_void(rotation: Rotation, key: PublicKey | None, report: ApplyReport | None) -> bool:
    """Whether a rotation under way of a host that has devices is not to go on: the plans are then those of its public key.

    A host takes its word back only while nothing has moved; later, an event without the next key is an old copy, and is no reason. One that
    has lost the new key, or has come by a third one, cannot go on.
    """
    if key is None or key.key not in (rotation.old, rotation.new):
        return True
    if rotation.stage == "beside":
        return key.next != rotation.new
    return _has_lost(rotation.new, report)


def _has_lost(key: Key, report: ApplyReport | None) -> bool:
    """Whether a host says that it has keys, and this is none of them."""
    return report is not None and bool(report.keys) and key not in report.keys


def recovered(key: PublicKey, planned: Iterable[PlanObject]) -> Rotation | None:
    """The rotation that the published plan of the node was made with, where nothing else is known of it; None for none."""
    if key.next is None:
        return None
    devices: dict[str, Key | None] = {}
    link = ""
    for item in planned:
        if isinstance(item, WireguardLink):
            devices[item.name] = item.public_key
        elif isinstance(item, Route) and item.table == layout.ENCRYPT_TABLE and item.prefix.length == 0 and item.hops:
            link = item.hops[0].link
    for stage in _FOLLOWING:
        found = Rotation(key.key, key.next, stage)
        made = turn(key.name, found)
        wanted = {names.ENCRYPTION_LINK: made.first, **({names.ENCRYPTION_LINK_BESIDE: made.second} if made.second else {})}
        if is_under_way(found) and (wanted, made.link) == (devices, link):
            return found
    return None


def ended(rotation: Rotation, key: PublicKey | None) -> Rotation | None:
    """What is left of a rotation that is void; None for nothing."""
    kept = retired(rotation) if key is not None and key.key == rotation.new else rotation.retired
    return replace(rotation, stage="done", waiting=0, reasons=(), retired=kept) if kept else None


def retired(rotation: Rotation) -> tuple[Key, ...]:
    """The keys that a node has had, after this rotation."""
    return (*(key for key in rotation.retired if key != rotation.old), rotation.old)[-RETIRED_MAX:]


class Asked(NamedTuple):
    """A rotation that is under way, and what it is asked about: the state, what hosts say, and whether one holds its plan."""

    host: HostId
    rotation: Rotation
    state: State
    reports: Mapping[HostId, ApplyReport]
    holds: Callable[[HostId], bool]


def unmet(asked: Asked) -> Iterator[str]:
    """What keeps a node's rotation from its next step, each in words that name a host."""
    host, rotation = asked.host, asked.rotation
    report = asked.reports.get(host)
    if rotation.stage == "leaving":
        yield from old_key_kept(asked)
        return
    if report is None or not asked.holds(host):
        yield f"{host} {behind(report, mesh_unit(host.cluster))}"
        return
    yield from _not_greeted(asked, report.greetings)
    away = set(report.greetings.away)
    for node in asked.state.nodes[host.cluster].values():
        other = HostId(host.cluster, node.name)
        is_there = mesh.encrypts(asked.state, node) and asked.state.keys[other].key not in away
        if other != host and is_there and not asked.holds(other):
            yield f"{other} {behind(asked.reports.get(other), mesh_unit(host.cluster))}"


def old_key_kept(asked: Asked) -> Iterator[str]:
    """Why the last stage does not end: the old key is there. A host that has let go of it may have made another one that is to follow."""
    if asked.state.keys[asked.host].key != asked.rotation.new:
        yield f"{asked.host} has not said yet that its old key is gone"


def _not_greeted(asked: Asked, greetings: Greetings) -> Iterator[str]:
    link = greeted_on(asked.rotation)
    if not link:
        return
    found = greetings.on(link, asked.rotation.new)
    if found is None:
        if any(mesh.encrypts(asked.state, node) for node in _others(asked)):
            yield f"{asked.host} has not looked at handshakes on {link} yet"
        return
    known = {asked.state.keys[host].key: node for node in _others(asked) if (host := HostId(node.cluster, node.name)) in asked.state.keys}
    named = [known[key] for key in found.first if key in known]
    yield from (_no_handshake(asked, node, link) for node in named)
    yield from (f"{asked.host}: another peer has not shaken hands on {link}" for _ in range(_unnamed(found, named)))


def _unnamed(found: Greeted, named: list[Node]) -> int:
    return max(0, found.lacking - len(named))


def _no_handshake(asked: Asked, node: Node, link: str) -> str:
    cluster = asked.state.clusters[asked.host.cluster]
    port = mesh.ports(cluster)[link == names.ENCRYPTION_LINK_BESIDE]
    return not_met(HostId(node.cluster, node.name), asked.host, link, port)


def not_met(one: HostId, other: HostId, link: str, port: int) -> str:
    """That two hosts have not shaken hands on a device."""
    return f"{one} and {other} have not shaken hands on {link}: is UDP port {port} let through between them?"


def _others(asked: Asked) -> Iterator[Node]:
    return (node for node in asked.state.nodes[asked.host.cluster].values() if node.name != asked.host.name)


def behind(report: ApplyReport | None, name: str) -> str:
    """Why a host does not hold the planned unit of this name, as far as its last report tells."""
    if report is None:
        return "has not reported yet"
    error = next((unit.error for unit in report.units if unit.unit == name and unit.error), "")
    return f"does not hold what is planned: {error}" if error else "has not followed yet, but its peers see it: does its applier run?"
