"""Snapshots and plans in the streams: written by compare-and-set under the planner's epoch, and read back after a restart.

The snapshot is written first, head last, then the difference is announced. Who finds a head that another planner wrote is fenced: Conflict.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import structlog
from msgspec import Struct
from msgspec.structs import replace

from schemas import codec, epochs, subjects
from schemas.plan import Cause, HostPlan, PlanDiff, SnapshotHead
from schemas.snapshot import Chunks, TornError, join
from schemas.status import ApplyReport
from services.planner.state import HostId
from services.planner.step import Step
from services.runtime import events
from services.runtime.broker import BatchMessage, Broker, ConsumerSpec
from services.runtime.errors import Conflict

_log = structlog.get_logger()

_PLAN_BYTES_MAX = 256 * 1024
_CAUSES_MAX = 16
_HOST_SERVICES = ("applier", "auditor")
_HEAD = "head"
_SNAPSHOT, _PLAN = "SNAPSHOT", "PLAN"


class News(Struct, frozen=True):
    """What plans come of: the topology messages behind them, when they were admitted (Unix time), and the trace that they belong to."""

    causes: tuple[Cause, ...] = ()
    admitted_s: float = 0.0
    trace: str = ""

    @property
    def headers(self) -> dict[str, str]:
        """Headers that carry the trace on to the next message."""
        return {events.TRACEPARENT: events.child(self.trace)} if self.trace else {}


class Published(Struct, frozen=True):
    """A plan that was read back, and when its head was stored (Unix time)."""

    plan: HostPlan
    stored_s: float


class PlanWriter:
    """Writes plans of all hosts. `epoch` is higher than that of every planner before it in this store; generations count per host."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.epoch = 1
        self._heads: dict[HostId, SnapshotHead] = {}
        self._plan_sequences: dict[HostId, int] = {}
        self._head_sequences: dict[HostId, int] = {}
        self._chunks: dict[HostId, Chunks] = {}
        self._served: set[HostId] = set()

    # Writing -------------------------------------------------------------------------------------------------------------------------

    async def write(self, step: Step, news: News) -> int:
        """Publish a step and return the generation. A host that claims another store's plan is told that this one takes over from it."""
        host, plan = step.host, step.plan
        await self._serve(host)
        before = self._heads.get(host)
        generation = before.generation + 1 if before else 1
        over = step.claim.epoch if step.claim and step.claim.epoch else before.over if before else 0
        await self._write_snapshot(step, generation, over)
        # What a host claims is no plan of ours that a difference could start from.
        resync = step.claim is not None
        units = () if resync else step.diffs
        await self._announce(
            host, PlanDiff(plan.cluster, plan.host, self.epoch, generation, units, resync, drift=plan.drift, over=over), news
        )
        return generation

    async def _announce(self, host: HostId, diff: PlanDiff, news: News) -> None:
        times = {"admitted_s": news.admitted_s, "planned_s": time.time()} if news.admitted_s else {}
        payload = codec.encode(replace(diff, causes=news.causes, **times))
        if len(payload) > _PLAN_BYTES_MAX:
            payload = codec.encode(replace(diff, units=(), resync=True, causes=news.causes[:_CAUSES_MAX]))
        expect = self._plan_sequences.get(host, 0)
        self._plan_sequences[host] = await self._broker.publish(subjects.plan(*host), payload, expect=expect, headers=news.headers)

    async def _write_snapshot(self, step: Step, generation: int, over: int) -> None:
        host, plan = step.host, step.plan
        chunks = self._chunks.get(host)
        if chunks is None or chunks.is_crowded:
            chunks = self._chunks[host] = Chunks(plan)
            changed = list(range(len(chunks)))
        else:
            changed = chunks.change(step.diffs)
        head = chunks.head(plan, self.epoch, generation, over)
        batch = [BatchMessage(subjects.snapshot(*host, str(number)), chunks.encoded(number)) for number in changed]
        batch.append(BatchMessage(subjects.snapshot(*host, _HEAD), codec.encode(head), self._head_sequences.get(host, 0)))
        self._head_sequences[host] = await self._broker.publish_batch(batch)
        self._heads[host] = head

    async def _serve(self, host: HostId) -> None:
        """Make sure that the host's services find a consumer for their plan, and that we know what was announced last."""
        if host in self._served:
            return
        for service in _HOST_SERVICES:
            await self._broker.ensure_consumer(ConsumerSpec(_PLAN, subjects.consumer(service, *host), subjects.plan(*host), max_deliver=-1))
        if host not in self._plan_sequences:
            # Where the snapshots alone were lost, plans are left of which they say nothing.
            last = await self._broker.last(_PLAN, subjects.plan(*host))
            self._plan_sequences[host] = last.sequence if last else 0
        self._served.add(host)

    # What hosts say ------------------------------------------------------------------------------------------------------------------

    def accounts_for(self, report: ApplyReport) -> bool:
        """Whether the host holds a plan that was published here, or one that the newest plan takes over from."""
        head = self._heads.get(HostId(report.cluster, report.host))
        if head is None:
            return False
        if report.epoch == head.over:
            return True
        return epochs.same_store(report.epoch, head.epoch) and (report.epoch, report.generation) <= (head.epoch, head.generation)

    async def outdo(self, report: ApplyReport) -> None:
        """Make the next plans ones that this host, which is not accounted for, may follow.

        Raises Conflict when that is because another planner writes its plans: then this one is fenced.
        """
        host = HostId(report.cluster, report.host)
        last = await self._broker.last(_SNAPSHOT, subjects.snapshot(*host, _HEAD))
        if last is not None and last.sequence != self._head_sequences.get(host, 0):
            msg = f"another planner has written the plan of {host}"
            raise Conflict(msg)
        if epochs.same_store(report.epoch, self.epoch):
            self.epoch = max(self.epoch, report.epoch + 1)

    # Reading back --------------------------------------------------------------------------------------------------------------------

    async def restore(self) -> dict[HostId, Published]:
        """Read all plans back, and announce what an earlier planner wrote and did not live to announce."""
        self.epoch = epochs.first_epoch((await self._broker.stream_info(_SNAPSHOT)).created_s)
        chunks: dict[tuple[HostId, str], bytes] = {}
        stored_s: dict[HostId, float] = {}
        async for message in self._broker.replay(_SNAPSHOT, f"{subjects.SNAPSHOT}.>"):
            cluster, name, chunk = subjects.parse(message.subject).tokens
            host = HostId(cluster, name)
            if chunk == _HEAD:
                self._heads[host] = codec.decode(message.data, SnapshotHead)
                self._head_sequences[host] = message.sequence
                stored_s[host] = message.stored_s
            else:
                chunks[host, chunk] = message.data
        if self._heads:
            self.epoch = max(head.epoch for head in self._heads.values()) + 1
        for host, head in self._heads.items():
            await self._catch_up(host, head)
        plans = {host: _joined(host, head, chunks) for host, head in self._heads.items()}
        return {host: Published(plan, stored_s[host]) for host, plan in plans.items() if plan is not None}

    async def _catch_up(self, host: HostId, head: SnapshotHead) -> None:
        last = await self._broker.last(_PLAN, subjects.plan(*host))
        self._plan_sequences[host] = last.sequence if last else 0
        told = codec.decode(last.data, PlanDiff) if last else None
        if told is None or not epochs.same_store(told.epoch, head.epoch) or told.generation < head.generation:
            await self._serve(host)
            diff = PlanDiff(head.cluster, head.host, head.epoch, head.generation, resync=True, drift=head.drift, over=head.over)
            await self._announce(host, diff, News())


def _joined(host: HostId, head: SnapshotHead, chunks: Mapping[tuple[HostId, str], bytes]) -> HostPlan | None:
    try:
        return join(head, [chunks.get((host, str(number)), b"") for number in range(len(head.chunks))])
    except TornError as error:
        _log.warning("snapshot_rewritten", host=str(host), why=str(error))
        return None
