"""The verb ``rotate`` at the applier: the next key is made and said, and let go of when the plan says so."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest

from schemas import codec
from schemas.commands import Rotate, Rotating
from schemas.host_objects import WireguardLink, WireguardPeer
from schemas.plan import Entry, HostPlan, mesh_unit
from schemas.status import ApplyReport
from schemas.topology import PublicKey
from schemas.values import Key, Prefix
from services.applier import peers
from services.kernel.curve25519 import public_key
from services.kernel.fake import FakeHost, FakeKernel
from services.runtime.messages import Message
from tests.unit.applier.test_service import EMPTY, running
from tests.unit.stubs import StubBroker

PEER = Key(public_key(b"\3" * 32))


def plan(*links: WireguardLink) -> HostPlan:
    """These devices, each with the same peer."""
    items = [*links, *(WireguardPeer(link.name, PEER, None, (Prefix("10.3.0.0/16"),), 5) for link in links)]
    return HostPlan(EMPTY.cluster, EMPTY.host, {mesh_unit(EMPTY.cluster): {item.key: Entry(item, ()) for item in items}})


@contextlib.asynccontextmanager
async def keyed(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[FakeKernel, StubBroker, WireguardLink]]:
    """An applier with a plan of one device, which has said its key."""
    kernel = FakeKernel(FakeHost())
    old = kernel.public_key()
    first = WireguardLink("me.0", 51871, 1420, old)
    async with running(monkeypatch, kernel) as broker:
        broker.write(plan(first), 1)
        broker.announce(EMPTY, plan(first), 1)
        assert await said(broker) == (old, None)
        yield kernel, broker, first


async def asked(broker: StubBroker, *, abort: bool = False) -> Rotating:
    return codec.decode(await broker.handlers["rotate"](Message("cmd", codec.encode(Rotate(abort)))), Rotating)


async def said(broker: StubBroker) -> tuple[Key, Key | None]:
    item = codec.decode((await broker.keys.get()).data, PublicKey)
    return item.key, item.next


async def report(broker: StubBroker, generation: int) -> ApplyReport:
    """The report on this generation."""
    while (found := await broker.reports.get()).generation != generation:
        pass
    return found


async def test_from_the_request_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host says both keys, counts handshakes on both devices while there are two, and at the end has one key and says so."""
    monkeypatch.setattr(peers, "TURNING_PERIOD_S", 0.01)
    async with keyed(monkeypatch) as (kernel, broker, first):
        (old,) = kernel.keys().all
        answer = await asked(broker)
        assert answer.next is not None
        assert await asked(broker) == answer
        assert await said(broker) == (old, answer.next)
        beside = WireguardLink("me.1", 51872, 1420, answer.next)
        broker.write(plan(first, beside), 2)
        broker.announce(plan(first), plan(first, beside), 2)
        found = await report(broker, 2)
        assert (found.keys, [device.lacking for device in found.greetings.devices]) == ((old, answer.next), [1, 1])
        kernel.host.handshakes_s[f"peer me.1 {PEER}"] = 1e12
        while [device.lacking for device in found.greetings.devices] != [1, 0]:
            found = await broker.reports.get()
        last = WireguardLink("me.0", 51871, 1420, answer.next)
        broker.write(plan(last), 3)
        broker.announce(plan(first, beside), plan(last), 3)
        assert (await report(broker, 3)).keys == (answer.next,)
        assert await said(broker) == (answer.next, None)
    assert kernel.keys().all == (answer.next,)


async def test_a_gateway_lets_go_of_its_key_when_no_device_is_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when all tunnels have the new one: the far end may not have heard of that yet."""
    kernel = FakeKernel(FakeHost())
    old = kernel.public_key()
    first = plan(WireguardLink("mt.0", 51840, 1420, old), WireguardLink("mt.1", 51841, 1420, old))
    async with running(monkeypatch, kernel) as broker:
        broker.write(first, 1)
        broker.announce(EMPTY, first, 1)
        assert await said(broker) == (old, None)
        new = (await asked(broker)).next
        assert await said(broker) == (old, new)
        turned = [WireguardLink("mt.0", 51840, 1420, new), WireguardLink("mt.1", 51841, 1420, new)]
        last, wanted = first, [plan(*turned, WireguardLink("mt.beside", 51842, 1420, new)), plan(*turned)]
        for generation, item, left in ((2, wanted[0], (old, new)), (3, wanted[1], (new,))):
            broker.write(item, generation)
            broker.announce(last, item, generation)
            assert (await report(broker, generation)).keys == left
            last = item
        assert await said(broker) == (new, None)


async def test_taken_back_before_anything_came_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """No plan changes by it and so no turn follows: the key goes at once."""
    async with keyed(monkeypatch) as (kernel, broker, _):
        (old,) = kernel.keys().all
        wished = (await asked(broker)).next
        assert await asked(broker, abort=True) == Rotating(old, withdrawn=wished)
        assert kernel.keys().all == (old,)
        assert await asked(broker, abort=True) == Rotating(old)


async def test_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key goes with the last device that may have it."""
    async with keyed(monkeypatch) as (kernel, broker, first):
        (old,) = kernel.keys().all
        answer = await asked(broker)
        await said(broker)
        both = plan(first, WireguardLink("me.1", 51872, 1420, answer.next))
        broker.write(both, 2)
        broker.announce(plan(first), both, 2)
        await report(broker, 2)
        assert await asked(broker, abort=True) == Rotating(old, withdrawn=answer.next)
        assert await said(broker) == (old, None)
        assert kernel.keys().withdrawn == answer.next
        broker.write(plan(first), 3)
        broker.announce(both, plan(first), 3)
        await report(broker, 3)
        assert await said(broker) == (old, None)
        assert await asked(broker, abort=True) == Rotating(old)
    assert kernel.keys().all == (old,)
