"""What the streams hold, as values: topology in force, allocations, published plans, reports, changes of keys, open drift. Reads only."""

from __future__ import annotations

from collections.abc import AsyncIterator

from schemas import codec, subjects
from schemas.allocation import Rotation
from schemas.drift import DriftEvent
from schemas.plan import SnapshotHead
from schemas.status import ApplyReport, Freeze, Refusal
from schemas.topology import KINDS, Topology, decode_topology
from services.cli.key_change import KeyChange
from services.planner.allocate import Allocations
from services.planner.rotation import ROTATION
from services.planner.state import HostId
from services.runtime import events
from services.runtime.broker import Broker
from services.runtime.messages import Message
from services.runtime.streams import STREAMS

_STREAMS = {subject.removesuffix(".>"): spec.name for spec in STREAMS for subject in spec.subjects}


async def admitted(broker: Broker) -> list[Topology]:
    """The topology in force, clusters first."""
    found: dict[str, Topology] = {}
    async for message in _replay(broker, subjects.STATE):
        if message.data:
            found[message.subject] = decode_topology(message.data)
        else:
            found.pop(message.subject, None)
    order = list(KINDS)
    return sorted(found.values(), key=lambda item: (order.index(item.kind), item.ref))


async def refused(broker: Broker) -> list[Refusal]:
    """The newest refusal of each object about which nothing newer was admitted."""
    decided: dict[str, int] = {}
    async for message in _replay(broker, subjects.STATE):
        decided[message.subject] = int(message.headers.get(events.SEQUENCE, "0"))
    found: dict[str, Refusal] = {}
    async for message in _replay(broker, subjects.REFUSED):
        refusal = codec.decode(message.data, Refusal)
        subject = subjects.state(refusal.kind, refusal.cluster, refusal.name)
        if refusal.sequence > decided.get(subject, 0):
            found[subject] = refusal
    return [found[subject] for subject in sorted(found)]


async def hosts(broker: Broker) -> set[HostId]:
    """The nodes and gateways of the topology in force."""
    found: dict[HostId, bool] = {}
    for kind in ("node", "gateway"):
        async for message in _replay(broker, subjects.STATE, f"{kind}.>"):
            _, cluster, name = subjects.parse(message.subject).tokens
            found[HostId(cluster, name)] = bool(message.data) or found.get(HostId(cluster, name), False)
    return {host for host, is_there in found.items() if is_there}


async def allocations(broker: Broker) -> Allocations:
    """What the planner has allocated: numbers, remaps, rollouts."""
    found = Allocations()
    async for message in _replay(broker, subjects.ALLOCATION):
        what, cluster, name = subjects.parse(message.subject).tokens
        if message.data:
            found.restore(what, cluster, name, message.data)
    return found


async def heads(broker: Broker) -> dict[HostId, SnapshotHead]:
    """What each host is to hold, removed hosts included: theirs has no units."""
    found = {}
    async for message in _replay(broker, subjects.SNAPSHOT, "*.*.head"):
        head = codec.decode(message.data, SnapshotHead)
        found[HostId(head.cluster, head.host)] = head
    return found


async def reports(broker: Broker) -> dict[HostId, ApplyReport]:
    """What each host said last."""
    found = {}
    async for message in _replay(broker, subjects.STATUS):
        report = codec.decode(message.data, ApplyReport)
        found[HostId(report.cluster, report.host)] = report
    return found


async def report(broker: Broker, host: HostId) -> ApplyReport | None:
    """What a host said last; None for one that never said anything."""
    found = await broker.last(_STREAMS[subjects.STATUS], subjects.status(*host))
    return codec.decode(found.data, ApplyReport) if found is not None else None


async def key_change(broker: Broker, host: HostId) -> KeyChange | None:
    """How far a host's last change of keys is; None for a host that never made one."""
    found = await broker.last(_STREAMS[subjects.ALLOCATION], subjects.allocation(ROTATION, *host))
    return KeyChange(codec.decode(found.data, Rotation), found.stored_s) if found is not None and found.data else None


async def key_changes(broker: Broker) -> dict[HostId, KeyChange]:
    """The changes of keys that are not over, those that wait for their turn included."""
    found: dict[HostId, KeyChange] = {}
    async for message in _replay(broker, subjects.ALLOCATION, f"{ROTATION}.>"):
        _, cluster, name = subjects.parse(message.subject).tokens
        found.pop(HostId(cluster, name), None)
        if message.data:
            change = KeyChange(codec.decode(message.data, Rotation), message.stored_s)
            if not change.is_over:
                found[HostId(cluster, name)] = change
    return found


async def freeze(broker: Broker) -> Freeze:
    """What the planner holds back, as it said last; nothing when it never said anything."""
    last = await broker.last(_STREAMS[subjects.FROZEN], subjects.FREEZE)
    return codec.decode(last.data, Freeze) if last is not None else Freeze("lifted")


async def open_drift(broker: Broker) -> list[DriftEvent]:
    """The newest word on each difference that is not resolved."""
    found: dict[tuple[str, str, str], DriftEvent] = {}
    async for message in _replay(broker, subjects.DRIFT):
        event = codec.decode(message.data, DriftEvent)
        found.pop((event.cluster, event.host, event.key), None)
        if event.key == f"layer {event.layer}" and event.state == "resolved":
            # Of an auditor that has ended nobody else says what has become of what it had open.
            found = {key: item for key, item in found.items() if not _is_ended_by(item, event)}
        if event.state != "resolved":
            found[event.cluster, event.host, event.key] = event
    return list(found.values())


def _is_ended_by(item: DriftEvent, said: DriftEvent) -> bool:
    """Whether what is said of a layer as a whole is about this event: an auditor told it that was there before the one that speaks."""
    return (item.cluster, item.host, item.layer) == (said.cluster, said.host, said.layer) and item.at_s < said.first_seen_s


def _replay(broker: Broker, subject: str, below: str = ">") -> AsyncIterator[Message]:
    """All messages of the stream that keeps `subject`, as far as the rest of their subject matches `below`."""
    return broker.replay(_STREAMS[subject], f"{subject}.{below}")
