"""Policies of what leaves a cluster through which node: plans in every routing, moves in steps, slots, and what is refused."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from msgspec.structs import replace

from schemas.codec import DecodeError, encode
from schemas.host_objects import NftChain, NftElement, PlanObject, PolicyRule, Route, WireguardPeer
from schemas.in_use import InUse, Use
from schemas.nft import Match, VerdictMap
from schemas.plan import HostPlan, unit_digest
from schemas.status import ApplyReport, UnitReport
from schemas.topology import Cluster, EgressPolicy, Gateway, Marks, Node, PublicKey, Topology, convert_topology
from schemas.values import Address, Key, Name, Prefix
from services.cli.files import load
from services.cli.render import plan_text
from services.planner import egress, layout
from services.planner.compile import compile_all, drops
from services.planner.core import Core, Said
from services.planner.egress import Way
from services.planner.state import HostId
from tests.firewalls import one_chain, rule
from tests.topologies import EXAMPLES, cluster, gateway, node, peering, pod, said, settled_plans, tell

GOLDEN = Path(__file__).parent / "golden_egress"
ONE, TWO, THREE = (HostId("rome", f"worker-{number}") for number in (1, 2, 3))
UNIT = "mesh/rome"


def items(**changes: object) -> list[Topology]:
    """The example with keys, and other fields of its cluster."""
    third = PublicKey(name=Name("worker-3"), cluster=Name("rome"), key=Key("3" * 42 + "A="))
    found = [*load([EXAMPLES / "egress.yaml", EXAMPLES / "encryption-keys.yaml"]), third]
    unique = {item.ref: item for item in found}
    return [replace(item, **changes) if isinstance(item, Cluster) else item for item in unique.values()]


def policy(name: str = "more", **changes: object) -> EgressPolicy:
    return replace(EgressPolicy(name=Name(name), cluster=Name("rome"), pods=(Prefix("10.200.3.0/24"),), node=Name("worker-1")), **changes)


def shop(**changes: object) -> EgressPolicy:
    found = next(item for item in items() if item.ref == "EgressPolicy/rome/shop")
    assert isinstance(found, EgressPolicy)
    return replace(found, **changes)


def objects(plans: dict[HostId, HostPlan], host: HostId) -> list[PlanObject]:
    return list(plans[host].objects().values())


def elements(found: Iterable[PlanObject], name: str) -> dict[str, str]:
    """What a set or map holds."""
    return {item.element: item.value for item in found if isinstance(item, NftElement) and item.set == name}


@pytest.fixture
def four() -> list[Topology]:
    """The example with a fourth node, which nobody uses yet."""
    third = next(item for item in items() if item.ref == "Node/rome/worker-3")
    addresses, prefixes = (Address("172.18.0.14"), Address("2001:db8:18::14")), (Prefix("10.200.4.0/24"), Prefix("fd00:200:0:4::/64"))
    assert isinstance(third, Node)
    fourth = replace(third, name=Name("worker-4"), addresses=addresses, pod_prefixes=prefixes)
    return [*items(), fourth, PublicKey(name=Name("worker-4"), cluster=Name("rome"), key=Key("4" * 42 + "A="))]


@pytest.mark.parametrize("path", sorted(GOLDEN.iterdir()), ids=lambda path: path.stem)
def test_golden_plans(path: Path) -> None:
    """What a reviewer has read: a node that leads its pods to another one, and the nodes that let them out, natively and by the overlay."""
    routing, host = path.stem.split(".")
    assert plan_text(settled_plans(items(routing=routing))[HostId("rome", host)]) == path.read_text(encoding="utf-8")


def test_one_rule_a_family_for_each_node_that_lets_pods_out() -> None:
    """However many policies and pods there are: they are elements. No rule of nftables names a pod either, but for its policy's chain."""
    more = [policy(f"p{number}", pods=(Prefix(f"10.200.1{number}.0/24"),), node=Name("worker-2")) for number in range(10)]
    few, many = (objects(settled_plans([*items(), *these]), ONE) for these in ([], more))
    for kind in (PolicyRule, Route):
        assert [item for item in few if isinstance(item, kind)] == [item for item in many if isinstance(item, kind)]
    rules = [{item.name: len(item.rules) for item in found if isinstance(item, NftChain) and item.hook} for found in (few, many)]
    assert rules[0] == rules[1]
    assert len([item for item in many if isinstance(item, PolicyRule) and item.priority == layout.RULE_EGRESS]) == 4  # two nodes, twice


