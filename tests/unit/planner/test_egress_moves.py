"""Policies that come, move in steps and go, and the slots of their nodes."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from msgspec.structs import replace

from schemas.codec import encode
from schemas.host_objects import NftChain
from schemas.topology import Cluster, Marks, Node, PublicKey, Topology
from schemas.values import Address, Key, Name, Prefix
from services.planner import egress
from services.planner.compile import compile_all
from services.planner.core import Core, Said
from services.planner.egress import Way
from services.planner.state import HostId
from tests.topologies import gateway, pod, said, tell
from tests.unit.planner.policies import elements, items, policy, publish, publish_and_hold, shop

ONE, TWO, THREE = (HostId("rome", f"worker-{number}") for number in (1, 2, 3))
UNIT = "mesh/rome"


@pytest.fixture
def four() -> list[Topology]:
    """The example with a fourth node, which nobody uses yet."""
    third = next(item for item in items() if item.ref == "Node/rome/worker-3")
    addresses, prefixes = (Address("172.18.0.14"), Address("2001:db8:18::14")), (Prefix("10.200.4.0/24"), Prefix("fd00:200:0:4::/64"))
    assert isinstance(third, Node)
    fourth = replace(third, name=Name("worker-4"), addresses=addresses, pod_prefixes=prefixes)
    return [*items(), fourth, PublicKey(name=Name("worker-4"), cluster=Name("rome"), key=Key("4" * 42 + "A="))]


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
