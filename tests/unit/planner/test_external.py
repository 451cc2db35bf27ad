"""External addresses: as what nodes send, and what IpMappings lead to; refused, chosen and compiled."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from schemas import codec
from schemas.codec import DecodeError
from schemas.host_objects import NftElement, Route
from schemas.plan import HostPlan
from schemas.topology import IpMapping, Topology, convert_topology
from schemas.values import Address, Name, Prefix
from services.cli.files import load
from services.planner import layout
from services.planner.admit import Problem, admit, admit_removal
from services.planner.allocate import Allocations
from services.planner.compile import compile_all
from services.planner.core import Core, settle_rollouts
from services.planner.external import has_room, mapping_numbers
from services.planner.names import table
from services.planner.state import HostId, State
from tests.topologies import (
    EXAMPLES,
    ROME_GATEWAY,
    cluster,
    dual_stack,
    gateway,
    node,
    peering,
    said,
    settled_plans,
    tell,
    two_clusters,
)

WORKER = HostId("rome", "worker-1")
TABLE = table("rome", "rome-milan")
OUTSIDE = Address("192.0.2.50")


def mapping(real: str, name: str = "map", home: str = "rome", **changes: object) -> IpMapping:
    """A mapping; `external` may be text."""
    fields = {key: Address(value) if key == "external" else value for key, value in changes.items()}
    return IpMapping(name=Name(name), cluster=Name(home), real=Address(real), **fields)  # type: ignore[arg-type]


def elements(plan: HostPlan, name: str, of: str = TABLE) -> dict[str, str]:
    """Key and value of each element of a set or map."""
    return {
        item.element: item.value
        for item in plan.objects().values()
        if isinstance(item, NftElement) and (item.table, item.set) == (of, name)
    }


def ways(plan: HostPlan, address: str) -> list[tuple[str, str]]:
    """Link and neighbour of a gateway's routes to just this address for packets from tunnels."""
    prefix = Address(address).host_prefix
    routes = [
        item for item in plan.objects().values() if isinstance(item, Route) and (item.table, item.prefix) == (layout.INCOMING_TABLE, prefix)
    ]
    return [(hop.link, hop.via or "") for route in routes for hop in route.hops]


def number_of(plan: HostPlan) -> int:
    """A node's number, by its overlay address."""
    return next(
        Prefix("10.80.0.0/16").place(item.address) for item in plan.objects().values() if item.key.startswith("address mo.gateway 10.")
    )  # type: ignore[union-attr]


# Sources -------------------------------------------------------------------------------------------------------------------------------


def test_each_node_sends_under_an_address_of_its_own() -> None:
    """Where the external prefix has room: the host part is the node's number, and the gateway has a route to that node for it."""
    plans = settled_plans(two_clusters())
    number = number_of(plans[WORKER])
    own = Prefix("10.70.0.0/16").address(number)
    assert elements(plans[WORKER], "others") == {"0.0.0.0/0": own}
    assert ways(plans[ROME_GATEWAY], own) == [("mo.worker-1", Prefix("10.80.0.0/16").address(number))]


@pytest.mark.parametrize("changes", [{"sources": "shared"}, {"external_prefixes": (Prefix("10.70.0.0/24"),)}], ids=["asked for", "no room"])
def test_nodes_share_an_address(changes: dict[str, object]) -> None:
    """A node sends under its overlay address, which its gateway makes the first external one."""
    items = [cluster("rome", **changes), *two_clusters()[1:]]
    if "external_prefixes" in changes:
        items = [replace(item, ends=remapped(item.ends)) if item == peering() else item for item in items]
    plans = settled_plans(items)
    assert elements(plans[WORKER], "others") == {"0.0.0.0/0": Prefix("10.80.0.0/16").address(number_of(plans[WORKER]))}
    assert elements(plans[ROME_GATEWAY], "to_external") == {"10.80.0.0/16": "10.70.0.0"}
    assert "10.80.0.0/16" in elements(plans[ROME_GATEWAY], "sources")


def remapped(ends: tuple) -> tuple:  # type: ignore[type-arg]
    return ends[0], replace(ends[1], remap_external=(Prefix("10.64.0.0/24"),))


