"""The planner's loop: topology messages and reports in; state, allocations, snapshots, plans and refusals out.

What is written before what, so that a kill at any instant loses nothing: allocations, then STATE, then snapshot and plan, then the
acknowledgement of the topology message. After a restart, whatever was admitted and not yet planned differs from what is published, and
is published then; when nothing differs, nothing is published. What takes away too much is held back (``freeze``).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping

import structlog

from schemas import codec, subjects
from schemas.plan import Cause
from schemas.status import Accept, ApplyReport, Freeze
from schemas.topology import KINDS, Topology, decode_topology
from services.planner.core import Claim, Core, Outcome, Said, Step
from services.planner.freeze import LIFTED, Freezer, Verdict
from services.planner.plans import News, PlanWriter
from services.planner.state import HostId
from services.runtime import events
from services.runtime.broker import Broker, ConsumerSpec
from services.runtime.deadletters import dead_letter
from services.runtime.errors import OutcomeUnknown, Permanent, Poison, Transient, Waiting
from services.runtime.messages import Message
from services.runtime.retries import backoff_s
from services.runtime.service import Context, leaves
from services.runtime.streams import STREAMS

_log = structlog.get_logger()

_BATCH_MAX = 256
_STATE, _TOPOLOGY, _ALLOCATION, _STATUS, _FROZEN = "STATE", "TOPOLOGY", "ALLOCATION", "STATUS", "FROZEN"
_WATCH_S = 3.0
_STEADY_S = 60.0
"""A planner that ran this long starts again at once."""


class Planner:
    """One planner, from reading the store to the end; made for one run."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._broker: Broker = context.broker
        self._core = Core()
        self._inbox: asyncio.Queue[Message] = asyncio.Queue(maxsize=_BATCH_MAX)
        self._arrived = asyncio.Event()
        self._plans = PlanWriter(self._broker)
        self._freezer = Freezer()
        self._told = LIFTED
        self._wishes: list[tuple[str, asyncio.Future[bytes]]] = []
        self._last_sequences: dict[str, int] = {}
        self._created_s: dict[str, float] = {}

    async def run(self) -> None:
        """Restore, publish what is missing, then follow topology and reports until told to stop."""
        await self._broker.ensure_streams()
        self._created_s = {spec.name: (await self._broker.stream_info(spec.name)).created_s for spec in STREAMS}
        await self._restore()
        await self._publish_plans(News(admitted_s=time.time()))
        self._context.ready("planner")
        self._arrived.set()
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._feed(_TOPOLOGY, "planner-topology"), name="topology"),
                group.create_task(self._feed(_STATUS, "planner-status"), name="status"),
                group.create_task(self._broker.serve(subjects.ACCEPT, self._accept), name="accept"),
                group.create_task(self._watch_store(), name="store"),
            ]
            await self._work()
            for task in tasks:
                task.cancel()

    async def _watch_store(self) -> None:
        """Raise Transient when a stream is not the one that was read at start: what is known of it is worth nothing."""
        while True:
            await asyncio.sleep(_WATCH_S)
            for name, created_s in self._created_s.items():
                try:
                    found_s = (await self._broker.stream_info(name)).created_s
                except (Transient, OutcomeUnknown):
                    break  # the broker is away; what it holds is looked at when it is back
                if found_s != created_s:
                    msg = f"the stream {name} was made anew: the broker's store was lost or emptied"
                    raise Transient(msg)

    async def _feed(self, stream: str, durable: str) -> None:
        spec = ConsumerSpec(stream, durable, max_ack_pending=_BATCH_MAX, max_deliver=-1)
        async for message in self._broker.consume(spec):
            await self._inbox.put(message)
            self._arrived.set()

    async def _work(self) -> None:
        """Take what has arrived, decide on all of it, write, acknowledge."""
        while not self._context.stop.is_set():
            batch = await self._next_batch()
            if not batch and not self._wishes:
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
            await self._publish_plans(News(causes, time.time(), trace))
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
            await self._hear_report(codec.decode(message.data, ApplyReport))
        except codec.DecodeError as error:
            await dead_letter(self._broker, "planner", message, str(error))

    async def _hear_report(self, report: ApplyReport) -> None:
        self._core.note_in_use(report)
        if self._plans.accounts_for(report):
            self._core.report(report)
            return
        host = HostId(report.cluster, report.host)
        await self._plans.outdo(report)
        self._core.claim(host, Claim.of_report(report))
        _log.warning("not_accounted_for", host=str(host), epoch=report.epoch, generation=report.generation, units=len(report.units))

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
            value = allocations.value(what, cluster, name)
            await self._store(subjects.allocation(what, cluster, name), codec.encode(value) if value is not None else b"")

    async def _store(self, subject: str, payload: bytes, headers: Mapping[str, str] | None = None) -> None:
        """Write the subject's next value, by compare-and-set: Conflict when another planner wrote it meanwhile."""
        expect = self._last_sequences.get(subject, 0)
        self._last_sequences[subject] = await self._broker.publish(subject, payload, expect=expect, headers=headers)

    async def _publish_plans(self, news: News) -> None:
        with self._context.metrics.compile_seconds.time():
            steps = self._core.steps()
        await self._write_allocations()
        wishes, self._wishes = self._wishes, []
        verdict = self._freezer.judge(steps, self._core.published, time.time(), {token for token, _ in wishes})
        if verdict.freeze.is_on:
            await self._tell(verdict.freeze)
        for step in verdict.held:
            self._core.keep(step)
        for step in verdict.go:
            await self._publish_plan(step, news)
        await self._tell(verdict.freeze)
        self._answer(wishes, verdict)
        for kind in KINDS:
            self._context.metrics.planner_objects.labels(kind).set(self._core.state.count(kind))
        self._context.metrics.planner_hosts.set(len(self._core.published))

    async def _publish_plan(self, step: Step, news: News) -> None:
        generation = await self._plans.write(step, news)
        self._core.publish(step)
        self._context.metrics.planner_plans.inc()
        operations = sum(len(unit.put) + len(unit.drop) for unit in step.diffs)
        _log.info("planned", host=str(step.host), generation=generation, operations=operations)

    async def _tell(self, freeze: Freeze) -> None:
        """Say that plans are held back, or no more, if that is news."""
        self._context.metrics.planner_frozen.set(int(freeze.is_on))
        if freeze == self._told:
            return
        self._told = freeze
        await self._store(subjects.FREEZE, codec.encode(freeze))
        log = _log.warning if freeze.is_on else _log.info
        log(freeze.state, reason=freeze.reason, units=freeze.count, planned=freeze.planned, hosts=freeze.hosts, token=freeze.token)

    # Accepting -----------------------------------------------------------------------------------------------------------------------

    async def _accept(self, message: Message) -> bytes:
        """Let go what is held back, if it is still what the token names; answers with what went."""
        try:
            token = codec.decode(message.data, Accept).token
        except codec.DecodeError as error:
            msg = f"accept: {error}"
            raise Permanent(msg) from None
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._wishes.append((token, answer))
        self._arrived.set()
        return await answer

    def _answer(self, wishes: Iterable[tuple[str, asyncio.Future[bytes]]], verdict: Verdict) -> None:
        freeze = verdict.freeze
        for token, answer in wishes:
            if answer.done():
                continue
            if verdict.accepted and token == freeze.token:
                answer.set_result(codec.encode(freeze))
            elif freeze.is_on:
                answer.set_exception(Permanent(f"what would go is not what {token} names any more, but {freeze.token}; look again"))
            else:
                answer.set_exception(Permanent("nothing is held back"))

    # Restoring -----------------------------------------------------------------------------------------------------------------------

    async def _restore(self) -> None:
        await self._restore_allocations()
        objects: list[tuple[Topology, int]] = []
        async for message in self._broker.replay(_STATE, f"{subjects.STATE}.>"):
            # A place in a stream of topology that was lost says nothing about the one that there is.
            is_known = message.stored_s >= self._created_s[_TOPOLOGY]
            sequence = int(message.headers.get(events.SEQUENCE, "0")) if is_known else 0
            self._last_sequences[message.subject] = message.sequence
            if message.data:
                objects.append((decode_topology(message.data), sequence))
            else:
                kind, cluster, name = subjects.parse(message.subject).tokens
                self._core.sequences[f"{_kind(kind)}/{cluster}/{name}"] = sequence
        objects.sort(key=lambda entry: list(KINDS).index(entry[0].kind))
        published = await self._plans.restore()
        self._core.restore(objects, {host: found.plan for host, found in published.items()}, {})
        for host, found in published.items():
            if found.stored_s < self._created_s[_STATE]:
                self._core.claim(host, Claim.of_plan(found.plan))
        async for message in self._broker.replay(_STATUS, f"{subjects.STATUS}.>"):
            await self._hear_report(codec.decode(message.data, ApplyReport))
        await self._restore_freeze()
        await self._restore_pending()
        _log.info("restored", objects=len(objects), hosts=len(published), epoch=self._plans.epoch, frozen=self._told.is_on)

    async def _restore_freeze(self) -> None:
        last = await self._broker.last(_FROZEN, subjects.FREEZE)
        if last is not None:
            self._last_sequences[last.subject] = last.sequence
            self._told = codec.decode(last.data, Freeze)
        self._freezer = Freezer(self._told)

    async def _restore_allocations(self) -> None:
        async for message in self._broker.replay(_ALLOCATION, f"{subjects.ALLOCATION}.>"):
            what, cluster, name = subjects.parse(message.subject).tokens
            self._last_sequences[message.subject] = message.sequence
            if message.data:
                self._core.allocations.restore(what, cluster, name, message.data)

    async def _restore_pending(self) -> None:
        """What was said last and is not in force waits for what it misses, as it did before the restart."""
        last: dict[str, Said] = {}
        async for message in self._broker.replay(_TOPOLOGY, f"{subjects.TOPOLOGY}.>"):
            said = _said(message)
            if not self._core.is_overtaken(said, last.get(message.subject)):
                last[message.subject] = said
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
    """Run planners, one after the other, until the context says stop.

    One that cannot go on because the broker was away, or has another store now, is followed by one that reads everything anew. Conflict, as
    when somebody else plans, and Permanent end it.
    """
    attempts = 0
    while not context.stop.is_set():
        started_s = time.monotonic()
        trouble: list[BaseException] = []
        try:
            await Planner(context).run()
        except* (Transient, OutcomeUnknown, Waiting) as group:
            trouble = list(leaves(group))
        if not trouble or context.stop.is_set():
            continue
        attempts = 1 if time.monotonic() - started_s > _STEADY_S else attempts + 1
        wait_s = backoff_s(attempts)
        _log.warning("planner_starts_again", why=str(trouble[0]), wait_s=round(wait_s, 3))
        context.metrics.planner_restarts.inc()
        context.ready("planner", f"starting again: {trouble[0]}")
        await context.until(asyncio.Event(), wait_s)
