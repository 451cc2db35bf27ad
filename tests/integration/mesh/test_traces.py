"""Flows traced in the kernels of a cluster that encrypts: each packet at each point, and whether it was encrypted."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas.host_objects import TRACE_TABLE
from services.auditor.trace.verdicts import courses
from services.cli.lab import namespaces
from tests.integration.mesh.changing import Rome
from tests.integration.mesh.traced import seen, traced
from tests.tracing import CASES, ONE, PODS, drawn, echo, flows, recording

pytestmark = pytest.mark.privileged

GOLDEN = Path(__file__).parents[2] / "unit" / "auditor" / "trace" / "golden"
PATIENCE_S = 30.0


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


@pytest.mark.parametrize("by", ["time", "restart"])
def test_nothing_is_told_once_a_trace_is_over(rome: Rome, by: str) -> None:
    """The kernel takes its rules back when the time is over, and when the applier is gone; no difference to the plan, before or after."""
    rome.turn()
    wanted, host = rome.session("shop", "stock", 1 if by == "time" else 600), rome.hosts[ONE]
    with recording({ONE: host}) as recorder:
        recorder.lend(wanted.hosts[ONE])
        assert TRACE_TABLE in host.run("nft", "list", "tables")
        assert host.differences(rome.plan(ONE)) == []
        if by == "restart":
            host.restart()
        end = time.monotonic() + PATIENCE_S
        while host.forget_traced() is not None:
            assert time.monotonic() < end
            time.sleep(0.05)
        assert TRACE_TABLE not in host.run("nft", "list", "tables")
        assert host.differences(rome.plan(ONE)) == []
        recorder.take()
        told = len(recorder.found[ONE].datagrams)
        assert echo("rome.pod.shop", PODS["stock"][0], recorder) == 1
        assert len(recorder.found[ONE].datagrams) == told
    assert flows(rome.plan(ONE), recorder.found[ONE]) == []


@pytest.mark.parametrize("name", CASES)
def test_each_packet_is_seen_at_its_points(rome: Rome, name: str) -> None:
    """The request and the answer of an echo, as the golden transcript has them, which the recorded messages lead to as well."""
    wanted, found = traced(rome, CASES[name])
    assert drawn(seen(rome, wanted, found), wanted) == (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")


def test_two_sessions_at_once_are_two_flows(rome: Rome) -> None:
    """Each sees its own packets, and only those."""
    rome.turn()
    one, other = rome.session("shop", "stock"), rome.session("shop", "post")
    hosts = {host: rome.hosts[host] for host in {*one.hosts, *other.hosts}}
    with recording(hosts) as recorder:
        for wish in (*one.hosts.values(), *other.hosts.values()):
            recorder.lend(wish)
        assert echo("rome.pod.shop", PODS["stock"][0], recorder, ident=2) == 1
        assert echo("rome.pod.shop", PODS["post"][0], recorder, ident=3) == 1
    verdicts = [[(course.verdict, course.packets) for course in courses(seen(rome, each, recorder.found))] for each in (one, other)]
    assert verdicts == [[("encrypted", 1)] * 2, [("plaintext", 1)] * 2]
