"""``meshmark rotate``: the node is asked, and what the planner says of it is shown until it is done."""

from __future__ import annotations

import pytest

from schemas import codec, subjects
from schemas.allocation import Rotation
from schemas.commands import Rotating
from schemas.topology import PublicKey
from schemas.values import Key, Name
from services.cli import rotate as module
from services.cli.rotate import rotate
from services.kernel.curve25519 import public_key
from services.runtime.errors import Permanent, Waiting
from tests.unit.cli.broker import StubBroker

OLD, NEW = (Key(public_key(bytes([number]) * 32)) for number in (1, 2))
PLACE = subjects.allocation("rotation", "rome", "worker-1")
COMMAND = subjects.command("rome", "worker-1", "rotate")


@pytest.fixture
def story(broker: StubBroker, monkeypatch: pytest.MonkeyPatch) -> list[Rotation]:
    """What the planner says, one after the other, each time somebody looks again; after the last the new key is in force."""
    told: list[Rotation] = []

    async def sleep(_: float) -> None:
        if told:
            broker.put(PLACE, codec.encode(told.pop(0)))
        else:
            broker.admit(PublicKey(name=Name("worker-1"), cluster=Name("rome"), key=NEW))

    monkeypatch.setattr(module.asyncio, "sleep", sleep)
    broker.admit(PublicKey(name=Name("worker-1"), cluster=Name("rome"), key=OLD, next=NEW))
    return told


async def test_it_says_how_far_it_is_and_for_whom_it_waits(broker: StubBroker, story: list[Rotation], capsys: pytest.CaptureFixture[str]):
    """Each stage and each reason once."""
    broker.answers[COMMAND] = codec.encode(Rotating(OLD, NEW))
    reasons = ("Node/rome/worker-2 has not followed yet",)
    story += [
        Rotation(OLD, NEW, "beside", 3, reasons),
        Rotation(OLD, NEW, "beside", 3, reasons),
        Rotation(OLD, NEW, "moved"),
        Rotation(OLD, NEW, "done"),
    ]
    assert await rotate("rome/worker-1", nats=broker) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines() == [
        "rome/worker-1: a second device with the new key comes on all nodes",
        "rome/worker-1: packets go by the second device",
        "rome/worker-1: done",
        f"rome/worker-1: its public key is {NEW}",
    ]
    assert shown.err.splitlines() == ["waits: Node/rome/worker-2 has not followed yet", "and 2 more"]


async def test_a_gateways_tunnels_are_told_one_by_one(broker: StubBroker, story: list[Rotation], capsys: pytest.CaptureFixture[str]):
    """Each by its link."""
    broker.answers[COMMAND] = codec.encode(Rotating(OLD, NEW))
    steps = [("beside", 0), ("moved", 0), ("rekeyed", 0), ("moved", 1), ("rekeyed", 1), ("back", 1), ("leaving", 1), ("done", 1)]
    story += [Rotation(OLD, NEW, stage, peering="Peering/rome/rome-milan", tunnel=tunnel) for stage, tunnel in steps]
    assert await rotate("rome/worker-1", nats=broker) == 0
    assert [line.removeprefix("rome/worker-1: ") for line in capsys.readouterr().out.splitlines()] == [
        "a device with the new key comes beside the tunnels, at both ends",
        "packets of mt.0 go by the device beside",
        "mt.0 gets the new key",
        "packets of mt.1 go by the device beside",
        "mt.1 gets the new key",
        "packets go by all tunnels again",
        "the device beside and the old key go",
        "done",
        f"its public key is {NEW}",
    ]


async def test_it_can_be_left(broker: StubBroker, capsys: pytest.CaptureFixture[str]):
    """It goes on by itself."""
    broker.answers[COMMAND] = codec.encode(Rotating(OLD, NEW))
    assert await rotate("rome/worker-1", wait=False, nats=broker) == 0
    assert capsys.readouterr().out == f"rome/worker-1: {NEW} is to take the place of {OLD}\n"


async def test_taken_back(broker: StubBroker, story: list[Rotation], capsys: pytest.CaptureFixture[str]):
    """Until nothing is under way any more."""
    broker.answers[COMMAND] = codec.encode(Rotating(OLD))
    broker.put(PLACE, codec.encode(Rotation(OLD, NEW, "beside")))
    story += [Rotation(OLD, NEW, "beside"), Rotation(OLD, NEW, "done")]
    assert await rotate("rome/worker-1", abort=True, nats=broker) == 0
    assert capsys.readouterr().out == f"rome/worker-1: its public key is {OLD}\n"


async def test_nobody_answers(broker: StubBroker):
    """The node's name, or its applier."""
    with pytest.raises(Waiting, match="the applier of rome/worker-9 does not answer"):
        await rotate("rome/worker-9", nats=broker)
    with pytest.raises(Permanent, match="names no host"):
        await rotate("worker-9", nats=broker)