@pytest.mark.parametrize("routing", ["native", "overlay"])
def test_the_way_to_an_exit_ends_in_unreachable(routing: str) -> None:
    """By mark to a table that holds the overlay's way to that node, and a refusal of everything else; a node has none to itself."""
    plans = settled_plans(items(routing=routing))
    found = [item for item in objects(plans, ONE) if isinstance(item, Route) and item.table in layout.EGRESS_TABLES]
    tables = {item.table for item in found}
    assert len(tables) == 2
    for table in tables:
        assert {(item.prefix, item.type) for item in found if item.table == table} == {
            (Prefix(each), kind) for each in ("0.0.0.0/0", "::/0") for kind in ("unicast", "unreachable")
        }
    assert all(hop.link == "mm.4" for item in found for hop in item.hops)
    assert len({item.table for item in objects(plans, TWO) if isinstance(item, Route) and item.table in layout.EGRESS_TABLES}) == 1


def ways_out(found: Iterable[PlanObject]) -> int:
    """How many ways lead to exit nodes, of both families."""
    return len([item for item in found if isinstance(item, Route) and item.table in layout.EGRESS_TABLES and item.type == "unicast"])


@pytest.mark.parametrize("strict,others", [("enforce", 2), ("audit", 4), ("off", 4)])
@pytest.mark.parametrize("routing", ["native", "overlay"])
def test_nothing_goes_to_an_exit_whose_key_is_not_known_where_nothing_may_go_in_clear(routing: str, strict: str, others: int) -> None:
    """Its table refuses everything until then, on nodes that encrypt; nor does a node lead pods anywhere before its own key is known."""
    without = [item for item in items(routing=routing, strict=strict) if item.ref != "PublicKey/rome/worker-3"]
    core = Core()
    tell(core, without)
    publish(core)
    assert ways_out(objects(core.published, ONE)) == others
    assert ways_out(objects(core.published, THREE)) == others - 2
    core.hear([said(next(item for item in items() if item.ref == "PublicKey/rome/worker-3"), 1000)])
    publish(core)
    assert ways_out(objects(core.published, ONE)) == 4
    assert ways_out(objects(core.published, THREE)) == 2
    assert compile_all(core.state, core.allocations)[ONE].units == core.published[ONE].units


def test_peers_take_outer_packets_where_pods_leave_by_them_only() -> None:
    """Natively, a node's own address is among what a peer may send if one of the two lets pods out; else its pods are all."""
    one_exit = [item for item in items() if item.ref != "EgressPolicy/rome/bank"]
    plans = settled_plans(one_exit)
    for host, others in ((ONE, {"172.18.0.12/32"}), (TWO, {"172.18.0.11/32", "172.18.0.13/32"}), (THREE, {"172.18.0.12/32"})):
        allowed = {prefix for item in objects(plans, host) if isinstance(item, WireguardPeer) for prefix in item.allowed_ips}
        assert {str(prefix) for prefix in allowed if str(prefix).startswith("172.")} == others


def test_who_lets_out_translates_and_who_leads_does_not() -> None:
    """The exit node maps pods to the given address or its own; others keep pods' addresses and map them to the policy's chain."""
    plans = settled_plans(items())
    assert elements(objects(plans, TWO), "leaving") == {"10.200.1.0/24": "172.18.0.12"}
    assert elements(objects(plans, TWO), "leaving6") == {"fd00:200:0:1::/64": "2001:db8:18::12"}
    assert elements(objects(plans, THREE), "leaving.bank.4") == {"10.200.2.10": "192.0.2.9"}
    assert elements(objects(plans, THREE), "leaving") == {}
    assert elements(objects(plans, ONE), "led") == {"10.200.1.0/24": "jump by.shop", "10.200.2.10": "jump by.bank"}
    assert elements(objects(plans, TWO), "led") == {"10.200.2.10": "jump by.bank"}


