"""``meshmark rotate``: the node is asked, and what the planner says of it is shown until it is done."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from schemas import codec, subjects
from schemas.allocation import Rotation
from schemas.commands import Rotating
from schemas.status import ApplyReport
from schemas.topology import PublicKey
from schemas.values import Key, Name
from services.cli import rotate as module
from services.cli.rotate import rotate
from services.kernel.curve25519 import public_key
from services.runtime.errors import Permanent, Waiting
from tests.topologies import node
from tests.unit.cli.broker import StubBroker

OLD, NEW, THIRD = (Key(public_key(bytes([number]) * 32)) for number in (1, 2, 3))
PLACE = subjects.allocation("rotation", "rome", "worker-1")
COMMAND = subjects.command("rome", "worker-1", "rotate")
NOW_S = 1_700_000_000.0
NOW = "2023-11-14 22:13:20 UTC"
REASON = "rome/worker-2 has not followed yet"
NOBODY = Rotation(OLD, NEW)
"""In place of a change: the planner knows of none."""


def say(broker: StubBroker, rotation: Rotation, at_s: float = 0.0) -> None:
    """What the planner says of the node's change of keys, since that time."""
    broker.put(PLACE, b"" if rotation is NOBODY else codec.encode(rotation), at_s)


def admit(broker: StubBroker, key: Key, following: Key | None = None) -> None:
    broker.admit(PublicKey(name=Name("worker-1"), cluster=Name("rome"), key=key, next=following))


