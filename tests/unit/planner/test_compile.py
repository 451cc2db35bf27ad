"""Compilation: the same plan by any way, sizes that do not grow, and golden plans to read."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from schemas.host_objects import NftChain, PolicyRule, Route, VxlanLink, WireguardLink, WireguardPeer
from schemas.nft import Comment, Verdict
from schemas.plan import HostPlan, diff_units, digest_of, unit_digest
from schemas.topology import IpMapping, Peering, PublicKey, Topology, WireguardSettings
from schemas.values import Address, Endpoint, Key, Name, Prefix
from services.cli.files import load
from services.cli.render import plan_text
from services.planner import layout
from services.planner.compile import compile_all
from services.planner.core import Core
from services.planner.names import LINK_NAME_BYTES
from services.planner.state import HostId
from tests.firewalls import match, one_chain, rule
from tests.routes import routes, to
from tests.topologies import (
    EXAMPLES,
    MILAN_GATEWAY,
    ROME_GATEWAY,
    cluster,
    dual_stack,
    encrypting,
    gateway,
    keys,
    node,
    peering,
    pod,
    said,
    settled_plans,
    tell,
    two_clusters,
    without_ipv4,
)

GOLDEN = Path(__file__).parent / "golden"


def rules(plan: HostPlan) -> list[PolicyRule]:
    return [item for item in plan.objects().values() if isinstance(item, PolicyRule)]


@pytest.mark.parametrize("path", sorted(GOLDEN.iterdir()), ids=lambda path: path.stem)
def test_golden_plans(path: Path) -> None:
    """The plans of the examples are what a reviewer has read; write them anew with ``meshmark plan -f examples/EXAMPLE.yaml HOST``."""
    example, cluster_name, name = path.stem.split(".")
    plans = settled_plans(load([EXAMPLES / f"{example}.yaml"]))
    assert plan_text(plans[HostId(cluster_name, name)]) == path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "items", [dual_stack(), encrypting(strict="enforce"), encrypting(routing="overlay"), load([EXAMPLES / "egress.yaml"])]
)
def test_each_rule_that_drops_says_why(items: list[Topology]) -> None:
    """In a comment, which a trace tells with a packet that ends there."""
    chains = [item for plan in settled_plans(items).values() for item in plan.objects().values() if isinstance(item, NftChain)]
    dropping = [rule for chain in chains for rule in chain.rules if Verdict("drop") in rule]
    assert dropping
    assert [rule for rule in dropping if not isinstance(rule[-1], Comment)] == []


def test_policy_rules_do_not_grow() -> None:
    """A gateway has as many policy rules and chains with 8 tunnels and 60 nodes as with 1 tunnel and 2 nodes."""
    small, large = (settled_plans(two_clusters(nodes, tunnels))[ROME_GATEWAY] for nodes, tunnels in ((2, 1), (60, 8)))
    assert len(rules(small)) == len(rules(large)) == 4
    chains = [{key: item for key, item in plan.objects().items() if isinstance(item, NftChain)} for plan in (small, large)]
    assert chains[0] == chains[1]


def test_each_family_has_its_policy_rules_and_no_other() -> None:
    """Four rules for each family that both clusters have; nothing at all of one that only one of them has."""
    assert [rule.family for rule in rules(settled_plans(dual_stack())[ROME_GATEWAY])] == [4] * 4 + [6] * 4
    only4 = {
        "pod_prefixes": (Prefix("10.200.0.0/16"),),
        "external_prefixes": (Prefix("10.71.0.0/16"),),
    }
    seen4 = tuple(replace(end, remap_pods=end.remap_pods[:1], remap_external=end.remap_external[:1]) for end in dual_stack()[-1].ends[:1])
    items = dual_stack(
        Cluster_milan_milan=only4,
        Node_milan_worker_1={"pod_prefixes": (Prefix("10.200.1.0/24"),)},
        Node_milan_worker_2={"pod_prefixes": (Prefix("10.200.2.0/24"),)},
        Endpoint_milan_bank={"addresses": (Address("10.200.1.10"),)},
        Endpoint_milan_post={"addresses": (Address("10.200.2.10"),)},
        Peering_rome_rome_milan={"ends": (*seen4, dual_stack()[-1].ends[1])},
    )
    for host, plan in settled_plans(items).items():
        inside = [line for line in plan_text(plan).splitlines() if "type vxlan" not in line]
        assert not any(word in line for line in inside for word in ("::", "ip6", "ipv6", "ip -6")), host


@pytest.mark.parametrize(
    "rome,milan,family,tunnel,overlay",
    [
        (("172.18.0.10", "2001:db8:18::10"), ("172.18.1.10", "2001:db8:18:1::10"), 4, 1440, 1450),
        (("172.18.0.10", "2001:db8:18::10"), ("2001:db8:18:1::10",), 6, 1420, 1450),
        (("2001:db8:18::10",), ("172.18.1.10", "2001:db8:18:1::10"), 6, 1420, 1430),
    ],
)
def test_links_go_over_ipv4_where_both_ends_have_it(
    rome: tuple[str, ...], milan: tuple[str, ...], family: int, tunnel: int, overlay: int
) -> None:
    """The outer family is chosen link by link, and an MTU is the same at both ends of a link."""
    items = dual_stack(
        Gateway_rome_gateway={"addresses": tuple(map(Address, rome))}, Gateway_milan_gateway={"addresses": tuple(map(Address, milan))}
    )
    plans = settled_plans([*items, *keys()])
    for host in (ROME_GATEWAY, MILAN_GATEWAY):
        objects = plans[host].objects().values()
        assert {item.endpoint.family for item in objects if isinstance(item, WireguardPeer)} == {family}
        assert {item.mtu for item in objects if isinstance(item, WireguardLink)} == {tunnel}
    here, there = plans[ROME_GATEWAY].objects()["link mo.worker-1"], plans[HostId("rome", "worker-1")].objects()["link mo.gateway"]
    assert isinstance(here, VxlanLink)
    assert isinstance(there, VxlanLink)
    assert (here.mtu, there.mtu) == (overlay, overlay)
    assert (here.local, here.remote) == (there.remote, there.local)


def test_an_endpoint_of_the_other_family_narrows_both_ends() -> None:
    """One end is told to reach the other by IPv6: the tunnel is as wide as that allows, at both ends."""
    first, second = dual_stack()[-1].ends
    ends = (replace(first, endpoint=Endpoint("[2001:db8::7]:51900")), second)
    plans = settled_plans([*dual_stack(Peering_rome_rome_milan={"ends": ends}), *keys()])
    mtus = {item.mtu for plan in plans.values() for item in plan.objects().values() if isinstance(item, WireguardLink)}
    assert mtus == {1420}
    peers = {item.link: item.endpoint for item in plans[MILAN_GATEWAY].objects().values() if isinstance(item, WireguardPeer)}
    assert peers == {"mt.0": "[2001:db8::7]:51900", "mt.1": "[2001:db8::7]:51901"}


def test_an_endpoint_by_name_is_said_as_it_is() -> None:
    """Each tunnel at the next port; as long as nobody knows its family, there is room for the larger headers, at both ends."""
    first, second = dual_stack()[-1].ends
    ends = (replace(first, endpoint=Endpoint("gw.rome.example:51900")), second)
    plans = settled_plans([*dual_stack(Peering_rome_rome_milan={"ends": ends}), *keys()])
    peers = {item.link: item.endpoint for item in plans[MILAN_GATEWAY].objects().values() if isinstance(item, WireguardPeer)}
    assert peers == {"mt.0": "gw.rome.example:51900", "mt.1": "gw.rome.example:51901"}
    mtus = {item.mtu for plan in plans.values() for item in plan.objects().values() if isinstance(item, WireguardLink)}
    assert mtus == {1420}
    assert "Endpoint = gw.rome.example:51901" in plan_text(plans[MILAN_GATEWAY])


def test_ipv6_alone() -> None:
    """Two clusters without IPv4, neither inside nor outside: no object of their plans is of IPv4."""
    items = dual_stack()
    plans = settled_plans([*map(without_ipv4, items), *keys()])
    for plan in plans.values():
        text = plan_text(plan)
        assert "::/" in text
        assert "10." not in text
        assert "172." not in text
        assert "ipv4" not in text.replace("net/ipv4/ping_group_range", "")  # which is about both families


def test_one_route_per_node_and_prefix() -> None:
    """The incoming table grows by three routes for a node: to the node, to its address as a sender, and to its pods."""
    few, more = (settled_plans(two_clusters(nodes))[ROME_GATEWAY] for nodes in (2, 3))
    added = {key for key in more.objects() if key not in few.objects() and isinstance(more.objects()[key], Route)}
    assert len(added) == 3


def test_a_roaming_pod_gets_a_host_route() -> None:
    """A pod inside its node's prefix needs no route of its own; one outside gets a host route by its node."""
    items = [*two_clusters(), pod("roam", "worker-2", "10.200.77.7")]
    routes = [item for item in settled_plans(items)[ROME_GATEWAY].objects().values() if isinstance(item, Route)]
    assert [route for route in routes if route.prefix == "10.200.1.10/32"] == []
    (roaming,) = [route for route in routes if route.prefix == "10.200.77.7/32"]
    assert (roaming.table, roaming.hops[0].link) == (layout.INCOMING_TABLE, "mo.worker-2")


