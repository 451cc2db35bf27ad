"""How a host's plan reaches the services on it: the snapshot once, then difference by difference.

The planner writes the snapshot before it publishes a difference, so a snapshot is never older than any difference a reader has seen. A
reader whose plan is not what a difference starts from takes the snapshot instead; order and repetition of messages do not matter. A store
that was lost or put back may hold older plans than the reader has: they are handed on, and the reader asks ``Update.follows``.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import structlog
from msgspec import Struct

from schemas import codec, epochs, snapshot, subjects
from schemas.plan import HostPlan, PlanDiff, SnapshotHead, apply_diff
from services.runtime import events
from services.runtime.broker import Broker, ConsumerSpec
from services.runtime.deadletters import dead_letter
from services.runtime.errors import OutcomeUnknown, Transient, Waiting
from services.runtime.messages import Message
from services.runtime.retries import retrying

PLAN_STREAM, SNAPSHOT_STREAM = "PLAN", "SNAPSHOT"
_HEAD = "head"
_AGAIN_S = 1.0

log = structlog.get_logger(__name__)


class Update(Struct, frozen=True):
    """A plan in force, and the difference that led to it; None when it was read from the snapshot at start. `trace` is its traceparent.

    `over` is the epoch of another store that the plan takes over from (``schemas.epochs``).
    """

    plan: HostPlan
    epoch: int
    generation: int
    diff: PlanDiff | None = None
    trace: str = ""
    over: int = 0

    @property
    def place(self) -> tuple[int, int]:
        """Epoch and generation: a later plan has a higher place."""
        return self.epoch, self.generation

    def follows(self, epoch: int) -> bool:
        """Whether the plan may replace one of this epoch: no fenced planner's, and none out of a store that knows nothing of it."""
        return epochs.may_follow(self.epoch, self.over, epoch)


async def fetch_plan(broker: Broker, cluster: str, host: str) -> Update | None:
    """The host's whole plan as it was last written, or None when there is none. Raises Transient while a writer is at work for too long."""
    return await retrying("snapshot", lambda: _fetch_once(broker, cluster, host))


async def _fetch_once(broker: Broker, cluster: str, host: str) -> Update | None:
    message = await broker.last(SNAPSHOT_STREAM, subjects.snapshot(cluster, host, _HEAD))
    if message is None:
        return None
    head = codec.decode(message.data, SnapshotHead)
    chunks = []
    for number in range(len(head.chunks)):
        chunk = await broker.last(SNAPSHOT_STREAM, subjects.snapshot(cluster, host, str(number)))
        chunks.append(chunk.data if chunk else b"")
    try:
        return Update(snapshot.join(head, chunks), head.epoch, head.generation, over=head.over)
    except snapshot.TornError as error:
        msg = f"the snapshot of {cluster}/{host} is being written: {error}"
        raise Transient(msg, 0.05) from None


async def follow_plan(broker: Broker, service: str, cluster: str, host: str) -> AsyncIterator[Update]:
    """The host's plan at start, if there is one, then again after every difference.

    A difference is acknowledged here, once the plan after it is known: the snapshot holds it, whatever becomes of the receiver.
    """
    current = await _first(broker, cluster, host)
    if current is not None:
        yield current
    async for message in broker.consume(ConsumerSpec(PLAN_STREAM, subjects.consumer(service, cluster, host)), create=False):
        following = None
        with contextlib.suppress(OutcomeUnknown, Transient):  # an answer that got lost means a redelivery, which changes nothing
            try:
                following = await _next(broker, current, message, cluster, host)
                await message.settle()
            except codec.DecodeError as error:
                await dead_letter(broker, service, message, str(error), cluster=cluster, host=host)
                await message.term("not a plan")
            except (Transient, OutcomeUnknown, Waiting) as error:
                log.warning("plan_waits", error=str(error))
                await message.nak(_AGAIN_S)
        if following is not None:
            current = following
            yield current


async def _first(broker: Broker, cluster: str, host: str) -> Update | None:
    """The plan at start; a host may be up before any planner was, which makes the streams."""
    while not broker.stop.is_set():
        try:
            return await fetch_plan(broker, cluster, host)
        except (Waiting, Transient, OutcomeUnknown, codec.DecodeError) as error:
            log.info("plan_waits", error=str(error))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_AGAIN_S):
                    await broker.stop.wait()
    return None


async def _next(broker: Broker, current: Update | None, message: Message, cluster: str, host: str) -> Update | None:
    """The plan after this difference, or None when it is an old one."""
    diff = codec.decode(message.data, PlanDiff)
    trace = message.headers.get(events.TRACEPARENT, "")
    same_store = current is None or epochs.same_store(diff.epoch, current.epoch)
    if current is not None and same_store and (diff.epoch, diff.generation) <= current.place:
        return None if diff.epoch == current.epoch else await _behind(broker, current, cluster, host)
    plan = None if diff.resync or not same_store else _advance(current, diff)
    if plan is not None:
        return Update(plan, diff.epoch, diff.generation, diff, trace, diff.over)
    fetched = await fetch_plan(broker, cluster, host)
    if fetched is None or (fetched.place < (diff.epoch, diff.generation) and epochs.same_store(fetched.epoch, diff.epoch)):
        # Written before it was announced: a replica that lags does not have it yet.
        msg = f"generation {diff.generation} of {cluster}/{host} was announced, but its snapshot is not there yet"
        raise Transient(msg)
    return Update(fetched.plan, fetched.epoch, fetched.generation, diff, trace, fetched.over)


async def _behind(broker: Broker, current: Update, cluster: str, host: str) -> Update | None:
    """What is in force in the store when that is older than `current`, as after an old copy was put back; None for a late message."""
    fetched = await fetch_plan(broker, cluster, host)
    return fetched if fetched is not None and fetched.place < current.place else None


def _advance(current: Update | None, diff: PlanDiff) -> HostPlan | None:
    plan = current.plan if current else HostPlan(diff.cluster, diff.host, {})
    try:
        return HostPlan(diff.cluster, diff.host, apply_diff(plan.units, diff.units), diff.drift)
    except ValueError:
        return None
