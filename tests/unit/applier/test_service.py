"""The applier's loop over a broker that is a stub and a kernel in memory: when turns are made, and what is told."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
import structlog

from schemas import codec
from schemas.commands import Repair, Settled, TraceFlow, Tracing
from schemas.epochs import first_epoch
from schemas.host_objects import NftElement, PolicyRule, Route, VxlanLink, WireguardLink, WireguardPeer
from schemas.in_use import InUse
from schemas.plan import Entry, HostPlan, mesh_unit, unit_tag
from schemas.status import Peers, TunnelHealth
from schemas.topology import PublicKey
from schemas.values import Address, Endpoint, Key, Prefix
from services.applier import health, newcomers, peers, reports, service, watch
from services.applier.health import Tunnel
from services.applier.service import ApplierService
from services.kernel.curve25519 import public_key
from services.kernel.events import KernelEvent
from services.kernel.fake import FakeHost, FakeKernel
from services.kernel.transaction import Marker
from services.runtime import neighbour
from services.runtime.errors import MeshmarkError, Transient, Waiting
from services.runtime.health import Readiness
from services.runtime.messages import Message
from services.runtime.metrics import Metrics
from services.runtime.service import Context
from services.runtime.settings import Settings
from tests.topologies import ROME_GATEWAY, keys, settled_plans, two_clusters
from tests.unit.stubs import NODE, StubBroker, StubEvents

PLAN = settled_plans([*two_clusters(), *keys()])[NODE]
RULE = next(key for key, item in PLAN.objects().items() if isinstance(item, PolicyRule))
ELEMENT = next(key for key, item in PLAN.objects().items() if isinstance(item, NftElement))
GATEWAY_PLAN = settled_plans([*two_clusters(2, 3), *keys()])[ROME_GATEWAY]
WIDER_PLAN = settled_plans([*two_clusters(2, 4), *keys()])[ROME_GATEWAY]
CLASS_ROUTE = next(key for key, item in GATEWAY_PLAN.objects().items() if isinstance(item, Route) and len(item.hops) > 1)
DEADLINE_S = 10.0


def blind() -> InUse:
    """A look that sees nothing, so that nothing is told of it."""
    raise PermissionError


@contextlib.asynccontextmanager
async def running(monkeypatch: pytest.MonkeyPatch, kernel: FakeKernel, look: Callable[[], InUse] = blind) -> AsyncIterator[StubBroker]:
    """The service while the body runs."""
    StubEvents.queue = asyncio.Queue()
    monkeypatch.setattr(service, "EventSource", StubEvents)
    monkeypatch.setattr(neighbour, "APPLIER", f"\0meshmark-test-{os.getpid()}")
    stop = asyncio.Event()
    broker: Any = StubBroker(stop)
    settings = Settings(cluster=NODE.cluster, host=NODE.name, state_dir=str(Path("unused")))
    context = Context(settings, broker, Metrics(), Readiness("applier"), stop, structlog.get_logger())
    task = asyncio.create_task(ApplierService(context, kernel, look).run())
    try:
        async with asyncio.timeout(DEADLINE_S):
            await broker.served.wait()
            yield broker
    finally:
        stop.set()
        await task


class StubProber:
    """A far end that answers through the links of `answering`."""

    answering: ClassVar[set[str]] = set()

    def __init__(self) -> None:
        self._asked: set[str] = set()

    def send(self, tunnels: Iterable[Tunnel]) -> bool:
        self._asked = {tunnel.link for tunnel in tunnels}
        return True

    def answered(self, _: Iterable[Tunnel]) -> set[str]:
        return self._asked & self.answering

    def close(self) -> None: ...


@pytest.fixture
def far_end(monkeypatch: pytest.MonkeyPatch) -> type[StubProber]:
    """A far end whose every tunnel works, and rounds without a pause in between; time is rounds."""
    monkeypatch.setattr(watch, "Prober", StubProber)
    monkeypatch.setattr(watch, "PERIOD_S", 0.01)
    StubProber.answering = {"mt.0", "mt.1", "mt.2"}
    return StubProber


async def test_a_dead_tunnel_is_withdrawn_without_the_broker(monkeypatch: pytest.MonkeyPatch, far_end: type[StubProber]) -> None:
    """With NATS away a tunnel that dies leaves the routes and its auditor is told over the local socket; the report follows; a new plan
    keeps the withdrawal, and so does the applier that comes after this one."""
    kernel = FakeKernel(FakeHost())
    empty = HostPlan(GATEWAY_PLAN.cluster, GATEWAY_PLAN.host, {})

    async def until_links(*links: str) -> None:
        while True:
            item = kernel.host.objects.get(CLASS_ROUTE)
            if isinstance(item, Route) and {hop.link for hop in item.hops} == set(links):
                return
            await asyncio.sleep(0.01)

    async with running(monkeypatch, kernel) as broker:
        broker.write(GATEWAY_PLAN, 1)
        broker.announce(empty, GATEWAY_PLAN, 1)
        assert (await broker.reports.get()).tunnels == TunnelHealth()
        await asyncio.sleep(0.05)
        broker.away = asyncio.Event()
        far_end.answering = {"mt.0", "mt.2"}
        await until_links("mt.0", "mt.2")
        settled = codec.decode(await neighbour.ask("settle"), Settled)
        assert (settled.withdrawn, settled.held) == (("mt.1",), GATEWAY_PLAN.digests())
        await neighbour.ask("repair")
        await until_links("mt.0", "mt.2")
        assert broker.reports.empty()
        broker.away.set()
        report = await broker.reports.get()
        assert (report.outcome, [item.link for item in report.tunnels.withdrawn]) == ("applied", ["mt.1"])
        assert report.tunnels.withdrawn[0].reason.startswith("no answer from 169.254.18.6 to")
        broker.write(WIDER_PLAN, 2)
        broker.announce(GATEWAY_PLAN, WIDER_PLAN, 2)
        await until_links("mt.0", "mt.2", "mt.3")
    async with running(monkeypatch, kernel) as broker:
        broker.write(WIDER_PLAN, 2)
        broker.announce(empty, WIDER_PLAN, 2)
        report = await broker.reports.get()
        assert (report.operations, [item.link for item in report.tunnels.withdrawn]) == (0, ["mt.1"])
        assert report.tunnels.withdrawn[0].reason == "found withdrawn at the start"


async def test_a_tunnel_comes_back(monkeypatch: pytest.MonkeyPatch, far_end: type[StubProber]) -> None:
    """Once it has answered for long enough its hop is in the routes again, and the report lists nothing."""
    kernel = FakeKernel(FakeHost())
    monkeypatch.setattr(health, "HOLD_FIRST_S", 0.1)
    async with running(monkeypatch, kernel) as broker:
        broker.write(GATEWAY_PLAN, 1)
        broker.announce(HostPlan(GATEWAY_PLAN.cluster, GATEWAY_PLAN.host, {}), GATEWAY_PLAN, 1)
        await broker.reports.get()
        await asyncio.sleep(0.05)
        far_end.answering = set()
        while len((await broker.reports.get()).tunnels.dead) < 3:
            pass
        far_end.answering = {"mt.0", "mt.2"}
        while [item.link for item in (await broker.reports.get()).tunnels.withdrawn] != ["mt.1"]:
            pass
        far_end.answering = {"mt.0", "mt.1", "mt.2"}
        while (await broker.reports.get()).tunnels != TunnelHealth():
            pass
        assert kernel.host.objects[CLASS_ROUTE] == GATEWAY_PLAN.objects()[CLASS_ROUTE]


async def test_a_repair_before_the_first_plan_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An applier that does not know its plan yet says so, and leaves alone what an earlier one made."""
    kernel = FakeKernel(FakeHost())
    kernel.host.objects[RULE] = PLAN.objects()[RULE]
    async with running(monkeypatch, kernel) as broker:
        for verb in ("repair", "diff"):
            with pytest.raises(Waiting, match="no plan yet"):
                await broker.handlers[verb](Message("x", b""))
    assert RULE in kernel.host.objects


