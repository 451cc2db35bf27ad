"""A gateway changes its key tunnel by tunnel: each step waits for both ends, and nothing is ever led where nobody takes it."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.firewall import ALL_TUNNELS
from schemas.host_objects import NftElement, Route, WireguardLink, WireguardPeer
from schemas.plan import HostPlan, diff_units
from schemas.topology import PublicKey, Topology
from schemas.values import IPV6, Key, Name
from services.applier import keys as applier_keys
from services.kernel.curve25519 import public_key
from services.planner.core import Core
from services.planner.layout import OUTGOING_TABLE, TUNNEL_NETWORK
from services.planner.names import firewall_table
from services.planner.state import HostId
from services.runtime.errors import Permanent
from tests.firewalls import match, one_chain, rule
from tests.meshes import InMemory
from tests.topologies import MILAN_GATEWAY, ROME_GATEWAY, dual_stack, peering, two_clusters
from tests.turnovers import Greeting

ENDS = (ROME_GATEWAY, MILAN_GATEWAY)
PRIVATE = {ROME_GATEWAY: b"\1" * 32, MILAN_GATEWAY: b"\2" * 32}
COUNTS = pytest.mark.parametrize("tunnels", [1, 3])
TURNING = pytest.mark.parametrize("turning", ENDS, ids=str)
BESIDE = "mt.beside"


class Joined(Greeting):
    """Two clusters in memory, joined by tunnels; ends that hold each other's key shake hands at once, unless they are `deaf`."""

    def __init__(self, tunnels: int = 3, items: list[Topology] | None = None) -> None:
        super().__init__(lambda host: InMemory(PRIVATE.get(host, bytes([3]) * 32)))
        self.deaf = False
        self.closed: set[str] = set()
        """Links that no handshake gets through."""
        self.hear(items or two_clusters(1, tunnels))
        self.hear([PublicKey(name=Name(host.name), cluster=Name(host.cluster), key=public_key(PRIVATE[host])) for host in ENDS])
        self.settle()
        self.stages.clear()

    def shake_hands(self) -> None:
        """All tunnels that can do so now."""
        for here, there in itertools.permutations(ENDS):
            for name in devices(self.plans[here]).keys() - self.closed if not self.deaf else ():
                self.greet(here, there, name)

    def until(self, turning: HostId, stage: str, tunnel: int = 0) -> None:
        """Steps until this step is planned, and nobody has followed yet."""
        for _ in range(60):
            self.plan()
            if (self.stage(turning), self.rotation(turning).tunnel if self.stage(turning) else 0) == (stage, tunnel):
                return
            self.step()
        pytest.fail(f"never at {stage} {tunnel}")

    def rotation(self, turning: HostId):
        return self.core.allocations.rotations[turning]

    def assert_nothing_is_lost(self, *, greeted: bool = True) -> None:
        """Each end leads packets to the other one only by devices on which both know each other, and have `greeted` each other.

        A tunnel that is rolled out is not greeted before its first packet, which waits for that.
        """
        for here, there in itertools.permutations(ENDS):
            ours, theirs = self.hosts[here].kernel.objects, self.hosts[there].kernel.objects
            for link in {hop.link for route in ways(ours.values()) for hop in route.hops}:
                near, far = ours.get(f"link {link}"), theirs.get(f"link {link}")
                assert isinstance(near, WireguardLink), (here, link)
                assert isinstance(far, WireguardLink), (here, link)
                sends, takes = ours.get(f"peer {link} {far.public_key}"), theirs.get(f"peer {link} {near.public_key}")
                assert isinstance(sends, WireguardPeer), (here, link)
                assert isinstance(takes, WireguardPeer), (here, link)
                assert not greeted or self.hosts[here].kernel.handshakes_s.get(sends.key), (here, link)
                assert not greeted or self.hosts[there].kernel.handshakes_s.get(takes.key), (here, link)


