"""Which tracked flows contradict the NAT that is wanted."""

from __future__ import annotations

import pytest

from schemas.host_objects import NftChain, NftElement
from schemas.topology import IpMapping
from schemas.values import Address, Name
from services.applier.flows import stale_flows, touches_nat
from services.cli.files import load
from services.kernel.port import Flow
from services.kernel.transaction import Change
from services.planner.state import HostId
from tests.topologies import EXAMPLES, ROME_GATEWAY, dual_stack, settled_plans, two_clusters

PLANS = settled_plans(two_clusters())
GATEWAY, NODE = PLANS[ROME_GATEWAY].objects(), PLANS[HostId("rome", "worker-1")].objects()


def flow(source: str, destination: str, reply_source: str, reply_destination: str) -> Flow:
    return Flow(17, Address(source), Address(destination), Address(reply_source), Address(reply_destination), 1000, 2000)


def element(name: str, key: str) -> NftElement:
    return next(item for item in GATEWAY.values() if isinstance(item, NftElement) and (item.set, item.element) == (name, key))


RIGHT = {
    "outgoing, translated": flow("10.200.1.10", "10.61.2.10", "10.200.2.10", "10.200.1.10"),
    "incoming, translated": flow("10.200.2.10", "10.200.1.10", "10.200.1.10", "10.61.2.10"),
    "the host's own": flow("172.18.0.10", "169.254.1.1", "169.254.1.1", "172.18.0.10"),
}
WRONG = {
    "outgoing, from before the translation": flow("10.200.1.10", "10.61.2.10", "10.61.2.10", "10.200.1.10"),
    "outgoing, from another translation": flow("10.200.1.10", "10.61.2.10", "10.99.2.10", "10.200.1.10"),
    "incoming, from before the translation": flow("10.200.2.10", "10.200.1.10", "10.200.1.10", "10.200.2.10"),
    "incoming, from another translation": flow("10.200.2.10", "10.200.1.10", "10.200.1.10", "10.66.2.10"),
}


@pytest.mark.parametrize("case", RIGHT)
def test_what_is_right_stays(case: str) -> None:
    """A flow whose translation is the wanted one is kept, whatever changes beside it."""
    assert stale_flows([], GATEWAY, [RIGHT[case]]) == []


@pytest.mark.parametrize("case", WRONG)
def test_what_contradicts_goes(case: str) -> None:
    """A flow whose translation is another than the wanted one is dropped, also when a crash lost what changed."""
    assert stale_flows([], GATEWAY, [WRONG[case]]) == [WRONG[case]]


def test_a_removed_translation_takes_its_flows_along() -> None:
    """Flows to a prefix that is not translated any more are dropped, though no wanted map speaks of them."""
    old = NftElement(element("to_real", "10.61.0.0/16").table, "to_real", "10.91.0.0/16", "10.200.0.0/16")
    gone = flow("10.200.1.10", "10.91.2.10", "10.200.2.10", "10.200.1.10")
    assert stale_flows([Change(old, None)], GATEWAY, [gone, *RIGHT.values()]) == [gone]


def test_a_foreign_element_of_any_form_is_no_trouble() -> None:
    """Somebody's range in our map is removed like anything else that is not planned."""
    foreign = NftElement(element("to_real", "10.61.0.0/16").table, "to_real", "10.99.0.0-10.99.0.4", "10.1.0.0-10.1.0.4")
    assert stale_flows([Change(foreign, None)], GATEWAY, RIGHT.values()) == []


def test_a_node_judges_flows_to_the_remote_only() -> None:
    """On a node a pod's source must be untouched on the way to the remote cluster; to elsewhere the CNI may do as it likes."""
    masqueraded = flow("10.200.1.10", "10.61.2.10", "10.61.2.10", "172.18.0.11")
    kept = flow("10.200.1.10", "10.61.2.10", "10.61.2.10", "10.200.1.10")
    elsewhere = flow("10.200.1.10", "198.51.100.7", "198.51.100.7", "172.18.0.11")
    assert stale_flows([], NODE, [masqueraded, kept, elsewhere]) == [masqueraded]


def test_each_family_is_judged_by_its_own_maps() -> None:
    """Where both are in use, a right flow of either stays and a wrong one goes, on the gateway and on a node."""
    plans = settled_plans(dual_stack())
    six = flow("fd00:200:0:1::10", "fd00:61:0:2::10", "fd00:200:0:2::10", "fd00:200:0:1::10")
    wrong = flow("fd00:200:0:1::10", "fd00:61:0:2::10", "fd00:61:0:2::10", "fd00:200:0:1::10")
    assert stale_flows([], plans[ROME_GATEWAY].objects(), [six, wrong, *RIGHT.values(), *WRONG.values()]) == [wrong, *WRONG.values()]
    masqueraded = flow("fd00:200:0:1::10", "fd00:61:0:2::10", "fd00:61:0:2::10", "2001:db8:18::11")
    elsewhere = flow("fd00:200:0:1::10", "2001:db8::7", "2001:db8::7", "2001:db8:18::11")
    assert stale_flows([], plans[HostId("rome", "worker-1")].objects(), [wrong, masqueraded, elsewhere]) == [masqueraded]


def test_the_source_of_a_flow_is_judged_on_its_way_only() -> None:
    """What a node sends under its overlay address gets the shared one on its way out; what it says to the gateway itself does not."""
    out = ("10.80.7.8", "10.61.2.10", "10.200.2.10")
    right, stale = flow(*out, "10.70.0.0"), flow(*out, "10.75.0.0")
    pinged = flow("10.80.7.8", "10.80.5.5", "10.80.5.5", "10.80.7.8")
    assert stale_flows([], GATEWAY, [right, stale, pinged]) == [stale]


