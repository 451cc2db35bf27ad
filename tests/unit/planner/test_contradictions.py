"""Objects that contradict each other: whichever comes first stays, the other is refused, both are named, and both orders say so."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from schemas.topology import Peering, PublicKey, Topology
from schemas.values import Address, Endpoint, Name, Prefix
from services.planner.core import Core
from services.planner.names import overlay_link
from tests.firewalls import one_chain, rule
from tests.topologies import ROME_KEY, cluster, dual_stack, gateway, node, peering, pod, said, tell

LONG = "ip-10-0-1-23.eu-west-1.compute.internal"
FAR = cluster("milan", pod_prefixes=(Prefix("10.210.0.0/16"),))
APART: list[Topology] = [cluster("rome"), FAR, gateway("rome"), gateway("milan"), node("worker-1", 1), node("worker-2", 2)]
"""Clusters whose pods differ, with their gateways, not joined."""


def end(place: int, **changes: object) -> Peering:
    """The peering with another end."""
    ends = list(peering().ends)
    ends[place] = replace(ends[place], **changes)
    return peering(ends=tuple(ends))


def bare() -> Peering:
    return peering(ends=tuple(replace(one, remap_pods=(), remap_external=()) for one in peering().ends))


def second(**changes: object) -> Peering:
    """Another peering of the two clusters, by gateways of its own."""
    ends = tuple(
        replace(
            one,
            gateway=Name("second"),
            remap_pods=(Prefix(f"10.{67 + place}.0.0/16"),),
            remap_external=(Prefix(f"10.{97 + place}.0.0/16"),),
        )
        for place, one in enumerate(peering().ends)
    )
    return replace(peering(ends=(replace(ends[0], **changes), ends[1])), name=Name("second"))


def key(host: str, home: str = "rome") -> PublicKey:
    return PublicKey(name=Name(host), cluster=Name(home), key=ROME_KEY)


PAIRS: dict[str, tuple[Topology, Topology, str]] = {
    "far pods on own pods, without a remap": (
        bare(),
        cluster("rome", pod_prefixes=(Prefix("10.200.0.0/16"), Prefix("10.210.3.0/24"))),
        "10.210.0.0/16 overlaps 10.210.3.0/24",
    ),
    "far pods on own overlay addresses": (
        bare(),
        cluster("rome", internal_prefixes=(Prefix("10.80.0.0/16"), Prefix("fd00:80::/64")), external_prefixes=(Prefix("10.210.9.0/24"),)),
        "10.210.0.0/16 overlaps 10.210.9.0/24",
    ),
    "a remap of another length": (
        peering(),
        cluster("milan", pod_prefixes=(Prefix("10.210.0.0/17"),)),
        "differ in length; a remap keeps the host part, so write a /17",
    ),
    "a remap of another family": (
        end(0, remap_external=()),
        cluster("milan", pod_prefixes=(Prefix("fd00:210::/48"),), internal_prefixes=(Prefix("10.81.0.0/16"), Prefix("fd00:81::/64"))),
        "are of two families",
    ),
    "too few remaps": (
        peering(),
        cluster("milan", pod_prefixes=(Prefix("10.210.0.0/16"), Prefix("10.211.0.0/16"))),
        "1 prefixes for the 2 of Cluster/milan/milan",
    ),
    "a node inside a remap": (peering(), node("x", 7, addresses=(Address("10.61.9.1"),)), "holds the underlay address 10.61.9.1"),
    "a node inside what is remapped": (
        peering(),
        node("x", 7, addresses=(Address("10.210.9.1"),)),
        "the underlay address 10.210.9.1",
    ),
    "a gateway inside its own end's remap": (peering(), gateway("rome", address=Address("10.61.0.9")), "the underlay address 10.61.0.9"),
    "a gateway inside the far end's remap": (peering(), gateway("rome", address=Address("10.63.0.9")), "the underlay address 10.63.0.9"),
    "a gateway inside the far cluster's pods": (
        peering(),
        gateway("milan", address=Address("10.200.0.9")),
        "holds the underlay address 10.200.0.9",
    ),
    "an endpoint inside the cluster's pods": (
        end(1, endpoint=Endpoint("10.199.0.9:51840")),
        cluster("rome", external_prefixes=(Prefix("10.199.0.0/16"),)),
        "10.199.0.0/16 of Cluster/rome/rome holds the underlay address 10.199.0.9",
    ),
    "a node inside its cluster": (
        node("x", 7, addresses=(Address("10.99.0.7"),)),
        cluster("rome", external_prefixes=(Prefix("10.99.0.0/16"),)),
        "10.99.0.7 lies inside 10.99.0.0/16",
    ),
    "one prefix at two peerings": (peering(), second(remap_pods=(Prefix("10.62.0.0/16"),)), "10.62.0.0/16"),
    "a gateway of two peerings": (peering(), replace(second(), ends=(peering().ends[0], second().ends[1])), "a gateway serves one peering"),
    "one key at two hosts": (key("gateway"), key("worker-1"), "every host has a key of its own"),
    "one key at both ends": (key("gateway"), key("gateway", "milan"), "every host has a key of its own"),
    "one pod prefix at two nodes": (
        node("x", 7),
        node("y", 8, pod_prefixes=(Prefix("10.200.7.128/25"),)),
        "10.200.7",
    ),
    "one address at two pods": (pod("a", "worker-1", "10.200.1.9"), pod("b", "worker-2", "10.200.1.9"), "10.200.1.9 belongs to"),
    "one address at two hosts": (node("x", 7), gateway("rome", "y", 17), "the underlay address 172.18.0.17 is taken by"),
    "one name at a node and a gateway": (node("x", 7), gateway("rome", "x", 99), "nodes and gateways of a cluster share one name space"),
    "names that lead to one link": (
        node(LONG, 7),
        node(overlay_link(LONG).removeprefix("mo."), 8),
        "the name leads to the same link name as",
    ),
    "class bits of a gateway": (
        peering(),
        one_chain(rule(action={"action": "setMark", "value": 0xFF00})),
        "the bits 0xff00 of a mark say there where a packet goes",
    ),
}


def told(refusal) -> str:
    return f"{refusal.field}: {refusal.reason} ({refusal.other})"


@pytest.mark.parametrize("order", [1, -1], ids=["first", "last"])
@pytest.mark.parametrize("case", PAIRS)
def test_the_established_object_wins(case: str, order: int) -> None:
    """What was admitted stays as it is; what comes later is refused; copies of both, in any order, change nothing."""
    *pair, words = PAIRS[case]
    stays, goes = pair[::order]
    core = Core()
    base = [
        item
        for item in [*APART, gateway("rome", "second", 40), gateway("milan", "second", 40)]
        if item.ref != stays.ref or item.kind == "Cluster"
    ]
    assert tell(core, base).refused == []
    assert tell(core, [stays], first=50).refused == []
    before = dict(core.state.objects)
    (refusal,) = tell(core, [goes], first=60).refused
    assert f"{refusal.kind}/{refusal.cluster}/{refusal.name}" == goes.ref
    assert words in refusal.reason
    assert stays.ref.removeprefix(f"{stays.kind}/") in named(told(refusal))
    assert core.state.objects == before
    core.hear([said(stays, 50), said(goes, 60), said(stays, 50)])
    assert core.state.objects == before


def named(text: str) -> set[str]:
    """``cluster/name`` of all objects that a text names."""
    words = (word.strip(",;:()") for word in text.split())
    return {"/".join(word.split("/")[-2:]) for word in words if "/" in word}


V6 = {item.ref: item for item in dual_stack()}
MILAN, WORKER, EDGE, JOINT = (
    V6[ref] for ref in ("Cluster/milan/milan", "Node/milan/worker-2", "Gateway/milan/gateway", "Peering/rome/rome-milan")
)
V6_PAIRS: dict[str, tuple[Topology, Topology, str]] = {
    "tunnels too narrow for IPv6": (
        replace(MILAN, mtu=1350),
        replace(JOINT, ends=(JOINT.ends[0], replace(JOINT.ends[1], endpoint=Endpoint("[2001:db8::9]:51840")))),
        "so the MTU must be at least 1360",
    ),
    "an overlay too narrow for IPv6": (replace(MILAN, mtu=1340), WORKER, "so the MTU must be at least 1350"),
    "hosts that have no family in common": (replace(EDGE, addresses=(Address("172.18.1.10"),)), WORKER, "no family in common with"),
}


@pytest.mark.parametrize("order", [1, -1], ids=["first", "last"])
@pytest.mark.parametrize("case", V6_PAIRS)
def test_the_established_object_wins_of_both_families(case: str, order: int) -> None:
    """The same for what IPv6 asks for beyond IPv4: room, and somebody who speaks it."""
    *pair, words = V6_PAIRS[case]
    stays, goes = pair[::order]
    absent = {item.ref for item in pair if item.kind != "Cluster"}
    core = Core()
    tell(core, [item for item in V6.values() if item.kind not in ("Peering", "Endpoint") and item.ref not in absent])
    assert tell(core, [stays], first=50).refused == []
    before = dict(core.state.objects)
    (refusal,) = tell(core, [goes], first=60).refused
    assert words in refusal.reason
    assert stays.ref.removeprefix(f"{stays.kind}/") in named(told(refusal))
    assert core.state.objects == before