def ways(objects) -> list[Route]:
    """The routes to what the far cluster has."""
    routes = (item for item in objects if isinstance(item, Route) and item.table == OUTGOING_TABLE and item.hops)
    return [item for item in routes if not TUNNEL_NETWORK[item.prefix.family].contains(item.prefix)]


def hops(plan: HostPlan) -> list[str]:
    """The links of a gateway's next hops, in their order."""
    (found,) = {tuple(hop.link for hop in route.hops) for route in ways(plan.objects().values())}
    return list(found)


def devices(plan: HostPlan) -> dict[str, Key | None]:
    return {item.name: item.public_key for item in plan.objects().values() if isinstance(item, WireguardLink)}


def peers(plan: HostPlan) -> dict[str, Key]:
    return {item.link: item.public_key for item in plan.objects().values() if isinstance(item, WireguardPeer)}


def steps(tunnels: int) -> list[tuple[str, int]]:
    """Every step of a change, with the tunnel that is in turn."""
    last = tunnels - 1
    moves = [(stage, index) for index in range(tunnels) for stage in ("moved", "rekeyed")]
    return [("beside", 0), *moves, ("back", last), ("leaving", last)]


def stages(tunnels: int) -> list[str]:
    return [*(stage for stage, _ in steps(tunnels)), "done"]


@COUNTS
@TURNING
def test_every_step_is_what_it_says(turning: HostId, tunnels: int) -> None:
    """Devices, peers and ways of both ends, step by step."""
    joined, links = Joined(tunnels), [f"mt.{index}" for index in range(tunnels)]
    (far,) = set(ENDS) - {turning}
    old, theirs = public_key(PRIVATE[turning]), public_key(PRIVATE[far])
    joined.rotate(turning)
    new = joined.hosts[turning].ask(lambda kernel, _: kernel.keys().next)
    for stage, index in steps(tunnels):
        joined.until(turning, stage, index)
        own, other = joined.plans[turning], joined.plans[far]
        turned = {"beside": 0, "moved": index, "rekeyed": index + 1}.get(stage, tunnels)
        wanted = {link: new if place < turned else old for place, link in enumerate(links)}
        wanted |= {BESIDE: new} if stage != "leaving" else {}
        assert devices(own) == wanted
        assert peers(other) == wanted
        assert devices(other) == peers(own) == dict.fromkeys(wanted, theirs)
        led = [BESIDE if stage in ("moved", "rekeyed") and place == index else link for place, link in enumerate(links)]
        assert hops(own) == hops(other) == led
    joined.settle()
    assert joined.stages == stages(tunnels)
    assert joined.hosts[turning].ask(lambda kernel, _: kernel.keys().all) == (new,)


@COUNTS
def test_afterwards_only_the_key_is_another(tunnels: int) -> None:
    """And the other end's change, and a second one, are like the first."""
    joined = Joined(tunnels)
    before = dict(joined.plans)
    for turning in (ROME_GATEWAY, MILAN_GATEWAY, ROME_GATEWAY):
        joined.rotate(turning)
        joined.settle()
        assert joined.stage(turning) == "done"
    for host in ENDS:
        (diff,) = diff_units(before[host].units, joined.plans[host].units)
        assert {entry.object.layer for entry in diff.put} <= {"link", "wireguard"}
        assert {key.split(" ")[0] for key in diff.drop} <= {"peer"}


def restarted(joined: Joined, *, forget: bool = False) -> Core:
    """A planner that reads what the one before it wrote."""
    core, known = Core(), joined.core.allocations
    for host, number in known.numbers.items():
        core.allocations.put_number(host, number)
    if not forget:
        core.allocations.rollouts.update(known.rollouts)
        for host, rotation in known.rotations.items():
            core.allocations.put_rotation(host, rotation)
    items = [(item, joined.core.sequences[item.ref]) for item in joined.core.state.objects.values()]
    core.restore(items, joined.core.published, joined.core.reports)
    return core