def test_a_change_of_sources_changes_one_element_of_each_node() -> None:
    """Gateways take both kinds at any time, so that nothing there changes while nodes follow one after the other."""
    before, after = (settled_plans([cluster("rome", sources=kind), *two_clusters()[1:]]) for kind in ("per-node", "shared"))
    changed = {host: {key for key, item in after[host].objects().items() if before[host].objects().get(key) != item} for host in after}
    element = f"element {TABLE} others 0.0.0.0/0"
    assert changed == {host: {element} if host in (WORKER, HostId("rome", "worker-2")) else set() for host in after}
    assert all(before[host].objects().keys() == after[host].objects().keys() for host in after)


def test_without_an_external_prefix_nodes_have_no_source() -> None:
    """No translation, and the gateway knows no such source: what nodes send is dropped and counted there."""
    ends = (peering().ends[0], replace(peering().ends[1], remap_external=()))
    items = [
        cluster("rome", external_prefixes=()),
        *(replace(item, ends=ends) if item == peering() else item for item in two_clusters()[1:]),
    ]
    plans = settled_plans(items)
    assert elements(plans[WORKER], "others") == {}
    assert elements(plans[ROME_GATEWAY], "to_external") == {}
    assert elements(plans[ROME_GATEWAY], "sources") == {"10.200.0.0/16": ""}


def test_each_family_has_its_own_sources() -> None:
    """One family may have room where the other has none: the first prefix with room counts, not the first."""
    prefixes = (Prefix("10.70.0.0/24"), Prefix("fd00:70::/120"), Prefix("fd00:7a::/64"))
    changed = dual_stack(Cluster_rome_rome={"external_prefixes": prefixes})
    first, second = changed[-1].ends  # type: ignore[union-attr]
    second = replace(second, remap_external=(Prefix("10.64.0.0/24"), Prefix("fd00:64::/120"), Prefix("fd00:6a::/64")))
    plans = settled_plans([*changed[:-1], replace(changed[-1], ends=(first, second))])
    number = number_of(plans[WORKER])
    assert elements(plans[WORKER], "others") == {"0.0.0.0/0": Prefix("10.80.0.0/16").address(number)}
    assert elements(plans[WORKER], "others6") == {"::/0": Prefix("fd00:7a::/64").address(number)}
    assert elements(plans[ROME_GATEWAY], "to_external6") == {"fd00:80::/64": "fd00:7a::"}


def test_nodes_guard_the_external_prefixes() -> None:
    """An answer to a forgotten connection is no packet for the default route, with or without nftables."""
    guards = [item for item in settled_plans(two_clusters())[WORKER].objects().values() if isinstance(item, Route) and item.is_guard]
    assert Prefix("10.70.0.0/16") in {item.prefix for item in guards if item.table == 254}


# Mappings ------------------------------------------------------------------------------------------------------------------------------


def test_a_mapped_pod_is_one_element() -> None:
    """The way to a pod is there already, and what the pod sends itself stays as it is."""
    items, more = two_clusters(), mapping("10.200.1.10", external="10.70.99.4")
    before, after = settled_plans(items), settled_plans([*items, more])
    added = {host: after[host].objects().keys() - before[host].objects().keys() for host in after}
    assert {host: keys for host, keys in added.items() if keys} == {ROME_GATEWAY: {f"element {TABLE} mapped 10.70.99.4"}}
    assert elements(after[ROME_GATEWAY], "mapped") == {"10.70.99.4": "10.200.1.10"}
    assert more.ref in after[ROME_GATEWAY].because(f"element {TABLE} mapped 10.70.99.4")


@pytest.mark.parametrize("masquerade", [False, True])
def test_a_mapped_outsider_is_led_to_by_one_node(masquerade: bool) -> None:
    """The gateway knows the way and the source, and the node lets such packets out; others do not."""
    plans = settled_plans([*two_clusters(), mapping(OUTSIDE, external="10.70.99.4", node=Name("worker-2"), masquerade=masquerade)])
    here, other = plans[HostId("rome", "worker-2")], plans[WORKER]
    assert [link for link, _ in ways(plans[ROME_GATEWAY], OUTSIDE)] == ["mo.worker-2"]
    assert OUTSIDE in elements(plans[ROME_GATEWAY], "sources")
    assert elements(plans[ROME_GATEWAY], "to_external")[OUTSIDE] == "10.70.99.4"
    assert elements(here, "mapped") == {OUTSIDE: ""}
    assert elements(here, "masqueraded") == ({OUTSIDE: ""} if masquerade else {})
    assert elements(here, "kept") == {"10.200.0.0/16": "10.200.0.0/16", OUTSIDE: OUTSIDE}
    assert elements(other, "mapped") == {}


