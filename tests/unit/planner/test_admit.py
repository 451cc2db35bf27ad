"""Admission: what is refused, why, and naming which field and object."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from schemas.topology import Node, PublicKey, Topology, WireguardSettings
from schemas.values import Address, Endpoint, Name, Prefix
from services.planner.admit import Problem, admit, admit_removal
from services.planner.state import State
from tests.topologies import ROME_KEY, cluster, dual_stack, gateway, keys, node, peering, pod, two_clusters


def established() -> State:
    return State([*two_clusters(), *keys()])


def end(place: int, **changes: object):
    item = peering()
    ends = list(item.ends)
    ends[place] = replace(ends[place], **changes)
    return replace(item, ends=tuple(ends))


def ends(place: int, **changes: object) -> dict[str, dict[str, object]]:
    """The change of one end of the example of both families."""
    peering_ends = list(dual_stack()[-1].ends)  # type: ignore[union-attr]
    peering_ends[place] = replace(peering_ends[place], **changes)
    return {"Peering_rome_rome_milan": {"ends": tuple(peering_ends)}}


REFUSED = {
    "remap of another length": (
        end(0, remap_pods=(Prefix("10.61.0.0/24"),)),
        "$.ends[0].remapPods[0]",
        "write a /16",
        "Cluster/milan/milan",
    ),
    "one remap too many": (
        end(1, remap_pods=(Prefix("10.63.0.0/16"), Prefix("10.65.0.0/16"))),
        "$.ends[1].remapPods",
        "give one for each",
        "Cluster/rome/rome",
    ),
    "overlap without a remap": (end(0, remap_pods=()), "$.ends[0].remapPods[0]", "overlaps 10.200.0.0/16", "Cluster/rome/rome"),
    "remap on own external prefix": (
        end(0, remap_external=(Prefix("10.70.0.0/16"),)),
        "$.ends[0].remapExternal[0]",
        "overlaps",
        "Cluster/rome/rome",
    ),
    "remap on own internal prefix": (
        end(0, remap_pods=(Prefix("10.80.0.0/16"),)),
        "$.ends[0].remapPods[0]",
        "overlaps",
        "Cluster/rome/rome",
    ),
    "both remaps equal": (end(0, remap_external=(Prefix("10.61.0.0/16"),)), "$.ends[0].remapExternal[0]", "overlaps 10.61.0.0/16", ""),
    "remap over the underlay": (end(0, remap_pods=(Prefix("172.18.0.0/16"),)), "$.ends[0]", "a loop", "Node/rome/worker-1"),
    "far endpoint inside the remap": (end(1, endpoint=Endpoint("10.61.0.9:51840")), "$.ends[0]", "a loop", "Gateway/milan/gateway"),
    "tunnel ports over the overlay's": (replace(peering(), port=4780), "$.port", "4789", ""),
    "unknown gateway": (end(0, gateway=Name("elsewhere")), "$.ends[0].gateway", "not known", "Gateway/rome/elsewhere"),
    "unknown cluster": (end(0, cluster=Name("turin")), "$.ends[0].cluster", "not known", "Cluster/turin/turin"),
    "gateway of another peering": (
        replace(peering(), name=Name("second")),
        "$.ends[0].gateway",
        "serves one peering",
        "Peering/rome/rome-milan",
    ),
    "node in no cluster": (node("x", 7, "turin"), "$.cluster", "not known", "Cluster/turin/turin"),
    "node named as a gateway": (node("gateway", 7), "$.name", "taken by Gateway/rome/gateway", "Gateway/rome/gateway"),
    "node with a taken address": (node("x", 7, addresses=(Address("172.18.0.11"),)), "$.addresses[0]", "taken", "Node/rome/worker-1"),
    "node inside its pod prefix": (node("x", 7, addresses=(Address("10.200.9.1"),)), "$.addresses[0]", "a loop", "Cluster/rome/rome"),
    "node at a multicast address": (node("x", 7, addresses=(Address("224.0.0.5"),)), "$.addresses[0]", "no host has", ""),
    "node at no address": (node("x", 7, addresses=(Address("0.0.0.0"),)), "$.addresses[0]", "no host has", ""),
    "node inside a remap": (node("x", 7, addresses=(Address("10.61.9.1"),)), "$.addresses[0]", "a loop", "Peering/rome/rome-milan"),
    "node prefix outside the cluster": (
        node("x", 7, pod_prefixes=(Prefix("10.9.0.0/24"),)),
        "$.podPrefixes[0]",
        "not inside",
        "Cluster/rome/rome",
    ),
    "node prefix of another node": (
        node("x", 7, pod_prefixes=(Prefix("10.200.1.0/25"),)),
        "$.podPrefixes[0]",
        "overlaps",
        "Node/rome/worker-1",
    ),
    "uplink named as our links": (node("x", 7, uplink=Name("mo.x")), "$.uplink", "cannot be an uplink", ""),
    "uplink of 16 bytes": (node("x", 7, uplink=Name("a" * 16)), "$.uplink", "cannot be an uplink", ""),
    "pod on no node": (pod("x", "nowhere", "10.200.1.11"), "$.node", "not known", "Node/rome/nowhere"),
    "pod outside the pod prefixes": (pod("x", "worker-1", "10.9.1.11"), "$.addresses[0]", "not inside", "Cluster/rome/rome"),
    "pod with a taken address": (
        pod("x", "worker-1", "10.200.1.10"),
        "$.addresses[0]",
        "belongs to Endpoint/rome/shop",
        "Endpoint/rome/shop",
    ),
    "key of another host": (
        PublicKey(name=Name("worker-1"), cluster=Name("rome"), key=ROME_KEY),
        "$.key",
        "of its own",
        "PublicKey/rome/gateway",
    ),
    "key of no host": (PublicKey(name=Name("x"), cluster=Name("rome"), key=ROME_KEY), "$.name", "not known", "Gateway/rome/x"),
    "cluster prefixes that overlap": (
        cluster("turin", external_prefixes=(Prefix("10.200.7.0/24"),)),
        "$.externalPrefixes[0]",
        "overlaps 10.200.0.0/16 ($.podPrefixes[0])",
        "",
    ),
    "pods on loopback": (cluster("turin", pod_prefixes=(Prefix("127.9.0.0/16"),)), "$.podPrefixes[0]", "no cluster may use", ""),
    "everything": (cluster("turin", pod_prefixes=(Prefix("0.0.0.0/0"),)), "$.externalPrefixes[0]", "overlaps", ""),
    "remap over the tunnels": (end(0, remap_pods=(Prefix("169.254.0.0/16"),)), "$.ends[0].remapPods[0]", "no cluster may use", ""),
    "internal prefix in use": (
        cluster("rome", internal_prefixes=(Prefix("10.90.0.0/16"),)),
        "$.internalPrefixes",
        "in use",
        "Cluster/rome/rome",
    ),
    "gateway inside the far remap": (gateway("rome", address=Address("10.63.0.9")), "$.addresses[0]", "a loop", "Peering/rome/rome-milan"),
    "internal prefix without room": (
        cluster("turin", internal_prefixes=(Prefix("10.9.0.0/30"),)),
        "$.internalPrefixes[0]",
        "too small",
        "",
    ),
    "packets in clear by the group of traces": (
        cluster("turin", wireguard=WireguardSettings(audit_group=5188)),
        "$.wireguard.auditGroup",
        "another number",
        "",
    ),
    "cluster change that breaks a remap": (
        cluster("milan", pod_prefixes=(Prefix("10.200.0.0/17"),)),
        "",
        "would no longer be valid",
        "Peering/rome/rome-milan",
    ),
}


IPV6_REFUSED = {
    "remap of the other family": (
        ends(0, remap_pods=(Prefix("fd00:61::/48"), Prefix("10.61.0.0/16"))),
        "$.ends[0].remapPods[0]",
        "of two families; they pair by index: write an IPv4 prefix",
        "Cluster/milan/milan",
    ),
    "endpoint of a family that the far gateway lacks": (
        {"Gateway_rome_gateway": {"addresses": (Address("172.18.0.10"),)}, **ends(1, endpoint=Endpoint("[2001:db8::9]:51840"))},
        "$.ends[1].endpoint",
        "have no family in common",
        "Gateway/rome/gateway",
    ),
    "tunnels too narrow for IPv6": (
        {"Cluster_milan_milan": {"mtu": 1350}, **ends(1, endpoint=Endpoint("[2001:db8::9]:51840"))},
        "$.ends[1].cluster",
        "take 80 of 1350 bytes and leave 1270; IPv6 needs 1280, so the MTU must be at least 1360",
        "Cluster/milan/milan",
    ),
    "overlay too narrow for IPv6": (
        {"Cluster_rome_rome": {"mtu": 1329}},
        "$.mtu",
        "take 50 of 1329 bytes and leave 1279; IPv6 needs 1280, so the MTU must be at least 1330",
        "",
    ),
    "overlay over IPv6 too narrow for IPv6": (
        {"Cluster_milan_milan": {"mtu": 1340}},
        "$.addresses",
        "over IPv6 take 70 of 1340 bytes and leave 1270",
        "Cluster/milan/milan",
    ),
    "node and gateway that cannot meet": (
        {"Gateway_milan_gateway": {"addresses": (Address("172.18.1.10"),)}},
        "$.addresses",
        "no family in common with Node/milan/worker-2 (2001:db8:18:1::12)",
        "Node/milan/worker-2",
    ),
    "node inside its pod prefix": (
        {"Node_rome_worker_1": {"addresses": (Address("172.18.0.11"), Address("fd00:200::1"))}},
        "$.addresses[1]",
        "a loop",
        "Cluster/rome/rome",
    ),
    "node inside a remap": (
        {"Node_rome_worker_1": {"addresses": (Address("fd00:61::1"),)}},
        "$.addresses[0]",
        "a loop",
        "Peering/rome/rome-milan",
    ),
    "node with a link-local address": (
        {"Node_rome_worker_1": {"addresses": (Address("fe80::9"),)}},
        "$.addresses[0]",
        "no host has such an address",
        "",
    ),
    "node with a taken address": (
        {"Node_rome_worker_1": {"addresses": (Address("2001:db8:18::12"),)}},
        "$.addresses[0]",
        "taken by Node/rome/worker-2",
        "Node/rome/worker-2",
    ),
    "tunnels' own addresses": (
        {"Cluster_rome_rome": {"external_prefixes": (Prefix("fd6d:6573:6812:0:8000::/80"),)}},
        "$.externalPrefixes[0]",
        "which no cluster may use",
        "",
    ),
    "internal prefix without room": (
        {"Cluster_rome_rome": {"internal_prefixes": (Prefix("10.80.0.0/16"), Prefix("fd00:80::/113"))}},
        "$.internalPrefixes[1]",
        "give a /112 or larger",
        "",
    ),
    "pod outside the prefixes of its family": (
        {"Endpoint_rome_shop": {"addresses": (Address("10.200.1.10"), Address("fd00:201::10"))}},
        "$.addresses[1]",
        "not inside the cluster's pod prefixes",
        "Cluster/rome/rome",
    ),
}


@pytest.mark.parametrize("case", IPV6_REFUSED)
def test_refuses_of_both_families(case: str) -> None:
    """In the example of both families, one thing wrong is refused when all else is established, or when it comes last."""
    changes, field, reason, other = IPV6_REFUSED[case]
    *before, last = changes
    item = next(item for item in dual_stack(**changes) if item.ref.replace("/", "_").replace("-", "_") == last)
    problem = admit(item, State(dual_stack(**{name: changes[name] for name in before})))
    if problem is None or problem.field != field:
        state = State()
        found = [problem for item in dual_stack(**changes) if (problem := joined(item, state))]
        problem = found[0]
    assert (problem.field, problem.other) == (field, other)
    assert reason in problem.reason


def joined(item: Topology, state: State) -> Problem | None:
    problem = admit(item, state)
    if problem is None:
        state.put(item)
    return problem


def test_admits_the_example_of_both_families() -> None:
    """Object by object, and each once more."""
    state = State()
    assert [problem for item in dual_stack() if (problem := joined(item, state))] == []
    assert {item.ref: admit(item, state) for item in dual_stack()} == dict.fromkeys(state.objects)


def test_a_second_family_joins_a_cluster_in_use() -> None:
    """Hosts keep their overlay addresses: a prefix is added beside the one in use where all their numbers fit, and none is taken away."""
    state = established()
    both = (Prefix("10.80.0.0/16"), Prefix("fd00:80::/64"))
    assert admit(cluster("rome", internal_prefixes=both), state) is None
    state.put(cluster("rome", internal_prefixes=both))
    gone = admit(cluster("rome"), state)
    assert gone is not None
    assert "fd00:80::/64 is in use" in gone.reason
    small = State(
        [cluster("rome", internal_prefixes=both[1:], pod_prefixes=(Prefix("fd00:200::/48"),), external_prefixes=()), node("n", 1)]
    )
    narrow = admit(replace(small.clusters["rome"], internal_prefixes=(Prefix("10.80.0.0/24"), both[1])), small)
    assert narrow is not None
    assert (narrow.field, "give a /20 or larger" in narrow.reason) == ("$.internalPrefixes[0]", True)


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(case: str) -> None:
    """Each contradiction is refused, naming the field, the reason, and the other object."""
    item, field, reason, other = REFUSED[case]
    problem = admit(item, established())
    assert problem is not None
    assert (problem.field, problem.other) == (field, other)
    assert reason in problem.reason


def test_admits_what_is_established_again() -> None:
    """Every established object passes admission once more: repetition is no conflict with oneself."""
    state = established()
    assert {item.ref: admit(item, state) for item in state.objects.values()} == dict.fromkeys(state.objects)


def test_refuses_an_older_revision_for_good() -> None:
    """A lower revision than the admitted one is refused, and no change of others can make it right."""
    state = established()
    state.put(node("worker-1", 1, revision=5))
    older = admit(node("worker-1", 1, revision=4), state)
    assert older is not None
    assert not older.retry
    assert admit(node("worker-1", 1, revision=5), state) is None


def test_without_a_revision_the_last_write_wins() -> None:
    """Who does not count revisions is not held to somebody else's."""
    state = established()
    state.put(node("worker-1", 1, revision=5))
    assert admit(node("worker-1", 1), state) is None