@pytest.mark.parametrize("step", steps(2))
def test_a_planner_or_applier_that_begins_anew_goes_on(step: tuple[str, int]) -> None:
    """At any step: what the one before decided is written, and what a host has is in its kernel and its files."""
    joined = Joined(2)
    joined.rotate(ROME_GATEWAY)
    joined.until(ROME_GATEWAY, *step)
    joined.core = restarted(joined)
    for host in joined.hosts.values():
        host.restart()
    joined.settle()
    assert joined.stages == stages(2)
    assert joined.core.state.keys[ROME_GATEWAY].next is None
    joined.assert_nothing_is_lost()


@pytest.mark.parametrize("step", steps(3)[:-1])
def test_where_only_the_plans_are_left_it_goes_on(step: tuple[str, int]) -> None:
    """A planner whose allocations were lost sees by the gateway's published plan how far the change was."""
    joined = Joined(3)
    joined.rotate(ROME_GATEWAY)
    joined.until(ROME_GATEWAY, *step)
    joined.core = restarted(joined, forget=True)
    assert (joined.stage(ROME_GATEWAY), joined.rotation(ROME_GATEWAY).tunnel) == (step[0], step[1] if step[0] != "back" else 0)
    joined.settle()
    assert joined.stages == stages(3)
    joined.assert_nothing_is_lost()


def test_the_ends_of_a_peering_take_turns() -> None:
    """By name; the other one is told whom it waits for."""
    joined = Joined()
    for host in ENDS:
        joined.rotate(host)
    joined.plan()
    assert (joined.stage(MILAN_GATEWAY), joined.stage(ROME_GATEWAY)) == ("beside", "queued")
    assert joined.rotation(ROME_GATEWAY).reasons == ("milan/gateway changes its key first",)
    joined.settle(120)
    assert {joined.stage(host) for host in ENDS} == {"done"}


@COUNTS
def test_the_far_end_is_waited_for_as_long_as_it_is_away(tunnels: int) -> None:
    """It neither follows nor answers: said so, at every step; when it is back, the change goes on."""
    for stage, index in steps(tunnels)[:-1]:
        joined = Joined(tunnels)
        joined.rotate(ROME_GATEWAY)
        joined.until(ROME_GATEWAY, stage, index)
        joined.away.add(MILAN_GATEWAY)
        joined.deaf = True
        for _ in range(4):
            joined.clock.now_s += 400.0
            joined.step()
        assert joined.stage(ROME_GATEWAY) == stage
        assert joined.rotation(ROME_GATEWAY).reasons == (
            "milan/gateway is away: it shakes hands on no tunnel, and the change goes on when it is back",
        )
        joined.away.clear()
        joined.deaf = False
        joined.settle()
        assert joined.stages == stages(tunnels)
        joined.assert_nothing_is_lost()


def test_who_is_met_but_does_not_follow_holds_it_up() -> None:
    """Its applier may be dead, but its kernel forwards."""
    joined = Joined()
    joined.away.add(MILAN_GATEWAY)
    joined.rotate(ROME_GATEWAY)
    for _ in range(5):
        joined.clock.now_s += 400.0
        joined.shake_hands()
        joined.step()
    assert joined.stage(ROME_GATEWAY) == "beside"
    assert joined.rotation(ROME_GATEWAY).reasons[-1] == ("milan/gateway has not followed yet, but its peers see it: does its applier run?")
    joined.assert_nothing_is_lost()


@pytest.mark.parametrize("link, port", [(BESIDE, 51843), ("mt.1", 51841)])
def test_a_port_that_is_closed_is_named(link: str, port: int) -> None:
    """That of the device beside before packets move, and that of a tunnel that does not come back with its new key."""
    joined = Joined()
    joined.closed.add(link)
    joined.rotate(ROME_GATEWAY)
    for _ in range(12):
        joined.step()
    assert joined.rotation(ROME_GATEWAY).reasons == (
        f"milan/gateway and rome/gateway have not shaken hands on {link}: is UDP port {port} let through between them?",
    )
    joined.assert_nothing_is_lost()
    joined.closed.clear()
    joined.settle()
    assert joined.stage(ROME_GATEWAY) == "done"