def test_a_nodes_own_address_is_led_to_by_itself() -> None:
    """Unless the mapping names another node, which then masquerades."""
    plans = settled_plans([*two_clusters(), mapping("172.18.0.12")])
    assert [link for link, _ in ways(plans[ROME_GATEWAY], "172.18.0.12")] == ["mo.worker-2"]
    named = mapping("172.18.0.12", node=Name("worker-1"), masquerade=True)
    assert [link for link, _ in ways(settled_plans([*two_clusters(), named])[ROME_GATEWAY], "172.18.0.12")] == ["mo.worker-1"]


def test_the_choice_of_a_node_turns_for_few() -> None:
    """A node that comes takes some mappings over and the others stay where they are; the order of arrival does not show."""
    mappings = [mapping(f"192.0.2.{number}", f"map-{number}") for number in range(60)]
    items = [*two_clusters(5), *mappings]

    def leaders(topology: list[Topology]) -> dict[str, str]:
        plan = settled_plans(topology)[ROME_GATEWAY]
        return {item.real: ways(plan, item.real)[0][0] for item in mappings}

    few, more = leaders(items), leaders([*items, node("extra", 77)])
    assert len(set(few.values())) > 2
    moved = {real for real in few if few[real] != more[real]}
    assert {more[real] for real in moved} == {"mo.extra"}
    assert leaders([*two_clusters(5), node("extra", 77), *reversed(mappings)]) == more


def test_a_peer_is_not_led_back_to_itself() -> None:
    """Milan maps an address of turin: the gateway to rome translates it, the gateway to turin does not."""
    plans = settled_plans(load([EXAMPLES / "three-clusters.yaml"]))
    to_rome, to_turin = (plans[HostId("milan", name)] for name in ("to-rome", "to-turin"))
    assert elements(to_rome, "mapped", table("milan", "rome-milan"))["10.71.200.10"] == "10.65.1.10"
    assert "10.71.200.10" not in elements(to_turin, "mapped", table("milan", "milan-turin"))
    assert ways(to_rome, "10.65.1.10")
    assert ways(to_turin, "10.65.1.10") == []


def test_a_node_of_two_peerings_holds_each_by_itself() -> None:
    """A table, a set of remote prefixes and a link for each peering; one policy rule for each family in all."""
    plan = settled_plans(load([EXAMPLES / "three-clusters.yaml"]))[HostId("milan", "worker-1")]
    remote = {name: set(elements(plan, "remote", table("milan", name))) for name in ("rome-milan", "milan-turin")}
    assert remote == {"rome-milan": {"10.63.0.0/16", "10.64.0.0/16"}, "milan-turin": {"10.65.0.0/16", "10.66.0.0/16"}}
    assert sorted(key for key in plan.objects() if key.startswith("rule ")) == [
        "rule 900 fwmark 0x0/0x0 iif - to -",
        "rule inet6 900 fwmark 0x0/0x0 iif - to -",
    ]
    routes = {
        item.prefix: item.hops[0].link
        for item in plan.objects().values()
        if isinstance(item, Route) and item.hops and item.table == layout.NODE_TABLE
    }
    assert {routes[Prefix(f"10.{number}.0.0/16")] for number in (63, 64)} == {"mo.to-rome"}
    assert {routes[Prefix(f"10.{number}.0.0/16")] for number in (65, 66)} == {"mo.to-turin"}


def test_chosen_addresses_are_kept() -> None:
    """In the upper half of the prefix, the same for the same name, and what was chosen stays although the prefix grows company."""
    core, other = Core(), Core()
    tell(core, [*two_clusters(), mapping(OUTSIDE), mapping("192.0.2.51", "second")])
    tell(other, [mapping("192.0.2.51", "second"), mapping(OUTSIDE), *two_clusters()])
    first = core.allocations.external(mapping(OUTSIDE))
    assert Prefix("10.70.128.0/17").covers(first)
    assert core.allocations.externals == other.allocations.externals
    core.hear([replace(said(mapping(OUTSIDE), 90), payload=b""), said(mapping("192.0.2.52"), 91)])
    assert core.allocations.external(mapping(OUTSIDE)) == first


