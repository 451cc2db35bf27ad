"""The applier's core on a real kernel: whole plans, their size, restarts, and what is foreign."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from schemas.codec import decode, encode
from schemas.plan import HostPlan
from services.planner.names import overlay_link
from services.planner.state import HostId
from tests.hosts import LinuxHost
from tests.topologies import ROME_GATEWAY, keys, node, settled_plans, two_clusters

pytestmark = pytest.mark.privileged

NODE = HostId("rome", "worker-1")


@pytest.fixture
def host(tmp_path: Path) -> Iterator[LinuxHost]:
    namespace = f"mm-test-{os.getpid()}"
    subprocess.run(["ip", "netns", "add", namespace], check=True)
    try:
        made = LinuxHost(namespace, tmp_path)
        made.run("ip", "link", "set", "lo", "up")
        try:
            yield made
        finally:
            made.close()
    finally:
        subprocess.run(["ip", "netns", "del", namespace], check=True)


def rules_of(host: LinuxHost) -> list[str]:
    return [line for line in host.run("ip", "rule").splitlines() if "proto 77" in line]


@pytest.mark.any_kernel
def test_policy_rules_do_not_grow(host: LinuxHost) -> None:
    """The kernel lists as many rules of ours with 8 tunnels and 60 nodes as with 1 tunnel and 2 nodes."""
    counts = []
    for nodes, tunnels in ((2, 1), (60, 8)):
        plan = settled_plans([*two_clusters(nodes, tunnels), *keys()])[ROME_GATEWAY]
        report = host.apply(plan, nodes)
        assert report.outcome == "applied", report
        assert host.differences(plan) == []
        counts.append(len(rules_of(host)))
    assert counts == [4, 4]
    assert len(host.run("ip", "-brief", "link").splitlines()) == 60 + 8 + 1


@pytest.mark.parametrize("which", [ROME_GATEWAY, NODE], ids=str)
def test_a_restart_changes_nothing(host: LinuxHost, which: HostId) -> None:
    """An applier that starts anew reads the kernel and finds nothing to do."""
    plan = settled_plans([*two_clusters(), *keys()])[which]
    assert host.apply(plan).operations > 0
    before = host.listed()
    host.restart()
    assert host.apply(plan).operations == 0
    assert host.listed() == before


@pytest.mark.parametrize("which", [ROME_GATEWAY, NODE], ids=str)
def test_an_overlay_changes_whole_or_not_at_all(host: LinuxHost, which: HostId) -> None:
    """With Geneve in the kernel, all links are made again with what lies on them; without, the host keeps its VXLAN links and says why."""
    items = [*two_clusters(), *keys()]
    before = settled_plans(items)[which]
    after = settled_plans([replace(item, overlay="geneve") if item.ref == "Cluster/rome/rome" else item for item in items])[which]
    assert host.apply(before).outcome == "applied"
    (unit,) = host.apply(after, 2).units
    if unit.outcome == "applied":
        assert host.differences(after) == []
        assert host.run("ip", "-o", "link", "show", "type", "geneve")
        assert host.apply(before, 3).outcome == "applied"
    else:
        assert unit.outcome == "degraded"
        assert "this host's kernel has no geneve; load the module geneve" in unit.error
    assert host.differences(before) == []
    assert "geneve" not in host.run("ip", "-d", "link")


def test_removal_leaves_what_was_there(host: LinuxHost) -> None:
    """After apply and removal the namespace is as before, with somebody else's table, rule and routes in it all along."""
    host.run("nft", "add table inet other; add chain inet other c { type filter hook forward priority 0; }; add rule inet other c drop")
    host.run("ip", "rule", "add", "pref", "500", "fwmark", "0x1", "lookup", "300")
    host.run("ip", "route", "add", "blackhole", "10.61.7.0/24", "table", "300")
    host.run("ip", "route", "add", "unreachable", "192.0.2.0/24")
    before = host.listed()
    assert host.apply(settled_plans([*two_clusters(), *keys()])[ROME_GATEWAY]).outcome == "applied"
    assert host.listed() != before
    host.restart()
    host.empty()
    assert host.listed() == before


def test_a_foreign_link_in_the_way_stops_one_unit_only(host: LinuxHost) -> None:
    """Somebody else's link with our name is not touched: the unit says so, holds nothing, and comes when the link has gone."""
    host.run("ip", "link", "add", "mo.gateway", "type", "bridge")
    plan = settled_plans(two_clusters())[NODE]
    report = host.apply(plan)
    (unit,) = report.units
    assert unit.outcome == "degraded"
    assert "mo.gateway" in unit.error
    assert rules_of(host) == []
    assert "unreachable 10.61.0.0/16" in host.run("ip", "route")
    host.run("ip", "link", "del", "mo.gateway")
    assert host.apply(plan).outcome == "applied"


def test_links_of_long_names_and_of_names_that_fill_the_limit(host: LinuxHost) -> None:
    """Nodes whose names are equal in their first 15 bytes, one that just fits and one that just does not: each has its own link."""
    names = ("aws-common-us-east-1", "aws-common-us-east-2", "twelve-bytes", "thirteen-byte", "ip-10-0-1-23.eu-west-1.compute.internal")
    hosts = [node(name, 20 + number) for number, name in enumerate(names)]
    items = [item for item in two_clusters(0) if item.kind != "Endpoint"]
    plan = settled_plans([*items, *hosts, *keys()])[ROME_GATEWAY]
    assert host.apply(plan).outcome == "applied"
    links = {line.split(": ")[1].split("@")[0] for line in host.run("ip", "-o", "link", "show", "type", "vxlan").splitlines()}
    assert links == {overlay_link(name) for name in names}
    assert "mo.twelve-bytes" in links
    assert len(links) == len(names)
    assert host.differences(plan) == []


@pytest.mark.parametrize("old", ["mo.old-scheme", "liqo.n556fkng95"])
@pytest.mark.parametrize("restarted", [False, True], ids=["running", "restarted"])
def test_links_of_an_earlier_naming_go_when_those_of_the_new_one_come(host: LinuxHost, old: str, restarted: bool) -> None:
    """The kernel takes no second link of the same far end and number: the old one, known by its alias, goes in the same turn."""
    plan = settled_plans([*two_clusters(1), *keys()])[ROME_GATEWAY]
    before = decode(encode(plan).replace(b"mo.worker-1", old.encode()), HostPlan)
    assert host.apply(before).outcome == "applied"
    assert old in host.run("ip", "-brief", "link")
    if restarted:
        host.restart()
    assert host.apply(plan, 2).outcome == "applied"
    assert old not in host.run("ip", "-brief", "link")
    assert host.differences(plan) == []
