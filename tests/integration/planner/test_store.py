"""A planner on a real broker: it goes on when the store is lost, and holds back what would take much away."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from schemas import codec, subjects
from schemas.epochs import first_epoch, same_store
from schemas.plan import PlanDiff, SnapshotHead, digest_of
from schemas.status import Accept, ApplyReport, Freeze, UnitReport
from schemas.values import Name
from services.planner import service
from services.planner.state import HostId
from services.runtime.errors import Conflict, MeshmarkError, OutcomeUnknown, Permanent, Transient, Waiting
from tests.topologies import MILAN_GATEWAY, ROME_GATEWAY, peering, pod, settled_plans, two_clusters

DEADLINE_S = 20.0
SMALL, LARGE = two_clusters(nodes=1), two_clusters(nodes=12)
LAST = HostId("rome", "worker-9")
"""The host of the large mesh that is planned last."""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(service, "_WATCH_S", 0.1)
    monkeypatch.setattr(service, "backoff_s", lambda _: 0.1)


async def eventually(condition: Callable[[], Awaitable[object]]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            with contextlib.suppress(Transient, Waiting, OutcomeUnknown):
                if await condition():
                    return
            await asyncio.sleep(0.05)


async def say(publisher, items) -> None:
    """Publish objects, however long the broker is away."""
    for item in items:
        await publisher.publish_surely(subjects.topology(item.kind, item.home, item.name), codec.encode(item))


async def units(reader, host: HostId) -> dict[str, str] | None:
    """What a host's published plan has, None when it has none."""
    found = await head(reader, host)
    return found.units if found else None


async def head(reader, host: HostId) -> SnapshotHead | None:
    last = await reader.last("SNAPSHOT", subjects.snapshot(*host, "head"))
    return codec.decode(last.data, SnapshotHead) if last else None


async def freeze(reader) -> Freeze:
    last = await reader.last("FROZEN", subjects.FREEZE)
    return codec.decode(last.data, Freeze) if last else Freeze("lifted")


async def frozen(reader) -> bool:
    return (await freeze(reader)).is_on


async def delete_streams(planner, *names: str) -> None:
    for name in names:
        await planner._connection.ask(f"$JS.API.STREAM.DELETE.{name}", b"", timeout_s=5.0)


def lose_store(server, config) -> None:
    server.kill()
    shutil.rmtree(Path(config.store_dir))
    server.start()


async def test_a_planner_goes_on_after_the_store_was_lost(planning, connect, server, config):
    """It makes the streams anew under an epoch of another store, and plans what is said then."""
    publisher, reader = await connect("publisher"), await connect("reader")
    async with planning() as context:
        await say(publisher, SMALL)
        await eventually(lambda: units(reader, ROME_GATEWAY))
        before = await head(reader, ROME_GATEWAY)
        await asyncio.sleep(1.0)  # an epoch tells stores apart by the second
        lose_store(server, config)
        await say(publisher, SMALL)
        await eventually(lambda: units(reader, ROME_GATEWAY))
        after = await head(reader, ROME_GATEWAY)
        assert not same_store(before.epoch, after.epoch)
        assert context.metrics.planner_restarts._value.get() >= 1
        await eventually(lambda: ready(context))  # what was said meanwhile is planned a moment before that


