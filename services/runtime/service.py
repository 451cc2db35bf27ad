"""Running a service: logging, metrics, health, the broker, signals, and an end that is always bounded.

A service is ``async def main(context)``. It runs until it returns, raises, or `stop` is set by SIGTERM or SIGINT; then it has
`shutdown_s` seconds to return, is cancelled after that, and the process ends hard when even that does not help (nats-py and Python 3.11
can lose a cancellation). Exit code 0 is a clean end, 1 a failure; a supervisor starts it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import TypeVar

import structlog
from msgspec import Struct

from services.runtime import logs
from services.runtime.broker import Broker
from services.runtime.errors import MeshmarkError, Transient
from services.runtime.health import HealthServer, Readiness
from services.runtime.metrics import Metrics
from services.runtime.settings import Settings

T = TypeVar("T")

_BEAT_S = 1.0
_HARD_S = 10.0
"""How long after `shutdown_s` the process may still take to cancel, drain and close."""


class Context(Struct, frozen=True):
    """What a service gets to work with. `port` is where health and metrics are served, 0 for nowhere."""

    settings: Settings
    broker: Broker
    metrics: Metrics
    ready: Readiness
    stop: asyncio.Event
    log: structlog.typing.FilteringBoundLogger
    port: int = 0

    async def until(self, event: asyncio.Event, timeout_s: float | None = None) -> None:
        """Wait until `event` or `stop` is set, or the time is over."""
        waiting = [asyncio.ensure_future(event.wait()), asyncio.ensure_future(self.stop.wait())]
        try:
            await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()


Main = Callable[[Context], Awaitable[None]]


def run(name: str, settings: Settings, main: Main) -> int:
    """Run the service to its end and return the exit code."""
    logs.configure(name, settings.log_level, settings.log_format)
    log = structlog.get_logger(name)
    failed = False
    try:
        asyncio.run(_serve(name, settings, main))
    except* MeshmarkError as group:
        failed = True
        for error in leaves(group):
            # One line, no traceback: the text says what to do.
            log.error("service_failed", kind=type(error).__name__, error=str(error))  # noqa: TRY400
    except* Exception as group:
        failed = True
        for unexpected in leaves(group):
            log.error("service_crashed", exc_info=unexpected)  # noqa: TRY400 - the group's own traceback says less
    return int(failed)


async def _serve(name: str, settings: Settings, main: Main) -> None:
    metrics, ready, stop = Metrics(), Readiness("broker", name), asyncio.Event()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_signals(stop))
        port = stack.enter_context(HealthServer(settings.http, metrics.registry, ready)).port if settings.http else 0
        stack.enter_context(_hard_end(stop, settings.shutdown_s + _HARD_S))
        log = structlog.get_logger(name)
        log.info("connecting", url=settings.nats_url)
        async with contextlib.AsyncExitStack() as connected:
            opening = Broker.connect(settings.broker(), name, metrics=metrics, stop=stop)
            broker = await _unless(stop, connected.enter_async_context(opening))
            if broker is None:
                return
            log.info("service_started", url=settings.nats_url, health_port=port)
            context = Context(settings, broker, metrics, ready, stop, log, port)
            notify("READY=1")
            await _supervise(context, main)
            notify("STOPPING=1")
        log.info("service_ended")


async def _unless(stop: asyncio.Event, work: Coroutine[object, object, T]) -> T | None:
    """The result of `work`; None when `stop` was set before there was one."""
    task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        stopped.cancel()
        task.cancel()


async def _supervise(context: Context, main: Main) -> None:
    """Run main beside the watchers; whichever ends first ends all."""

    async def work() -> None:
        try:
            await main(context)
        finally:
            context.stop.set()

    async with asyncio.TaskGroup() as group:
        task = group.create_task(work(), name="main")
        group.create_task(_end(task, context), name="end")
        group.create_task(_beat(context), name="beat")
        group.create_task(_watch(context), name="watch")


async def _end(task: asyncio.Task[None], context: Context) -> None:
    """Once `stop` is set, give main its time, then cancel it, again and again should a cancellation get lost."""
    await context.stop.wait()
    await asyncio.wait({task}, timeout=context.settings.shutdown_s)
    while not task.done():
        context.log.warning("main_cancelled", after_s=context.settings.shutdown_s)
        task.cancel()
        await asyncio.wait({task}, timeout=_BEAT_S)


async def _beat(context: Context) -> None:
    """Say that the loop turns and whether the broker is there."""
    while not context.stop.is_set():
        context.ready.beat()
        notify("WATCHDOG=1")
        if context.broker.connected:
            context.ready("broker")
        else:
            context.ready("broker", f"not connected to {context.settings.nats_url}")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_BEAT_S):
                await context.stop.wait()


async def _watch(context: Context) -> None:
    """Fail the service when the broker is lost for good: a new process is the only cure."""
    closed = asyncio.ensure_future(context.broker.closed.wait())
    stopped = asyncio.ensure_future(context.stop.wait())
    try:
        await asyncio.wait({closed, stopped}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        closed.cancel()
        stopped.cancel()
    if context.broker.closed.is_set() and not context.stop.is_set():
        context.stop.set()
        msg = f"the broker at {context.settings.nats_url} is lost: {context.broker.lost_reason}"
        raise Transient(msg)


@contextlib.contextmanager
def _signals(stop: asyncio.Event) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


@contextlib.contextmanager
def _hard_end(stop: asyncio.Event, after_s: float) -> Iterator[None]:
    """End the process `after_s` seconds after `stop` was set, whatever still hangs."""
    timer = threading.Timer(after_s, os._exit, (1,))
    timer.daemon = True

    async def arm() -> None:
        await stop.wait()
        timer.start()

    task = asyncio.create_task(arm(), name="hard-end")
    try:
        yield
    finally:
        task.cancel()
        timer.cancel()


def notify(state: str) -> None:
    """Tell systemd (sd_notify(3)); nothing happens elsewhere."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path:
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.connect(f"\0{path[1:]}" if path.startswith("@") else path)
        channel.sendall(state.encode())


def leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    """The errors in a group, and in the groups in it."""
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from leaves(error)
        else:
            yield error
