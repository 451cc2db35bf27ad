"""A live change of overlay on the kernel in memory: links are made again with what lies on them, and a host without Geneve says so."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from schemas.host_objects import GeneveLink, LinkAddress, Route, VxlanLink
from schemas.plan import HostPlan
from services.applier.core import Applier
from services.applier.steps import order
from services.kernel.fake import FakeHost, FakeKernel
from services.kernel.transaction import changes, repairs
from services.planner.state import HostId
from tests.topologies import ROME_GATEWAY, keys, settled_plans, two_clusters

ITEMS = [*two_clusters(), *keys()]
VXLAN = settled_plans(ITEMS)
GENEVE = settled_plans([replace(item, overlay="geneve") if item.ref == "Cluster/rome/rome" else item for item in ITEMS])
HOSTS = [ROME_GATEWAY, HostId("rome", "worker-1")]


def holds(host: FakeHost, plan: HostPlan) -> bool:
    """True when reading the kernel finds nothing to do."""
    kernel, objects = FakeKernel(host), plan.objects()
    return repairs(objects, kernel.reference(objects), kernel.read(objects)) == []


@pytest.mark.parametrize("restarted", [False, True], ids=["from memory", "after a restart"])
@pytest.mark.parametrize("which", HOSTS, ids=str)
def test_an_overlay_changes_there_and_back(which: HostId, restarted: bool) -> None:
    """Each time one turn ends with the whole plan in the kernel: links of the other kind, their addresses and routes with them."""
    host = FakeHost()
    one = Applier(FakeKernel(host), lambda: 0.0)
    for number, plans in enumerate((VXLAN, GENEVE, VXLAN), 1):
        one = Applier(FakeKernel(host), lambda: 0.0) if restarted else one
        assert one.apply(plans[which], 1, number).outcome == "applied"
        assert holds(host, plans[which])


def test_links_come_before_what_lies_on_them() -> None:
    """nftables first, then each link in its new form, then its address, then the routes over it."""
    before, after = VXLAN[ROME_GATEWAY].objects(), GENEVE[ROME_GATEWAY].objects()
    steps = order(changes(before, after), before, after, ())
    assert not steps.leave
    assert not steps.stage
    assert not steps.remove
    assert {change.subject.layer for change in steps.commit} == {"nft"}
    layers = [change.subject.layer for change in steps.connect]
    assert layers == sorted(layers, key=("link", "address", "route").index)
    replaced = [change for change in steps.connect if change.subject.layer == "link"]
    assert all(isinstance(change.old, VxlanLink) and isinstance(change.new, GeneveLink) for change in replaced)
    again = {change.key for change in steps.connect if isinstance(change.new, LinkAddress | Route)}
    on_links = {
        key
        for key, item in after.items()
        if (isinstance(item, LinkAddress) and item.link.startswith("mo."))
        or (isinstance(item, Route) and any(hop.link.startswith("mo.") for hop in item.hops))
    }
    assert again == on_links


@pytest.mark.parametrize("which", HOSTS, ids=str)
def test_a_host_without_geneve_keeps_what_it_has_and_says_why(which: HostId) -> None:
    """The unit stays at its old version, whole, and is degraded with a text that says what to do; it comes when the kernel has Geneve."""
    host = FakeHost(geneve=False)
    one = Applier(FakeKernel(host), lambda: 0.0)
    one.apply(VXLAN[which], 1, 1)
    (unit,) = one.apply(GENEVE[which], 1, 2).units
    assert unit.outcome == "degraded"
    assert "has no geneve; load the module geneve" in unit.error
    assert unit.held == VXLAN[which].digests()[unit.unit]
    assert holds(host, VXLAN[which])
    host.geneve = True
    assert one.apply(GENEVE[which], 1, 2).outcome == "applied"
    assert holds(host, GENEVE[which])