async def test_snapshot_then_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan comes from the snapshot, changes by differences, and by the snapshot again where a difference does not fit."""
    kernel = FakeKernel(FakeHost())
    empty = HostPlan(PLAN.cluster, PLAN.host, {})
    async with running(monkeypatch, kernel) as broker:
        broker.write(PLAN, 1)
        broker.announce(empty, PLAN, 1)
        assert (await broker.reports.get()).generation == 1
        assert RULE in kernel.host.objects
        broker.write(empty, 2)
        broker.announce(PLAN, empty, 2)
        assert (await broker.reports.get()).generation == 2
        assert kernel.host.objects == {}
        broker.write(PLAN, 5)
        broker.announce(empty, PLAN, 3)
        broker.announce(PLAN, PLAN, 5)
        while (await broker.reports.get()).generation < 5:
            pass
        assert RULE in kernel.host.objects


async def test_a_waiting_unit_does_not_wake_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a failing turn writes and undoes makes kernel events; they are no reason for the next turn, a later one is."""
    blocked = [True]
    writes: list[str] = []

    def fail(change: Any) -> Exception | None:
        writes.append(change.key)
        StubEvents.queue.put_nowait(KernelEvent("route", 0, None, overrun=False, kind="route"))
        return Waiting("no uplink", "link eth0") if blocked[0] and isinstance(change.new, VxlanLink) else None

    kernel = FakeKernel(FakeHost(), fail)
    monkeypatch.setattr(service, "backoff_s", lambda _: 3600.0)
    async with running(monkeypatch, kernel) as broker:
        broker.write(PLAN, 1)
        broker.announce(HostPlan(PLAN.cluster, PLAN.host, {}), PLAN, 1)
        assert (await broker.reports.get()).outcome == "waiting"
        made = len(writes)
        await asyncio.sleep(2 * service._ECHO_S)
        assert len(writes) == made
        blocked[0] = False
        StubEvents.queue.put_nowait(KernelEvent("link", 0, None, overrun=False, kind="link"))
        assert (await broker.reports.get()).outcome == "applied"


