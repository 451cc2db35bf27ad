"""The host's keys as files: one in force, one that is to follow or was taken back, and which is which after a kill at any instant."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.kernel.port import KeyRing
from services.kernel.wireguard_key import KeyFiles
from services.runtime.errors import Permanent


def test_the_next_key_is_made_once_and_for_nobody_else(tmp_path: Path) -> None:
    """A second one is only made when the first is in force; both files are for root alone."""
    keys = KeyFiles(tmp_path)
    first = keys.public()
    keys.make_next()
    ring = keys.ring()
    keys.make_next()
    assert keys.ring() == ring
    assert ring.next not in (None, first)
    assert {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {"wireguard.key": 0o600, "wireguard.next.key": 0o600}
    assert KeyFiles(tmp_path).ring() == ring, "another process finds the same"


def test_a_device_is_given_the_key_that_is_planned(tmp_path: Path) -> None:
    """Where the host does not have it, or nobody said which, the one in force."""
    keys, other = KeyFiles(tmp_path), KeyFiles(tmp_path / "elsewhere")
    keys.make_next()
    ring = keys.ring()
    assert [keys.planned(key) for key in (ring.key, ring.next, other.public(), None)] == [ring.key, ring.next, ring.key, ring.key]
    assert set(keys.known().values()) == {ring.key, ring.next}


def test_the_old_key_is_destroyed_when_the_next_takes_its_place(tmp_path: Path) -> None:
    """Nothing is left of it; another key than the next one takes nobody's place."""
    keys = KeyFiles(tmp_path)
    keys.make_next()
    before = keys.ring()
    keys.promote(before.key)
    assert keys.ring() == before
    assert before.next is not None
    keys.promote(before.next)
    assert keys.ring() == KeyFiles(tmp_path).ring() == KeyRing(before.next)
    assert [path.name for path in tmp_path.iterdir()] == ["wireguard.key"]


def test_a_key_that_was_taken_back_stays_until_it_is_forgotten(tmp_path: Path) -> None:
    """Devices may have it. Asked for a next one meanwhile, it is that; and the planner may have gone on with it."""
    keys = KeyFiles(tmp_path)
    keys.make_next()
    ring = keys.ring()
    keys.withdraw_next()
    assert KeyFiles(tmp_path).ring() == keys.ring() == KeyRing(ring.key, None, ring.next)
    assert keys.planned(ring.next) == ring.next
    keys.make_next()
    assert keys.ring() == ring
    keys.withdraw_next()
    keys.forget_withdrawn()
    keys.forget_withdrawn()
    assert keys.ring() == KeyFiles(tmp_path).ring() == KeyRing(ring.key)
    keys.make_next()
    assert keys.ring().next not in (None, ring.next)


def test_a_file_that_holds_no_key_is_no_reason_to_make_another(tmp_path: Path) -> None:
    """Somebody may still want what is in it."""
    (tmp_path / "wireguard.next.key").write_text("nonsense\n")
    with pytest.raises(Permanent, match=r"wireguard\.next\.key does not hold a WireGuard private key"):
        KeyFiles(tmp_path).ring()
