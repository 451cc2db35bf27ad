"""Hosts as people name them: what is said of a name that none has."""

from __future__ import annotations

import pytest

from services.cli.hosts import choose, near
from services.planner.state import HostId
from services.runtime.errors import Permanent

HOSTS = [HostId("rome", "worker-3"), HostId("milan", "gateway")]


def test_one_or_all():
    """By name, else in order."""
    assert choose(HOSTS, "rome/worker-3") == HOSTS[:1]
    assert choose(HOSTS, None) == HOSTS[::-1]


def test_a_name_that_is_near_is_told():
    """Else those that there are, the first few of many."""
    with pytest.raises(Permanent, match=r"no host rome/worker-9; did you mean rome/worker-3\?"):
        choose(HOSTS, "rome/worker-9")
    assert near("x", ["a", "b"]) == "there are a, b"
    assert near("x", list("abcdefghi")) == "there are a, b, c, d, e, f, g, h, …"
    assert near("x", []) == "there are none yet"
