"""Events of a live trace, as packets: when they are told, and what is given up."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from services.cli.trace import stream
from services.cli.trace.stream import Stream
from tests.unit.auditor.trace.test_recorded import told


def test_what_is_given_up_is_counted(monkeypatch: pytest.MonkeyPatch):
    """Events that no packet told has: they are missing in the answer."""
    wanted, events = told("native")
    monkeypatch.setattr(stream, "_EVENTS_MAX", len(events) - 3)
    held = Stream(wanted)
    for event in events:
        held.add(event, 0.0)
    assert held.given_up == 3


def test_events_of_packets_that_were_told_are_no_loss(monkeypatch: pytest.MonkeyPatch):
    """They are held for a while only to find late ones of the same packet."""
    wanted, events = told("native")
    own = [event for event in events if wanted.ways(event)]
    monkeypatch.setattr(stream, "_EVENTS_MAX", len(own))
    held = Stream(wanted)
    for event in own:
        held.add(event, 0.0)
    assert len(held.complete(2.0)) == 2
    for event in own:
        held.add(replace(event, uuid=f"next-{event.uuid}"), 2.0)
    assert held.given_up == 0