async def test_hosts_that_hold_more_freeze_it_until_all_is_said_again(planning, connect):
    """A host of another store says what it holds: nothing goes to it but what leaves it all of that, and that takes over by name."""
    publisher, reader, applier = await connect("publisher"), await connect("reader"), await connect("planner")
    plans, old = settled_plans(SMALL), first_epoch(1_000_000_000.0)
    async with planning() as context:
        await eventually(lambda: applier.stream_info("FROZEN"))
        for host in (ROME_GATEWAY, MILAN_GATEWAY):
            held = tuple(UnitReport(name, digest_of(unit), "", "degraded", "x", len(unit)) for name, unit in plans[host].units.items())
            report = ApplyReport(Name(host.cluster), Name(host.name), old, 12, held)
            await applier.publish(subjects.status(*host), codec.encode(report))

        async def both_are_heard() -> bool:
            found = await freeze(reader)
            return (found.state, found.count, found.planned, found.hosts) == ("frozen", 2, 2, 2)

        await eventually(both_are_heard)
        assert context.metrics.planner_frozen._value.get() == 1
        await say(publisher, [item for item in SMALL if item.kind != "Peering"])
        await eventually(lambda: units_known(reader, HostId("milan", "worker-1")))
        assert await head(reader, ROME_GATEWAY) is None
        await say(publisher, [peering()])
        await eventually(lambda: lifted(reader))
        taken = await head(reader, ROME_GATEWAY)
        assert (taken.units, taken.over) == (plans[ROME_GATEWAY].digests(), old)
        assert context.metrics.planner_frozen._value.get() == 0


async def test_a_host_that_is_ahead_is_outdone(planning, connect):
    """An old copy of the store was put back: the planner goes on above the epoch that the host reports, and the host may follow."""
    publisher, reader, applier = await connect("publisher"), await connect("reader"), await connect("planner")
    async with planning():
        await say(publisher, SMALL)
        await eventually(lambda: units(reader, ROME_GATEWAY))
        before = await head(reader, ROME_GATEWAY)
        held = tuple(UnitReport(name, digest, digest, "applied") for name, digest in before.units.items())
        report = ApplyReport(Name("rome"), Name("gateway"), before.epoch + 3, 40, held)
        await applier.publish(subjects.status(*ROME_GATEWAY), codec.encode(report))

        async def is_above() -> bool:
            return (await head(reader, ROME_GATEWAY)).epoch == before.epoch + 4

        await eventually(is_above)
        last = codec.decode((await reader.last("PLAN", subjects.plan(*ROME_GATEWAY))).data, PlanDiff)
        assert (last.epoch, last.resync) == (before.epoch + 4, True)
        assert (await head(reader, ROME_GATEWAY)).units == before.units
        assert not await frozen(reader)


async def lifted(reader) -> bool:
    return not await frozen(reader)


async def units_known(reader, host: HostId) -> bool:
    return await units(reader, host) is not None


async def test_lost_topology_is_no_deletion(planning, connect):
    """When the streams of topology alone are lost, however small the mesh is, published plans stay until it is said again."""
    publisher, reader, operator = await connect("publisher"), await connect("reader"), await connect("planner")
    async with planning():
        await say(publisher, SMALL)
        await eventually(lambda: units(reader, ROME_GATEWAY))
        before = await units(reader, ROME_GATEWAY)
        await delete_streams(operator, "STATE", "TOPOLOGY")
        await eventually(lambda: frozen(reader))
        assert await units(reader, ROME_GATEWAY) == before
        await say(publisher, SMALL)
        await eventually(lambda: lifted(reader))
        assert await units(reader, ROME_GATEWAY) == before
    async with planning() as context:
        await eventually(lambda: ready(context))
        assert not await frozen(reader)


async def ready(context) -> bool:
    return context.ready.ready


@pytest.mark.parametrize("stream", ["TOPOLOGY", "STATUS", "PLAN", "SNAPSHOT", "ALLOCATION", "STATE"])
async def test_any_one_stream_may_be_lost(planning, connect, stream: str):
    """The planner makes it again, keeps what it planned, and plans what is said afterwards.

    Without allocations it is not known how far the tunnels were rolled out: then they are, at once.
    """
    publisher, reader, operator = await connect("publisher"), await connect("reader"), await connect("planner")
    roam = pod("roam", "worker-1", "10.200.77.7")
    async with planning():
        await say(publisher, SMALL)
        await eventually(lambda: units(reader, ROME_GATEWAY))
        before = await units(reader, ROME_GATEWAY)
        created_s = (await reader.stream_info(stream)).created_s
        await delete_streams(operator, stream)

        async def is_new() -> bool:
            return (await reader.stream_info(stream)).created_s != created_s

        await eventually(is_new)
        if stream != "ALLOCATION":
            await eventually(lambda: same(reader, ROME_GATEWAY, before))
        await say(publisher, [roam])

        async def is_planned() -> bool:
            found = await units(reader, ROME_GATEWAY)
            return bool(found) and found != before

        await eventually(is_planned)
        assert not await frozen(reader)


