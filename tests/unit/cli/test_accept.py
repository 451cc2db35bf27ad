"""``meshmark accept``: what would go is shown, and only that is accepted."""

from __future__ import annotations

import json

import pytest

from schemas import codec, subjects
from schemas.status import Accept, Freeze, UnitLoss
from services.cli import accept as module
from services.cli.accept import accept
from services.cli.status import status
from services.runtime.errors import Permanent, Waiting
from tests.topologies import node
from tests.unit.cli.broker import StubBroker

LOSSES = (UnitLoss("rome/gateway", "peering/rome/rome-milan", 63, 0), UnitLoss("rome/[node]", "x", 0, 3))
FROZEN = Freeze("frozen", "the store was lost", 2, 40, 2, LOSSES, 1_700_000_000.0, "ab12")


@pytest.fixture
def frozen(broker: StubBroker) -> StubBroker:
    broker.put(subjects.FREEZE, codec.encode(FROZEN))
    return broker


@pytest.fixture
def answering(frozen: StubBroker, monkeypatch: pytest.MonkeyPatch) -> list[Accept]:
    """A planner that accepts; what it was asked."""
    asked: list[Accept] = []

    async def request(subject: str, data: bytes, timeout_s: float = 5.0) -> bytes:
        assert subject == subjects.ACCEPT
        asked.append(codec.decode(data, Accept))
        return codec.encode(Freeze("lifted", "accepted", 2, 40, 2, LOSSES, 0.0, "ab12"))

    monkeypatch.setattr(frozen, "request", request)
    return asked


def answer(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Somebody sits at the terminal and says this."""
    monkeypatch.setattr(module.sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr(module.console, "input", lambda _: text)


async def test_nothing_to_accept(broker: StubBroker, capsys: pytest.CaptureFixture[str]):
    """Where the planner never was frozen, or is no more."""
    assert await accept(nats=broker) == 0
    broker.put(subjects.FREEZE, codec.encode(Freeze("lifted")))
    assert await accept(yes=True, nats=broker) == 0
    assert capsys.readouterr().out.count("nothing is held back") == 2


async def test_it_shows_and_asks(frozen: StubBroker, answering: list[Accept], monkeypatch, capsys: pytest.CaptureFixture[str]):
    """A yes sends the token of what was shown; anything else sends nothing."""
    answer(monkeypatch, "")
    assert await accept(nats=frozen) == 1
    assert answering == []
    answer(monkeypatch, "y")
    assert await accept(nats=frozen) == 0
    assert answering == [Accept("ab12")]
    printed = capsys.readouterr()
    for words in ("2 units of 40 on 2 hosts would go", "the store was lost", "rome/gateway", "rome/[node]", "accepted: 2 units on 2 hosts"):
        assert words in printed.out
    assert "nothing was accepted" in printed.err


async def test_without_a_terminal_it_takes_a_yes(frozen: StubBroker, answering: list[Accept], monkeypatch):
    """A script is told how; with --yes nobody is asked, and a token that is not the one in force is none."""
    monkeypatch.setattr(module.sys.stdin, "isatty", lambda: False)
    with pytest.raises(Permanent, match="accept --yes --token ab12"):
        await accept(nats=frozen)
    with pytest.raises(Permanent, match="ab12"):
        await accept(yes=True, token="0000", nats=frozen)
    assert answering == []
    assert await accept(yes=True, token="ab12", nats=frozen) == 0
    assert answering == [Accept("ab12")]


async def test_without_a_planner_it_says_so(frozen: StubBroker):
    with pytest.raises(Waiting, match="no planner answers"):
        await accept(yes=True, nats=frozen)


async def test_status_says_that_the_planner_is_frozen(frozen: StubBroker, capsys: pytest.CaptureFixture[str]):
    """People see a line above the hosts, programs the token with each host; the exit code says that something is wrong."""
    assert await status(output="table", nats=frozen) == 2
    assert "frozen since 2023-11-14 22:13:20 UTC: 2 units of 40 on 2 hosts would go" in capsys.readouterr().out
    frozen.admit(node("worker-1", 1))
    assert await status(output="json", nats=frozen) == 2
    printed = capsys.readouterr()
    assert [one["frozen"] for one in json.loads(printed.out)] == ["ab12"]
    assert "2 of 40 units would go" in printed.err
