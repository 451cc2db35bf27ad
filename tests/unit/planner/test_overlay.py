"""Overlays: what a cluster's choice of one makes of its hosts' plans, and what a change of it touches."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from schemas.host_objects import GeneveLink, NftChain, OverlayLink, VxlanLink
from schemas.plan import HostPlan, diff_units
from schemas.topology import Topology
from services.cli.render import plan_text
from services.planner.core import Core
from services.planner.state import HostId
from tests.topologies import ROME_GATEWAY, cluster, keys, peering, said, settled_plans, tell, two_clusters

NODE = HostId("rome", "worker-1")


def with_geneve(home: str = "rome") -> list[Topology]:
    """Two clusters, of which one has Geneve."""
    return [replace(item, overlay="geneve") if item.ref == f"Cluster/{home}/{home}" else item for item in [*two_clusters(), *keys()]]


def links(plan: HostPlan) -> list[VxlanLink | GeneveLink]:
    return [item for item in plan.objects().values() if isinstance(item, OverlayLink)]


def test_a_cluster_has_the_overlay_that_it_asks_for() -> None:
    """All of its links are of that kind, with the port of it; those of the cluster at the other end are as they were."""
    plans, before = settled_plans(with_geneve()), settled_plans([*two_clusters(), *keys()])
    for host, plan in plans.items():
        assert links(plan)
        if host.cluster == "rome":
            assert {(type(item), item.port) for item in links(plan)} == {(GeneveLink, 6081)}
        else:
            assert plan == before[host]


def test_both_ends_of_a_geneve_link_agree() -> None:
    """The two ends have one id and MTU, each other's address, and different Ethernet addresses; the MTU is VXLAN's."""
    plans = settled_plans(with_geneve())
    here, there = plans[ROME_GATEWAY].objects()["link mo.worker-1"], plans[NODE].objects()["link mo.gateway"]
    assert isinstance(here, GeneveLink)
    assert isinstance(there, GeneveLink)
    assert (here.vni, here.mtu) == (there.vni, there.mtu)
    assert (here.remote, there.remote) == ("172.18.0.11", "172.18.0.10")
    assert here.mac != there.mac
    other = settled_plans(two_clusters())[NODE].objects()["link mo.gateway"]
    assert isinstance(other, VxlanLink)
    assert (other.mtu, other.vni, other.mac) == (there.mtu, there.vni, there.mac)


@pytest.mark.parametrize("host", [ROME_GATEWAY, NODE], ids=str)
def test_a_change_of_overlay_touches_links_and_what_names_their_port(host: HostId) -> None:
    """Addresses, routes, rules, tunnels and translations stay; in nftables only the chains that leave outer packets untracked differ."""
    before, after = settled_plans([*two_clusters(), *keys()])[host], settled_plans(with_geneve())[host]
    (unit,) = diff_units(before.units, after.units)
    assert unit.drop == ()
    changed = [entry.object for entry in unit.put]
    assert {item.name for item in changed if isinstance(item, NftChain)} == {"notrack_in", "notrack_out"}
    assert all(isinstance(item, GeneveLink | NftChain) for item in changed)


def test_a_change_of_overlay_reaches_the_hosts_of_that_cluster_alone() -> None:
    """The other cluster's hosts get no plan, and the change back gives the plans of the beginning."""
    core = Core()
    tell(core, [*two_clusters(), *keys()])
    core.published.update({step.host: step.plan for step in core.steps()})
    first = dict(core.published)
    for number, overlay in enumerate(("geneve", "vxlan"), 100):
        core.hear([said(cluster("rome", overlay=overlay), number)])
        steps = {step.host: step.plan for step in core.steps()}
        assert {host.cluster for host in steps} == {"rome"}
        core.published.update(steps)
    assert core.published == first


@pytest.mark.parametrize("port,overlay", [(4789, "vxlan"), (4730, "vxlan"), (6081, "geneve"), (6018, "geneve")])
def test_tunnels_keep_away_from_the_ports_of_both_overlays(port: int, overlay: str) -> None:
    """A peering whose tunnels could take an overlay's port is refused, whichever overlay its clusters have now."""
    core = Core()
    tell(core, [item for item in two_clusters() if item.kind != "Peering"])
    (refusal,) = core.hear([said(peering(port=port), 100)]).refused
    assert (refusal.field, f"that of {overlay} overlays" in refusal.reason) == ("$.port", True)


def test_a_person_sees_the_link_that_would_be_made() -> None:
    """The offline plan has the lines for ``ip``: a Geneve device takes its MTU once it is there."""
    lines = plan_text(settled_plans(with_geneve())[NODE]).splitlines()
    (made,) = [line for line in lines if "type geneve" in line]
    assert made.startswith("ip link add mo.gateway address 02:4d:02:")
    assert made.endswith("remote 172.18.0.10 dstport 6081")
    assert "ip link set mo.gateway mtu 1450 up" in lines
    assert not any("4789" in line for line in lines)
