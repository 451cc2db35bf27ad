"""A node changes its key step by step: each step waits for those that are there, and nothing is ever led where nobody takes it."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from schemas.host_objects import NftElement, Route, WireguardLink, WireguardPeer
from schemas.plan import HostPlan, diff_units
from schemas.topology import Node, PublicKey, Topology, WireguardSettings
from schemas.values import Key, Name, Prefix
from services.applier import keys as applier_keys
from services.kernel.curve25519 import public_key
from services.planner.core import Core
from services.planner.layout import ENCRYPT_TABLE
from services.planner.state import HostId
from services.runtime.errors import Permanent
from tests.meshes import InMemory
from tests.topologies import cluster, encrypting, node, said, settled_plans
from tests.turnovers import Greeting

HOSTS = [HostId("rome", f"worker-{number}") for number in (1, 2, 3)]
FIRST, TURNING, THIRD = HOSTS
PRIVATE = {host: bytes([number]) * 32 for number, host in enumerate(HOSTS, 1)}
STAGES = ["beside", "moved", "rekeyed", "back", "leaving", "done"]


class Small(Greeting):
    """Three nodes in memory that encrypt; peers of which both ends hold each other's key shake hands at once, unless they are `deaf`."""

    def __init__(self, **changes: object) -> None:
        super().__init__(lambda host: InMemory(PRIVATE[host]))
        self.deaf: set[HostId] = set()
        self.closed: set[tuple[HostId, str]] = set()
        """Hosts that cannot be met on a link."""
        self.hear([cluster("rome", encryption="wireguard", **changes), *(node(host.name, number) for number, host in enumerate(HOSTS, 1))])
        self.hear([PublicKey(name=Name(host.name), cluster=Name("rome"), key=public_key(PRIVATE[host])) for host in HOSTS])
        self.settle()

    def shake_hands(self) -> None:
        """All peers that can do so now."""
        for here, there, link in itertools.product(self.hosts, self.hosts, ("me.0", "me.1")):
            if here != there and not {here, there} & self.deaf and not {(here, link), (there, link)} & self.closed:
                self.greet(here, there, link)

    def assert_nobody_is_lost(self) -> None:
        """Whoever is there and leads packets to another one does it by a device on which both know each other, with what is sent."""
        for here in HOSTS:
            for there in HOSTS:
                if here != there and not {here, there} & self.away and here in self.hosts and there in self.hosts:
                    self._assert_reached(here, there)

    def _assert_reached(self, here: HostId, there: HostId) -> None:
        ours, theirs = self.hosts[here].kernel.objects, self.hosts[there].kernel.objects
        prefix, own = Prefix(f"10.200.{there.name[-1]}.0/24"), Prefix(f"10.200.{here.name[-1]}.0/24")
        route = ours.get(f"route {ENCRYPT_TABLE} {prefix} 0") or ours.get(f"route {ENCRYPT_TABLE} 0.0.0.0/0 0")
        assert isinstance(route, Route)
        if route.type == "throw":
            return
        link = route.hops[0].link
        far, near = theirs.get(f"link {link}"), ours.get(f"link {link}")
        assert isinstance(far, WireguardLink), (here, there, link)
        assert isinstance(near, WireguardLink), (here, there, link)
        sends, takes = ours.get(f"peer {link} {far.public_key}"), theirs.get(f"peer {link} {near.public_key}")
        assert isinstance(sends, WireguardPeer), (here, there, link)
        assert isinstance(takes, WireguardPeer), (here, there, link)
        assert prefix in sends.allowed_ips
        assert own in takes.allowed_ips
        assert self.hosts[here].kernel.handshakes_s.get(sends.key), (here, there, link)
        assert self.hosts[there].kernel.handshakes_s.get(takes.key), (here, there, link)


