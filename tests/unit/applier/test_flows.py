"""Which tracked flows a change of NAT makes stale."""

from __future__ import annotations

from schemas.plan import NftElement
from schemas.values import Address
from services.applier.flows import stale_flows, touches_nat
from services.kernel.port import Flow
from services.kernel.transaction import Change
from services.planner.state import HostId
from tests.topologies import ROME_GATEWAY, settled_plans, two_clusters

PLANS = settled_plans(two_clusters())
GATEWAY, NODE = PLANS[ROME_GATEWAY].objects(), PLANS[HostId("rome", "worker-1")].objects()


def flow(source: str, destination: str) -> Flow:
    return Flow(17, Address(source), Address(destination), Address(destination), Address(source), 1000, 2000)


OUTGOING = flow("10.200.1.10", "10.61.1.10")
INCOMING = flow("10.200.1.10", "10.200.2.10")
ELSEWHERE = flow("192.0.2.1", "198.51.100.7")


def element(objects: dict, name: str, key: str) -> NftElement:  # type: ignore[type-arg]
    return next(item for item in objects.values() if isinstance(item, NftElement) and (item.set, item.element) == (name, key))


def test_a_new_destination_translation_drops_flows_to_it() -> None:
    """Flows to the remapped prefix that began before its translation was there are dropped; others stay."""
    batch = [Change(None, element(GATEWAY, "to_real", "10.61.0.0/16"))]
    assert stale_flows(batch, GATEWAY, [OUTGOING, ELSEWHERE]) == [OUTGOING]


def test_a_changed_source_translation_drops_flows_from_it() -> None:
    """On the gateway a flow's source decides how the far side's address is shown."""
    item = element(GATEWAY, "to_seen", "10.200.0.0/16")
    batch = [Change(NftElement(item.table, item.set, item.element, "10.99.0.0/16"), item)]
    assert stale_flows(batch, GATEWAY, [INCOMING, ELSEWHERE]) == [
        INCOMING,
    ]


def test_a_node_drops_flows_to_the_remote_only() -> None:
    """On a node the destination decides: flows of pods to elsewhere are nobody's business."""
    batch = [Change(None, item) for item in NODE.values() if isinstance(item, NftElement)]
    elsewhere = flow("10.200.1.10", "198.51.100.7")
    assert stale_flows(batch, NODE, [OUTGOING, elsewhere]) == [OUTGOING]


def test_other_changes_touch_no_flow() -> None:
    """A change of a set that decides no translation leaves all flows alone."""
    batch = [Change(None, element(GATEWAY, "sources", "10.200.0.0/16"))]
    assert not touches_nat(batch, GATEWAY)
    assert stale_flows(batch, GATEWAY, [OUTGOING]) == []
