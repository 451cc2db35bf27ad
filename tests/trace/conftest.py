"""The cluster that a module's tests share, and an audit that does not wait."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from services.auditor import plaintext, plaintext_watch
from services.cli.lab import namespaces
from tests.trace.site import GRACE_S, QUIET_S, Rome


@pytest.fixture(scope="module")
def rome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rome]:
    if namespaces.existing():
        pytest.skip("a lab is up on this machine")
    made = Rome(tmp_path_factory.mktemp("rome"))
    try:
        made.make()
        yield made
    finally:
        made.close()


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody changes the mesh but the test."""
    monkeypatch.setattr(plaintext, "GRACE_S", GRACE_S)
    monkeypatch.setattr(plaintext, "QUIET_S", QUIET_S)
    monkeypatch.setattr(plaintext_watch, "_ROUND_S", 0.2)