def hops(plan: HostPlan) -> dict[str, str]:
    """Where table 10 leads, by prefix."""
    routes = [item for item in plan.objects().values() if isinstance(item, Route) and item.table == ENCRYPT_TABLE and item.hops]
    return {str(item.prefix): item.hops[0].link for item in routes}


def devices(plan: HostPlan) -> dict[str, Key | None]:
    return {item.name: item.public_key for item in plan.objects().values() if isinstance(item, WireguardLink)}


def peers(plan: HostPlan, link: str) -> set[Key]:
    return {item.public_key for item in plan.objects().values() if isinstance(item, WireguardPeer) and item.link == link}


def next_key(small: Small, host: HostId = TURNING) -> Key:
    found = small.hosts[host].ask(lambda kernel, _: kernel.keys().next)
    assert found is not None
    return found


def test_every_stage_is_what_it_says() -> None:
    """Devices, peers and ways of the node that changes its key and of another one, stage by stage."""
    small = Small()
    old, others = public_key(PRIVATE[TURNING]), {public_key(PRIVATE[host]) for host in (FIRST, THIRD)}
    small.rotate(TURNING)
    new, seen = next_key(small), {}
    while small.stage(TURNING) != "done":
        small.plan()
        own, other = small.plans[TURNING], small.plans[FIRST]
        seen[small.stage(TURNING)] = (devices(own), hops(own)["0.0.0.0/0"], hops(other).get("10.200.2.0/24", "me.0"))
        assert peers(own, "me.0") == others
        assert peers(own, "me.1") == (others if "me.1" in devices(own) else set())
        assert peers(other, "me.0") == {devices(own)["me.0"], public_key(PRIVATE[THIRD])}
        assert peers(other, "me.1") == ({new} if "me.1" in devices(other) else set())
        assert devices(other).keys() == devices(own).keys()
        assert set(devices(other).values()) == {public_key(PRIVATE[FIRST])}
        small.step()
    assert list(seen) == STAGES
    assert seen == {
        "beside": ({"me.0": old, "me.1": new}, "me.0", "me.0"),
        "moved": ({"me.0": old, "me.1": new}, "me.1", "me.1"),
        "rekeyed": ({"me.0": new, "me.1": new}, "me.1", "me.1"),
        "back": ({"me.0": new, "me.1": new}, "me.0", "me.0"),
        "leaving": ({"me.0": new}, "me.0", "me.0"),
        "done": ({"me.0": new}, "me.0", "me.0"),
    }
    assert small.hosts[TURNING].ask(lambda kernel, _: kernel.keys().all) == (new,)


def test_afterwards_only_the_key_is_another() -> None:
    """And a second change is like the first."""
    small = Small()
    before = dict(small.plans)
    for _ in range(2):
        small.rotate(TURNING)
        small.settle()
        assert small.stage(TURNING) == "done"
    for host in HOSTS:
        (diff,) = diff_units(before[host].units, small.plans[host].units)
        assert {entry.object.layer for entry in diff.put} <= {"link", "wireguard"}
        assert {key.split(" ")[0] for key in diff.drop} <= {"peer"}


@pytest.mark.parametrize("stage", STAGES[:-1])
def test_a_planner_or_applier_that_begins_anew_goes_on(stage: str) -> None:
    """At any stage: what the one before decided is written, and what a host has is in its kernel and its files."""
    small = Small()
    small.rotate(TURNING)
    while small.stage(TURNING) != stage:
        small.step()
    small.core = restarted(small)
    for host in small.hosts.values():
        host.restart()
    small.settle()
    assert small.stages == STAGES
    assert small.core.state.keys[TURNING].next is None


@pytest.mark.parametrize("stage", STAGES[:-2])
def test_where_only_the_plans_are_left_it_goes_on(stage: str) -> None:
    """A planner whose allocations were lost sees by the node's published plan how far the change was."""
    small = Small()
    small.rotate(TURNING)
    while small.stage(TURNING) != stage:
        small.step()
    small.core = restarted(small, forget=True)
    assert small.stage(TURNING) == stage
    small.settle()
    assert small.stages == STAGES