@pytest.mark.parametrize("host", [ONE, TWO, THREE], ids=str)
def test_no_answer_of_an_exit_node_begins_a_flow(host: HostId) -> None:
    """Whether a node leads a policy's pods or lets them out: for what is outside to that policy, they have to begin."""
    found = objects(settled_plans(items()), host)
    assert elements(found, "chosen") == {"10.200.1.0/24": "jump back.shop", "10.200.2.10": "jump back.bank"}
    assert elements(found, "chosen6") == {"fd00:200:0:1::/64": "jump back.shop"}
    chains = {item.name: item.rules for item in found if isinstance(item, NftChain)}
    assert chains["back.shop"] == (drops.NO_ANSWER,)
    assert chains["back.bank"] == ((Match("ip saddr", ("@to.bank.4",)), *drops.NO_ANSWER),)
    reply, drop = (
        next(number for number, rule in enumerate(chains["egress_forward"]) if match in rule)
        for match in (Match("ct direction", ("reply",)), VerdictMap("ip daddr", "chosen"))
    )
    assert reply < drop
    assert Match("ct direction", ("original",)) in chains["egress_forward"][drop]


def test_inside_is_all_that_a_cluster_and_its_peers_have() -> None:
    """Pods, external and internal prefixes, what is seen of peers, broker, gateways, and what is never routed."""
    rome = cluster("rome", control=(Prefix("192.0.2.7/32"),), external_prefixes=(Prefix("10.70.0.0/16"),))
    base = [rome, cluster("milan"), gateway("rome"), gateway("milan"), node("worker-1", 1), node("worker-2", 2), peering()]
    found = objects(settled_plans([*base, policy(pods=(Prefix("10.200.1.0/24"),), node=Name("worker-2"))]), ONE)
    inside = elements(found, "inside").keys()
    assert {"10.200.0.0/16", "10.70.0.0/16", "10.80.0.0/16", "10.61.0.0/16", "192.0.2.7", "169.254.0.0/16", "224.0.0.0/3"} <= inside
    assert elements(found, "hosts").keys() == {"172.18.0.10", "172.18.0.11", "172.18.0.12"}


def test_a_cluster_without_policies_has_nothing_of_it() -> None:
    """The last policy takes all along that the first one brought."""
    core = Core()
    tell(core, items())
    policies = [item for item in items() if isinstance(item, EgressPolicy)]
    core.hear([Said(("egresspolicy", "rome", item.name), b"", 100 + number) for number, item in enumerate(policies)])
    core.steps()
    without = settled_plans([item for item in items() if not isinstance(item, EgressPolicy)])
    assert {step: core._compiler.plan(step).units for step in (ONE, TWO, THREE)} == {host: plan.units for host, plan in without.items()}


# Following changes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"routing": "overlay"}, {"overlay": "geneve"}, {"encryption": "none", "strict": "off"}], ids=str)
def test_following_a_change_gives_what_compiling_anew_does(changes: dict[str, object]) -> None:
    """Policies come, change, move and go; nodes and roaming pods change beside them: every plan is as if made from nothing."""
    core = Core()
    tell(core, items(**changes))
    roaming = pod("roam", "worker-2", "10.200.1.77")
    third = next(item for item in items() if item.ref == "Node/rome/worker-3")
    assert isinstance(third, Node)
    series: list[Topology | str] = [
        policy(),
        roaming,
        policy(node=Name("worker-2")),
        shop(node=Name("worker-3")),
        policy(node=Name("worker-2"), destinations=(Prefix("198.51.100.0/24"),)),
        replace(third, addresses=(Address("172.18.0.33"), Address("2001:db8:18::33"))),
        replace(roaming, node=Name("worker-3")),
        gateway("rome"),
        "egresspolicy/bank",
        "egresspolicy/shop",
        "egresspolicy/more",
        policy(),
    ]
    for number, item in enumerate(series, 1000):
        if isinstance(item, str):
            kind, name = item.split("/")
            outcome = core.hear([Said((kind, "rome", name), b"", number)])
        else:
            outcome = core.hear([said(item, number)])
        assert not outcome.refused, (item, outcome.refused)
        for _ in range(4):
            publish_and_hold(core)
            fresh = compile_all(core.state, core.allocations)
            assert {host: core._compiler.plan(host) for host in fresh} == fresh, item


def publish_and_hold(core: Core, *silent: HostId) -> None:
    """All hosts hold what is published now, but for silent ones."""
    publish(core)
    for host, plan in core.published.items():
        if host not in silent:
            units = tuple(
                UnitReport(name, digest, digest, "applied")
                for name, digest in ((name, unit_digest(unit.values())) for name, unit in plan.units.items())
            )
            core.report(ApplyReport(Name(host.cluster), Name(host.name), 1, 1, units))


def publish(core: Core) -> None:
    for step in core.steps():
        core.publish(step)


