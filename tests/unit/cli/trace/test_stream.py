"""Events of a live trace, as packets: when they are told, and what is given up."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from schemas import codec
from schemas.flow import FlowMessage
from services.cli.trace import stream
from services.cli.trace.stream import Inbox, Stream
from tests.unit.auditor.trace.test_recorded import told


def test_an_inbox_counts_what_it_does_not_hold(monkeypatch: pytest.MonkeyPatch):
    """What is no message, and what comes while it is full; what was taken makes room."""
    monkeypatch.setattr(stream, "_MESSAGES_MAX", 2)
    inbox, message = Inbox(), FlowMessage("rome/worker-1", "2026-01-01T00:00:00Z")
    for data in (b"{}", b"\xff", *[codec.encode(message)] * 3):
        inbox.put(data)
    assert list(inbox.take()) == [message, message]
    assert (inbox.not_understood, inbox.turned_away) == (2, 1)
    inbox.put(codec.encode(message))
    assert list(inbox.take()) == [message]


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


def test_a_packet_is_told_once_when_nothing_more_has_come_of_it_for_a_while():
    """What comes of it later is of a packet that was told; of all of them nothing is held for good."""
    wanted, events = told("native")
    own = [event for event in events if wanted.ways(event)]
    held = Stream(wanted)
    for event in own[:-1]:
        held.add(event, 100.0)
    assert held.complete(100.0 + stream.SETTLED_S) == []
    assert len(held.complete(100.1 + stream.SETTLED_S)) == 2
    held.add(own[-1], 101.0)
    assert held.complete(110.0) == held.complete(110.0, all_of_them=True) == []
    assert (held._events, held._told) == ({}, set())