def test_every_remote_prefix_is_guarded() -> None:
    """Each prefix that names the remote cluster is unreachable in main, on gateways and nodes, whatever else is missing."""
    for host, plan in settled_plans(dual_stack()).items():
        guarded = {item.prefix for item in plan.objects().values() if isinstance(item, Route) and item.is_guard and item.table == 254}
        numbers = (61, 62) if host.cluster == "rome" else (63, 64)
        seen = {prefix for number in numbers for prefix in (f"10.{number}.0.0/16", f"fd00:{number}::/48")}
        assert seen <= guarded


def test_link_names_fit_the_kernel() -> None:
    """Names of any length lead to different link names of at most 15 bytes."""
    names = [f"ip-10-0-1-{number}.eu-west-1.compute.internal" for number in range(30)]
    items = [*two_clusters(), *(node(name, 20 + number) for number, name in enumerate(names))]
    links = {item.name for item in settled_plans(items)[ROME_GATEWAY].objects().values() if isinstance(item, VxlanLink)}
    assert len(links) == 32
    assert all(len(link.encode()) <= LINK_NAME_BYTES for link in links)


def test_both_ends_of_a_link_agree() -> None:
    """The two ends of an overlay link have one VXLAN id, mirrored addresses, and different Ethernet addresses."""
    plans = settled_plans(two_clusters())
    here = plans[ROME_GATEWAY].objects()["link mo.worker-1"]
    there = plans[HostId("rome", "worker-1")].objects()["link mo.gateway"]
    assert isinstance(here, VxlanLink)
    assert isinstance(there, VxlanLink)
    assert (here.vni, here.local, here.remote) == (there.vni, there.remote, there.local)
    assert here.mac != there.mac