def test_a_policy_moves_in_steps() -> None:
    """The new node is ready before anybody leads pods there; the old one lets go once all nodes have followed, and not before."""
    core = Core()
    tell(core, items())
    publish_and_hold(core)
    core.hear([said(shop(node=Name("worker-3")), 1000)])

    def now() -> tuple[set[str], str]:
        plans = {host: core._compiler.plan(host) for host in (ONE, TWO, THREE)}
        out = {host.name for host, plan in plans.items() if "10.200.1.0/24" in elements(plan.objects().values(), "leaving")}
        chain = next(item for item in plans[ONE].objects().values() if isinstance(item, NftChain) and item.name == "by.shop")
        slot = next(slot for slot in range(1, 5) if f"value={egress.mark(Marks(), slot)}, " in str(chain))
        return out, next(host.name for host, value in core.allocations.slots.items() if value.slot == slot)

    assert now() == ({"worker-2", "worker-3"}, "worker-2")
    publish_and_hold(core, THREE)
    publish(core)
    assert now() == ({"worker-2", "worker-3"}, "worker-2")
    publish_and_hold(core)
    publish(core)
    assert now() == ({"worker-2", "worker-3"}, "worker-3")
    publish_and_hold(core, ONE)
    publish(core)
    assert now() == ({"worker-2", "worker-3"}, "worker-3")
    publish_and_hold(core)
    publish(core)
    assert now() == ({"worker-3"}, "worker-3")


def test_a_node_lets_pods_out_until_nobody_leads_them_there(four: list[Topology]) -> None:
    """Also one from before the last move: a policy may be given a third node before all have followed to the second."""
    core, late = Core(), ONE
    tell(core, four)
    publish_and_hold(core)

    def out() -> set[str]:
        found = {host.name: core._compiler.plan(host).objects().values() for host in core.state.hosts()}
        return {name for name, these in found.items() if "10.200.1.0/24" in elements(these, "leaving")}

    core.hear([said(shop(node=Name("worker-3")), 1000)])
    publish_and_hold(core)
    publish_and_hold(core, late)
    core.hear([said(shop(node=Name("worker-4")), 1001)])
    publish_and_hold(core, late)
    publish_and_hold(core, late)
    assert core.allocations.way(core.state, shop()).node == "worker-4"
    assert out() == {"worker-2", "worker-3", "worker-4"}
    publish_and_hold(core)
    publish(core)
    assert (out(), core.allocations.ways["rome", "shop"]) == ({"worker-4"}, Way("worker-4"))


@pytest.mark.parametrize(
    "way,wanted,after",
    [
        (Way("a"), "b", Way("b", "a")),
        (Way("b", "a"), "c", Way("c", "b", ("a",))),
        (Way("c", "b", ("a",)), "a", Way("a", "c", ("b",))),
        (Way("b", "a"), "a", Way("a", "b")),
        (Way("c", "b", ("a",)), "c", Way("c")),
        (Way("c"), "c", Way("c")),
    ],
    ids=str,
)
def test_the_steps_of_a_move(way: Way, wanted: str, after: Way) -> None:
    """Each needs that those hold who must; no node that is down keeps pods from being led to another one."""
    assert egress.advance(way, wanted, wanted_holds=True, all_hold=True) == after
    assert egress.advance(way, wanted, wanted_holds=way.node != wanted, all_hold=way.node == wanted) == after
    assert egress.advance(way, wanted, wanted_holds=way.node == wanted, all_hold=False) == way


def test_a_policy_moves_to_a_node_that_encrypts_only() -> None:
    """Where nothing may go in clear, pods stay with the node before until the next one's key is known."""
    core = Core()
    tell(core, [item for item in items(strict="enforce") if item.ref != "PublicKey/rome/worker-3"])
    core.hear([said(shop(node=Name("worker-3")), 1000)])
    for _ in range(3):
        publish_and_hold(core)
    assert core.allocations.ways["rome", "shop"] == Way("worker-2")
    core.hear([said(next(item for item in items() if item.ref == "PublicKey/rome/worker-3"), 1001)])
    for _ in range(3):
        publish_and_hold(core)
    assert core.allocations.ways["rome", "shop"] == Way("worker-3")


