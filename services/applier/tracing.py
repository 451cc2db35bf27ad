"""Verb ``trace``: the kernel is asked to tell of a flow, and told when to forget it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Protocol, TypeVar

import structlog

from schemas import codec
from schemas.commands import TraceFlow, Tracing
from schemas.plan import HostPlan
from services.kernel.port import Kernel
from services.runtime.errors import MeshmarkError, Waiting

_log = structlog.get_logger()

T = TypeVar("T")

_AGAIN_S = 1.0
_AFTER_S = 0.01
"""What is over is so by the kernel's clock, which is not this one."""


class InThread(Protocol):
    """Runs what asks the kernel in the kernel's thread."""

    async def __call__(self, work: Callable[[], T], /) -> T: ...


class Traces:
    """What is traced on this host. The kernel ends it by itself when this process does; while it runs, it ends what is over."""

    def __init__(self, kernel: Kernel, in_thread: InThread) -> None:
        self._kernel = kernel
        self._in_thread = in_thread
        self._asked = asyncio.Event()
        self._shows = True

    async def ask(self, body: bytes, plan: HostPlan) -> bytes:
        """Have the kernel tell of the flow that a command names. Waiting on a host whose links nobody knows."""
        try:
            wish = codec.decode(body, TraceFlow)
        except codec.DecodeError as error:
            msg = f"trace: {error}"
            raise MeshmarkError(msg) from None
        if not plan.units:
            msg = f"{plan.cluster}/{plan.host} holds nothing by which a flow could be traced"
            raise Waiting(msg, "a peering or a mesh")
        shows = await self._in_thread(lambda: self._kernel.trace(wish))
        if self._shows and not shows:
            _log.warning("overlay_packets_unshown", reason="the kernel has no NFLOG (modules nft_log, nfnetlink_log)")
        if wish.overlay_ports:
            self._shows = shows
        self._asked.set()
        return codec.encode(Tracing(len({*wish.flow}) + len({*wish.outer}) + len({*wish.ports}), wish.seconds))

    async def run(self) -> None:
        """Have the kernel forget what is over, until cancelled."""
        while True:
            self._asked.clear()
            try:
                left_s = await self._in_thread(self._kernel.forget_traced)
            except MeshmarkError as error:
                _log.warning("traces_kept", error=str(error))
                left_s = _AGAIN_S
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._asked.wait(), left_s + _AFTER_S if left_s is not None else None)
