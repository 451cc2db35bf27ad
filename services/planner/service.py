"""The planner's loop: topology messages and reports in; state, allocations, snapshots, plans and refusals out.

What is written before what, so that a kill at any instant loses nothing: allocations, then STATE, then snapshot and plan, then the
acknowledgement of the topology message. After a restart, whatever was admitted and not yet planned differs from what is published, and
is published then; when nothing differs, nothing is published.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

import structlog

from schemas import codec, subjects
from schemas.plan import Cause, HostPlan, PlanDiff, SnapshotHead
from schemas.snapshot import Chunks, TornError, join
from schemas.status import ApplyReport
from schemas.topology import KINDS, Topology, decode_topology
from services.planner.allocate import NUMBER, Number, Rollout
from services.planner.core import Core, Outcome, Said, Step
from services.planner.state import HostId
from services.runtime import events
from services.runtime.broker import BatchMessage, Broker, ConsumerSpec
from services.runtime.deadletters import dead_letter
from services.runtime.errors import Poison
from services.runtime.messages import Message
from services.runtime.service import Context

_log = structlog.get_logger()

_BATCH_MAX = 256
_PLAN_BYTES_MAX = 256 * 1024
_HOST_SERVICES = ("applier", "auditor")
_HEAD = "head"
_STATE, _TOPOLOGY, _ALLOCATION, _SNAPSHOT, _PLAN, _STATUS = "STATE", "TOPOLOGY", "ALLOCATION", "SNAPSHOT", "PLAN", "STATUS"


class Planner:
    """One planner process. `epoch` is higher than that of every planner before it."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._broker: Broker = context.broker
        self._core = Core()
        self._inbox: asyncio.Queue[Message] = asyncio.Queue(maxsize=_BATCH_MAX)
        self._arrived = asyncio.Event()
        self._epoch = 1
        self._generations: dict[HostId, int] = {}
        self._plan_sequences: dict[HostId, int] = {}
        self._head_sequences: dict[HostId, int] = {}
        self._chunks: dict[HostId, Chunks] = {}
        self._last_sequences: dict[str, int] = {}
        self._served: set[HostId] = set()

    async def run(self) -> None:
        """Restore, publish what is missing, then follow topology and reports until told to stop."""
        await self._broker.ensure_streams()
        await self._restore()
        await self._publish_plans((), time.time())
        self._context.ready("planner")
        self._arrived.set()
        async with asyncio.TaskGroup() as group:
            feeds = [
                group.create_task(self._feed(_TOPOLOGY, "planner-topology"), name="topology"),
                group.create_task(self._feed(_STATUS, "planner-status"), name="status"),
            ]
            await self._work()
            for feed in feeds:
                feed.cancel()

    async def _feed(self, stream: str, durable: str) -> None:
        spec = ConsumerSpec(stream, durable, max_ack_pending=_BATCH_MAX, max_deliver=-1)
        async for message in self._broker.consume(spec):
            await self._inbox.put(message)
            self._arrived.set()

    async def _work(self) -> None:
        """Take what has arrived, decide on all of it, write, acknowledge."""
        while not self._context.stop.is_set():
            batch = await self._next_batch()
            if not batch:
                continue
            topology = [message for message in batch if message.subject.startswith(f"{subjects.TOPOLOGY}.")]
            for message in batch:
                if message not in topology:
                    await self._note_report(message)
            said = [_said(message) for message in topology]
            outcome = self._core.hear(said)
            await self._write(outcome)
            causes = tuple(Cause(entry.ref, entry.said.sequence, entry.said.stored_s) for entry in outcome.admitted)
            trace = next((entry.said.trace for entry in outcome.admitted if entry.said.trace), "")
            await self._publish_plans(causes, time.time(), trace)
            for message in batch:
                await message.settle()

    async def _next_batch(self) -> list[Message]:
        await self._context.until(self._arrived)
        self._arrived.clear()
        batch: list[Message] = []
        while not self._inbox.empty() and len(batch) < _BATCH_MAX:
            batch.append(self._inbox.get_nowait())
        if not self._inbox.empty():
            self._arrived.set()
        return [] if self._context.stop.is_set() else batch

    async def _note_report(self, message: Message) -> None:
        try:
            self._core.report(codec.decode(message.data, ApplyReport))
        except codec.DecodeError as error:
            await dead_letter(self._broker, "planner", message, str(error))

    # Writing -------------------------------------------------------------------------------------------------------------------------

    async def _write(self, outcome: Outcome) -> None:
        await self._write_allocations()
        metrics = self._context.metrics
        for entry in outcome.admitted:
            kind, cluster, name = entry.ref.split("/")
            payload = codec.encode(entry.item) if entry.item is not None else b""
            headers = {events.SEQUENCE: str(entry.said.sequence), **_traced(entry.said.trace)}
            await self._store(subjects.state(kind, cluster, name), payload, headers)
            metrics.planner_admitted.labels(kind).inc()
            _log.info("admitted", object=entry.ref, deleted=entry.item is None, sequence=entry.said.sequence)
        for refusal in outcome.refused:
            subject = subjects.refused(refusal.kind, refusal.cluster, refusal.name)
            await self._broker.publish(subject, codec.encode(refusal), message_id=f"refused-{refusal.sequence}")
            metrics.planner_refused.labels(refusal.kind).inc()
            _log.warning("refused", object=f"{refusal.kind}/{refusal.cluster}/{refusal.name}", field=refusal.field, reason=refusal.reason)
        for said, reason in outcome.unreadable:
            await dead_letter(self._broker, "planner", Message(said.subject, said.payload, sequence=said.sequence), reason)

    async def _write_allocations(self) -> None:
        allocations = self._core.allocations
        for what, cluster, name in allocations.take_changes():
            value = allocations.numbers.get(HostId(cluster, name)) if what == NUMBER else allocations.rollouts[cluster, name]
            await self._store(subjects.allocation(what, cluster, name), codec.encode(value) if value is not None else b"")

    async def _store(self, subject: str, payload: bytes, headers: Mapping[str, str] | None = None) -> None:
        """Write the subject's next value, by compare-and-set: Conflict when another planner wrote it meanwhile."""
        expect = self._last_sequences.get(subject, 0)
        self._last_sequences[subject] = await self._broker.publish(subject, payload, expect=expect, headers=headers)

    async def _publish_plans(self, causes: tuple[Cause, ...], admitted_s: float, trace: str = "") -> None:
        with self._context.metrics.compile_seconds.time():
            steps = self._core.steps()
        await self._write_allocations()
        for step in steps:
            await self._publish_plan(step, causes, admitted_s, trace)
        for kind in KINDS:
            self._context.metrics.planner_objects.labels(kind).set(self._core.state.count(kind))
        self._context.metrics.planner_hosts.set(len(self._core.published))

    async def _publish_plan(self, step: Step, causes: tuple[Cause, ...], admitted_s: float, trace: str) -> None:
        host = step.host
        await self._serve(host)
        generation = self._generations.get(host, 0) + 1
        await self._write_snapshot(step, generation)
        diff = PlanDiff(
            step.plan.cluster,
            step.plan.host,
            self._epoch,
            generation,
            step.diffs,
            causes=causes,
            admitted_s=admitted_s,
            planned_s=time.time(),
            drift=step.plan.drift,
        )
        payload = codec.encode(diff)
        if len(payload) > _PLAN_BYTES_MAX:
            payload = codec.encode(
                PlanDiff(diff.cluster, diff.host, diff.epoch, generation, resync=True, causes=causes[:16], drift=diff.drift)
            )
        sequence = await self._broker.publish(
            subjects.plan(*host), payload, expect=self._plan_sequences.get(host, 0), headers=_traced(trace)
        )
        self._plan_sequences[host] = sequence
        self._generations[host] = generation
        self._core.published[host] = step.plan
        self._context.metrics.planner_plans.inc()
        operations = sum(len(unit.put) + len(unit.drop) for unit in step.diffs)
        _log.info("planned", host=str(host), generation=generation, operations=operations)

    async def _write_snapshot(self, step: Step, generation: int) -> None:
        host, plan = step.host, step.plan
        chunks = self._chunks.get(host)
        if chunks is None or chunks.is_crowded:
            chunks = self._chunks[host] = Chunks(plan)
            changed = list(range(len(chunks)))
        else:
            changed = chunks.change(step.diffs)
        batch = [BatchMessage(subjects.snapshot(*host, str(number)), chunks.encoded(number)) for number in changed]
        head = codec.encode(chunks.head(plan, self._epoch, generation))
        batch.append(BatchMessage(subjects.snapshot(*host, _HEAD), head, self._head_sequences.get(host, 0)))
        self._head_sequences[host] = await self._broker.publish_batch(batch)

    async def _serve(self, host: HostId) -> None:
        """Make sure that the host's services find a consumer for their plan."""
        if host in self._served:
            return
        for service in _HOST_SERVICES:
            await self._broker.ensure_consumer(ConsumerSpec(_PLAN, subjects.consumer(service, *host), subjects.plan(*host), max_deliver=-1))
        self._served.add(host)

    # Restoring -----------------------------------------------------------------------------------------------------------------------

    async def _restore(self) -> None:
        await self._restore_allocations()
        objects: list[tuple[Topology, int]] = []
        async for message in self._broker.replay(_STATE, f"{subjects.STATE}.>"):
            sequence = int(message.headers.get(events.SEQUENCE, "0"))
            self._last_sequences[message.subject] = message.sequence
            if message.data:
                objects.append((decode_topology(message.data), sequence))
            else:
                kind, cluster, name = subjects.parse(message.subject).tokens
                self._core.sequences[f"{_kind(kind)}/{cluster}/{name}"] = sequence
        objects.sort(key=lambda entry: list(KINDS).index(entry[0].kind))
        published = await self._restore_plans()
        reports = {}
        async for message in self._broker.replay(_STATUS, f"{subjects.STATUS}.>"):
            report = codec.decode(message.data, ApplyReport)
            reports[HostId(report.cluster, report.host)] = report
        self._core.restore(objects, published, reports)
        await self._restore_pending()
        _log.info("restored", objects=len(objects), hosts=len(published), epoch=self._epoch)

    async def _restore_allocations(self) -> None:
        async for message in self._broker.replay(_ALLOCATION, f"{subjects.ALLOCATION}.>"):
            what, cluster, name = subjects.parse(message.subject).tokens
            self._last_sequences[message.subject] = message.sequence
            if not message.data:
                continue
            if what == NUMBER:
                self._core.allocations.put_number(HostId(cluster, name), codec.decode(message.data, Number))
            else:
                self._core.allocations.rollouts[cluster, name] = codec.decode(message.data, Rollout)

    async def _restore_plans(self) -> dict[HostId, HostPlan]:
        heads: dict[HostId, SnapshotHead] = {}
        chunks: dict[tuple[HostId, str], bytes] = {}
        async for message in self._broker.replay(_SNAPSHOT, f"{subjects.SNAPSHOT}.>"):
            cluster, name, chunk = subjects.parse(message.subject).tokens
            host = HostId(cluster, name)
            if chunk == _HEAD:
                heads[host] = codec.decode(message.data, SnapshotHead)
                self._head_sequences[host] = message.sequence
            else:
                chunks[host, chunk] = message.data
        published = {}
        for host, head in heads.items():
            try:
                published[host] = join(head, [chunks.get((host, str(number)), b"") for number in range(len(head.chunks))])
            except TornError as error:
                _log.warning("snapshot_rewritten", host=str(host), why=str(error))
            self._generations[host] = head.generation
            self._epoch = max(self._epoch, head.epoch + 1)
            await self._announce(host, head)
        return published

    async def _announce(self, host: HostId, head: SnapshotHead) -> None:
        """Publish the generation of a snapshot that an earlier planner wrote and did not live to announce."""
        last = await self._broker.last(_PLAN, subjects.plan(*host))
        self._plan_sequences[host] = last.sequence if last else 0
        if last is None or codec.decode(last.data, PlanDiff).generation < head.generation:
            await self._serve(host)
            diff = PlanDiff(head.cluster, head.host, head.epoch, head.generation, resync=True, drift=head.drift)
            expect = self._plan_sequences[host]
            self._plan_sequences[host] = await self._broker.publish(subjects.plan(*host), codec.encode(diff), expect=expect)

    async def _restore_pending(self) -> None:
        """What was said last and is not in force waits for what it misses, as it did before the restart."""
        last: dict[str, Said] = {}
        async for message in self._broker.replay(_TOPOLOGY, f"{subjects.TOPOLOGY}.>"):
            last[message.subject] = _said(message)
        await self._write(self._core.hear(sorted(last.values(), key=lambda said: said.sequence), quiet=True))


def _kind(token: str) -> str:
    found = {kind.lower(): kind for kind in KINDS}.get(token)
    if found is None:
        msg = f"STATE holds an object of the unknown kind {token!r}; a newer planner wrote it: run that version"
        raise Poison(msg)
    return found


def _said(message: Message) -> Said:
    try:
        tokens = subjects.parse(message.subject).tokens
    except ValueError:
        tokens = ()
    trace = message.headers.get(events.TRACEPARENT, "")
    return Said(tokens, message.data, message.sequence, message.stored_s, trace, message.subject)


def _traced(trace: str) -> dict[str, str]:
    """Headers that carry a trace on to the next message."""
    return {events.TRACEPARENT: events.child(trace)} if trace else {}


async def main(context: Context) -> None:
    """Run the planner until the context says stop."""
    await Planner(context).run()
