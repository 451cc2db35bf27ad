"""Trying again: bounded in attempts and time, exponential with jitter, and only what the error tree calls Transient."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt, stop_after_delay, wait_random_exponential

from services.runtime.errors import Transient
from services.runtime.metrics import Metrics

T = TypeVar("T")

log = structlog.get_logger(__name__)


_TURN_BACKOFF = wait_random_exponential(multiplier=0.25, max=30)


def backoff_s(attempt: int) -> float:
    """How long to wait after attempt number `attempt`, from 1, of what is tried for ever: exponential with jitter, at most 30 s."""
    state = RetryCallState(AsyncRetrying(), None, (), {})
    state.attempt_number = attempt
    return _TURN_BACKOFF(state)


async def retrying(
    what: str,
    action: Callable[[], Awaitable[T]],
    *,
    metrics: Metrics | None = None,
    attempts: int = 6,
    within_s: float = 30.0,
    most_s: float = 5.0,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> T:
    """The result of `action`, tried up to `attempts` times within `within_s` seconds; the last error is raised as it is.

    The wait is at least the error's `retry_after_s`, else up to `most_s`. `what` is a fixed word, no name: it is the label of
    the metric, which is counted where `metrics` are given.
    """
    backoff = wait_random_exponential(multiplier=0.2, max=most_s)

    def wait(state: RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome else None
        return max(backoff(state), error.retry_after_s if isinstance(error, Transient) else 0.0)

    def count(state: RetryCallState) -> None:
        if metrics is not None:
            metrics.retries.labels(what).inc()
        error = state.outcome.exception() if state.outcome else None
        log.info("retry", what=what, attempt=state.attempt_number, error=str(error), wait_s=round(state.upcoming_sleep, 3))

    attempt = AsyncRetrying(
        retry=retry_if_exception_type(Transient),
        stop=stop_after_attempt(attempts) | stop_after_delay(within_s),
        wait=wait,
        before_sleep=count,
        sleep=sleep,
        reraise=True,
    )

    async def call() -> T:
        # tenacity awaits only what it can tell to be a coroutine function; a lambda that returns a coroutine is not.
        return await action()

    return await attempt(call)