def test_taken_back_while_nothing_has_moved() -> None:
    """The devices beside go, the key is destroyed, and everything is as before; not any more when packets have moved."""
    joined = Joined()
    before = dict(joined.plans)
    joined.closed.add(BESIDE)
    joined.rotate(ROME_GATEWAY)
    for _ in range(3):
        joined.step()
    joined.rotate(ROME_GATEWAY, abort=True)
    joined.settle()
    assert joined.plans == before
    assert joined.stage(ROME_GATEWAY) == ""
    assert joined.hosts[ROME_GATEWAY].ask(lambda kernel, _: kernel.keys().all) == (public_key(PRIVATE[ROME_GATEWAY]),)
    joined.closed.clear()
    joined.rotate(ROME_GATEWAY)
    joined.until(ROME_GATEWAY, "moved")
    with pytest.raises(Permanent, match="packets have the next key already"):
        joined.hosts[ROME_GATEWAY].ask(lambda kernel, _: applier_keys.rotated(kernel, joined.plans[ROME_GATEWAY], abort=True))


@pytest.mark.parametrize("wanted", [1, 5])
@pytest.mark.parametrize("step", steps(3))
def test_tunnels_come_and_go_after_the_change(step: tuple[str, int], wanted: int) -> None:
    """As many as there were have their turn; what a peering wants meanwhile is rolled out when the change is over."""
    joined = Joined(3)
    joined.rotate(ROME_GATEWAY)
    joined.until(ROME_GATEWAY, *step)
    joined.publish(peering(wanted))
    for _ in range(60):
        joined.step()
        joined.assert_nothing_is_lost()
    assert joined.stages == stages(3)
    for host in ENDS:
        assert hops(joined.plans[host]) == [f"mt.{index}" for index in range(wanted)]
        assert devices(joined.plans[host]).keys() == set(hops(joined.plans[host]))


def test_a_change_waits_for_tunnels_on_their_way() -> None:
    """And says so; with as many as there may be, no port is left."""
    joined = Joined(3)
    joined.publish(peering(5))
    joined.rotate(ROME_GATEWAY)
    joined.plan()
    assert joined.rotation(ROME_GATEWAY).reasons == ("the tunnels of Peering/rome/rome-milan are still being rolled out, or taken back",)
    joined.settle()
    assert joined.stage(ROME_GATEWAY) == "done"
    joined.publish(peering(64))
    joined.settle()
    joined.rotate(MILAN_GATEWAY)
    joined.plan()
    assert joined.rotation(MILAN_GATEWAY).reasons[0].startswith("Peering/rome/rome-milan has 64 tunnels, and no port is left")


@pytest.mark.parametrize("step", steps(2))
def test_a_peering_that_goes_in_the_middle(step: tuple[str, int]) -> None:
    """The change ends with it; when it is back, it begins anew, and nothing waits for ever."""
    joined = Joined(2)
    joined.rotate(ROME_GATEWAY)
    joined.until(ROME_GATEWAY, *step)
    joined.forget(peering(2))
    joined.publish(peering(2))
    joined.say_keys(ROME_GATEWAY)
    joined.settle(120)
    assert joined.core.state.keys[ROME_GATEWAY].next is None
    joined.assert_nothing_is_lost()
    joined.rotate(ROME_GATEWAY)
    joined.settle()
    joined.forget(peering(2))
    joined.settle()
    assert not devices(joined.plans[ROME_GATEWAY])


def test_weights_stay_with_their_places() -> None:
    """The device beside has the weight of the tunnel whose place it takes, in both families."""
    joined = Joined(items=dual_stack(Peering_rome_rome_milan={"weights": (1, 5, 2), "tunnels": 3}))
    joined.rotate(ROME_GATEWAY)
    joined.until(ROME_GATEWAY, "moved", 1)
    found = ways(joined.plans[MILAN_GATEWAY].objects().values())
    assert {tuple((hop.link, hop.weight) for hop in route.hops) for route in found} == {(("mt.0", 1), (BESIDE, 5), ("mt.2", 2))}
    assert IPV6 in {route.prefix.family for route in found}


