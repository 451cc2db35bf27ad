"""Hosts as people name them: what is said of a name that none has."""

from __future__ import annotations

import pytest

from services.cli.hosts import asked, choose, near
from services.planner.state import HostId
from services.runtime.errors import OutcomeUnknown, Permanent, Transient
from tests.unit.cli.broker import StubBroker

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


async def test_of_a_silent_host_it_is_not_said_that_something_may_have_happened(broker: StubBroker, monkeypatch: pytest.MonkeyPatch):
    """It was only asked."""

    async def request(subject: str, data: bytes, timeout_s: float = 5.0) -> bytes:
        assert (subject, data, timeout_s) == ("mesh.cmd.rome.worker-3.diff", b"", 2.0)
        msg = "no answer in time; it may have happened"
        raise OutcomeUnknown(msg)

    monkeypatch.setattr(broker, "request", request)
    with pytest.raises(Transient, match="the applier of rome/worker-3 does not answer within 2 s; "):
        await asked(broker, HOSTS[0], "diff", 2.0)  # type: ignore[arg-type]