def restarted(small: Small, *, forget: bool = False) -> Core:
    """A planner that reads what the one before it wrote."""
    core = Core()
    for host, number in small.core.allocations.numbers.items():
        core.allocations.put_number(host, number)
    if not forget:
        for host, rotation in small.core.allocations.rotations.items():
            core.allocations.put_rotation(host, rotation)
    items = [(item, small.core.sequences[item.ref]) for item in small.core.state.objects.values()]
    core.restore(items, small.core.published, small.core.reports)
    return core


def test_others_wait_for_their_turn_by_name() -> None:
    """One at a time in a cluster: the others are told whom they wait for."""
    small = Small()
    for host in (THIRD, TURNING, FIRST):
        small.rotate(host)
    small.plan()
    assert {host: small.stage(host) for host in HOSTS} == {FIRST: "beside", TURNING: "queued", THIRD: "queued"}
    assert small.core.allocations.rotations[THIRD].reasons == (f"{FIRST} changes its key first",)
    small.settle(80)
    assert {small.stage(host) for host in HOSTS} == {"done"}
    assert small.stages.count("leaving") == 3


def test_who_is_away_is_waited_for_until_that_is_sure() -> None:
    """Not longer; and whoever is back makes its plan as it is then."""
    small = Small()
    small.away.add(THIRD)
    small.deaf.add(THIRD)
    small.rotate(TURNING)
    for _ in range(5):
        small.step()
    rotation = small.core.allocations.rotations[TURNING]
    assert rotation.stage == "beside"
    assert rotation.waiting == 2
    small.clock.now_s += 400.0
    small.shake_hands()
    small.settle()
    assert small.stage(TURNING) == "done"
    small.away.clear()
    small.deaf.clear()
    small.settle()
    small.assert_nobody_is_lost()


def test_who_is_met_but_does_not_follow_holds_it_up() -> None:
    """Its applier may be dead, but its kernel forwards: however long that takes, it is not cut off."""
    small = Small()
    small.away.add(THIRD)
    small.rotate(TURNING)
    for _ in range(5):
        small.clock.now_s += 400.0
        small.shake_hands()
        small.step()
    rotation = small.core.allocations.rotations[TURNING]
    assert rotation.stage == "beside"
    assert rotation.reasons[-1] == f"{THIRD} has not followed yet, but its peers see it: does its applier run?"


def test_a_port_that_is_closed_is_named() -> None:
    """The second one before packets move, with both ends."""
    small = Small()
    small.closed.add((FIRST, "me.1"))
    small.rotate(TURNING)
    for _ in range(5):
        small.step()
    assert small.core.allocations.rotations[TURNING].reasons == (
        f"{FIRST} and {TURNING} have not shaken hands on me.1: is UDP port 51872 let through between them?",
    )
    small.closed.clear()
    small.shake_hands()
    small.settle()
    assert small.stage(TURNING) == "done"


def test_taken_back_while_nothing_has_moved() -> None:
    """The second devices go, the key is destroyed, and everything is as before; the next change has a key of its own or the same."""
    small = Small()
    before = dict(small.plans)
    small.closed.add((FIRST, "me.1"))
    small.rotate(TURNING)
    for _ in range(3):
        small.step()
    small.rotate(TURNING, abort=True)
    small.settle()
    assert small.plans == before
    assert small.stage(TURNING) == ""
    assert small.hosts[TURNING].ask(lambda kernel, _: kernel.keys().all) == (public_key(PRIVATE[TURNING]),)


def test_not_taken_back_when_packets_have_moved() -> None:
    """Then it is refused, with what to do."""
    small = Small()
    small.rotate(TURNING)
    while small.stage(TURNING) != "moved":
        small.step()
    small.plan()
    with pytest.raises(Permanent, match="packets have the next key already"):
        small.hosts[TURNING].ask(lambda kernel, _: applier_keys.rotated(kernel, small.plans[TURNING], abort=True))


