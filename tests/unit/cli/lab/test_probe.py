"""A probe that cannot even be made is a failed check, and no end of the others."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest

from services.cli.lab import namespaces, probe
from tests.topologies import dual_stack


async def test_a_pod_without_its_address_yet_is_a_failed_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """A namespace that is there before its addresses: every check says so."""

    def inside(_name: str, work: Callable[[], object]) -> object:
        if "make" in getattr(work, "__qualname__", ""):
            raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
        return work()

    monkeypatch.setattr(namespaces, "inside", inside)
    checks = await probe.check(dual_stack())
    assert len(checks) == 44
    assert not any(check.ok for check in checks)
    assert all("Cannot assign requested address" in check.detail for check in checks)