def test_tunnels_have_one_mtu_at_both_ends() -> None:
    """The smaller underlay decides, so that a packet that enters a tunnel also leaves it."""
    items = [replace(item, mtu=1400) if item.ref == "Cluster/milan/milan" else item for item in two_clusters()]
    mtus = {item.mtu for plan in settled_plans(items).values() for item in plan.objects().values() if isinstance(item, WireguardLink)}
    assert mtus == {1400 - 60}


def test_because_leads_to_topology() -> None:
    """Every object of every plan names admitted objects that it comes from, the peering among them."""
    items = [*two_clusters(), *keys()]
    refs = {item.ref for item in items}
    for plan in settled_plans(items).values():
        for unit in plan.units.values():
            for entry in unit.values():
                assert set(entry.because) <= refs
                assert "Peering/rome/rome-milan" in entry.because


def test_the_same_objects_in_any_order_give_the_same_plans() -> None:
    """What is refused for want of something else is admitted when that comes: order of arrival does not show in plans."""
    mapped = ("10.200.1.10", "192.0.2.50", "172.18.0.12", "10.61.1.10")
    mappings = [IpMapping(name=Name(f"m{number}"), cluster=Name("rome"), real=Address(real)) for number, real in enumerate(mapped)]
    items = [*two_clusters(), *keys(), *mappings]
    assert plans_of(items) == plans_of(list(reversed(items)))


def plans_of(items: list[Topology]) -> dict[HostId, HostPlan]:
    core = Core()
    tell(core, items)
    core.steps()
    return compile_all(core.state, core.allocations)