def test_names_that_lead_to_one_link_are_refused() -> None:
    """Two long names may share a cut, never a link: the hash keeps them apart; a name that is another's hash is refused."""
    state = established()
    long_name = "ip-10-0-1-23.eu-west-1.compute.internal"
    assert admit(node(long_name, 7), state) is None
    state.put(node(long_name, 7))
    assert admit(node(long_name.replace("23", "24"), 8), state) is None
    from services.planner.names import overlay_link

    twin = admit(node(overlay_link(long_name).removeprefix("mo."), 9), state)
    assert twin is not None
    assert "same link name" in twin.reason


@pytest.mark.parametrize(
    "ref,user",
    [
        ("Cluster/rome/rome", "Gateway/rome/gateway"),
        ("Gateway/rome/gateway", "Peering/rome/rome-milan"),
        ("Node/rome/worker-1", "Endpoint/rome/shop"),
    ],
)
def test_what_is_used_stays(ref: str, user: str) -> None:
    """An object that others need is not removed before them."""
    problem = admit_removal(ref, established())
    assert problem is not None
    assert problem.other == user


def test_what_is_not_used_goes() -> None:
    """A peering, a pod and an unknown object may go at any time."""
    for ref in ("Peering/rome/rome-milan", "Endpoint/rome/shop", "Node/rome/unknown"):
        assert admit_removal(ref, established()) is None


