"""The cluster whose flows are traced, and recordings of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from schemas import codec, subjects
from services.planner.allocate import Allocations
from services.planner.state import State
from tests.topologies import encrypting
from tests.unit.cli.broker import StubBroker
from tests.unit.cli.trace.said import messages


@pytest.fixture
def mesh(broker: StubBroker) -> StubBroker:
    """The cluster that encrypts, with what the planner allocated for it."""
    items, allocations = encrypting(), Allocations()
    broker.admit(*items)
    allocations.allocate(State(items), items)
    for place in allocations.take_changes():
        broker.put(subjects.allocation(*place), codec.encode(allocations.value(*place)))
    return broker


@pytest.fixture
def recorded(tmp_path: Path) -> dict[str, Path]:
    """Files as ``--output json`` writes them."""
    found = {}
    for name in ("native", "reply-in-clear", "dropped"):
        found[name] = tmp_path / f"{name}.json"
        found[name].write_bytes(b"".join(codec.encode(message) + b"\n" for message in messages(name)))
    return found