@pytest.fixture(autouse=True)
def now(broker: StubBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a certain time, and the topology has one node, which has one key."""
    monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: NOW_S))
    broker.admit(node("worker-1", 1))
    admit(broker, OLD)


@pytest.fixture
def story(broker: StubBroker, monkeypatch: pytest.MonkeyPatch) -> list[Rotation]:
    """What the planner says, one after the other, each time somebody looks again; after the last the new key is in force."""
    told: list[Rotation] = []

    async def sleep(_: float) -> None:
        if told:
            say(broker, told.pop(0))
        else:
            admit(broker, NEW)

    monkeypatch.setattr(module.asyncio, "sleep", sleep)
    admit(broker, OLD, NEW)
    return told


async def shown(broker: StubBroker, capsys: pytest.CaptureFixture[str], **how: bool) -> tuple[int, list[str]]:
    """The exit code, and what is printed of the node."""
    code = await rotate("rome/worker-1", nats=broker, **how)
    return code, [line.removeprefix("rome/worker-1: ") for line in capsys.readouterr().out.splitlines()]


async def test_it_says_how_far_it_is_and_for_whom_it_waits(broker: StubBroker, story: list[Rotation], capsys: pytest.CaptureFixture[str]):
    """Each stage and each reason once."""
    broker.answers[COMMAND] = codec.encode(Rotating(OLD, NEW))
    story += [
        Rotation(OLD, NEW, "beside", 3, (REASON,)),
        Rotation(OLD, NEW, "beside", 3, (REASON,)),
        Rotation(OLD, NEW, "moved"),
        Rotation(OLD, NEW, "leaving"),
    ]
    assert await rotate("rome/worker-1", nats=broker) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines() == [
        "rome/worker-1: a second device with the new key comes on all nodes",
        "rome/worker-1: packets go by the second device",
        "rome/worker-1: the second device and the old key go",
        f"rome/worker-1: its public key is {NEW}",
    ]
    assert printed.err.splitlines() == [f"waits: {REASON}", "waits: for 2 more"]


@pytest.mark.parametrize("ago_s, told", [(0.0, False), (4.9, False), (5.0, True), (-30.0, True)])
async def test_a_wait_is_told_once_it_lasts(
    broker: StubBroker, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, ago_s: float, told: bool
):
    """Each step of a sound change waits for a moment; where clocks differ, it is told rather than never."""
    broker.answers[COMMAND] = codec.encode(Rotating(OLD, NEW))
    say(broker, Rotation(OLD, NEW, "beside", 1, (REASON,)), NOW_S - ago_s)

    async def sleep(_: float) -> None:
        admit(broker, NEW)

    monkeypatch.setattr(module.asyncio, "sleep", sleep)
    assert await rotate("rome/worker-1", nats=broker) == 0
    assert capsys.readouterr().err.splitlines() == ([f"waits: {REASON}"] if told else [])


async def test_a_gateways_tunnels_are_told_one_by_one(broker: StubBroker, story: list[Rotation], capsys: pytest.CaptureFixture[str]):
    """Each by its link."""
    broker.answers[COMMAND] = codec.encode(Rotating(OLD, NEW))
    steps = [("beside", 0), ("moved", 0), ("rekeyed", 0), ("moved", 1), ("rekeyed", 1), ("back", 1), ("leaving", 1)]
    story += [Rotation(OLD, NEW, stage, peering="Peering/rome/rome-milan", tunnel=tunnel) for stage, tunnel in steps]
    assert await shown(broker, capsys) == (
        0,
        [
            "a device with the new key comes beside the tunnels, at both ends",
            "packets of mt.0 go by the device beside",
            "mt.0 gets the new key",
            "packets of mt.1 go by the device beside",
            "mt.1 gets the new key",
            "packets go by all tunnels again",
            "the device beside and the old key go",
            f"its public key is {NEW}",
        ],
    )


async def test_it_can_be_left(broker: StubBroker, capsys: pytest.CaptureFixture[str]):
    """It goes on by itself."""
    broker.answers[COMMAND] = codec.encode(Rotating(OLD, NEW))
    assert await shown(broker, capsys, wait=False) == (0, [f"{NEW} is to take the place of {OLD}"])


@pytest.mark.parametrize("after", [NOBODY, Rotation(OLD, NEW, "done", retired=(THIRD,)), Rotation(OLD, THIRD, "beside")])
async def test_what_somebody_else_takes_back_is_not_waited_for(broker: StubBroker, story: list[Rotation], after: Rotation):
    """Whatever the planner knows then."""
    broker.answers[COMMAND] = codec.encode(Rotating(OLD, NEW))
    story += [Rotation(OLD, NEW, "beside"), after]
    with pytest.raises(Permanent, match="rome/worker-1: the new key was taken back meanwhile"):
        await rotate("rome/worker-1", nats=broker)


async def test_a_planner_that_says_nothing_is_told(
    broker: StubBroker, story: list[Rotation], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """After some seconds: nothing would ever be shown."""
    times = iter([NOW_S, NOW_S + 1.0, *[NOW_S + 6.0] * 9])
    monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: next(times)))
    broker.answers[COMMAND] = codec.encode(Rotating(OLD, NEW))
    story += [NOBODY, NOBODY, Rotation(OLD, NEW, "beside")]
    assert await rotate("rome/worker-1", nats=broker) == 0
    assert capsys.readouterr().err.splitlines() == ["waits: the planner has not taken it up: does it run?"]


async def test_a_key_that_was_taken_back_once_comes_again(broker: StubBroker, story: list[Rotation], capsys: pytest.CaptureFixture[str]):
    """What is left of the first time is neither the end of the second one nor its taking back."""
    broker.answers[COMMAND] = codec.encode(Rotating(OLD, NEW))
    over = Rotation(OLD, NEW, "done", retired=(THIRD,))
    say(broker, over)
    story += [over, Rotation(OLD, NEW, "beside")]
    assert await shown(broker, capsys) == (0, ["a second device with the new key comes on all nodes", f"its public key is {NEW}"])


# Taking it back ---------------------------------------------------------------------------------------------------------------------------


async def test_taken_back(broker: StubBroker, story: list[Rotation], capsys: pytest.CaptureFixture[str]):
    """Said when nothing is under way any more."""
    broker.answers[COMMAND] = codec.encode(Rotating(OLD, withdrawn=NEW))
    say(broker, Rotation(OLD, NEW, "beside"))
    story += [Rotation(OLD, NEW, "beside"), Rotation(OLD, NEW, "done")]
    assert await shown(broker, capsys, abort=True) == (
        0,
        [f"taken back: {NEW} does not take the place of {OLD}", f"its public key is {OLD}"],
    )
    assert await shown(broker, capsys, abort=True, wait=False) == (0, [f"{NEW} is being taken back", f"its public key is {OLD}"])


@pytest.mark.parametrize("known", [NOBODY, Rotation(THIRD, NEW, "done", retired=(THIRD,))])
async def test_nothing_to_take_back(broker: StubBroker, capsys: pytest.CaptureFixture[str], known: Rotation):
    """The node never changed its key, or the last change was taken back."""
    broker.answers[COMMAND] = codec.encode(Rotating(OLD))
    say(broker, known)
    lines = ["nothing to take back: no change of its key is under way", f"its public key is {OLD}"]
    assert await shown(broker, capsys, abort=True) == (0, lines)


async def test_too_late_to_take_back(broker: StubBroker, story: list[Rotation]):
    """The change is done before the node is asked, or before the planner has heard of it."""
    broker.answers[COMMAND] = codec.encode(Rotating(NEW))
    say(broker, Rotation(OLD, NEW, "done", retired=(OLD,)), NOW_S)
    words = f"rome/worker-1: too late to take back: the change is done, and the old key is gone; its public key is {NEW}"
    with pytest.raises(Permanent) as early:
        await rotate("rome/worker-1", abort=True, nats=broker)
    assert str(early.value) == f"{words} since {NOW}"
    broker.answers[COMMAND] = codec.encode(Rotating(OLD, withdrawn=NEW))
    say(broker, Rotation(OLD, NEW, "moved"))
    admit(broker, NEW)
    story += [Rotation(OLD, NEW, "done", retired=(OLD,))]
    with pytest.raises(Permanent, match="too late to take back"):
        await rotate("rome/worker-1", abort=True, nats=broker)


# Looking ----------------------------------------------------------------------------------------------------------------------------------


async def test_status_of_a_change_under_way(broker: StubBroker, capsys: pytest.CaptureFixture[str]):
    """How far it is and, when that lasts, what it waits for; the host is not asked for anything, and the code is 2."""
    admit(broker, OLD, NEW)
    known = Rotation(OLD, NEW, "beside", 1, (REASON,))
    first, last = (
        "a change of its key is under way: a second device with the new key comes on all nodes",
        f"its public key is {OLD}, and {NEW} is to take its place",
    )
    say(broker, known, NOW_S - 1.0)
    assert await shown(broker, capsys, status=True) == (2, [first, last])
    say(broker, known, NOW_S - 3600.0)
    assert await shown(broker, capsys, status=True) == (2, [first, f"waits since 2023-11-14 21:13:20 UTC: {REASON}", last])
    say(broker, replace(known, stage="queued", reasons=("rome/worker-0 changes its key first",)), NOW_S)
    assert await shown(broker, capsys, status=True) == (
        2,
        ["a change of its key is under way: waits for its turn", f"waits since {NOW}: rome/worker-0 changes its key first", last],
    )
    assert broker.asked == []


async def test_status_where_the_planner_has_not_begun(broker: StubBroker, capsys: pytest.CaptureFixture[str]):
    """The host has said its next key."""
    admit(broker, OLD, NEW)
    assert await shown(broker, capsys, status=True) == (
        2,
        [
            "a change of its key is asked for, and the planner has not begun with it",
            f"its public key is {OLD}, which was never changed, and {NEW} is to take its place",
        ],
    )


@pytest.mark.parametrize("keys, words", [((OLD,), "no change of its key is under way"), ((OLD, NEW), "its applier has a second key")])
async def test_status_knows_what_the_host_says_it_has(
    broker: StubBroker, capsys: pytest.CaptureFixture[str], keys: tuple[Key, ...], words: str
):
    """A key that was just asked for, or a planner that does not run, is no end of a change."""
    broker.report(ApplyReport(Name("rome"), Name("worker-1"), 1, 1, (), keys=keys))
    code, lines = await shown(broker, capsys, status=True)
    assert (code, lines[0].startswith(words)) == (2 * (len(keys) - 1), True)


async def test_status_without_a_change(broker: StubBroker, capsys: pytest.CaptureFixture[str]):
    """The key, and since when the host has it, as far as that is known; the host is not asked for anything."""
    none = "no change of its key is under way"
    assert await shown(broker, capsys, status=True) == (0, [none, f"its public key is {OLD}, which was never changed"])
    say(broker, Rotation(THIRD, OLD, "done", retired=(THIRD,)), NOW_S)
    assert await shown(broker, capsys, status=True) == (0, [none, f"its public key is {OLD} since {NOW}"])
    say(broker, Rotation(OLD, NEW, "done", retired=(THIRD,)), NOW_S)
    assert await shown(broker, capsys, status=True) == (0, [none, f"its public key is {OLD}"])
    broker.put(subjects.state("PublicKey", "rome", "worker-1"), b"")
    assert await shown(broker, capsys, status=True) == (
        0,
        ["its public key is not known: it has no WireGuard device, or its applier has not said it yet"],
    )
    assert broker.asked == []


# Names ------------------------------------------------------------------------------------------------------------------------------------


async def test_a_host_that_is_not_there(broker: StubBroker):
    """It is said at once, with what is like it, and nobody is asked."""
    for how in ({}, {"abort": True}, {"status": True}):
        with pytest.raises(Permanent, match=r"no host rome/worker-9; did you mean rome/worker-1\?"):
            await rotate("rome/worker-9", nats=broker, **how)
    with pytest.raises(Permanent, match="names no host"):
        await rotate("worker-9", nats=broker)
    assert broker.asked == []


async def test_nobody_answers(broker: StubBroker):
    """The host is there, and its applier is not."""
    with pytest.raises(Waiting, match=r"the applier of rome/worker-1 does not answer; does it run\?"):
        await rotate("rome/worker-1", nats=broker)


async def test_one_thing_at_a_time(broker: StubBroker):
    """Looking takes nothing back."""
    with pytest.raises(Permanent, match="give one of them"):
        await rotate("rome/worker-1", abort=True, status=True, nats=broker)
