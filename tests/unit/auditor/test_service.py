"""The auditor's loop over a broker and kernel events in memory: what is told, and when, with an applier beside it or without."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import structlog
from msgspec.structs import replace

from schemas import codec, subjects
from schemas.commands import Settled
from schemas.drift import Suspect
from schemas.host_objects import PolicyRule, Route, Sysctl, WireguardPeer
from schemas.plan import HostPlan
from schemas.status import ApplyReport, DeadTunnel, TunnelHealth
from schemas.values import Prefix
from services.applier.core import Applier
from services.auditor import service
from services.auditor.findings import LAYERS
from services.auditor.service import AuditorService
from services.kernel.events import KernelEvent
from services.kernel.fake import FakeHost, FakeKernel
from services.runtime import neighbour
from services.runtime.errors import Conflict, Transient
from services.runtime.health import Readiness
from services.runtime.metrics import Metrics
from services.runtime.service import Context
from services.runtime.settings import Settings
from tests.topologies import ROME_GATEWAY, keys, settled_plans, two_clusters
from tests.unit.stubs import NODE, StubBroker, StubEvents

GATEWAY_PLAN = settled_plans([*two_clusters(2, 3), *keys()])[ROME_GATEWAY]
CLASS_ROUTE = next(key for key, item in GATEWAY_PLAN.objects().items() if isinstance(item, Route) and len(item.hops) > 1)
DEAD = TunnelHealth(withdrawn=(DeadTunnel("mt.1", 5.0, "no answer"),))
PEER = next(key for key, item in GATEWAY_PLAN.objects().items() if isinstance(item, WireguardPeer))
PLAN = settled_plans([*two_clusters(), *keys()])[NODE]
RULE = next(key for key, item in PLAN.objects().items() if isinstance(item, PolicyRule))
GUARD = next(key for key, item in PLAN.objects().items() if isinstance(item, Route) and item.is_guard)
EVENT = KernelEvent("rule", 0, None, overrun=False, kind="rule")
DEADLINE_S = 10.0


class StubApplier:
    """Holds the plan, and repairs when it is asked; `during_settle` runs before an answer to ``settle``, `after_repair` behind a repair."""

    def __init__(self, host: FakeHost, plan: HostPlan = PLAN, tunnels: TunnelHealth = TunnelHealth()) -> None:  # noqa: B008 - a value
        self.core = Applier(FakeKernel(host), lambda: 0.0)
        self.plan, self.tunnels = plan, tunnels
        self.turns = 0
        self.repairs = 0
        self.repaired = asyncio.Event()
        self.during_settle: Callable[[], None] = lambda: None
        self.after_repair: Callable[[], None] = lambda: None
        self.apply(plan)

    def apply(self, plan: HostPlan) -> ApplyReport:
        self.turns += 1
        return self.core.repair(plan, 1, self.turns, tunnels=self.tunnels)

    async def settle(self, _: bytes) -> bytes:
        self.during_settle()
        return codec.encode(Settled(self.turns, self.core.held(), self.core.withdrawn()))

    async def repair(self, _: bytes) -> bytes:
        self.repairs += 1
        report = self.apply(self.plan)
        self.after_repair()
        self.repaired.set()
        return codec.encode(report)


@contextlib.asynccontextmanager
async def running(
    monkeypatch: pytest.MonkeyPatch, kernel: FakeKernel, applier: StubApplier | None, plan: HostPlan = PLAN, quiet_s: float = 60.0
) -> AsyncIterator[StubBroker]:
    """The service while the body runs, from the moment that it knows the plan."""
    StubEvents.queue = asyncio.Queue()
    monkeypatch.setattr(service, "EventSource", StubEvents)
    monkeypatch.setattr(service, "_RECHECK_S", 0.01)
    monkeypatch.setattr(neighbour, "APPLIER", f"\0meshmark-test-{os.getpid()}")
    stop = asyncio.Event()
    broker: Any = StubBroker(stop)
    broker.write(plan, 1)
    settings = Settings(cluster=NODE.cluster, host=NODE.name, quiet_s=quiet_s)
    context = Context(settings, broker, Metrics(), Readiness("auditor"), stop, structlog.get_logger())
    async with contextlib.AsyncExitStack() as stack:
        if applier is not None:
            await stack.enter_async_context(neighbour.serving({"settle": applier.settle, "repair": applier.repair}))
        task = asyncio.create_task(AuditorService(context, kernel).run())
        try:
            async with asyncio.timeout(DEADLINE_S):
                yield broker
        finally:
            stop.set()
            await task


async def test_drift_is_repaired_while_the_broker_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cuts the host off from NATS is repaired without it; the story is told in order once it is back."""
    host = FakeHost()
    applier = StubApplier(host)
    async with running(monkeypatch, FakeKernel(host), applier) as broker:
        broker.away = asyncio.Event()
        del host.objects[RULE]
        StubEvents.queue.put_nowait(EVENT)
        await applier.repaired.wait()
        assert RULE in host.objects
        assert broker.drift.empty()
        broker.away.set()
        told = [await broker.drift.get(), await broker.drift.get()]
        assert [(event.key, event.state) for event in told] == [(RULE, "raised"), (RULE, "resolved")]
    assert applier.repairs == 1


