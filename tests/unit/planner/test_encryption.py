"""Plans of nodes that encrypt: peers, what leads packets to them and what does not, in every mode, and golden plans to read."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from schemas.host_objects import (
    FdbEntry,
    GeneveLink,
    LinkAddress,
    Neighbour,
    NftChain,
    NftElement,
    PlanObject,
    PolicyRule,
    Route,
    Sysctl,
    VxlanLink,
    WireguardLink,
    WireguardPeer,
)
from schemas.nft import Match, SetMark
from schemas.plan import HostPlan
from schemas.topology import Node, PublicKey, Topology, WireguardSettings
from schemas.values import Address, Endpoint, Key, Name, Prefix
from services.cli.files import load
from services.cli.render import plan_text
from services.kernel.nft.statements import rule_text
from services.planner import layout
from services.planner.compile import compile_all
from services.planner.core import Core
from services.planner.state import HostId
from tests.topologies import EXAMPLES, cluster, encrypting, node, pod, said, settled_plans, tell

GOLDEN = Path(__file__).parent / "golden_encryption"
ONE, TWO, THREE = (HostId("rome", f"worker-{number}") for number in (1, 2, 3))
UNIT = "mesh/rome"
NODES = WireguardSettings(nodes=True)


def objects(host: HostId = ONE, *more: Topology, **changes: object) -> list[PlanObject]:
    """What a host holds in the example, with objects more and other fields of its cluster."""
    return list(settled_plans([*encrypting(**changes), *more])[host].objects().values())


def peers(found: list[PlanObject]) -> dict[str, WireguardPeer]:
    """Peers by the first digit of their keys."""
    return {item.public_key[:3]: item for item in found if isinstance(item, WireguardPeer)}


def key(number: int) -> PublicKey:
    return PublicKey(name=Name(f"worker-{number}"), cluster=Name("rome"), key=Key(f"{number}" * 42 + "A="))


def three(**changes: object) -> list[Topology]:
    """A cluster of IPv4 with three nodes that all encrypt."""
    return [
        cluster("rome", encryption="wireguard", **changes),
        *(node(f"worker-{number}", number) for number in (1, 2, 3)),
        *map(key, (1, 2, 3)),
    ]


@pytest.mark.parametrize("path", sorted(GOLDEN.iterdir()), ids=lambda path: path.stem)
def test_golden_plans(path: Path) -> None:
    """What a reviewer has read, natively and by the overlay; ``meshmark plan`` of the example and its keys writes the first."""
    routing, host = path.stem.split(".")
    plans = settled_plans(encrypting(routing=routing))
    assert plan_text(plans[HostId("rome", host)]) == path.read_text(encoding="utf-8")


def test_the_seeds_own_words() -> None:
    """Mark 0x4d2 at priority 1000 looks table 10 up, whose default is the device with the node's source; reverse paths are loose."""
    lines = plan_text(settled_plans(encrypting())[ONE]).splitlines()
    assert "ip rule add priority 1000 fwmark 0x4d2/0xfff lookup 10 protocol 77" in lines
    assert "ip route add default dev me.0 src 10.200.1.1 table 10 proto 77" in lines
    assert "net/ipv4/conf/me.0/rp_filter=2" in lines


# Who is whose peer -----------------------------------------------------------------------------------------------------------------


def test_peers_are_those_that_encrypt_and_have_exactly_their_pods() -> None:
    """A roaming pod's address is its node's, whoever has the prefix; a node that opted out is no peer and is only looked at."""
    found = peers(objects())
    assert list(found) == ["cAK"]
    assert found["cAK"].allowed_ips == ("10.200.1.77/32", "10.200.2.0/24", "fd00:200:0:2::/64")
    assert found["cAK"].endpoint == "172.18.0.12:51871"
    assert THREE in settled_plans(encrypting())
    left_out = settled_plans(encrypting())[THREE].objects().values()
    assert all("meshmark.host" in item.key for item in left_out)


def test_nodes_are_allowed_where_they_are_encrypted_too() -> None:
    """With `nodes`, and where an overlay's outer packets are what is encrypted; then pods are not."""
    assert peers(objects(wireguard=NODES))["cAK"].allowed_ips == (
        "10.200.1.77/32",
        "10.200.2.0/24",
        "172.18.0.12/32",
        "2001:db8:18::12/128",
        "fd00:200:0:2::/64",
    )
    assert peers(objects(routing="overlay"))["cAK"].allowed_ips == ("172.18.0.12/32", "2001:db8:18::12/128")