def test_what_is_published_for_all_tunnels_is_for_the_device_beside() -> None:
    """While it is there."""
    joined = Joined()
    joined.hear([one_chain(rule(match("inInterface", f"@{ALL_TUNNELS}"), action="drop"), hosts={"role": "gateway"})])
    joined.settle()

    table = firewall_table("test")

    def named() -> set[str]:
        objects = joined.plans[ROME_GATEWAY].objects().values()
        return {item.element for item in objects if isinstance(item, NftElement) and item.table == table and item.set == ALL_TUNNELS}

    before = named()
    joined.rotate(ROME_GATEWAY)
    joined.until(ROME_GATEWAY, "moved", 0)
    assert named() == {*before, BESIDE} == {"mt.0", "mt.1", "mt.2", BESIDE}
    joined.settle()
    assert named() == before


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["", "", "", "", "restart", "say", "copy", "planner", "tunnels"]),  # what else happens, before
        st.permutations(ENDS),  # the ends follow
        st.sampled_from([2, 2, 2, 1, 0]),
        st.sampled_from([True, True, False]),  # hands are shaken
        st.permutations(ENDS),  # the ends report
        st.sampled_from([2, 2, 2, 1, 0]),
    ),
    min_size=8,
    max_size=30,
)


@pytest.mark.parametrize("waiting", ["tunnels", "the other end"])
def test_what_waited_for_the_end_of_a_change_goes_on_with_it(waiting: str) -> None:
    """The last that is said is the key: no plan differs by it, so that nobody says anything more."""
    joined, turning = Joined(2), MILAN_GATEWAY
    joined.rotate(turning)
    if waiting == "the other end":
        joined.rotate(ROME_GATEWAY)
    joined.until(turning, "back", 1)
    if waiting == "tunnels":
        joined.publish(peering(3))
    joined.step()
    joined.plan()
    late: list[HostId] = []
    joined.say_keys = late.append  # type: ignore[method-assign]
    joined.follow()
    joined.tell(joined.hosts)
    joined.plan()
    del joined.say_keys
    for host in late:
        joined.say_keys(host)
    assert joined.core.steps()
    assert joined.core.steps() == []


def do(joined: Joined, what: str, host: HostId, copy: PublicKey, number: int) -> None:
    """One thing that may happen at any time; `copy` is of what the gateway said before it was asked for another key."""
    match what:
        case "restart":
            joined.hosts[host].restart()
        case "say":
            joined.say_keys(host)
        case "copy":
            joined.publish(copy)
        case "planner":
            joined.core = restarted(joined)
        case "tunnels":
            joined.publish(peering(1 + number % 4))


@settings(max_examples=60, deadline=None)
@given(actions=ACTIONS, tunnels=st.sampled_from([1, 2, 3]), turning=st.sampled_from(ENDS))
def test_no_order_loses_a_packet(
    actions: list[tuple[str, list[HostId], int, bool, list[HostId], int]], tunnels: int, turning: HostId
) -> None:
    """Whoever follows, reports or begins anew first, and whatever a host says again: at every moment both reach each other."""
    joined = Joined(tunnels)
    first = joined.core.state.keys[turning]
    joined.rotate(turning)
    greeted = True
    for number, (what, following, follow, shake, telling, tells) in enumerate(actions):
        do(joined, what, following[0], first, number)
        greeted = greeted and what != "tunnels"
        joined.plan()
        for host in following[:follow]:
            joined.follow([host])
            joined.assert_nothing_is_lost(greeted=greeted)
        if shake:
            joined.shake_hands()
        joined.tell(telling[:tells])
    joined.say_keys(turning)
    joined.settle(120)
    assert joined.stage(turning) == "done"
    joined.assert_nothing_is_lost()
