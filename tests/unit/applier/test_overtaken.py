"""Plans that follow each other faster than turns are made: the applier's loop over a broker that is a stub and a kernel in memory."""

from __future__ import annotations

import asyncio
import threading
from itertools import pairwise

import pytest

from schemas.topology import IpMapping
from schemas.values import Address, Name
from services.kernel.fake import FakeHost, FakeKernel
from services.kernel.transaction import Change
from tests.topologies import gateway, keys, settled_plans, two_clusters
from tests.unit.applier.test_service import DEADLINE_S, EMPTY, PLAN, running
from tests.unit.stubs import NODE

MAPPING = IpMapping(name=Name("late"), cluster=Name("rome"), real=Address("192.0.2.50"), node=Name(NODE.name), masquerade=True)
CHANGED = settled_plans([*two_clusters(), gateway("rome", host=99), MAPPING, *keys()])[NODE]
"""The plan after an update of its unit: the overlay leads elsewhere, and there are objects that were not there."""
BROUGHT = CHANGED.objects().keys() - PLAN.objects().keys()
PLANS = [EMPTY, PLAN, CHANGED, EMPTY]


class Gate:
    """Where turns stop before their first change, once it is shut."""

    def __init__(self) -> None:
        self.added: set[str] = set()
        self._open, self._reached = threading.Event(), threading.Event()
        self._open.set()

    def shut(self) -> None:
        self._open.clear()

    async def reached(self) -> None:
        assert await asyncio.to_thread(self._reached.wait, DEADLINE_S)

    def open(self) -> None:
        self._open.set()

    def pass_through(self, change: Change) -> None:
        if not self._open.is_set():
            self._reached.set()
            self._open.wait(DEADLINE_S)
        if change.verb == "add":
            self.added.add(change.key)


@pytest.mark.parametrize("busy", [0, 2, 1], ids=["one after the other", "update under way", "update not begun"])
async def test_an_update_and_a_removal_at_once_leave_nothing(monkeypatch: pytest.MonkeyPatch, busy: int) -> None:
    """The removal comes when the update is made, while it is, or with it while the turn before takes its time (`busy`): in two turns, or
    in one that never sees the update, nothing of either plan is left, and no turn fails."""
    gate, host = Gate(), FakeHost()
    async with running(monkeypatch, FakeKernel(host, gate.pass_through)) as broker:
        for generation, (before, after) in enumerate(pairwise(PLANS), 1):
            if generation == busy:
                gate.shut()
            broker.write(after, generation)
            broker.announce(before, after, generation)
            if generation == busy:
                await gate.reached()
            elif generation < (busy or len(PLANS)):
                assert (await broker.reports.get()).generation == generation
        if busy:
            await broker.plans.join()
            gate.open()
            while (report := await broker.reports.get()).generation < len(PLANS) - 1:
                assert report.outcome == "applied"
            assert report.outcome == "applied"
    assert BROUGHT
    assert gate.added & BROUGHT == (set() if busy == 1 else BROUGHT)
    assert (host.objects, host.marker, host.kept_sysctls) == ({}, None, {})