@pytest.mark.parametrize(
    "fields",
    [{}, {"routing": "overlay"}, {"routing": "overlay", "overlay": "geneve"}],
    ids=lambda fields: "-".join(fields.values()) or "native",
)
def test_what_leaves_by_an_overlay_is_encrypted_in_every_mode(fields: dict[str, str]) -> None:
    """A node that turns from one has its link, and routes by it, for a moment longer than its rules."""
    leave = next(item for item in objects(**fields) if isinstance(item, NftChain) and item.name == "leave")
    marked = [rule for rule in leave.rules if Match("oifname", ("mm.*",)) in rule]
    assert [[part for part in rule if isinstance(part, SetMark)] for rule in marked] == [[SetMark(0x4D2, 0xFFF)]]


def test_a_device_is_there_before_its_key_is_known() -> None:
    """So that the applier publishes it; until then all is let out, here and elsewhere. What then comes is peers, and what lets out goes."""
    items = [item for item in three() if item.ref != "PublicKey/rome/worker-1"]
    plans = settled_plans(items)
    (link,) = [item for item in plans[ONE].objects().values() if isinstance(item, WireguardLink)]
    assert (link.name, link.listen_port, link.public_key, link.fwmark) == ("me.0", 51871, None, 0xE00)
    assert not peers(list(plans[ONE].objects().values()))
    assert throws(plans[ONE]) == {"10.200.1.0/24", "10.200.2.0/24", "10.200.3.0/24"}
    assert throws(plans[TWO]) == {"10.200.1.0/24", "10.200.2.0/24"}
    assert set(peers(list(plans[TWO].objects().values()))) == {"333"}
    before, after = plans[ONE].objects(), settled_plans(three())[ONE].objects()
    assert {name.split()[0] for name in after.keys() - before.keys()} == {"peer", "element"}
    assert before.keys() - after.keys() == {"route 10 10.200.2.0/24 0", "route 10 10.200.3.0/24 0"}


def throws(plan: HostPlan) -> set[str]:
    return {item.prefix for item in plan.objects().values() if isinstance(item, Route) and item.type == "throw"}


def test_a_key_that_vanishes_takes_its_peers_along() -> None:
    """The host itself stops leading packets into the device, and others let its pods' packets out."""
    core = Core()
    tell(core, three())
    assert len(peers(list(compile_all(core.state, core.allocations)[TWO].objects().values()))) == 2
    core.hear([replace(said(key(1), 100), payload=b"")])
    plans = {step.host: step.plan for step in core.steps()}
    assert "10.200.1.0/24" in throws(plans[TWO])
    assert set(peers(list(plans[TWO].objects().values()))) == {"333"}
    assert not peers(list(plans[ONE].objects().values()))


def test_endpoints_by_family_by_word_and_by_hearsay() -> None:
    """IPv4 where both have it, else IPv6; as the node says; and none of a node that roams, which keeps others' memory awake."""
    items = [
        cluster("rome", encryption="wireguard", wireguard=WireguardSettings(port=7)),
        node("worker-1", 1, addresses=(Address("172.18.0.11"), Address("2001:db8::11"))),
        node("worker-2", 2, addresses=(Address("2001:db8::12"),)),
        node("worker-3", 3, addresses=(Address("172.18.0.13"), Address("2001:db8::13")), endpoint=Endpoint("[2001:db8::99]:999")),
        node("worker-4", 4, addresses=(Address("172.18.0.14"), Address("2001:db8::14")), roaming=True),
        *map(key, (1, 2, 3, 4)),
    ]
    plans = {host.name: peers(list(plan.objects().values())) for host, plan in settled_plans(items).items()}
    assert plans["worker-1"]["222"].endpoint == "[2001:db8::12]:7"
    assert plans["worker-2"]["111"].endpoint == "[2001:db8::11]:7"
    assert plans["worker-1"]["333"].endpoint == "[2001:db8::99]:999"
    assert plans["worker-3"]["111"].endpoint == "172.18.0.11:7"
    assert {plans[name]["444"].endpoint for name in ("worker-1", "worker-2", "worker-3")} == {None}
    assert {name: {item.keepalive_seconds for item in found.values()} for name, found in plans.items()} == {
        "worker-1": {0},
        "worker-2": {0},
        "worker-3": {0},
        "worker-4": {25},
    }


