"""Fixtures of the command's tests."""

import pytest

from tests.unit.cli.broker import StubBroker


@pytest.fixture
def broker() -> StubBroker:
    return StubBroker()