async def test_a_repair_leaves_layers_alone_that_are_only_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """With nftables left to people, a repair brings a rule back and keeps its hands off the missing element."""
    kernel = FakeKernel(FakeHost())
    async with running(monkeypatch, kernel) as broker:
        broker.write(PLAN, 1)
        broker.announce(HostPlan(PLAN.cluster, PLAN.host, {}), PLAN, 1)
        await broker.reports.get()
        del kernel.host.objects[RULE]
        del kernel.host.objects[ELEMENT]
        await broker.handlers["repair"](Message("x", codec.encode(Repair(("nft",)))))
        assert RULE in kernel.host.objects
        assert ELEMENT not in kernel.host.objects
        await broker.handlers["repair"](Message("x", b""))
        assert ELEMENT in kernel.host.objects


async def test_a_kernel_that_cannot_be_read_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unreadable kernel is a degraded host with the reason, not silence; it is tried again."""
    kernel = FakeKernel(FakeHost())
    broken, interrupted = [True], Transient("the dump was interrupted")
    read = kernel.read

    def unreadable(*arguments: Any) -> Any:
        if broken[0]:
            raise interrupted
        return read(*arguments)

    monkeypatch.setattr(kernel, "read", unreadable)
    monkeypatch.setattr(service, "backoff_s", lambda _: 0.01)
    async with running(monkeypatch, kernel) as broker:
        broker.write(PLAN, 1)
        broker.announce(HostPlan(PLAN.cluster, PLAN.host, {}), PLAN, 1)
        report = await broker.reports.get()
        assert report.outcome == "degraded"
        assert "interrupted" in report.units[0].error
        broken[0] = False
        while (await broker.reports.get()).outcome != "applied":
            pass


async def test_a_repair_needs_no_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    """While NATS is away, turns go on and the host's auditor is answered over the local socket; the last report is told afterwards."""
    kernel = FakeKernel(FakeHost())
    async with running(monkeypatch, kernel) as broker:
        broker.write(PLAN, 1)
        broker.announce(HostPlan(PLAN.cluster, PLAN.host, {}), PLAN, 1)
        await broker.reports.get()
        before = codec.decode(await neighbour.ask("settle"), Settled)
        assert before.held == PLAN.digests()
        broker.away = asyncio.Event()
        for _ in range(3):
            del kernel.host.objects[RULE]
            await neighbour.ask("repair")
            assert RULE in kernel.host.objects
        assert codec.decode(await neighbour.ask("settle"), Settled).turns == before.turns + 3
        assert broker.reports.empty()
        broker.away.set()
        assert (await broker.reports.get()).outcome == "applied"