def test_a_node_behind_a_name_is_found_by_it() -> None:
    """The planner hands the name on to every peer, of whatever family, and looks nothing up."""
    named = node("worker-2", 2, endpoint=Endpoint("worker-2.example.net:999"))
    plans = settled_plans([cluster("rome", encryption="wireguard"), node("worker-1", 1), named, key(1), key(2)])
    assert peers(list(plans[ONE].objects().values()))["222"].endpoint == "worker-2.example.net:999"


@pytest.mark.parametrize(
    "addresses,native,overlay",
    [(("172.18.0.11",), 1440, {1390}), (("172.18.0.11", "2001:db8::11"), 1420, {1370, 1350}), (("2001:db8::11",), 1420, {1350})],
)
def test_mtus_leave_room_for_what_may_be_around(addresses: tuple[str, ...], native: int, overlay: set[int]) -> None:
    """WireGuard takes 60 bytes, or 80 where a peer may be found by IPv6; the overlay 50 or 70 more, by its own outer family."""
    for routing in ("native", "overlay"):
        items = [cluster("rome", encryption="wireguard", routing=routing), node("worker-1", 1, addresses=tuple(map(Address, addresses)))]
        found = settled_plans(items)[ONE].objects().values()
        assert {item.mtu for item in found if isinstance(item, WireguardLink)} == {native}
        assert {item.mtu for item in found if isinstance(item, VxlanLink)} == (overlay if routing == "overlay" else set())


# What leads where ------------------------------------------------------------------------------------------------------------------


def routes(found: list[PlanObject], table: int) -> dict[str, str]:
    """What a table says, by prefix: the type, or the link; guards left out."""
    return {
        item.prefix: item.hops[0].link if item.hops else item.type
        for item in found
        if isinstance(item, Route) and item.table == table and not item.is_guard
    }


def test_table_10_lets_out_what_no_peer_would_decrypt() -> None:
    """Its own pods and those of nodes that do not encrypt; a pod that roams has a route of its own, longer than its address's prefix."""
    roaming = [pod("far", "worker-3", "10.200.2.78"), pod("near", "worker-1", "10.200.2.79")]
    found = routes(objects(ONE, *roaming), layout.ENCRYPT_TABLE)
    assert found == {
        "0.0.0.0/0": "me.0",
        "::/0": "me.0",
        "10.200.1.0/24": "throw",
        "fd00:200:0:1::/64": "throw",
        "10.200.3.0/24": "throw",
        "fd00:200:0:3::/64": "throw",
        "10.200.1.77/32": "me.0",
        "10.200.2.78/32": "throw",
        "10.200.2.79/32": "throw",
    }


def test_table_10_of_an_overlay_is_about_nodes() -> None:
    """Outer packets go into the device, but for those to nodes that do not encrypt; their source is the node's address."""
    found = objects(routing="overlay")
    assert routes(found, layout.ENCRYPT_TABLE) == {"0.0.0.0/0": "me.0", "::/0": "me.0", "172.18.0.13/32": "throw"}
    sources = {item.source for item in found if isinstance(item, Route) and item.table == layout.ENCRYPT_TABLE and item.hops}
    assert sources == {"172.18.0.11", "2001:db8:18::11"}


def test_what_the_node_itself_sends_is_led_by_destination() -> None:
    """Enforced, what pods send is too: should nftables be emptied, nothing goes in clear."""
    for strict, iif in (("off", "lo"), ("audit", "lo"), ("enforce", "")):
        rules = {(item.priority, item.iif, item.to) for item in objects(strict=strict) if isinstance(item, PolicyRule) and item.to}
        assert rules == {(1001, iif, "10.200.0.0/16"), (1001, iif, "fd00:200::/48")}


def test_a_family_without_an_underlay_is_led_by_destination_whoever_sends() -> None:
    """There is no other way to its pods, and a device that checks reverse paths looks for the way back without the mark."""
    family = [replace(item, addresses=item.addresses[:1]) if isinstance(item, Node) else item for item in encrypting()]
    rules = {item.to: item.iif for item in settled_plans(family)[ONE].objects().values() if isinstance(item, PolicyRule) and item.to}
    assert rules == {"10.200.0.0/16": "lo", "fd00:200::/48": ""}


def test_who_is_no_pod_sends_by_the_overlay_from_its_address_there() -> None:
    """A node that dials a service is bound to the uplink's address: an answer to that would go by the uplink, in clear."""
    found = objects(routing="overlay", wireguard=NODES)
    own = {item.address.family: item.address for item in found if isinstance(item, LinkAddress) and item.link == "mm.4"}
    (senders,) = [item for item in found if isinstance(item, NftChain) and item.name == "senders"]
    lines = [rule_text(rule) for rule in senders.rules]
    assert f'oifname "mm.*" ip saddr != @pods ip saddr != {own[4]} masquerade' in lines


