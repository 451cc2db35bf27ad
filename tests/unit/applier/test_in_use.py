"""What others use on a host, on its way into the reports: told when it is news, thrown away when it was seen during a turn, and what of it
the plan has as well."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Iterable
from types import SimpleNamespace

import pytest

from schemas.host_objects import PlanObject, PolicyRule, Route, WireguardLink
from schemas.in_use import InUse, Use
from schemas.plan import HostPlan
from schemas.values import IPV6, Prefix
from services.applier import in_use
from services.applier.in_use import InUseWatch, collisions
from services.kernel.events import KernelEvent
from services.kernel.fake import FakeKernel
from services.runtime import tasks
from tests.firewalls import one_chain, rule
from tests.topologies import ROME_GATEWAY, keys, settled_plans, two_clusters
from tests.unit.applier.test_service import DEADLINE_S, GATEWAY_PLAN, PLAN, running
from tests.unit.stubs import StubEvents

SEEN = InUse(priorities=(Use(500, "IPv4 rule 500 lookup 300", 4),))
MET = InUse(priorities=(Use(900, "IPv4 rule 900 lookup 300", 4),))


class Scene:
    """A look whose answer a test sets. `began` is counted up by every look; `gate`, while it is clear, holds one up."""

    def __init__(self) -> None:
        self.seen: InUse | OSError = SEEN
        self.began = threading.Semaphore(0)
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self) -> InUse:
        self.began.release()
        assert self.gate.wait(DEADLINE_S)
        if isinstance(self.seen, OSError):
            raise self.seen
        return self.seen

    async def begins(self) -> None:
        """Until a look begins that nobody has waited for yet."""
        assert await asyncio.to_thread(self.began.acquire, timeout=DEADLINE_S)


@contextlib.asynccontextmanager
async def watching(scene: Scene, idle: asyncio.Event, turns: list[int]) -> AsyncIterator[tuple[InUseWatch, asyncio.Queue[InUse]]]:
    """The watch while the body runs, and what it tells."""
    told: asyncio.Queue[InUse] = asyncio.Queue()
    watch = InUseWatch(scene, idle, lambda: turns[0], told.put_nowait)
    task = asyncio.create_task(watch.run())
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield watch, told
    finally:
        scene.gate.set()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_use, "REST_S", 0.001)


async def test_it_is_in_the_report_and_told_again_when_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first look is in a report without another turn; the kernel's word of a change leads to the next one; what the plan has as well is
    named."""
    scene, empty = Scene(), HostPlan(PLAN.cluster, PLAN.host, {})
    async with running(monkeypatch, FakeKernel(), scene) as broker:
        broker.write(PLAN, 1)
        broker.announce(empty, PLAN, 1)
        while (report := await broker.reports.get()).in_use is None:
            pass
        assert (report.in_use, report.collisions, report.outcome) == (SEEN, (), "applied")
        await scene.begins()
        scene.seen = MET
        while broker.reports.empty():
            # It is taken for the turn's own echo when it comes right after it.
            StubEvents.queue.put_nowait(KernelEvent("rule", kind="new"))
            await asyncio.sleep(0.05)
        report = await broker.reports.get()
        assert (report.in_use, report.collisions) == (MET, ("priority 900: IPv4 rule 900 lookup 300",))
        assert (report.generation, report.outcome) == (1, "applied")


async def test_what_was_seen_during_a_turn_is_thrown_away() -> None:
    """A turn that began and ended while it was looked: what is half made looks like somebody else's. It is looked again."""
    scene, idle, turns = Scene(), asyncio.Event(), [0]
    scene.gate.clear()
    async with watching(scene, idle, turns) as (_, told):
        idle.set()
        await scene.begins()
        turns[0] += 1
        scene.gate.set()
        await scene.begins()
        assert await told.get() == SEEN
        assert told.empty()


async def test_nobody_looks_during_a_turn() -> None:
    """It waits for the turn's end; one that begins meanwhile makes the look worthless, too."""
    scene, idle, turns = Scene(), asyncio.Event(), [0]
    async with watching(scene, idle, turns) as (_, told):
        await asyncio.sleep(0.02)
        assert not scene.began.acquire(blocking=False)
        scene.gate.clear()
        idle.set()
        await scene.begins()
        idle.clear()
        scene.gate.set()
        await asyncio.sleep(0.02)
        assert told.empty()
        idle.set()
        assert await told.get() == SEEN