OLD, NEW = first_epoch(1_700_000_000.0), first_epoch(1_800_000_000.0)
EMPTY = HostPlan(PLAN.cluster, PLAN.host, {})


async def test_a_plan_out_of_another_store_is_left_alone_until_it_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host keeps what it holds, says what that is and why, and takes the plan that names what it takes over from."""
    kernel = FakeKernel(FakeHost())
    async with running(monkeypatch, kernel) as broker:
        broker.write(PLAN, 9, OLD)
        broker.announce(EMPTY, PLAN, 9, OLD)
        (unit,) = (await broker.reports.get()).units
        assert (unit.held, unit.objects) == (PLAN.digests()[unit.unit], len(PLAN.units[unit.unit]))
        held = dict(kernel.host.objects)
        broker.write(EMPTY, 1, NEW)
        broker.announce(EMPTY, EMPTY, 1, NEW)
        report = await broker.reports.get()
        assert (report.epoch, report.generation, report.outcome) == (OLD, 9, "degraded")
        assert (report.units[0].held, report.units[0].wanted, report.units[0].objects) == (unit.held, "", unit.objects)
        assert "store lost" in report.units[0].error
        assert kernel.host.objects == held
        broker.write(EMPTY, 2, NEW, OLD)
        broker.announce(EMPTY, EMPTY, 2, NEW, OLD)
        report = await broker.reports.get()
        assert (report.epoch, report.generation, report.outcome) == (NEW, 2, "applied")
        assert kernel.host.objects == {}


async def test_a_plan_of_a_lower_epoch_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """An old copy of the store was put back: the host says that it is ahead. A late message of a planner that is no more is none."""
    kernel = FakeKernel(FakeHost())
    async with running(monkeypatch, kernel) as broker:
        broker.write(PLAN, 9, 5)
        broker.announce(EMPTY, PLAN, 9, 5)
        assert (await broker.reports.get()).epoch == 5
        broker.announce(EMPTY, EMPTY, 8, 4)
        broker.write(EMPTY, 3, 4)
        broker.announce(EMPTY, EMPTY, 3, 4)
        report = await broker.reports.get()
        assert (report.epoch, report.generation, report.outcome) == (5, 9, "degraded")
        assert RULE in kernel.host.objects


async def test_the_kernel_remembers_the_epoch_over_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new applier leaves alone what the last one would have, and says by the marker what the host holds."""
    kernel = FakeKernel(FakeHost())
    async with running(monkeypatch, kernel) as broker:
        broker.write(PLAN, 9, OLD)
        broker.announce(EMPTY, PLAN, 9, OLD)
        await broker.reports.get()
    held = dict(kernel.host.objects)
    async with running(monkeypatch, kernel) as broker:
        broker.write(PLAN, 1, NEW)
        broker.announce(EMPTY, PLAN, 1, NEW)
        report = await broker.reports.get()
        assert (report.epoch, report.generation) == (OLD, 9)
        assert {unit.unit: (unit.held, unit.objects) for unit in report.units} == {name: (at, 0) for name, at in PLAN.digests().items()}
        broker.write(PLAN, 2, NEW, OLD)
        broker.announce(PLAN, PLAN, 2, NEW, OLD)
        assert (await broker.reports.get()).outcome == "applied"
    assert kernel.host.objects == held


