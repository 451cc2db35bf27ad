"""The applier's part in a trace: the kernel is asked, and told when to forget."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from schemas import codec
from schemas.commands import TraceFlow, Tracing
from schemas.plan import HostPlan
from schemas.values import Address, Name
from services.applier import tracing
from services.applier.tracing import Traces
from services.kernel.fake import FakeKernel
from services.runtime.errors import MeshmarkError, Transient, Waiting
from tests.unit.applier.test_service import GATEWAY_PLAN

T = TypeVar("T")

WISH = TraceFlow((Address("10.200.1.10"), Address("10.200.2.10")), (), (51871,), 30)


class Forgetful(FakeKernel):
    """A kernel whose traces end as `ends` says, one look after the other, and that fails with what is an error there."""

    def __init__(self, ends: list[float | MeshmarkError | None]) -> None:
        super().__init__()
        self._ends: Iterator[float | MeshmarkError | None] = iter(ends)
        self.looks = 0
        self.has_looked, self.is_over = asyncio.Event(), asyncio.Event()

    def forget_traced(self) -> float | None:
        self.looks += 1
        self.has_looked.set()
        found = next(self._ends, None)
        if isinstance(found, MeshmarkError):
            raise found
        if found is None and self.looks > 1:
            self.is_over.set()
        return found


async def at_once(work: Callable[[], T]) -> T:
    return work()


async def test_what_is_asked_is_answered_with_what_the_kernel_was_given() -> None:
    """A host without any plan knows none of its links."""
    kernel = FakeKernel()
    traces = Traces(kernel, at_once)
    assert codec.decode(await traces.ask(codec.encode(WISH), GATEWAY_PLAN), Tracing) == Tracing(3, 30)
    with pytest.raises(Waiting, match="holds nothing"):
        await traces.ask(codec.encode(WISH), HostPlan(Name("rome"), Name("gateway"), {}))
    with pytest.raises(MeshmarkError, match="trace: "):
        await traces.ask(b'{"flow":["10.200.1.10"],"protocols":["gre"]}', GATEWAY_PLAN)


class Blind(FakeKernel):
    """A kernel without NFLOG."""

    def trace(self, wish: TraceFlow) -> bool:
        super().trace(wish)
        return not wish.overlay_ports


async def test_a_kernel_that_cannot_show_packets_traces_and_that_is_logged_once() -> None:
    """Whatever else is traced in between."""
    traces, overlay = Traces(Blind(), at_once), replace(WISH, ports=(51871, 4789), overlay_ports=(4789,))
    with capture_logs() as said:
        for wish in (WISH, overlay, WISH, replace(overlay, seconds=60)):
            assert codec.decode(await traces.ask(codec.encode(wish), GATEWAY_PLAN), Tracing).elements > 0
    assert [line["event"] for line in said] == ["overlay_packets_unshown"]


async def test_the_kernel_forgets_what_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the next one ends, also after a failure, and not before anything is asked."""
    monkeypatch.setattr(tracing, "_AGAIN_S", 0.0)
    kernel = Forgetful([None, 0.0, Transient("busy"), None])
    traces = Traces(kernel, at_once)
    running = asyncio.create_task(traces.run())
    try:
        await asyncio.wait_for(kernel.has_looked.wait(), 5)
        await traces.ask(codec.encode(WISH), GATEWAY_PLAN)
        await asyncio.wait_for(kernel.is_over.wait(), 5)
        assert kernel.looks == 4
    finally:
        running.cancel()