def test_a_host_without_a_device_refuses() -> None:
    """One that does not encrypt."""
    small = Small()
    nothing = HostPlan(Name("rome"), Name("worker-1"), {})
    with pytest.raises(Permanent, match="it encrypts nothing"):
        small.hosts[FIRST].ask(lambda kernel, _: applier_keys.rotated(kernel, nothing, abort=False))


def test_a_change_ends_though_the_next_one_is_asked_for_at_once() -> None:
    """A node that has let go of its old key, and has made another one before anybody heard of that, is done with the first change."""
    small = Small()
    small.rotate(TURNING)
    while small.stage(TURNING) != "leaving":
        small.step()
    small.plan()
    plan = small.plans[TURNING]
    report = small.hosts[TURNING].apply(plan)
    assert report.outcome == "applied"
    small.hosts[TURNING].ask(lambda _, applier: applier.settle_keys(plan))
    small.rotate(TURNING)
    small.settle(80)
    assert small.stages == [*STAGES, *STAGES]
    assert small.core.state.keys[TURNING].next is None


def test_a_key_that_was_replaced_is_refused() -> None:
    """Old copies of what a host said come late and twice; a key that others may know by now never comes back."""
    small = Small()
    old = small.core.state.keys[TURNING]
    small.rotate(TURNING)
    wish = small.core.state.keys[TURNING]
    small.settle()
    for copy in (old, wish):
        (refusal,) = small.core.hear([said(copy, 10_000)]).refused
        assert refusal.reason.startswith("the host had this key before it changed it")
    assert not small.plan()


@pytest.mark.parametrize("field", ["key", "next"])
def test_nobody_has_a_key_that_somebody_else_has_or_will_have(field: str) -> None:
    """Neither in force nor to come."""
    small = Small()
    small.rotate(TURNING)
    theirs = small.core.state.keys[TURNING].next
    item = replace(small.core.state.keys[FIRST], **{field: theirs})
    (refusal,) = small.core.hear([said(item, 10_000)]).refused
    assert (refusal.field, refusal.other) == (f"$.{field}", f"PublicKey/{TURNING}")


def test_a_key_that_follows_itself_is_refused() -> None:
    """That is no change."""
    small = Small()
    item = small.core.state.keys[FIRST]
    (refusal,) = small.core.hear([said(replace(item, next=item.key), 10_000)]).refused
    assert refusal.field == "$.next"


@pytest.mark.parametrize("stage", STAGES[:-1])
@pytest.mark.parametrize("what", ["removed", "switched off", "opted out"])
def test_a_node_that_leaves_the_mesh_in_the_middle(stage: str, what: str) -> None:
    """The second devices go with it; whoever waited begins, and what comes back can change its key anew."""
    small = Small()
    small.rotate(TURNING)
    while small.stage(TURNING) != stage:
        small.step()
    small.plan()
    known, node_before = small.core.state.clusters["rome"], small.core.state.nodes["rome"]["worker-2"]
    match what:
        case "removed":
            small.remove(TURNING)
        case "switched off":
            small.publish(replace(known, encryption="none"))
        case "opted out":
            small.publish(replace(node_before, opt_out=True))
    small.settle()
    assert all("me.1" not in devices(plan) for plan in small.plans.values())
    assert small.stage(TURNING) in ("", "done")
    small.publish(known, node_before)
    small.say_keys(TURNING)
    small.settle(80)
    assert small.core.state.keys[TURNING].next is None
    small.assert_nobody_is_lost()