async def test_a_broker_that_has_forgotten_the_host_is_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report, also one by the marker alone when there is no plan any more; a broker that has it is not told twice."""
    monkeypatch.setattr(reports, "_ASK_S", 0.02)
    kernel = FakeKernel(FakeHost())
    async with running(monkeypatch, kernel) as broker:
        broker.write(PLAN, 9, OLD)
        broker.announce(EMPTY, PLAN, 9, OLD)
        first = await broker.reports.get()
        asked = asyncio.Event()
        last = broker.last

        async def counted(stream: str, subject: str) -> Message | None:
            if stream == "STATUS":
                asked.set()
            return await last(stream, subject)

        broker.last = counted
        await asked.wait()
        assert broker.reports.empty()
        broker.stored.clear()
        assert await broker.reports.get() == first
    async with running(monkeypatch, kernel) as broker:
        report = await broker.reports.get()
        assert (report.epoch, report.generation, report.outcome) == (OLD, 9, "degraded")
        assert [unit.unit for unit in report.units] == [unit_tag(name) for name in PLAN.units]


async def test_a_planner_that_lost_the_store_is_told_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with a WireGuard device says its public key to a planner whose plan knows nothing of it, once."""
    kernel = FakeKernel(FakeHost())
    kernel.host.objects["link mt0"] = WireguardLink("mt0", 51820, 1420)
    kernel.host.marker = Marker(OLD, 9, {unit_tag("x"): "ab" * 16})
    async with running(monkeypatch, kernel) as broker:
        broker.write(EMPTY, 1, NEW)
        for generation in (1, 2):
            broker.announce(EMPTY, EMPTY, generation, NEW)
        assert codec.decode((await broker.keys.get()).data, PublicKey).key == kernel.public_key()
        assert broker.keys.empty()


async def test_a_key_without_a_device_is_not_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    """While another program has the port the report says who, and nobody is told the key; when the port is free, both are right."""
    kernel = FakeKernel(FakeHost())
    unit = {item.key: Entry(item, ()) for item in (WireguardLink("mt.node", 51871, 1420),)}
    plan = HostPlan(EMPTY.cluster, EMPTY.host, {"encryption/rome": unit})
    kernel.host.ports[51871] = "wg-portal (77)"
    async with running(monkeypatch, kernel) as broker:
        broker.write(plan, 1)
        broker.announce(EMPTY, plan, 1)
        report = await broker.reports.get()
        assert report.outcome == "degraded"
        assert "UDP port 51871 is taken by wg-portal (77)" in report.units[0].error
        while report.outcome != "applied":
            assert broker.keys.empty()
            kernel.host.ports.clear()
            report = await broker.reports.get()
        assert codec.decode((await broker.keys.get()).data, PublicKey).key == kernel.public_key()


NAMED = WireguardPeer("mt.node", Key(public_key(b"\3" * 32)), Endpoint("gw-c.example.invalid:51840"), (Prefix("10.3.0.0/16"),))


async def test_a_name_without_address_holds_nobody_up(monkeypatch: pytest.MonkeyPatch, far_end: type[StubProber]) -> None:
    """Its host holds everything else and says what it waits for; the address is written when it is found, and then said no more."""
    answers: list[list[Address]] = []

    async def look_up(name: str) -> list[Address]:
        if not answers:
            msg = f"{name} is not known"
            raise OSError(msg)
        return answers[0]

    del far_end
    monkeypatch.setattr(peers, "addresses_of", look_up)
    monkeypatch.setattr(peers, "backoff_s", lambda _: 0.01)
    kernel = FakeKernel(FakeHost())
    known = msgspec.structs.replace(NAMED, public_key=Key(public_key(b"\4" * 32)), endpoint=Endpoint("192.0.2.4:1"), allowed_ips=())
    items = (WireguardLink("mt.node", 51871, 1420, kernel.public_key()), NAMED, known)
    plan = HostPlan(EMPTY.cluster, EMPTY.host, {mesh_unit(EMPTY.cluster): {item.key: Entry(item, ()) for item in items}})
    async with running(monkeypatch, kernel) as broker:
        broker.write(plan, 1)
        broker.announce(EMPTY, plan, 1)
        kernel.host.handshakes_s[NAMED.key] = time.time()
        kernel.host.learned[NAMED.key] = Endpoint("203.0.113.7:40001")
        report = await broker.reports.get()
        assert (report.outcome, report.peers.count, report.peers.waiting, report.peers.roamed) == ("applied", 2, 1, 0)
        assert kernel.host.objects[known.key] == known
        while "is not known" not in str(report.peers.waiting_for):
            report = await broker.reports.get()
        assert report.peers.waiting_for == ("gw-c.example.invalid: gw-c.example.invalid is not known",)
        answers.append([Address("192.0.2.30")])
        while report.peers.waiting:
            report = await broker.reports.get()
        assert kernel.host.objects[NAMED.key] == msgspec.structs.replace(NAMED, endpoint=Endpoint("192.0.2.30:51840"))