def test_a_node_without_pods_sends_from_its_overlay_address() -> None:
    """It has no address among pods that peers would take; they take that one, and answer by a route that needs no mark."""
    items = [cluster("rome", encryption="wireguard"), node("worker-1", 1), node("worker-2", 2, pod_prefixes=()), *map(key, (1, 2))]
    plans = settled_plans(items)
    (own,) = [item for item in plans[TWO].objects().values() if isinstance(item, LinkAddress)]
    assert own.address.host_prefix.length == own.length == 32
    assert Prefix("10.80.0.0/16").covers(own.address)
    assert peers(list(plans[ONE].objects().values()))["222"].allowed_ips == (own.address.host_prefix,)
    assert routes(list(plans[ONE].objects().values()), 254) == {own.address.host_prefix: "me.0"}


def test_the_overlay_leads_to_every_nodes_pods() -> None:
    """Forwarding entry, neighbour and routes for each node, by the outer family that both have; no flooding, no learning."""
    found = objects(routing="overlay")
    links = {item.name: item for item in found if isinstance(item, VxlanLink)}
    assert {name: (link.vni, link.remote) for name, link in links.items()} == {"mm.4": (77, None), "mm.6": (77, None)}
    assert {(item.link, item.remote) for item in found if isinstance(item, FdbEntry)} == {("mm.4", "172.18.0.12"), ("mm.4", "172.18.0.13")}
    macs = {item.mac for item in found if isinstance(item, Neighbour)}
    assert macs == {item.mac for item in found if isinstance(item, FdbEntry)}
    assert (
        routes(found, layout.MESH_TABLE).items()
        >= {
            "10.200.2.0/24": "mm.4",
            "10.200.3.0/24": "mm.4",
            "10.200.1.77/32": "mm.4",
            "10.200.1.0/24": "throw",
        }.items()
    )
    guarded = {(item.table, item.prefix) for item in found if isinstance(item, Route) and item.is_guard}
    assert {(table, prefix) for table in (254, 7011) for prefix in ("10.200.0.0/16", "fd00:200::/48")} <= guarded


def test_geneve_has_a_link_for_each_node() -> None:
    """It has no forwarding entries; both ends have one id and Ethernet addresses that the other one knows."""
    plans = settled_plans(encrypting(routing="overlay", overlay="geneve"))
    here, there = (plans[one].objects()[f"link mm.{other.name}"] for one, other in ((ONE, TWO), (TWO, ONE)))
    assert isinstance(here, GeneveLink)
    assert isinstance(there, GeneveLink)
    assert (here.vni, here.remote, there.remote) == (there.vni, "172.18.0.12", "172.18.0.11")
    assert {item.mac for item in plans[ONE].objects().values() if isinstance(item, Neighbour) and item.link == "mm.worker-2"} == {there.mac}
    assert not [item for item in plans[ONE].objects().values() if isinstance(item, FdbEntry)]


def test_an_overlay_needs_no_encryption() -> None:
    """Then it takes no bytes for it, marks nothing and has no device."""
    found = objects(routing="overlay", encryption="none", strict="off")
    assert {item.mtu for item in found if isinstance(item, VxlanLink)} == {1450, 1430}
    assert not [item for item in found if isinstance(item, WireguardLink | NftChain | NftElement) and "meshmark.host" not in item.key]


# Rules ------------------------------------------------------------------------------------------------------------------------------


def chains(**changes: object) -> dict[str, list[str]]:
    return {item.name: list(map(rule_text, item.rules)) for item in objects(**changes) if isinstance(item, NftChain)}


def test_packets_are_marked_where_their_destination_is_final() -> None:
    """A pod dials a service; the pod behind it, on another node, is known after the translation only."""
    (steer,) = [item for item in objects() if isinstance(item, NftChain) and item.name == "steer"]
    assert steer.hook == "prerouting"
    assert steer.priority > layout.PRIORITY_DSTNAT
    assert "ip daddr @pods ip daddr != @own meta mark set meta mark & 0xfffff000 | 0x4d2" in list(map(rule_text, steer.rules))


def test_wireguards_own_packets_are_led_nowhere() -> None:
    """They have another value of the field than what is to be encrypted, and none of either goes into the device."""
    found = chains(wireguard=NODES)
    assert [line.partition(" comment ")[0] for line in found["leave"][:2]] == [
        'oifname "me.*" meta mark & 0xfff == 0xe00 counter drop',
        'oifname "me.*" udp sport { 51871, 51872 } fib saddr type local counter drop',
    ]
    own = found["steer_own"]
    assert own.index("meta mark & 0xfff == 0xe00 return") < own.index("ip daddr @encnodes meta mark set meta mark & 0xfffff000 | 0x4d2")


