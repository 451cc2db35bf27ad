"""Tests that need a kernel, run again in an emulated machine whose kernel has WireGuard and Geneve; each is one test here."""

from __future__ import annotations

import pytest

from tests.real_kernel.guest import Guest, GuestError


@pytest.mark.timeout(0)  # the guest has limits of its own, and the first test waits for its boot
def test_inside(guest: Guest, inner: str) -> None:
    """What came of the test of that name in the guest."""
    try:
        result = guest.result(inner)
    except GuestError as error:
        pytest.fail(str(error), pytrace=False)
    if result.outcome == "skipped":
        pytest.skip(result.text)
    if result.outcome != "passed":
        pytest.fail(result.text, pytrace=False)


@pytest.mark.timeout(0)
def test_nothing_is_left_behind_inside(guest: Guest) -> None:
    """The runs in the guest have no complaint of their own: no namespace and no process outlives its test."""
    try:
        complaints = guest.complaints()
    except GuestError as error:
        pytest.fail(str(error), pytrace=False)
    assert not complaints, complaints