def test_slots_and_steps_are_kept_over_a_restart() -> None:
    """What was written is what a planner that starts again goes on with."""
    core = Core()
    tell(core, items())
    publish_and_hold(core)
    core.hear([said(shop(node=Name("worker-3")), 1000)])
    again = Core()
    for what, home, name in core.allocations.take_changes():
        value = core.allocations.value(what, home, name)
        if value is not None:
            again.allocations.restore(what, home, name, encode(value))
    again.restore([(item, 1) for item in core.state.objects.values()], {}, {})
    assert again.allocations.take_changes() == []
    assert compile_all(again.state, again.allocations) == compile_all(core.state, core.allocations)
    assert again.allocations.ways["rome", "shop"] == Way("worker-2")


def test_a_deleted_policy_is_forgotten() -> None:
    """One of its name that comes later begins anew."""
    core = Core()
    tell(core, items())
    core.allocations.take_changes()
    core.hear([Said(("egresspolicy", "rome", "shop"), b"", 1000)])
    assert core.allocations.take_changes() == [("way", "rome", "shop")]
    assert core.allocations.value("way", "rome", "shop") is None


def test_a_refused_policy_leaves_no_way_behind(four: list[Topology]) -> None:
    """Where all slots are taken it is refused, and admitted when it names a node that has one."""
    core = Core()
    marks = Marks(mask=0x7, encrypt=1, encrypted=2, decrypted=3)
    tell(core, [replace(item, marks=marks) if isinstance(item, Cluster) else item for item in (*four, policy())])
    core.allocations.take_changes()
    late = policy("late", pods=(Prefix("10.200.4.0/24"),), node=Name("worker-4"))
    assert [item.other for item in core.hear([said(late, 1000)]).refused] == ["Cluster/rome/rome"]
    assert core.allocations.take_changes() == []
    assert core.hear([said(replace(late, node=Name("worker-1")), 1001)]).refused == []
    assert core.allocations.ways["rome", "late"] == Way("worker-1")


