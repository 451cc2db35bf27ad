"""What an auditor that has ended had open: the next one finds out whether it left anything so, and says what of that is over."""

from __future__ import annotations

from typing import Any

import pytest

from schemas import codec, subjects
from schemas.drift import DriftEvent, DriftLayer
from schemas.values import Name
from services.auditor import inheritance
from services.auditor.findings import LAYERS
from services.auditor.inheritance import left_open
from services.kernel.fake import FakeHost, FakeKernel
from services.runtime.errors import MeshmarkError, Permanent, Transient, Waiting
from services.runtime.messages import Message
from tests.unit.auditor.test_service import EVENT, RULE, StubApplier, running
from tests.unit.stubs import NODE, StubBroker, StubEvents


class Kept:
    """Stands in for the stream of drift: whether the last word on a layer left something open, and errors that come before."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, errors: tuple[MeshmarkError, ...] = (), **layers: bool) -> None:
        self.asked: list[str] = []
        self.told = {subjects.drift(*NODE, layer): last(layer, leaves_open=value) for layer, value in layers.items()}
        self._errors = list(errors)
        self._others = StubBroker.last
        monkeypatch.setattr(StubBroker, "last", lambda broker, stream, subject: self.last(stream, subject, broker))
        monkeypatch.setattr(inheritance, "backoff_s", lambda _: 0.0)

    async def last(self, stream: str, subject: str, broker: Any = None) -> Message | None:
        if stream != "DRIFT":
            return await self._others(broker, stream, subject)
        self.asked.append(subject)
        if self._errors:
            raise self._errors.pop(0)
        return Message(subject, self.told[subject]) if subject in self.told else None


def last(layer: str, *, leaves_open: bool) -> bytes:
    """What was told last of a layer, which need not be what is open."""
    found: Any = layer
    return codec.encode(DriftEvent(Name(NODE.cluster), Name(NODE.name), found, "key", "resolved", at_s=1.0, leaves_open=leaves_open))


async def before(kept: Kept) -> set[DriftLayer]:
    broker: Any = kept
    return await left_open(broker, *NODE)


async def test_the_last_word_on_each_layer_says_what_is_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer is asked for, of this host only; nothing is left where nothing was told, or where all was resolved."""
    kept = Kept(monkeypatch, rule=True, route=False, sysctl=True)
    assert await before(kept) == {"rule", "sysctl"}
    assert kept.asked == [subjects.drift(*NODE, layer) for layer in LAYERS]


async def test_a_broker_that_does_not_answer_yet_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often: an auditor begins before its broker where it has to."""
    kept = Kept(monkeypatch, (Transient("no answer"), Waiting("no stream", "the stream")) * 5, rule=True)
    assert await before(kept) == {"rule"}


async def test_words_of_another_version_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be read is no reason to end."""
    kept = Kept(monkeypatch, rule=True)
    kept.told = dict.fromkeys(kept.told, b"{}")
    assert await before(kept) == set()


async def test_a_broker_that_lets_nobody_ask_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its permissions were written for an earlier version; all but this works."""
    kept = Kept(monkeypatch, (Permanent("no permission"),), rule=True)
    assert await before(kept) == set()
    assert len(kept.asked) == 1


async def test_what_an_auditor_that_has_ended_had_open_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Said of the layers of which something was left open, and of no other; what comes later is raised after the time that is named."""
    Kept(monkeypatch, rule=True, route=False, sysctl=True)
    host = FakeHost()
    async with running(monkeypatch, FakeKernel(host), StubApplier(host)) as broker:
        told = [await broker.drift.get() for _ in range(2)]
        assert {(event.key, event.state) for event in told} == {("layer rule", "resolved"), ("layer sysctl", "resolved")}
        del host.objects[RULE]
        StubEvents.queue.put_nowait(EVENT)
        event = await broker.drift.get()
        assert (event.key, event.state) == (RULE, "raised")
        assert event.at_s >= told[0].first_seen_s > 0
