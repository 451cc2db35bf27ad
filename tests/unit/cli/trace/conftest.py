"""The cluster whose flows are traced."""

from __future__ import annotations

import pytest

from schemas import codec, subjects
from services.planner.allocate import Allocations
from services.planner.state import State
from tests.topologies import encrypting
from tests.unit.cli.broker import StubBroker


@pytest.fixture
def mesh(broker: StubBroker) -> StubBroker:
    """The cluster that encrypts, with what the planner allocated for it."""
    items, allocations = encrypting(), Allocations()
    broker.admit(*items)
    allocations.allocate(State(items), items)
    for place in allocations.take_changes():
        broker.put(subjects.allocation(*place), codec.encode(allocations.value(*place)))
    return broker