async def same(reader, host: HostId, before: object) -> bool:
    return await units(reader, host) == before


async def test_what_would_take_much_away_waits_for_somebody(planning, connect):
    """Topology is admitted, plans stay; a planner that comes after is frozen, too; an acceptance of what is shown lets it go."""
    publisher, reader = await connect("publisher"), await connect("reader")
    gone = subjects.topology("Peering", "rome", "rome-milan")
    async with planning():
        await say(publisher, LARGE)
        await eventually(lambda: units(reader, LAST))
        before = await units(reader, ROME_GATEWAY)
        await publisher.publish(gone, b"")
        await eventually(lambda: frozen(reader))
        assert (await reader.last("STATE", subjects.state("Peering", "rome", "rome-milan"))).data == b""
        assert await units(reader, ROME_GATEWAY) == before
    first = await freeze(reader)
    assert (first.count, first.planned) == (26, 26)
    async with planning() as context:
        await eventually(lambda: ready(context))
        assert await freeze(reader) == first
        assert await units(reader, ROME_GATEWAY) == before
        with pytest.raises(Permanent, match=f"but {first.token}; look again"):
            await publisher.request(subjects.ACCEPT, codec.encode(Accept("other")))
        with pytest.raises(Permanent, match="accept: "):
            await publisher.request(subjects.ACCEPT, b"{}")
        answer = codec.decode(await publisher.request(subjects.ACCEPT, codec.encode(Accept(first.token)), 10.0), Freeze)
        assert (answer.reason, answer.count) == ("accepted", 26)
        assert await units(reader, ROME_GATEWAY) == {}
        assert not await frozen(reader)
        with pytest.raises(Permanent, match="nothing is held back"):
            await publisher.request(subjects.ACCEPT, codec.encode(Accept(first.token)))


async def test_said_again_it_is_not_lost(planning, connect):
    """A deletion by mistake is taken back by publishing the object again: no plan was changed by it."""
    publisher, reader = await connect("publisher"), await connect("reader")
    async with planning():
        await say(publisher, LARGE)
        await eventually(lambda: units(reader, LAST))
        before = await head(reader, LAST)
        await publisher.publish(subjects.topology("Peering", "rome", "rome-milan"), b"")
        await eventually(lambda: frozen(reader))
        await say(publisher, [peering()])
        await eventually(lambda: lifted(reader))
        assert await head(reader, LAST) == before


async def test_another_planner_ends_this_one(planning, connect):
    """Who finds a plan that it did not write is fenced: it ends with Conflict, and does not start again."""
    publisher, reader, other = await connect("publisher"), await connect("reader"), await connect("planner")
    with pytest.RaisesGroup(pytest.RaisesExc(Conflict), flatten_subgroups=True):
        async with planning() as context:
            await say(publisher, SMALL)
            await eventually(lambda: units(reader, ROME_GATEWAY))
            last = await reader.last("SNAPSHOT", subjects.snapshot(*ROME_GATEWAY, "head"))
            await other.publish(last.subject, last.data)
            report = ApplyReport(Name("rome"), Name("gateway"), codec.decode(last.data, SnapshotHead).epoch + 1, 1, ())
            await other.publish(subjects.status(*ROME_GATEWAY), codec.encode(report))
            async with asyncio.timeout(DEADLINE_S):
                while not context.stop.is_set():
                    tasks = [task for task in asyncio.all_tasks() if task.get_coro().__qualname__ == "main"]
                    if not tasks:
                        break
                    await asyncio.sleep(0.05)


def test_all_errors_are_of_the_tree() -> None:
    """Those that a planner starts again after are no others than these three."""
    passing = {kind for kind in MeshmarkError.__subclasses__() if kind not in (Permanent, Conflict)}
    assert passing == {Transient, OutcomeUnknown, Waiting}