async def test_a_turn_under_way_is_no_drift(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long an applier takes for its turns, and however many it makes: what it is about to write is not missing."""
    host = FakeHost()
    applier = StubApplier(host)
    looked = asyncio.Event()
    asked = 0

    def turn() -> None:
        nonlocal asked
        asked += 1
        if asked < 8:
            applier.turns += 1
        else:
            applier.apply(PLAN)
            looked.set()

    async with running(monkeypatch, FakeKernel(host), applier) as broker:
        applier.during_settle = turn
        del host.objects[RULE]
        StubEvents.queue.put_nowait(EVENT)
        await looked.wait()
        del host.objects[RULE]
        applier.during_settle = lambda: None
        StubEvents.queue.put_nowait(EVENT)
        event = await broker.drift.get()
        assert (event.state, event.count) == ("raised", 1), "the first that is told is the one that nobody was about to write"
    assert applier.repairs >= 1


async def test_drift_is_told_without_an_applier(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host whose applier is not running is audited all the same."""
    host = FakeHost()
    Applier(FakeKernel(host), lambda: 0.0).apply(PLAN, 1, 1)
    async with running(monkeypatch, FakeKernel(host), None) as broker:
        del host.objects[RULE]
        StubEvents.queue.put_nowait(EVENT)
        event = await broker.drift.get()
        assert (event.key, event.state, event.wanted != "", event.found) == (RULE, "raised", True, "")


async def test_what_cannot_be_read_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that fails is told as such, once, and never as missing objects; reading again resolves it."""
    host = FakeHost()
    applier = StubApplier(host)
    kernel = FakeKernel(host)
    broken, read = [True], kernel.read
    interrupted = Transient("the dump was interrupted")

    def unreadable(*arguments: Any) -> Any:
        if broken[0]:
            raise interrupted
        return read(*arguments)

    monkeypatch.setattr(kernel, "read", unreadable)
    async with running(monkeypatch, kernel, applier) as broker:
        told = [await broker.drift.get() for _ in LAYERS]
        assert {event.state for event in told} == {"unknown"}
        assert {event.layer for event in told} == set(LAYERS)
        broken[0] = False
        assert {(await broker.drift.get()).state for _ in LAYERS} == {"resolved"}
    assert applier.repairs == 0


async def test_a_withdrawn_hop_is_no_drift_and_other_hops_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the applier has withdrawn lacks in silence; somebody's change of the same route is told, and repaired without the hop."""
    host = FakeHost()
    applier = StubApplier(host, GATEWAY_PLAN, DEAD)
    withdrawn = host.objects[CLASS_ROUTE]
    assert isinstance(withdrawn, Route)
    async with running(monkeypatch, FakeKernel(host), applier, GATEWAY_PLAN) as broker:
        host.objects[CLASS_ROUTE] = replace(withdrawn, hops=withdrawn.hops[:1])
        StubEvents.queue.put_nowait(KernelEvent("route", 0, None, overrun=False, kind="route"))
        told = [await broker.drift.get(), await broker.drift.get()]
    assert [(event.key, event.state) for event in told] == [(CLASS_ROUTE, "raised"), (CLASS_ROUTE, "resolved")]
    assert host.objects[CLASS_ROUTE] == withdrawn
    assert applier.repairs == 1


async def test_a_withdrawn_hop_that_is_put_back_by_hand_is_drift(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traffic would be lost again: the route as the plan has it is a difference while the tunnel is withdrawn."""
    host = FakeHost()
    applier = StubApplier(host, GATEWAY_PLAN, DEAD)
    async with running(monkeypatch, FakeKernel(host), applier, GATEWAY_PLAN) as broker:
        host.objects[CLASS_ROUTE] = GATEWAY_PLAN.objects()[CLASS_ROUTE]
        StubEvents.queue.put_nowait(KernelEvent("route", 0, None, overrun=False, kind="route"))
        event = await broker.drift.get()
        assert (event.key, event.state, "mt.1" in event.found, "mt.1" in event.wanted) == (CLASS_ROUTE, "raised", True, False)


async def test_without_an_applier_its_last_report_says_what_is_withdrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """An applier that ended while a tunnel was withdrawn leaves no drift behind, and what differs besides is told."""
    host = FakeHost()
    report = Applier(FakeKernel(host), lambda: 0.0).apply(GATEWAY_PLAN, 1, 1, tunnels=DEAD)
    assert isinstance(report, ApplyReport)
    async with running(monkeypatch, FakeKernel(host), None, GATEWAY_PLAN) as broker:
        broker.stored[subjects.status(*NODE)] = codec.encode(report)
        host.objects["route 7001 192.0.2.0/24 3"] = Route(7001, Prefix("192.0.2.0/24"), "unreachable", 3)
        StubEvents.queue.put_nowait(KernelEvent("route", 0, None, overrun=False, kind="route"))
        event = await broker.drift.get()
        assert (event.key, event.state) == ("route 7001 192.0.2.0/24 3", "raised")
        assert broker.drift.empty()


async def test_what_has_no_events_is_looked_at_in_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that somebody removed and a sysctl that somebody set are told and repaired without any event."""
    host = FakeHost()
    applier = StubApplier(host, GATEWAY_PLAN)
    peer = host.objects[PEER]
    sysctl = next(item for item in GATEWAY_PLAN.objects().values() if isinstance(item, Sysctl))
    async with running(monkeypatch, FakeKernel(host), applier, GATEWAY_PLAN, quiet_s=0.02) as broker:
        del host.objects[PEER]
        assert [((event := await broker.drift.get()).key, event.state) for _ in range(2)] == [(PEER, "raised"), (PEER, "resolved")]
        assert host.objects[PEER] == peer
        host.sysctls[sysctl.name] = "7"
        told = [await broker.drift.get() for _ in range(2)]
        assert [(event.layer, event.state) for event in told] == [("sysctl", "raised"), ("sysctl", "resolved")]
    assert host.sysctls[sysctl.name] == sysctl.value


async def test_a_link_that_flaps_before_it_is_looked_at_is_one_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the time of the look the link is up: its routes that went are told as the link's, by whom, and are repaired."""
    host = FakeHost()
    applier = StubApplier(host)
    routes = [key for key, item in host.objects.items() if isinstance(item, Route) and item.hops]
    (name,) = {hop.link for key in routes for hop in PLAN.objects()[key].hops}  # type: ignore[union-attr]
    async with running(monkeypatch, FakeKernel(host), applier) as broker:
        for key in routes:
            del host.objects[key]
        StubEvents.queue.put_nowait(KernelEvent("link", 7, "ip", kind="down", link=name))
        StubEvents.queue.put_nowait(KernelEvent("link", 8, "dhcp", kind="new", link=name))
        told = [await broker.drift.get() for _ in range(2)]
        assert [(event.key, event.state) for event in told] == [(f"link {name}", "raised"), (f"link {name}", "resolved")]
        assert told[0].suspect == Suspect(7, "ip")
        assert set(routes) <= host.objects.keys()
        del host.objects[routes[0]]
        StubEvents.queue.put_nowait(KernelEvent("route", kind="delete"))
        assert (await broker.drift.get()).key == routes[0], "the link is whole again, and stands for nothing any more"


async def test_one_layer_that_cannot_be_read_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """WireGuard does not answer: that is told of its layer, and a rule that is missing is told all the same."""
    host = FakeHost()
    applier = StubApplier(host)
    kernel = FakeKernel(host)
    read, silent = kernel.read, Transient("no answer")

    def partly(wanted: Any, layers: Any) -> Any:
        if "wireguard" in layers:
            raise silent
        return read(wanted, layers)

    monkeypatch.setattr(kernel, "read", partly)
    async with running(monkeypatch, kernel, applier) as broker:
        event = await broker.drift.get()
        assert (event.key, event.state, event.found) == ("layer wireguard", "unknown", "no answer")
        del host.objects[RULE]
        StubEvents.queue.put_nowait(EVENT)
        assert [((event := await broker.drift.get()).key, event.state) for _ in range(2)] == [(RULE, "raised"), (RULE, "resolved")]
        monkeypatch.setattr(kernel, "read", read)
        event = await broker.drift.get()
        assert (event.key, event.state) == ("layer wireguard", "resolved")


async def test_a_repair_in_vain_is_asked_for_more_and_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the applier cannot repair does not keep it busy; what is new is repaired at once."""
    host = FakeHost()
    applier = StubApplier(host)
    kept = host.objects[RULE]
    asked: list[float] = []
    stuck = True
    in_the_way = Conflict("somebody else's is in the way")
    applier.core = Applier(FakeKernel(host, lambda change: in_the_way if stuck and change.key == RULE else None), lambda: 0.0)

    async with running(monkeypatch, FakeKernel(host), applier) as broker:
        monkeypatch.setattr(service, "_RECHECK_S", 0.05)
        del host.objects[RULE]
        StubEvents.queue.put_nowait(EVENT)
        assert (await broker.drift.get()).state == "raised"
        while len(asked) < 5:
            applier.repaired.clear()
            await applier.repaired.wait()
            asked.append(asyncio.get_running_loop().time())
        pauses = [later - earlier for earlier, later in itertools.pairwise(asked)]
        assert pauses[3] > 2 * pauses[1]
        stuck = False
        del host.objects[GUARD]
        StubEvents.queue.put_nowait(KernelEvent("route", kind="delete"))
        told = [await broker.drift.get() for _ in range(3)]
        assert asyncio.get_running_loop().time() - asked[-1] < pauses[3], "sooner than the next attempt at what was in vain"
    assert {(event.key, event.state) for event in told} == {(GUARD, "raised"), (GUARD, "resolved"), (RULE, "resolved")}
    assert host.objects[RULE] == kept


async def test_who_undoes_each_repair_at_once_is_told_to_contest_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody ever sees the rule whole between two deletions: the third time is contested all the same, and says when the next repair is."""
    host = FakeHost()
    applier = StubApplier(host)
    kept = host.objects[RULE]
    applier.after_repair = lambda: host.objects.__delitem__(RULE)
    async with running(monkeypatch, FakeKernel(host), applier) as broker:
        monkeypatch.setattr(service, "_RECHECK_S", 0.05)
        del host.objects[RULE]
        StubEvents.queue.put_nowait(KernelEvent("rule", 7, "ip", kind="rule"))
        told = [await broker.drift.get() for _ in range(3)]
        assert [(event.key, event.state, event.count) for event in told] == [
            (RULE, "raised", 1),
            (RULE, "contested", 3),
            (RULE, "contested", 4),
        ]
        assert [event.next_repair_s > event.at_s for event in told] == [False, True, True]
        assert {event.suspect for event in told} == {Suspect(7, "ip")}
        applier.after_repair = lambda: None
        while (last := await broker.drift.get()).state == "contested":
            pass  # a repair was under way
        assert (last.state, last.next_repair_s) == ("resolved", 0.0)
    assert host.objects[RULE] == kept


async def test_what_nobody_touched_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event that changed nothing, or changed it back, costs a fingerprint; the change behind it is found all the same."""
    host = FakeHost()
    applier = StubApplier(host)
    kernel = FakeKernel(host)
    read, layers = kernel.read, []
    loop = asyncio.get_running_loop()
    all_read, asked_again = asyncio.Event(), asyncio.Event()

    def noted(wanted: Any, asked: Any) -> Any:
        found = read(wanted, asked)
        layers.extend(asked)
        loop.call_soon_threadsafe(all_read.set)
        return found

    def fingerprint(layer: Any) -> Any:
        loop.call_soon_threadsafe(asked_again.set)
        return FakeKernel.fingerprint(kernel, layer)

    monkeypatch.setattr(kernel, "read", noted)
    async with running(monkeypatch, kernel, applier) as broker:
        await all_read.wait()
        assert "rule" in layers
        layers.clear()
        monkeypatch.setattr(kernel, "fingerprint", fingerprint)
        StubEvents.queue.put_nowait(EVENT)
        await asked_again.wait()
        assert layers == []
        del host.objects[RULE]
        StubEvents.queue.put_nowait(EVENT)
        assert (await broker.drift.get()).key == RULE
    assert layers[0] == "rule"
