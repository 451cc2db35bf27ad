"""The broker of the runtime's tests, and planners beside it."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
import structlog

from services.planner import service
from services.runtime.health import Readiness
from services.runtime.metrics import Metrics
from services.runtime.service import Context
from services.runtime.settings import Settings
from tests.integration.runtime.conftest import config, connect, server

__all__ = ["config", "connect", "planning", "server"]


@pytest.fixture
def planning(connect):
    """``async with planning() as context``: a planner service that runs while the body does, on a connection of its own."""

    @contextlib.asynccontextmanager
    async def run():
        broker = await connect("planner")
        context = Context(Settings(), broker, Metrics(), Readiness("planner"), broker.stop, structlog.get_logger())
        task = asyncio.create_task(service.main(context))
        try:
            yield context
        finally:
            context.stop.set()
            await task

    return run
