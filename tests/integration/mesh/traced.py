"""Flows to trace in rome: what its cluster is like, what somebody breaks, and who speaks to whom."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from services.auditor.trace.trails import Trail, trails
from services.cli.trace.ends import Session
from services.planner.state import HostId
from tests.integration.mesh.changing import Rome
from tests.tracing import Case, Recorded, address, echo, flows, recording

_RULES = {1000: "fwmark 0x4d2/0xfff lookup 10 protocol 77", 1001: "to 10.200.0.0/16 lookup 10 protocol 77"}


@contextmanager
def arranged(rome: Rome, case: Case) -> Iterator[None]:
    """The cluster as the case has it, and whole again after that."""
    rome.turn(**case.cluster)
    if case.broken is None:
        yield
        return
    host, priorities = case.broken
    try:
        for priority in priorities:
            rome.hosts[host].run("ip", "rule", "del", "priority", str(priority))
        yield
    finally:
        for priority in priorities:
            rome.hosts[host].run("ip", "rule", "add", "priority", str(priority), *_RULES[priority].split())


def traced(rome: Rome, case: Case) -> tuple[Session, dict[HostId, Recorded]]:
    """One echo request of a flow that has begun, and what the hosts on its way told of it."""
    with arranged(rome, case):
        wanted = rome.session("shop", case.to)
        hosts = {host: rome.hosts[host] for host in wanted.hosts}
        with recording(hosts) as before:
            # Neighbours are found, and WireGuard's sessions made.
            assert echo("rome.pod.shop", address(case), before, count=2, ident=1) == (2 if case.answered else 0)
        with recording(hosts) as recorder:
            for wish in set(wanted.hosts.values()):
                recorder.lend(wish)
            assert echo("rome.pod.shop", address(case), recorder) == case.answered
            return wanted, recorder.found


def seen(rome: Rome, wanted: Session, found: dict[HostId, Recorded]) -> list[Trail]:
    """The packets of what was told."""
    return trails([event for host, recorded in found.items() for event in flows(rome.plan(host), recorded)], wanted.ways, wanted.route)