def test_outer_packets_are_led_into_the_device_by_where_they_go() -> None:
    """Their mark is that of what is inside, which has none where it is no IP packet."""
    assert [line for line in chains(routing="overlay")["steer_own"] if "daddr" in line] == [
        f"udp dport 4789 {word} daddr @encnodes{suffix} meta mark set meta mark & 0xfffff000 | 0x4d2"
        for word, suffix in (("ip", ""), ("ip6", "6"))
    ]
    assert "steer_own" not in chains()


def test_neighbours_and_the_broker_are_spoken_to_in_clear() -> None:
    """What nodes send is encrypted but for that: without either of them, nothing would come up again."""
    own = chains(wireguard=NODES, control=(Prefix("192.0.2.7/32"),))["steer_own"]
    assert own[:2] == ["fib saddr type local ip saddr @control return", "fib saddr type local ip daddr @control return"]
    assert any(line.startswith("icmpv6 type {") and line.endswith("return") for line in own)


@pytest.mark.parametrize("fields", [{}, {"routing": "overlay"}, {"wireguard": NODES}, {"routing": "overlay", "wireguard": NODES}])
def test_audit_counts_what_enforce_drops(fields: dict[str, object]) -> None:
    """The very same matches, so that nobody is surprised; and with strict mode off it is counted and shown all the same."""
    off, audit, enforce = (chains(strict=mode, **fields) for mode in ("off", "audit", "enforce"))
    assert off.keys() == audit.keys() == enforce.keys()
    for name in ("strict_in", "strict_out"):
        assert off[name] == audit[name] == enforce[name]
    ends = [name for name in audit if name.startswith("clear_")]
    assert {line.rpartition("jump ")[2] for name in ("strict_in", "strict_out") for line in audit[name] if "jump" in line} == set(ends)
    for name in ends:
        shown, counted = audit[name]
        assert shown == enforce[name][0] == off[name][0]
        assert shown.startswith("limit rate 10/second burst 20 packets log prefix")
        assert enforce[name][1] == counted.replace("accept", "drop").replace("strict audit", "strict enforce")
        assert off[name][1] == counted.replace("strict audit", "strict off")


def test_without_a_group_packets_are_counted_only() -> None:
    """For kernels that cannot show any: a rule that one of them refuses would keep the whole unit out."""
    found = chains(wireguard=WireguardSettings(audit_group=None))
    assert [len(lines) for name, lines in found.items() if name.startswith("clear_")] == [1, 1]
    assert not any(" log " in line for lines in found.values() for line in lines)


def test_strict_mode_knows_who_does_not_encrypt() -> None:
    """Pods of a node that opted out are no concern of it, even at an address of a peer's prefix; those that roam to a peer are."""
    found = objects(ONE, pod("far", "worker-3", "10.200.2.78"))
    elements = {(item.set, item.element) for item in found if isinstance(item, NftElement)}
    assert ("enc", "10.200.2.0/24") in elements
    assert ("enc", "10.200.3.0/24") not in elements
    assert ("clear_roaming", "10.200.2.78") in elements
    assert ("roaming", "10.200.1.77") in elements


def test_one_more_node_is_a_few_objects_on_each_host() -> None:
    """And none of policy rules and chains: these do not grow."""
    before, after = settled_plans(three()), settled_plans([*three(), node("worker-4", 4), key(4)])
    for host, plan in before.items():
        added = after[host].objects().keys() - plan.objects().keys()
        assert {name.split()[0] for name in added} == {"peer", "element"}
        assert plan.objects().items() <= after[host].objects().items()


def test_because_leads_to_topology() -> None:
    """Every object names admitted objects that it comes from, the cluster among them."""
    items = encrypting(routing="overlay")
    refs = {item.ref for item in items}
    for plan in settled_plans(items).values():
        for entry in plan.units[UNIT].values():
            assert set(entry.because) <= refs
            assert "Cluster/rome/rome" in entry.because


def test_the_example_shows_both_sides() -> None:
    """What the golden plans are made of is what people read."""
    assert [item.opt_out for item in load([EXAMPLES / "encryption.yaml"]) if isinstance(item, Node)] == [False, False, True]
    assert any(isinstance(item, Sysctl) and item.link == "me.0" for item in objects())
