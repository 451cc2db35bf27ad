"""Two clusters on a kernel with WireGuard: packets of pods through tunnels and overlays in both directions, and what changes under them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Literal

import msgspec
import pytest

from schemas.topology import Cluster, Gateway, Node, Peering, Pod, Topology
from services.planner import names
from tests.real_kernel.inside.mesh import Mesh
from tests.topologies import example

pytestmark = pytest.mark.privileged


def small() -> list[Topology]:
    """The example with one node and one pod in each cluster and two tunnels."""
    items = example()
    pods = {item.cluster: item for item in items if isinstance(item, Pod)}
    nodes = {(item.cluster, item.node) for item in pods.values()}
    kept = [item for item in items if isinstance(item, Cluster | Gateway | Peering)]
    kept += [item for item in items if isinstance(item, Node) and (item.cluster, item.name) in nodes]
    return [*kept, *pods.values()]


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    made = Mesh(tmp_path_factory.mktemp("mesh"), small())
    try:
        made.start()
        made.publish(*made.topology.values())
        made.await_packets()
        yield made
    finally:
        made.stop()


def kinds(mesh: Mesh, cluster: str) -> set[str]:
    """The kinds of links that the cluster's gateway has, but for the lab's own."""
    links = json.loads(mesh.run(cluster, "gateway", "ip", "-j", "-d", "link"))
    return {link["linkinfo"]["info_kind"] for link in links if "linkinfo" in link} - {"veth"}


def test_pods_talk_both_ways_through_the_kernels_own_tunnels(mesh: Mesh) -> None:
    """Every packet arrives with the addresses that the topology says, and the tunnels are the kernel's WireGuard devices."""
    mesh.await_packets()
    for cluster in ("rome", "milan"):
        assert kinds(mesh, cluster) == {"vxlan", "wireguard"}
        carried = [line.split() for line in mesh.run(cluster, "gateway", "wg", "show", "all", "transfer").splitlines()]
        assert all(line[0].startswith(names.TUNNEL_LINK_PREFIX) for line in carried)
        assert sum(int(line[2]) for line in carried) > 0
        assert sum(int(line[3]) for line in carried) > 0


def test_what_is_taken_away_by_hand_comes_back(mesh: Mesh) -> None:
    """A gateway whose tables of nftables were deleted is repaired by its own auditor and applier, and packets flow again."""
    tables = [line for line in mesh.run("milan", "gateway", "nft", "list", "tables").splitlines() if "meshmark." in line]
    assert tables
    for table in tables:
        mesh.run("milan", "gateway", "nft", "delete", *table.split())
    mesh.eventually(
        lambda: all(table in mesh.run("milan", "gateway", "nft", "list", "tables") for table in tables), lambda: "the tables are back"
    )
    mesh.await_packets()


@pytest.mark.parametrize("overlay", ["geneve", "vxlan"])
def test_a_cluster_changes_its_overlay_while_it_runs(mesh: Mesh, overlay: Literal["geneve", "vxlan"]) -> None:
    """From VXLAN to Geneve and back: the links of that cluster are made again under their names, and packets flow through them."""
    rome = mesh.topology["Cluster/rome/rome"]
    assert isinstance(rome, Cluster)
    mesh.publish(msgspec.structs.replace(rome, overlay=overlay))
    mesh.eventually(lambda: kinds(mesh, "rome") == {overlay, "wireguard"}, lambda: f"rome has {overlay} links")
    mesh.await_packets()
    assert kinds(mesh, "milan") == {"vxlan", "wireguard"}
    links = {link["ifname"]: link for link in json.loads(mesh.run("rome", "gateway", "ip", "-j", "-s", "-d", "link"))}
    carried = [link for name, link in links.items() if name.startswith(names.OVERLAY_LINK_PREFIX)]
    assert all(link["stats64"]["rx"]["packets"] and link["stats64"]["tx"]["packets"] for link in carried)


def test_nothing_of_ours_stays_when_the_peering_is_gone(mesh: Mesh) -> None:
    """Every host is as it was before: no link, no rule, no route and no table of ours."""
    ref = next(ref for ref, item in mesh.topology.items() if isinstance(item, Peering))
    mesh.delete(ref)
    for host in (item for item in mesh.topology.values() if isinstance(item, Gateway | Node)):
        mesh.eventually(lambda host=host: not left(mesh, host), lambda host=host: f"{host.ref} has {left(mesh, host)}")  # type: ignore[misc]


def left(mesh: Mesh, host: Gateway | Node) -> list[str]:
    """What a host holds of ours, as lines."""
    listings = (["ip", "-o", "link"], ["ip", "rule"], ["ip", "route", "show", "table", "all"], ["nft", "list", "tables"])
    words = ("proto 77", "meshmark", f" {names.OVERLAY_LINK_PREFIX}", f" {names.TUNNEL_LINK_PREFIX}")
    lines = [line for argv in listings for line in mesh.run(host.cluster, host.name, *argv).splitlines()]
    return [line for line in lines if any(word in line for word in words)]