def test_a_policy_of_which_no_plan_can_be_made_leaves_no_way_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does one that is refused after it was given one."""
    core = Core()
    tell(core, items())
    refresh = core._compiler.refresh

    def fail_once(changed: Iterable[Topology]) -> set[HostId]:
        monkeypatch.setattr(core._compiler, "refresh", refresh)
        raise ValueError(list(changed))

    monkeypatch.setattr(core._compiler, "refresh", fail_once)
    assert len(core.hear([said(policy(), 1000)]).refused) == 1
    assert ("rome", "more") not in core.allocations.ways
    assert core.allocations.value("way", "rome", "more") is None


def moving_from_a_node_that_goes(*destinations: Prefix) -> tuple[Core, Node]:
    """A core in which a policy is on its way off worker-2, and that node, which is deleted."""
    core, moving = Core(), shop(destinations=destinations)
    tell(core, [moving if item.ref == moving.ref else item for item in items()])
    publish_and_hold(core)
    second = core.state.objects["Node/rome/worker-2"]
    assert isinstance(second, Node)
    outcome = core.hear(
        [
            said(replace(moving, node=Name("worker-3")), 1000),
            Said(("endpoint", "rome", "stock"), b"", 1001),
            Said(("node", "rome", "worker-2"), b"", 1002),
        ]
    )
    assert not outcome.refused
    return core, second


@pytest.mark.parametrize("destinations", [(), (Prefix("203.0.113.0/24"), Prefix("2001:db8:113::/48"))], ids=["all", "narrowed"])
def test_a_deleted_node_is_on_no_policys_way(destinations: tuple[Prefix, ...]) -> None:
    """Pods are led to the node that the policy names at once, on all nodes."""
    core, _ = moving_from_a_node_that_goes(*destinations)
    assert core.allocations.ways["rome", "shop"] == Way("worker-3")
    fresh = compile_all(core.state, core.allocations)
    assert {host: core._compiler.plan(host) for host in fresh} == fresh


def test_a_node_that_comes_back_is_on_no_policys_way() -> None:
    """One of its name is another node: pods are led there when a policy says so."""
    core, second = moving_from_a_node_that_goes()
    core.hear([said(second, 1003)])
    assert core.allocations.way(core.state, shop(node=Name("worker-3"))) == Way("worker-3")
    fresh = compile_all(core.state, core.allocations)
    assert {host: core._compiler.plan(host) for host in fresh} == fresh


def test_a_way_by_a_node_that_is_gone_ends_with_a_restart() -> None:
    """What an earlier planner may have left behind."""
    core, second = moving_from_a_node_that_goes()
    again = Core()
    again.allocations.restore("way", "rome", "shop", b'{"node":"worker-2","before":""}')
    again.restore([(item, 1) for item in core.state.objects.values()], {}, {})
    assert again.allocations.ways["rome", "shop"] == Way("worker-3")
    again.hear([said(second, 1003)])
    assert again.allocations.ways["rome", "shop"] == Way("worker-3")


def test_values_of_marks_are_none_of_the_clusters_own() -> None:
    """Each slot has one, inside the mask; a narrow mask has few, and says so."""
    for marks in (Marks(), Marks(mask=0xF0, encrypt=0x10, encrypted=0x20, decrypted=0x30)):
        values = [egress.mark(marks, slot) for slot in range(egress.room(marks) + 1)]
        assert len(set(values)) == len(values)
        assert not {0, marks.encrypt, marks.encrypted, marks.decrypted} & set(values)
        assert all(value & ~marks.mask == 0 for value in values)
    assert egress.room(Marks(mask=0xF0, encrypt=0x10, encrypted=0x20, decrypted=0x30)) == 11
    narrow = Marks(mask=0x7, encrypt=1, encrypted=2, decrypted=3)
    assert egress.room(narrow) == 3
    narrowest = Marks(mask=0x3, encrypt=1, encrypted=2, decrypted=3)
    assert [found[1:] for found in refused(*items(marks=narrowest))] == [("$.node", "Cluster/rome/rome")] * 2


# Admission -----------------------------------------------------------------------------------------------------------------------


def refused(*these: Topology) -> list[tuple[str, str, str]]:
    """Object, field and other object of each refusal."""
    return [(f"{item.kind}/{item.name}", item.field, item.other) for item in tell(Core(), these).refused]


@pytest.mark.parametrize(
    "wrong,field,other",
    [
        (policy(node=Name("nobody")), "$.node", "Node/rome/nobody"),
        (policy(pods=(Prefix("10.201.0.0/24"),)), "$.pods[0]", "Cluster/rome/rome"),
        (policy(pods=(Prefix("10.200.3.0/24"), Prefix("10.200.1.7/32"))), "$.pods[1]", "EgressPolicy/rome/shop"),
        (policy(pods=(Prefix("10.200.0.0/16"),)), "$.pods[0]", "EgressPolicy/rome/bank"),
        (policy(destinations=(Prefix("10.200.9.0/24"),)), "$.destinations[0]", "Cluster/rome/rome"),
        (policy(destinations=(Prefix("169.254.169.254/32"),)), "$.destinations[0]", "Cluster/rome/rome"),
        (policy(addresses=(Address("192.0.2.9"),)), "$.addresses[0]", "EgressPolicy/rome/bank"),
        (policy(addresses=(Address("172.18.0.12"),)), "$.addresses[0]", "Node/rome/worker-2"),
        (policy(addresses=(Address("10.200.3.9"),)), "$.addresses[0]", "Cluster/rome/rome"),
    ],
)
def test_what_a_policy_contradicts_is_refused(wrong: EgressPolicy, field: str, other: str) -> None:
    """Who was there first stays; the field and the other object are named."""
    assert refused(*items(), wrong) == [("EgressPolicy/more", field, other)]


@pytest.mark.parametrize(
    "fields,at",
    [
        ({"addresses": ["2001:db8::1"]}, "$.addresses[0]"),
        ({"addresses": ["192.0.2.1", "192.0.2.2"]}, "$.addresses[1]"),
        ({"destinations": ["2001:db8::/64"]}, "$.destinations[0]"),
        ({"destinations": ["192.0.2.0/24", "192.0.2.8/29"]}, "$.destinations[1]"),
        ({"pods": ["10.200.1.0/24", "10.200.1.9"]}, "$.pods[1]"),
        ({"pods": []}, "$.pods"),
    ],
)
def test_what_a_policy_contradicts_by_itself(fields: dict[str, object], at: str) -> None:
    """Families that none of its pods has, and prefixes that overlap."""
    with pytest.raises(DecodeError) as caught:
        convert_topology({"kind": "EgressPolicy", "name": "x", "cluster": "rome", "node": "worker-1", "pods": ["10.200.1.0/24"], **fields})
    assert caught.value.field == at


def test_destinations_of_a_peer_go_through_tunnels() -> None:
    """What pods see of another cluster is not outside, however it is written."""
    base = [cluster("rome"), cluster("milan"), gateway("rome"), gateway("milan"), node("worker-1", 1), node("worker-2", 2), peering()]
    wrong = policy(pods=(Prefix("10.200.1.0/24"),), node=Name("worker-2"), destinations=(Prefix("10.61.2.0/24"),))
    assert refused(*base, wrong) == [("EgressPolicy/more", "$.destinations[0]", "Peering/rome/rome-milan")]
    assert refused(*base, replace(wrong, destinations=(Prefix("0.0.0.0/0"),))) == []


def test_a_node_that_opted_out_lets_nobody_out_where_that_matters() -> None:
    """In strict mode, what goes there in clear is what nobody wanted; else it is the publisher's choice. And so from the node's side."""
    clear = [replace(item, opt_out=True) if item.ref == "Node/rome/worker-3" else item for item in items()]
    clear = [item for item in clear if item.ref != "PublicKey/rome/worker-3"]
    assert refused(*clear) == [("EgressPolicy/bank", "$.node", "Node/rome/worker-3")]
    assert refused(*(replace(item, strict="off") if isinstance(item, Cluster) else item for item in clear)) == []
    third = next(item for item in items() if item.ref == "Node/rome/worker-3")
    assert isinstance(third, Node)
    assert refused(*items(), replace(third, opt_out=True)) == [("Node/worker-3", "$.addresses", "EgressPolicy/rome/bank")]


def test_a_node_needs_an_address_of_each_family_that_it_lets_out() -> None:
    """Its own, or one that the policy gives."""
    without = [replace(item, addresses=item.addresses[:1]) if item.ref == "Node/rome/worker-2" else item for item in items()]  # type: ignore[union-attr]
    assert refused(*without) == [("EgressPolicy/shop", "$.node", "Node/rome/worker-2")]
    given = shop(addresses=(Address("2001:db8:18::99"),))
    assert refused(*(given if item.ref == given.ref else item for item in without)) == []


def test_packets_of_ipv6_need_their_room_in_the_overlay() -> None:
    """1400 bytes are enough for WireGuard, and not for the overlay inside it."""
    found = refused(*items(mtu=1400))
    assert {(ref, field) for ref, field, _ in found} == {("EgressPolicy/shop", "$.node"), ("EgressPolicy/bank", "$.node")}


def test_a_node_of_a_policy_stays_and_its_address_too() -> None:
    """A node goes when no policy names it any more; nobody else takes an address by which pods leave."""
    core = Core()
    tell(core, items())
    outcome = core.hear([Said(("node", "rome", "worker-3"), b"", 1000)])
    assert outcome.refused[0].other in ("Endpoint/rome/post", "EgressPolicy/rome/bank")
    taker = Gateway(name=Name("gateway"), cluster=Name("rome"), addresses=(Address("192.0.2.9"),))
    refusal = core.hear([said(taker, 1001)]).refused[0]
    assert (refusal.field, refusal.other) == ("$.addresses[0]", "EgressPolicy/rome/bank")


def test_published_firewalls_leave_the_marks_alone() -> None:
    """Also where nothing is encrypted: by these bits nodes tell where they lead pods. Who is there first stays."""
    plain = items(encryption="none", strict="off")
    firewall = one_chain(rule(actions=[{"action": "setMark", "value": 1}]))
    bare = [item for item in plain if not isinstance(item, EgressPolicy | PublicKey)]
    assert refused(*bare, firewall) == []
    assert refused(*plain, firewall)[0][1] == "$.chains[0].rules[0].actions[0]"
    assert {other for _, _, other in refused(*bare, firewall, shop())} == {firewall.ref}


def test_numbers_that_others_use_on_a_node_are_asked_for() -> None:
    """The marks' bits, the priority, and all tables among which the planner chooses."""
    uses = {
        "marks": Use(0x10, "somebody"),
        "priorities": Use(layout.RULE_EGRESS, "somebody"),
        "tables": Use(layout.EGRESS_TABLE + 3, "somebody"),
    }
    for kind, use in uses.items():
        core = Core()
        tell(core, [item for item in items(encryption="none", strict="off") if not isinstance(item, EgressPolicy | PublicKey)])
        report = ApplyReport(Name("rome"), Name("worker-1"), 1, 1, (), in_use=InUse(**{kind: (use,)}))
        core.note_in_use(report)
        assert core.hear([said(shop(), 1000)]).refused[0].other == "Node/rome/worker-1"