def test_a_node_that_joins_in_the_middle_is_one_of_them() -> None:
    """At every stage it is planned for as the others are, and waited for."""
    for stage in STAGES[:-1]:
        small = Small()
        small.remove(THIRD)
        small.settle()
        small.rotate(TURNING)
        while small.stage(TURNING) != stage:
            small.step()
        small.publish(node("worker-3", 3), PublicKey(name=Name("worker-3"), cluster=Name("rome"), key=public_key(PRIVATE[THIRD])))
        small.settle()
        assert small.stage(TURNING) == "done"
        small.assert_nobody_is_lost()


def test_a_key_that_is_lost_ends_the_change() -> None:
    """A host that was put back to an older state without the new key is planned for with the one that it has."""
    small = Small()
    small.rotate(TURNING)
    while small.stage(TURNING) != "rekeyed":
        small.step()
    small.hosts[TURNING].kernel.next_key = b""
    small.settle()
    assert "me.1" not in devices(small.plans[TURNING])
    small.say_keys(TURNING)
    small.settle()
    assert devices(small.plans[TURNING]) == {"me.0": public_key(PRIVATE[TURNING])}
    small.assert_nobody_is_lost()


ORDERS = st.permutations(range(len(HOSTS)))
MOST = st.sampled_from([3, 3, 3, 3, 2, 1, 0])
"""How many of three do it: mostly all, or nothing would ever come to its end."""
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["", "", "", "", "restart", "say", "copy", "planner"]),  # what else happens, before
        ORDERS,  # the hosts follow
        MOST,
        st.sampled_from([True, True, False]),  # hands are shaken
        ORDERS,  # the hosts report
        MOST,
    ),
    min_size=8,
    max_size=25,
)


def do(small: Small, what: str, host: HostId, copy: PublicKey) -> None:
    """One thing that may happen at any time; `copy` is of what the node said before it was asked for another key."""
    match what:
        case "restart":
            small.hosts[host].restart()
        case "say":
            small.say_keys(host)
        case "copy":
            small.publish(copy)
        case "planner":
            small.core = restarted(small)


@settings(max_examples=60, deadline=None)
@given(actions=ACTIONS)
def test_no_order_loses_a_packet(actions: list[tuple[str, list[int], int, bool, list[int], int]]) -> None:
    """Whoever follows, reports or begins anew first, and whatever a host says again: at every moment all reach all."""
    small = Small()
    first = small.core.state.keys[TURNING]
    small.rotate(TURNING)
    for what, following, follow, shake, telling, tells in actions:
        do(small, what, HOSTS[following[0]], first)
        small.plan()
        for number in following[:follow]:
            small.follow([HOSTS[number]])
            small.assert_nobody_is_lost()
        if shake:
            small.shake_hands()
        small.tell([HOSTS[number] for number in telling[:tells]])
    small.say_keys(TURNING)
    small.settle(80)
    assert small.stage(TURNING) == "done"
    small.assert_nobody_is_lost()


def test_both_ports_are_taken_from_the_beginning() -> None:
    """No rule changes when keys do; a port whose next one is an overlay's, or none at all, is refused."""
    core = Core()
    for port, words in (
        (65535, "65534 at the most"),
        (4788, "4789 is the port of vxlan overlays, and it is taken, too, while keys change"),
    ):
        item = cluster("rome", encryption="wireguard", wireguard=WireguardSettings(port=port))
        (refusal,) = core.hear([said(item, port)]).refused
        assert words in refusal.reason


def test_a_node_of_one_family_says_nothing_of_the_other() -> None:
    """It has no set for the addresses of others that it cannot send to."""
    items: list[Topology] = [
        replace(item, opt_out=False) if isinstance(item, Node) else item for item in encrypting(wireguard=WireguardSettings(nodes=True))
    ]
    items.append(PublicKey(name=Name("worker-3"), cluster=Name("rome"), key=public_key(PRIVATE[THIRD])))
    plan = settled_plans(items)[HostId("rome", "worker-3")]
    named = {item.set for item in plan.objects().values() if isinstance(item, NftElement)}
    assert "encnodes" in named
    assert "encnodes6" not in named
