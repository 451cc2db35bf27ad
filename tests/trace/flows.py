"""Flows to trace in rome: what its cluster is like, what somebody breaks, and who speaks to whom."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from schemas.topology import WireguardSettings
from schemas.values import IPV6
from services.auditor.trace.trails import Trail
from services.cli.trace.ends import Session
from services.planner.state import HostId
from tests.trace.site import Rome
from tests.tracing import CASES, Case, Recorded, address, echo, flows, recording

_RULES = {1000: "fwmark 0x4d2/0xfff lookup 10 protocol 77", 1001: "to 10.200.0.0/16 lookup 10 protocol 77"}
_OVERLAY, _GENEVE = {"routing": "overlay"}, {"routing": "overlay", "overlay": "geneve"}

ALL = CASES | {
    "native-over-ipv6": Case(outer=6),
    "overlay-ipv6": Case(_OVERLAY, family=6),
    "overlay-over-ipv6": Case(_OVERLAY, outer=6),
    "geneve": Case(_GENEVE),
    "geneve-ipv6": Case(_GENEVE, family=6),
    "geneve-over-ipv6": Case(_GENEVE, outer=6),
    "node-to-pod": Case(source="worker-1"),
    "node-to-node": Case({"wireguard": WireguardSettings(nodes=True)}, source="worker-1", to="worker-2"),
    "node-to-node-in-clear": Case(source="worker-1", to="worker-2"),
}
"""Those that were recorded, and more, which only exist live."""


@contextmanager
def arranged(rome: Rome, case: Case) -> Iterator[None]:
    """The cluster as the case has it, and whole again after that."""
    rome.turn(case.outer, **case.cluster)
    if case.broken is None:
        yield
        return
    host, priorities = case.broken
    ip = ("ip", "-6") if case.outer == IPV6 else ("ip",)
    try:
        for priority in priorities:
            rome.hosts[host].run(*ip, "rule", "del", "priority", str(priority))
        yield
    finally:
        for priority in priorities:
            rome.hosts[host].run(*ip, "rule", "add", "priority", str(priority), *_RULES[priority].split())


def traced(rome: Rome, case: Case, count: int = 1) -> tuple[Session, dict[HostId, Recorded]]:
    """Echo requests of a flow that has begun, one after the other, and what the hosts on its way told of them."""
    with arranged(rome, case):
        wanted, place = rome.session(case.source, case.to), place_of(case.source)
        hosts = {host: rome.hosts[host] for host in wanted.hosts}
        with recording(hosts) as before:
            # Neighbours are found, and WireGuard's sessions made.
            assert echo(place, address(case), before, count=2, ident=1) == (2 if case.answered else 0)
        rome.forget_traces()
        with recording(hosts) as recorder:
            for wish in set(wanted.hosts.values()):
                recorder.lend(wish)
            assert echo(place, address(case), recorder, count) == (count if case.answered else 0)
            return wanted, recorder.found


def place_of(name: str) -> str:
    """The namespace of a pod or node of rome."""
    return f"rome.{name}" if name.startswith("worker-") else f"rome.pod.{name}"


def seen(rome: Rome, wanted: Session, found: dict[HostId, Recorded]) -> list[Trail]:
    """The packets of what was told."""
    return wanted.trails([event for host, recorded in found.items() for event in flows(rome.plan(host), recorded)])
