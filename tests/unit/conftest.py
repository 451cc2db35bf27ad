"""What unit tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog


@pytest.fixture(autouse=True)
def logs_as_at_first() -> Iterator[None]:
    """A command sets up logs for its process, and that is the one of the tests that follow."""
    yield
    structlog.reset_defaults()