async def test_whoever_waits_takes_nobodys_time() -> None:
    """Neither for a turn's end nor for the kernel: only for what a look costs, there is a rest after it."""
    scene, idle = Scene(), asyncio.Event()
    async with watching(scene, idle, [0]) as (watch, told):
        await asyncio.sleep(0.3)
        scene.gate.clear()
        idle.set()
        await scene.begins()
        await asyncio.sleep(0.3)
        scene.gate.set()
        assert await told.get() == SEEN
        watch.hint()
        assert await told.get() == SEEN


async def test_a_look_that_costs_much_is_followed_by_a_long_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fifty times as long, of the processor's time."""
    rests: asyncio.Queue[float] = asyncio.Queue()

    async def sleep(seconds: float) -> None:
        rests.put_nowait(seconds)
        await asyncio.Event().wait()

    def look() -> InUse:
        began_s = time.thread_time()
        while time.thread_time() - began_s < 0.05:
            pass
        return SEEN

    idle = asyncio.Event()
    idle.set()
    monkeypatch.setattr(in_use, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": sleep}))
    told: asyncio.Queue[InUse] = asyncio.Queue()
    task = asyncio.create_task(InUseWatch(look, idle, lambda: 0, told.put_nowait).run())
    try:
        async with asyncio.timeout(DEADLINE_S):
            assert await told.get() == SEEN
            assert await rests.get() >= 50 * 0.05
    finally:
        await tasks.end([task])


async def test_a_look_that_fails_is_tried_again() -> None:
    """Nothing is told of it, as if nobody had looked."""
    scene, idle = Scene(), asyncio.Event()
    scene.seen = PermissionError(1, "not permitted")
    idle.set()
    async with watching(scene, idle, [0]) as (watch, told):
        await scene.begins()
        scene.seen = SEEN
        watch.hint()
        assert await told.get() == SEEN


def of_every_kind(number: int) -> InUse:
    uses = (Use(number, "theirs"),)
    return InUse(uses, uses, uses, uses)


@pytest.mark.parametrize(
    "objects, seen, expected",
    [
        ([Route(7001, Prefix("10.9.0.0/16"))], InUse(tables=(Use(7001, "IPv4 routes", 4),)), ("table 7001: IPv4 routes",)),
        ([Route(7001, Prefix("10.9.0.0/16"))], InUse(tables=(Use(7001, "IPv6 routes", 6),)), ()),
        ([Route(254, Prefix("10.9.0.0/16"))], of_every_kind(254), ()),
        ([PolicyRule(900, 254, family=IPV6)], of_every_kind(900), ("priority 900: theirs",)),
        ([WireguardLink("mt.0", 51840, 1420)], of_every_kind(51840), ("UDP port 51840: theirs",)),
        ([PolicyRule(900, 7001), PolicyRule(900, 7001, iif="lo")], of_every_kind(900), ("priority 900: theirs",)),
    ],
    ids=["table", "other family", "main", "priority", "port", "once"],
)
def test_collisions_are_numbers_of_the_plan_that_others_use(objects: Iterable[PlanObject], seen: InUse, expected: tuple[str, ...]) -> None:
    """Of the same family; main is everybody's; each is said once."""
    assert collisions(objects, seen) == expected


def test_a_gateways_marks_and_those_of_firewalls_collide() -> None:
    """Class bits that a peering writes, and bits that a published firewall writes; others do not."""
    objects = GATEWAY_PLAN.objects().values()
    assert collisions(objects, InUse(marks=(Use(0x4000, "kube-proxy"),))) == ("mark bits 0xff00: kube-proxy",)
    assert collisions(objects, InUse(marks=(Use(0xFF0000, "tailscale"),))) == ()
    item = one_chain(rule(action={"action": "setMark", "value": 0x10000, "mask": 0x10000}))
    plan = settled_plans([*two_clusters(), *keys(), item])[ROME_GATEWAY]
    assert collisions(plan.objects().values(), InUse(marks=(Use(0xFF0000, "tailscale"),))) == ("mark bits 0x10000: tailscale",)
