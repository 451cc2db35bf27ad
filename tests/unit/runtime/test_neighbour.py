"""Requests between the services of one host: answered, refused, lost, and by one applier only."""

from __future__ import annotations

import asyncio
import os

import pytest

from services.runtime import neighbour
from services.runtime.errors import Conflict, OutcomeUnknown, Permanent, Waiting


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A place of this test's own: other runs may be in the same network namespace."""
    monkeypatch.setattr(neighbour, "APPLIER", f"\0meshmark-test-{os.getpid()}")


async def echo(body: bytes) -> bytes:
    return body[::-1]


async def test_an_answer_comes_back_whole() -> None:
    """Bodies of any bytes and of more than one buffer arrive as they were sent, in both directions."""
    body = b"a\nb\0" * 300_000
    async with neighbour.serving({"echo": echo}):
        assert await neighbour.ask("echo", body) == body[::-1]
        assert await neighbour.ask("echo") == b""


async def test_a_refusal_is_told_with_its_own_text() -> None:
    """Errors of the tree come back as Permanent; so does a verb that nobody knows, with those that there are."""

    async def refuse(_: bytes) -> bytes:
        msg = "no plan yet"
        raise Waiting(msg, "a plan")

    async with neighbour.serving({"repair": refuse}):
        with pytest.raises(Permanent, match=r"^no plan yet$"):
            await neighbour.ask("repair")
        with pytest.raises(Permanent, match="there are repair"):
            await neighbour.ask("dance")


async def test_nobody_there() -> None:
    """Without an applier, asking says so at once; after one has ended, too."""
    with pytest.raises(Waiting, match="no applier serves"):
        await neighbour.ask("settle")
    async with neighbour.serving({"echo": echo}):
        pass
    with pytest.raises(Waiting, match="no applier serves"):
        await neighbour.ask("settle")


async def test_a_second_applier_is_refused() -> None:
    """Two appliers would fight over one kernel."""
    async with neighbour.serving({"echo": echo}):
        with pytest.raises(Conflict, match="another applier"):
            async with neighbour.serving({"echo": echo}):
                pass
        assert await neighbour.ask("echo", b"ab") == b"ba"


async def test_an_answer_that_is_late_or_lost_is_unknown() -> None:
    """Whoever asked must not take silence, or a server that died half-way, for an answer."""

    async def hang(_: bytes) -> bytes:
        await asyncio.Event().wait()
        raise AssertionError

    async def crash(_: bytes) -> bytes:
        msg = "a defect"
        raise RuntimeError(msg)

    async with neighbour.serving({"hang": hang, "crash": crash}):
        with pytest.raises(OutcomeUnknown, match="no answer to hang"):
            await neighbour.ask("hang", timeout_s=0.05)
        with pytest.raises(OutcomeUnknown, match="ended before"):
            await neighbour.ask("crash")


async def test_other_users_are_not_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request from a user who is neither root nor the applier's own gets nothing."""
    monkeypatch.setattr(neighbour, "_is_allowed", lambda _: False)
    async with neighbour.serving({"echo": echo}):
        with pytest.raises(OutcomeUnknown):
            await neighbour.ask("echo", b"ab")