async def test_peers_that_shake_hands_are_counted_without_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report is said again with the new numbers; nothing is written for it."""
    monkeypatch.setattr(peers, "PERIOD_S", 0.01)
    kernel = FakeKernel(FakeHost())
    item = msgspec.structs.replace(NAMED, endpoint=Endpoint("192.0.2.3:51871"))
    items = (WireguardLink("mt.node", 51871, 1420, kernel.public_key()), item)
    plan = HostPlan(EMPTY.cluster, EMPTY.host, {mesh_unit(EMPTY.cluster): {item.key: Entry(item, ()) for item in items}})
    async with running(monkeypatch, kernel) as broker:
        broker.write(plan, 1)
        broker.announce(EMPTY, plan, 1)
        assert (await broker.reports.get()).peers == Peers(1)
        commits = kernel.host.commits
        kernel.host.learned[item.key] = Endpoint("203.0.113.7:40001")
        for handshake_s, expected in ((time.time(), Peers(1, 1, roamed=1)), (1000.0, Peers(1, 0, 1))):
            kernel.host.handshakes_s["mt.node"] = handshake_s
            report = await broker.reports.get()
            assert report.peers == expected
        assert kernel.host.commits == commits


async def test_a_new_peer_that_does_not_answer_is_greeted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the turn that brought it, on its link."""
    monkeypatch.setattr(newcomers, "UNHEARD_S", 0.0)
    monkeypatch.setattr(newcomers, "OTHER_S", 0.0)
    item = msgspec.structs.replace(NAMED, endpoint=Endpoint("192.0.2.3:51871"))
    loop, is_greeted = asyncio.get_running_loop(), asyncio.Event()

    class Telling(FakeKernel):
        def greet(self, link: str, keys: Collection[Key]) -> None:
            super().greet(link, keys)
            loop.call_soon_threadsafe(is_greeted.set)

    kernel = Telling(FakeHost(greeted=[item.key]))  # it was sent something
    items = (WireguardLink("mt.node", 51871, 1420, kernel.public_key()), item)
    plan = HostPlan(EMPTY.cluster, EMPTY.host, {mesh_unit(EMPTY.cluster): {item.key: Entry(item, ()) for item in items}})
    async with running(monkeypatch, kernel) as broker:
        broker.write(plan, 1)
        broker.announce(EMPTY, plan, 1)
        await is_greeted.wait()
    assert set(kernel.host.greeted) == {item.key}
    assert len(kernel.host.greeted) > 1


async def test_the_kernel_is_asked_to_trace_a_flow(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the time that is wished, and no longer than the applier runs; a host that holds nothing cannot."""
    kernel = FakeKernel()
    wish = TraceFlow((Address("10.200.1.10"), Address("fd00:200::1")), (Address("172.18.0.11"),), (51871,), 30)
    asked = Message("mesh.cmd.rome.gateway.trace", codec.encode(wish))
    nothing = HostPlan(GATEWAY_PLAN.cluster, GATEWAY_PLAN.host, {})
    async with running(monkeypatch, kernel) as broker:
        with pytest.raises(Waiting, match="no plan"):
            await broker.handlers["trace"](asked)
        broker.write(GATEWAY_PLAN, 1)
        broker.announce(nothing, GATEWAY_PLAN, 1)
        await broker.reports.get()
        assert codec.decode(await broker.handlers["trace"](asked), Tracing) == Tracing(4, 30)
        with pytest.raises(MeshmarkError, match="trace"):
            await broker.handlers["trace"](Message("mesh.cmd.rome.gateway.trace", b'{"flow":["10.200.1.10"],"seconds":100000}'))
        assert list(kernel.host.traced.values()) == [30]
    assert kernel.host.traced == {}