def test_a_chosen_address_is_not_given_to_another() -> None:
    """Who asks for it by name is refused, until its keeper is gone or has another; a given address is not chosen."""
    core = Core()
    tell(core, [*two_clusters(), mapping(OUTSIDE)])
    chosen = core.allocations.external(mapping(OUTSIDE))
    wish = mapping("192.0.2.51", "second", external=chosen)
    (refusal,) = core.hear([said(wish, 90)]).refused
    assert (refusal.field, refusal.other) == ("$.external", "IpMapping/rome/map")
    outcome = core.hear([said(mapping(OUTSIDE, external="10.70.99.4"), 91)])
    assert {entry.ref for entry in outcome.admitted} == {"IpMapping/rome/map", "IpMapping/rome/second"}
    core.hear([said(mapping(OUTSIDE), 92)])
    assert core.allocations.external(mapping(OUTSIDE)) not in (chosen, "10.70.99.4")


def test_a_prefix_without_room_for_mappings_says_so() -> None:
    """What nodes send is kept free, so that a /20 has nothing left to choose from; an address of a /31 may still be given."""
    for prefix in map(Prefix, ("10.70.0.0/20", "10.70.0.0/31")):
        ends = (peering().ends[0], replace(peering().ends[1], remap_external=(Prefix(f"10.64.0.0/{prefix.length}"),)))
        core = Core()
        tell(
            core,
            [
                cluster("rome", external_prefixes=(prefix,)),
                *(replace(item, ends=ends) if item == peering() else item for item in two_clusters()[1:]),
            ],
        )
        (refusal,) = core.hear([said(mapping(OUTSIDE), 90)]).refused
        assert (refusal.field, refusal.other) == ("$.external", "Cluster/rome/rome")
        assert "no external prefix" in refusal.reason
    assert not core.hear([said(mapping(OUTSIDE, external="10.70.0.1"), 91)]).refused


@pytest.mark.parametrize("length,first,count", [(16, 32768, 32767), (19, 4096, 4095), (20, 4095, 0), (24, 128, 127), (32, 1, 0)])
def test_places_for_mappings(length: int, first: int, count: int) -> None:
    """The upper half without its last address, and nothing that is, or might become, a node's."""
    prefix = Prefix(f"10.0.0.0/{length}")
    assert (mapping_numbers(prefix).start, len(mapping_numbers(prefix))) == (first, count)
    assert has_room(prefix) == (length <= 20)


def test_a_lost_mapping_is_told_from_a_new_one() -> None:
    """What was chosen is written once, read back, and written as gone when it is released."""
    core = Core()
    tell(core, [*two_clusters(), mapping(OUTSIDE)])
    assert ("external", "rome", "map") in core.allocations.take_changes()
    after = Allocations()
    after.restore("external", "rome", "map", codec.encode(core.allocations.value("external", "rome", "map")))
    assert after.externals == core.allocations.externals
    after.allocate(core.state, [mapping(OUTSIDE)])
    assert after.take_changes() == []
    core.hear([said(mapping(OUTSIDE, external="10.70.99.4"), 91)])
    assert core.allocations.take_changes() == [("external", "rome", "map")]
    assert core.allocations.value("external", "rome", "map") is None


ROW = load([EXAMPLES / "three-clusters.yaml"])
ROW_PLANS = settled_plans(ROW)


@settings(max_examples=30)
@given(st.permutations(ROW))
def test_any_order_gives_the_same_plans(items: list[Topology]) -> None:
    """Two peerings, mappings of pods, nodes and other clusters' pods: nothing shows of the order in which they were said."""
    core = Core()
    tell(core, items)
    settle_rollouts(core.state, core.allocations)
    assert compile_all(core.state, core.allocations) == ROW_PLANS


# Refused -------------------------------------------------------------------------------------------------------------------------------