MESHES: list[dict[str, object]] = [
    {"encryption": "wireguard", "strict": "enforce"},
    {"encryption": "wireguard", "strict": "audit", "wireguard": WireguardSettings(nodes=True, keepalive_seconds=5)},
    {"encryption": "wireguard", "strict": "audit", "routing": "overlay"},
    {"encryption": "wireguard", "routing": "overlay", "overlay": "geneve", "wireguard": WireguardSettings(nodes=True)},
    {"routing": "overlay"},
]
POOL: list[Topology] = [
    *two_clusters(),
    *keys(),
    node("worker-3", 3),
    pod("roam", "worker-2", "10.200.77.7"),
    pod("roam", "worker-1", "10.200.77.7"),
    pod("extra", "worker-3", "10.200.3.9"),
    node("worker-2", 2, pod_prefixes=(Prefix("10.200.2.0/25"), Prefix("10.200.9.0/24"))),
    peering(5),
    peering(1),
    gateway("rome", host=77),
    cluster("milan", pod_prefixes=(Prefix("10.210.0.0/16"),)),
    cluster("milan", external_prefixes=(Prefix("10.71.0.0/16"), Prefix("10.72.0.0/16"))),
    node("worker-1", 1, addresses=(Address("172.18.0.11"), Address("2001:db8::11"))),
    node("worker-1", 1, addresses=(Address("2001:db8::11"),)),
    gateway("rome", address=Address("2001:db8::10")),
    *(
        cluster(
            name,
            pod_prefixes=(Prefix("10.200.0.0/16"), Prefix(f"fd00:20{number}::/48")),
            internal_prefixes=(Prefix(f"10.{80 + number}.0.0/16"), Prefix("fd00:80::/64")),
        )
        for number, name in enumerate(("rome", "milan"))
    ),
    peering(
        2,
        ends=(
            replace(peering().ends[0], remap_pods=(Prefix("10.61.0.0/16"), Prefix("fd00:61::/48"))),
            replace(peering().ends[1], remap_pods=(Prefix("10.63.0.0/16"), Prefix("fd00:63::/48"))),
        ),
    ),
    pod("roam", "worker-2", "fd00:200::77"),
    peering(2, ends=tuple(replace(place, remap_pods=(), remap_external=()) for place in peering().ends)),
    one_chain(rule(match("outInterface", "@tunnels")), hosts={"role": "gateway"}),
    one_chain(rule(match("outInterface", "@tunnels")), hosts={"names": ["worker-*"], "peering": "rome-milan"}),
    one_chain(rule(action={"action": "setMark", "value": 1}), name="marks"),
    cluster("rome", sources="shared"),
    *(
        IpMapping(name=Name(name), cluster=Name("rome"), real=Address(real), **fields)
        for name, real, fields in (
            ("pods", "10.200.1.10", {}),
            ("pods", "10.200.77.7", {"external": Address("10.70.99.1")}),
            ("outside", "192.0.2.50", {}),
            ("outside", "192.0.2.51", {"node": Name("worker-1"), "masquerade": True}),
            ("nodes", "172.18.0.12", {}),
            ("far", "10.61.2.10", {}),
        )
    ),
    *(cluster("rome", **fields) for fields in MESHES),
    node("worker-1", 1, opt_out=True),
    node("worker-2", 2, endpoint=Endpoint("192.0.2.9:999")),
    node("worker-2", 2, roaming=True),
    node("worker-3", 3, pod_prefixes=()),
    *(PublicKey(name=Name(f"worker-{number}"), cluster=Name("rome"), key=Key(f"{number}" * 42 + "A=")) for number in (1, 2, 3)),
    pod("roam", "worker-1", "10.200.2.7"),
    routes(routes=[to("10.9.0.0/16", "@tunnels")], rules=[{"iif": "@tunnels"}], hosts={"peering": "rome-milan"}),
    routes(routes=[to("10.9.0.0/16", "eth1"), to("172.18.0.0/16", type="throw")], rules=[{}], hosts={"names": ["worker-*"]}),
]


@settings(max_examples=150)
@given(st.lists(st.tuples(st.sampled_from(POOL), st.booleans()), max_size=25))
def test_following_changes_is_compiling_anew(history: list[tuple[Topology, bool]]) -> None:
    """After any history of objects said and deleted, the plans kept up by parts are those compiled from scratch."""
    core = Core()
    tell(core, two_clusters())
    core.published.update({step.host: step.plan for step in core.steps()})
    for number, (item, deleted) in enumerate(history, 100):
        event = said(item, number)
        core.hear([replace(event, payload=b"") if deleted else event])
        published = {step.host: step.plan for step in core.steps()}
        core.published.update(published)
    fresh = compile_all(core.state, core.allocations)
    for host in {*fresh, *core.published}:
        kept = core.published.get(host)
        anew = fresh.get(host)
        assert diff_units(kept.units if kept else {}, anew.units if anew else {}) == ()
        for unit in kept.units.values() if kept else ():
            assert digest_of(unit) == unit_digest(unit.values())


def test_a_removed_peering_leaves_empty_plans() -> None:
    """Hosts of a peering that is gone are told so: their next plan has no unit."""
    core = Core()
    tell(core, two_clusters())
    core.published.update({step.host: step.plan for step in core.steps()})
    core.hear([replace(said(peering(), 100), payload=b"")])
    assert {step.host: step.plan.units for step in core.steps()} == {host: {} for host in core.published}
    assert not any(isinstance(item, Peering) for item in core.state.objects.values())