def test_a_mapped_flow_is_judged_by_both_its_addresses() -> None:
    """From outside to the real address, and from the far cluster's address to what it is here."""
    mapping = IpMapping(name=Name("map"), cluster=Name("rome"), real=Address("192.0.2.50"), external=Address("10.70.99.4"))
    gateway = settled_plans([*two_clusters(), mapping])[ROME_GATEWAY].objects()
    right = flow("10.200.1.10", "10.70.99.4", "192.0.2.50", "10.61.1.10")
    wrong = [
        flow("10.200.1.10", "10.70.99.4", "192.0.2.51", "10.61.1.10"),
        flow("10.200.1.10", "10.70.99.4", "192.0.2.50", "10.200.1.10"),
        flow("192.0.2.50", "10.61.1.10", "10.200.1.10", "192.0.2.50"),
    ]
    assert stale_flows([], gateway, [right, *wrong, flow("192.0.2.50", "172.18.0.10", "172.18.0.10", "192.0.2.50")]) == wrong


def test_a_node_judges_what_no_pod_sent() -> None:
    """A flow of its own that has another source than the one in force begins again under that."""
    element = next(item for item in NODE.values() if isinstance(item, NftElement) and item.set == "others")
    right, stale = (flow("172.18.0.11", "10.61.2.10", "10.61.2.10", source) for source in (element.value, "10.80.7.8"))
    assert stale_flows([], NODE, [right, stale, flow("172.18.0.11", "172.18.0.12", "172.18.0.12", "172.18.0.11")]) == [stale]


OUTWARDS = settled_plans(load([EXAMPLES / "egress.yaml"]))
LEADS, LETS_OUT = (OUTWARDS[HostId("rome", f"worker-{number}")].objects() for number in (1, 2))


def test_flows_of_pods_that_leave_through_another_node_keep_their_source_until_there() -> None:
    """What the CNI had masqueraded before begins again; what stays inside, or is of no chosen pod, is left alone.

    On the exit node, the source is the policy's.
    """
    kept, masqueraded = (flow("10.200.1.10", "192.0.2.50", "192.0.2.50", source) for source in ("10.200.1.10", "172.18.0.11"))
    others = [
        flow("10.200.3.10", "192.0.2.50", "192.0.2.50", "172.18.0.11"),
        flow("10.200.1.10", "10.200.3.10", "10.200.3.10", "172.18.0.11"),
    ]
    to_node = flow("10.200.1.10", "172.18.0.13", "172.18.0.13", "172.18.0.11")
    assert stale_flows([], LEADS, [kept, masqueraded, *others, to_node]) == [masqueraded]
    let_out = flow("10.200.1.10", "192.0.2.50", "192.0.2.50", "172.18.0.12")
    assert stale_flows([], LETS_OUT, [let_out, kept, *others]) == [kept]


def test_a_policy_with_destinations_judges_flows_to_these_only() -> None:
    """To the bank the pod's address is kept up to the exit node; elsewhere the CNI masquerades it as ever."""
    bank, elsewhere = (flow("10.200.2.10", to, to, "172.18.0.12") for to in ("198.51.100.7", "192.0.2.50"))
    assert stale_flows([], LETS_OUT, [bank, elsewhere]) == [bank]


def test_while_a_policy_moves_flows_are_right_that_are_led_or_let_out() -> None:
    """The node that is to let pods out, or still does, leads its own ones meanwhile: neither kind of flow begins again, others do."""
    leads = [item for item in LEADS.values() if isinstance(item, NftElement) and item.set == "kept"]
    moving = {**LETS_OUT, **{item.key: item for item in leads}}
    led, let_out, masqueraded = (
        flow("10.200.1.10", "192.0.2.50", "192.0.2.50", source) for source in ("10.200.1.10", "172.18.0.12", "172.18.0.99")
    )
    assert stale_flows([], moving, [led, let_out, masqueraded]) == [masqueraded]
    assert stale_flows([], LETS_OUT, [led, let_out]) == [led]


@pytest.mark.parametrize("last", [False, True])
def test_a_policy_that_goes_takes_its_flows_along(last: bool) -> None:
    """Under the pod's own address they would go on by another way, on which nobody answers that; also when all of it goes at once."""
    kept = flow("10.200.1.10", "192.0.2.50", "192.0.2.50", "10.200.1.10")
    inside = flow("10.200.1.10", "10.200.3.10", "10.200.3.10", "10.200.1.10")
    nft = [
        item
        for item in LEADS.values()
        if isinstance(item, NftElement | NftChain) and (item.table, item.layer) == ("meshmark.mesh.rome", "nft")
    ]
    gone = [item for item in nft if last or (isinstance(item, NftElement) and item.set == "kept" and item.element == "10.200.1.0/24")]
    left = {key: item for key, item in LEADS.items() if item not in gone}
    changes = [Change(item, None) for item in gone]
    assert touches_nat(changes, left)
    assert stale_flows(changes, left, [kept, inside]) == [kept]


def test_only_changes_of_translations_make_flows_stale() -> None:
    """A change of a set that decides no translation is no reason to look at flows."""
    assert touches_nat([Change(None, element("to_real", "10.61.0.0/16"))], GATEWAY)
    assert not touches_nat([Change(None, element("sources", "10.200.0.0/16"))], GATEWAY)
