"""A host's public keys are said until the planner's plan shows them: over a broker that is a stub, in time that passes by waiting."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import structlog

from schemas import codec
from schemas.host_objects import WireguardLink
from schemas.plan import Entry, HostPlan, mesh_unit
from schemas.status import ApplyReport
from schemas.topology import PublicKey
from schemas.values import Key, Name
from services.applier import reports
from services.applier.reports import Reporter
from services.kernel.curve25519 import public_key
from services.kernel.port import KeyRing
from services.runtime.health import Readiness
from services.runtime.metrics import Metrics
from services.runtime.plans import Update
from services.runtime.service import Context
from services.runtime.settings import Settings
from tests.unit.stubs import NODE, StubBroker

ONE, TWO = (Key(public_key(bytes([number] * 32))) for number in (1, 2))
LOOK_S = reports._ASK_S * 1.2
"""The longest time between two looks at whether there is something to say."""


class Said(NamedTuple):
    at_s: float
    key: Key
    next: Key | None


def plan(*keys: Key | None) -> HostPlan:
    """A device for each of these keys; None stands for one that the planner has not heard."""
    links = [WireguardLink(f"me.{number}", 51871 + number, 1420, key) for number, key in enumerate(keys)]
    return HostPlan(Name(NODE.cluster), Name(NODE.name), {mesh_unit(NODE.cluster): {link.key: Entry(link, ()) for link in links}})


class Host:
    """A reporter of a host with these keys, and what it says of them. Its time passes by waiting, up to the next plan that is applied."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ring: KeyRing) -> None:
        self.now_s = 0.0
        self.said: list[Said] = []
        self._ring = ring
        self._plans: list[tuple[float, HostPlan]] = []
        self._end_s = 0.0
        self._stop = asyncio.Event()
        self._broker: Any = StubBroker(self._stop)
        settings = Settings(cluster=NODE.cluster, host=NODE.name)
        context = Context(settings, self._broker, Metrics(), Readiness("applier"), self._stop, structlog.get_logger())
        self._reporter = Reporter(context, self._keys, self._uses_key)
        monkeypatch.setattr(Context, "until", lambda _, __, timeout_s: self._pass(timeout_s))
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: self.now_s)

    async def run(self, plans: dict[float, HostPlan], end_s: float) -> list[Said]:
        """What is said until `end_s`, with each plan applied at its time."""
        self._plans, self._end_s = sorted(plans.items(), key=lambda item: item[0]), end_s
        await self._reporter.run()
        return self.said

    async def _pass(self, timeout_s: float) -> None:
        while not self._broker.keys.empty():
            item = codec.decode(self._broker.keys.get_nowait().data, PublicKey)
            self.said.append(Said(self.now_s, item.key, item.next))
        next_s = self._plans[0][0] if self._plans else self._end_s
        self.now_s = min(self.now_s + timeout_s, next_s)
        if self.now_s < next_s:
            return
        if not self._plans:
            self._stop.set()
            return
        _, applied = self._plans.pop(0)
        report = ApplyReport(applied.cluster, applied.host, epoch=1, generation=1, units=())
        self._reporter.put(report, Update(applied, report.epoch, report.generation))

    async def _keys(self) -> KeyRing:
        return self._ring

    async def _uses_key(self) -> bool:
        return True


def pauses(found: list[Said]) -> list[float]:
    return [later.at_s - earlier.at_s for earlier, later in pairwise(found)]


async def test_a_key_is_said_again_until_the_plan_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every ten seconds, or at the next look after that; once the planner has acknowledged it by a plan, never again."""
    found = await Host(monkeypatch, KeyRing(ONE)).run({5.0: plan(None), 605.0: plan(ONE)}, 3600.0)
    assert {(each.key, each.next) for each in found} == {(ONE, None)}
    assert found[0].at_s == 5.0
    assert 605.0 - LOOK_S - reports._KEY_REPEAT_S < found[-1].at_s <= 605.0
    assert all(reports._KEY_REPEAT_S <= pause < reports._KEY_REPEAT_S + LOOK_S for pause in pauses(found))


async def test_a_key_that_the_plan_has_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By an applier that was started anew: what the planner heard before is no reason to be silent, nor to go on."""
    assert await Host(monkeypatch, KeyRing(ONE)).run({5.0: plan(ONE)}, 3600.0) == [(5.0, ONE, None)]


async def test_a_key_that_is_to_follow_is_said_again_more_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may wait for its turn for long; with the plan that has a device for it there is nothing more to say."""
    found = await Host(monkeypatch, KeyRing(ONE, TWO)).run({5.0: plan(ONE), 1805.0: plan(ONE, TWO)}, 3600.0)
    assert {(each.key, each.next) for each in found} == {(ONE, TWO)}
    assert 1805.0 - LOOK_S - reports._NEXT_REPEAT_S < found[-1].at_s <= 1805.0
    assert all(reports._NEXT_REPEAT_S <= pause < reports._NEXT_REPEAT_S + LOOK_S for pause in pauses(found))