GIVEN = mapping(OUTSIDE, external="10.70.99.4")
REFUSED = {
    "no cluster": (mapping(OUTSIDE, home="turin"), "$.cluster", "not known", "Cluster/turin/turin"),
    "loopback": (mapping("127.0.0.1"), "$.real", "no packet is led there", ""),
    "link-local": (mapping("169.254.1.1"), "$.real", "no packet is led there", ""),
    "multicast": (mapping("ff02::1"), "$.real", "no packet is led there", ""),
    "itself": (mapping("10.70.1.1"), "$.real", "an external prefix of its own cluster", "Cluster/rome/rome"),
    "an overlay address": (mapping("10.80.1.1"), "$.real", "an internal prefix of its own cluster", "Cluster/rome/rome"),
    "a gateway": (mapping("172.18.0.10"), "$.real", "to which no node leads", "Gateway/rome/gateway"),
    "a family without external prefix": (mapping("2001:db8::5"), "$.real", "no IPv6 external prefix", "Cluster/rome/rome"),
    "mapped twice": (mapping(OUTSIDE, "twin"), "$.real", "is mapped by IpMapping/rome/map", "IpMapping/rome/map"),
    "external outside": (mapping("192.0.2.9", "x", external="10.71.99.4"), "$.external", "not inside", "Cluster/rome/rome"),
    "external of the nodes": (
        mapping("192.0.2.9", "x", external="10.70.15.254"),
        "$.external",
        "10.70.0.0 to 10.70.15.254 of",
        "Cluster/rome/rome",
    ),
    "external for all nodes": (
        mapping("192.0.2.9", "x", external="10.70.0.0"),
        "$.external",
        "kept for what nodes send",
        "Cluster/rome/rome",
    ),
    "external taken": (mapping("192.0.2.9", "x", external="10.70.99.4"), "$.external", "is IpMapping/rome/map's", "IpMapping/rome/map"),
    "unknown node": (mapping("192.0.2.9", "x", node=Name("nowhere")), "$.node", "not known", "Node/rome/nowhere"),
    "node of a pod": (mapping("10.200.1.10", "x", node=Name("worker-1")), "$.node", "leave `node` out", "Cluster/rome/rome"),
    "masquerade of a pod": (mapping("10.200.1.10", "x", masquerade=True), "$.masquerade", "leave `masquerade` out", "Cluster/rome/rome"),
    "another node's address": (mapping("172.18.0.12", "x", node=Name("worker-1")), "$.node", "or masquerade", "Node/rome/worker-2"),
    "gateway at a mapped address": (gateway("rome", "second", address=OUTSIDE), "$.addresses[0]", "mapped by", "IpMapping/rome/map"),
    "node at a mapped address": (
        node("x", 9, addresses=(Address("192.0.2.77"),)),
        "$.addresses[0]",
        "whose answers do not come by worker-1",
        "IpMapping/rome/led",
    ),
    "no room for each node": (
        cluster("turin", external_prefixes=(Prefix("10.72.0.0/24"),), sources="per-node"),
        "$.externalPrefixes[0]",
        "give a /20 or larger, or say sources: shared",
        "",
    ),
    "prefix of a chosen address": (
        cluster("rome", external_prefixes=(Prefix("10.75.0.0/16"),)),
        "$.externalPrefixes",
        "IpMapping/rome/chosen may have its address from it",
        "IpMapping/rome/chosen",
    ),
}


def established() -> State:
    led = mapping("192.0.2.77", "led", node=Name("worker-1"), external="10.70.99.5")
    return State([*two_clusters(), GIVEN, led, mapping("192.0.2.78", "chosen")])


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(case: str) -> None:
    """Each contradiction is refused, naming the field, the reason, and the other object."""
    item, field, reason, other = REFUSED[case]
    problem = admit(item, established())
    assert isinstance(problem, Problem)
    assert (problem.field, problem.other) == (field, other)
    assert reason in problem.reason


def test_a_cluster_that_would_break_a_mapping_is_refused() -> None:
    """A new order of prefixes may give nodes an address that a mapping was given."""
    prefixes = (Prefix("10.75.0.0/16"), Prefix("10.70.0.0/16"))
    state = State([cluster("rome", external_prefixes=prefixes), mapping(OUTSIDE, external="10.70.0.9")])
    problem = admit(cluster("rome", external_prefixes=prefixes[::-1]), state)
    assert problem is not None
    assert problem.other == "IpMapping/rome/map"
    assert "kept for what nodes send" in problem.reason


def test_a_node_that_leads_by_name_stays() -> None:
    """A node that a mapping names is not removed before the mapping; one that was chosen goes at any time."""
    state = established()
    problem = admit_removal("Node/rome/worker-1", State(item for item in state.objects.values() if item.kind != "Endpoint"))
    assert problem is not None
    assert problem.other == "IpMapping/rome/led"
    assert admit_removal("Node/rome/worker-2", state) is None


def test_families_of_a_mapping_agree() -> None:
    """One object can get that wrong by itself."""
    with pytest.raises(DecodeError, match="give an IPv4 address"):
        convert_topology({"kind": "IpMapping", "cluster": "rome", "name": "x", "real": "192.0.2.1", "external": "fd00:70::9"})
