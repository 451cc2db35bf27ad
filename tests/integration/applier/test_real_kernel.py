"""The applier's core on a real kernel: whole plans, their size, restarts, and what is foreign."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
from msgspec.structs import replace

from schemas.plan import HostPlan
from schemas.status import ApplyReport
from schemas.values import Name
from services.applier.core import Applier, Difference
from services.kernel.linux import LinuxKernel
from services.kernel.namespace import enter_network
from services.planner.state import HostId
from tests.topologies import ROME_GATEWAY, keys, settled_plans, two_clusters

pytestmark = pytest.mark.privileged

T = TypeVar("T")
NODE = HostId("rome", "worker-1")
EMPTY = HostPlan(Name("rome"), Name("gateway"), {})


class Host:
    """A network namespace that an applier serves, in a thread of its own."""

    def __init__(self, folder: Path) -> None:
        self.namespace = f"mm-test-{os.getpid()}"
        self._folder = folder
        subprocess.run(["ip", "netns", "add", self.namespace], check=True)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=self.namespace)
        self._thread.submit(enter_network, Path("/run/netns") / self.namespace).result()
        self.ip("link", "set", "lo", "up")
        self._kernel = self._thread.submit(LinuxKernel, folder).result()
        self._applier = Applier(self._kernel, time.time)

    def restart(self) -> None:
        self._thread.submit(self._kernel.close).result()
        self._kernel = self._thread.submit(LinuxKernel, self._folder).result()
        self._applier = Applier(self._kernel, time.time)

    def apply(self, plan: HostPlan, generation: int = 1) -> ApplyReport:
        return self._thread.submit(self._applier.apply, plan, 1, generation).result()

    def differences(self, plan: HostPlan) -> list[Difference]:
        return self._thread.submit(self._applier.differences, plan).result()

    def ip(self, *arguments: str) -> str:
        return self.run("ip", *arguments)

    def run(self, *argv: str) -> str:
        return subprocess.run(["ip", "netns", "exec", self.namespace, *argv], check=True, capture_output=True, text=True).stdout

    def state(self) -> dict[str, str]:
        listings = (("ip", "rule"), ("ip", "route", "show", "table", "all"), ("ip", "-d", "link"), ("nft", "-s", "list", "ruleset"))
        return {" ".join(argv): _lasting(self.run(*argv)) for argv in listings}

    def close(self) -> None:
        try:
            self.apply(EMPTY, 99)
            self._thread.submit(self._kernel.close).result()
        finally:
            self._thread.shutdown()
            subprocess.run(["ip", "netns", "del", self.namespace], check=True)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path)
    try:
        yield made
    finally:
        made.close()


def rules_of(host: Host) -> list[str]:
    return [line for line in host.ip("rule").splitlines() if "proto 77" in line]


def test_policy_rules_do_not_grow(host: Host) -> None:
    """The kernel lists as many rules of ours with 8 tunnels and 60 nodes as with 1 tunnel and 2 nodes."""
    counts = []
    for nodes, tunnels in ((2, 1), (60, 8)):
        plan = settled_plans([*two_clusters(nodes, tunnels), *keys()])[ROME_GATEWAY]
        report = host.apply(plan, nodes)
        assert report.outcome == "applied", report
        assert host.differences(plan) == []
        counts.append(len(rules_of(host)))
    assert counts == [4, 4]
    assert len(host.ip("-brief", "link").splitlines()) == 60 + 8 + 1


@pytest.mark.parametrize("which", [ROME_GATEWAY, NODE], ids=str)
def test_a_restart_changes_nothing(host: Host, which: HostId) -> None:
    """An applier that starts anew reads the kernel and finds nothing to do."""
    plan = settled_plans([*two_clusters(), *keys()])[which]
    assert host.apply(plan).operations > 0
    before = host.state()
    host.restart()
    assert host.apply(plan).operations == 0
    assert host.state() == before


@pytest.mark.parametrize("which", [ROME_GATEWAY, NODE], ids=str)
def test_an_overlay_changes_whole_or_not_at_all(host: Host, which: HostId) -> None:
    """With Geneve in the kernel, all links are made again with what lies on them; without, the host keeps its VXLAN links and says why."""
    items = [*two_clusters(), *keys()]
    before = settled_plans(items)[which]
    after = settled_plans([replace(item, overlay="geneve") if item.ref == "Cluster/rome/rome" else item for item in items])[which]
    assert host.apply(before).outcome == "applied"
    (unit,) = host.apply(after, 2).units
    if unit.outcome == "applied":
        assert host.differences(after) == []
        assert host.ip("-o", "link", "show", "type", "geneve")
        assert host.apply(before, 3).outcome == "applied"
    else:
        assert unit.outcome == "degraded"
        assert "this host's kernel has no geneve; load the module geneve" in unit.error
    assert host.differences(before) == []
    assert "geneve" not in host.ip("-d", "link")


def test_removal_leaves_what_was_there(host: Host) -> None:
    """After apply and removal the namespace is as before, with somebody else's table, rule and routes in it all along."""
    host.run("nft", "add table inet other; add chain inet other c { type filter hook forward priority 0; }; add rule inet other c drop")
    host.ip("rule", "add", "pref", "500", "fwmark", "0x1", "lookup", "300")
    host.ip("route", "add", "blackhole", "10.61.7.0/24", "table", "300")
    host.ip("route", "add", "unreachable", "192.0.2.0/24")
    before = host.state()
    host.apply(settled_plans([*two_clusters(), *keys()])[ROME_GATEWAY])
    assert host.state() != before
    host.restart()
    report = host.apply(EMPTY, 2)
    assert report.outcome == "applied"
    assert host.state() == before


def test_a_foreign_link_in_the_way_stops_one_unit_only(host: Host) -> None:
    """Somebody else's link with our name is not touched: the unit says so, holds nothing, and comes when the link has gone."""
    host.ip("link", "add", "mo.gateway", "type", "bridge")
    plan = settled_plans(two_clusters())[NODE]
    report = host.apply(plan)
    (unit,) = report.units
    assert unit.outcome == "degraded"
    assert "mo.gateway" in unit.error
    assert rules_of(host) == []
    assert "unreachable 10.61.0.0/16" in host.ip("route")
    host.ip("link", "del", "mo.gateway")
    assert host.apply(plan).outcome == "applied"


def _lasting(listing: str) -> str:
    """Without what the kernel puts on a link by itself, and for IPv6 only a while after the link is up."""
    return "\n".join(line for line in listing.splitlines() if not ("proto kernel" in line and ("fe80::" in line or "ff00::/8" in line)))