def test_a_second_gateway_serves_a_second_peering() -> None:
    """Two peerings of a cluster need two gateways and prefixes that do not meet in it."""
    state = established()
    extra: list[Topology] = [
        cluster("turin", pod_prefixes=(Prefix("10.200.0.0/16"),), external_prefixes=(), internal_prefixes=(Prefix("10.82.0.0/16"),)),
        gateway("rome", "gateway-2", 30),
        gateway("turin"),
    ]
    for item in extra:
        assert admit(item, state) is None
        state.put(item)
    first, second = peering().ends
    ends = (
        replace(first, gateway=Name("gateway-2"), remap_pods=(Prefix("10.61.0.0/16"),), remap_external=()),
        replace(second, cluster=Name("turin"), remap_external=(Prefix("10.66.0.0/16"),)),
    )
    clash = admit(replace(peering(), name=Name("rome-turin"), ends=ends), state)
    assert clash is not None
    assert clash.other == "Peering/rome/rome-milan"
    free = (replace(ends[0], remap_pods=(Prefix("10.67.0.0/16"),)), ends[1])
    assert admit(replace(peering(), name=Name("rome-turin"), ends=free), state) is None


def test_nodes_are_frozen_values() -> None:
    """Admission changes nothing: the state is as before."""
    state = established()
    before = dict(state.objects)
    admit(Node(name=Name("x"), cluster=Name("rome"), addresses=(Address("172.18.0.99"),)), state)
    assert state.objects == before
