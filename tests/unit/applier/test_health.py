"""The judgement of tunnels: when one dies, when it comes back, and what is never done."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from schemas.host_objects import LinkAddress, NextHop, Route, WireguardLink, WireguardPeer
from schemas.values import Address, Endpoint, Key, Prefix
from services.applier.health import (
    BREAK,
    GRACE_S,
    HANDSHAKE_MAX_S,
    HOLD_FIRST_S,
    HOLD_MAX_S,
    MISSES,
    PERIOD_S,
    STALL_S,
    Health,
    Round,
    Tunnel,
    found_withdrawn,
    tunnels_of,
)
from tests.topologies import ROME_GATEWAY, keys, settled_plans, two_clusters

LINKS = ("mt.0", "mt.1", "mt.2")
TUNNELS = [
    Tunnel(link, Address(f"169.254.18.{4 * number + 1}"), Address(f"169.254.18.{4 * number + 2}"), ()) for number, link in enumerate(LINKS)
]
KEY = Key("AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=")
BEGAN_S, UNIX_S = 1000.0, 1_790_000_000.0


class Clock:
    """Rounds one after the other, with a `Health` that sees them."""

    def __init__(self, tunnels: list[Tunnel] = TUNNELS, found: Collection[str] = ()) -> None:
        self.now_s = BEGAN_S
        self.health = Health()
        self.health.watch(tunnels, self.now_s, self.at_s, found)

    @property
    def at_s(self) -> float:
        return UNIX_S + self.now_s - BEGAN_S

    @property
    def withdrawn(self) -> list[str]:
        return sorted(self.health.report().links)

    def step(
        self,
        answered: Collection[str],
        handshakes_s: Mapping[str, float] | None = None,
        *,
        after_s: float = PERIOD_S,
        probing: bool = True,
    ) -> list[str]:
        """One round; what changed by it, as ``mt.1 dead``."""
        self.now_s += after_s
        seen = Round(self.now_s, self.at_s, answered, handshakes_s or {}, probing)
        return [f"{step.link} {step.to}" for step in self.health.observe(seen)]

    def steps(
        self, duration_s: float, answered: Collection[str], handshakes_s: Mapping[str, float] | None = None, *, probing: bool = True
    ) -> list[str]:
        count = round(duration_s / PERIOD_S)
        return [text for _ in range(count) for text in self.step(answered, handshakes_s, probing=probing)]


def test_three_misses_and_a_tunnel_is_dead() -> None:
    """Two rounds without an answer are nothing; the third takes the tunnel out, and the report says since when and why."""
    clock = Clock()
    clock.steps(2, LINKS)
    assert clock.steps(1, ("mt.0", "mt.2")) == []
    clock.step(LINKS)
    assert clock.steps(1, ("mt.0", "mt.2")) == []
    assert clock.step(("mt.0", "mt.2")) == ["mt.1 dead"]
    (dead,) = clock.health.report().withdrawn
    assert (dead.link, dead.since_s, dead.reason) == ("mt.1", clock.at_s, "no answer from 169.254.18.6 to 3 probes")
    assert clock.health.count() == {"alive": 2, "withdrawn": 1, "dead": 0}


def test_it_comes_back_after_a_while_without_a_break() -> None:
    """Ten seconds of answers bring it back; two misses one after the other begin them anew."""
    clock = Clock()
    clock.steps(2, LINKS)
    clock.steps(5, ("mt.0", "mt.2"))
    assert clock.steps(HOLD_FIRST_S - 1, LINKS) == []
    assert clock.steps(BREAK * PERIOD_S, ("mt.0", "mt.2")) == []
    assert clock.steps(HOLD_FIRST_S, LINKS) == []
    assert clock.step(LINKS) == ["mt.1 alive"]
    assert clock.withdrawn == []


def test_one_that_flaps_waits_longer_each_time_and_is_forgiven() -> None:
    """The wait doubles up to a minute while it dies again soon, and is the first one again after a calm while."""
    clock = Clock()
    clock.steps(2, LINKS)
    waits = []
    for calm_s in (1, 1, 1, 1, 200, 1):
        clock.steps(2, ("mt.0", "mt.2"))
        assert clock.withdrawn == ["mt.1"]
        began_s = clock.now_s
        while clock.withdrawn:
            clock.step(LINKS)
        waits.append(clock.now_s - began_s - PERIOD_S)
        clock.steps(calm_s, LINKS)
    assert waits == [HOLD_FIRST_S, 20.0, 40.0, HOLD_MAX_S, HOLD_MAX_S, HOLD_FIRST_S]


def test_when_all_are_dead_none_is_withdrawn() -> None:
    """The last one that dies puts all back into the routes; the first that works is used at once, with those that come with it."""
    clock = Clock()
    clock.steps(2, LINKS)
    clock.steps(5, ("mt.0", "mt.2"))
    clock.steps(5, ())
    assert clock.withdrawn == []
    assert [dead.link for dead in clock.health.report().dead] == list(LINKS)
    clock.step(("mt.0",))
    clock.step(("mt.0", "mt.2"))
    assert sorted(clock.step(("mt.0", "mt.2"))) == ["mt.0 alive", "mt.2 alive"]
    assert clock.withdrawn == ["mt.1"]


def test_a_late_round_is_no_miss() -> None:
    """When this host itself was late, nothing is held against the tunnels; what was answered counts."""
    clock = Clock()
    clock.steps(2, LINKS)
    for _ in range(10):
        assert clock.step((), after_s=STALL_S + 0.1) == []
    assert clock.withdrawn == []


def test_an_end_that_never_answers_is_judged_by_handshakes() -> None:
    """Without a single answer a tunnel lives as long as it shakes hands, and a dead one comes back by a handshake after its death."""
    clock = Clock()
    hands = dict.fromkeys(LINKS, UNIX_S)
    assert clock.steps(HANDSHAKE_MAX_S - 1, (), hands) == []
    fresh = {"mt.0": clock.at_s, "mt.2": clock.at_s}
    assert clock.steps(2, (), {**hands, **fresh}) == ["mt.1 dead"]
    assert clock.health.report().withdrawn[0].reason.startswith("no handshake for 18")
    assert clock.steps(20, (), {**hands, **fresh}) == []
    again = clock.at_s
    assert clock.steps(HOLD_FIRST_S + 1, (), {**fresh, "mt.1": again}) == ["mt.1 alive"]


KEPT_ALIVE = [replace(tunnel, make=(WireguardPeer(tunnel.link, KEY, Endpoint("172.18.1.10:51840"), (), 25),)) for tunnel in TUNNELS]


def test_an_idle_tunnel_without_probes_and_keepalive_is_not_judged() -> None:
    """It does not shake hands since nobody sends anything: withdrawn, nobody ever would."""
    clock = Clock()
    assert clock.steps(2 * HANDSHAKE_MAX_S, (), {"mt.0": UNIX_S, "mt.1": 0.0, "mt.2": UNIX_S}, probing=False) == []


@pytest.mark.parametrize("probing", [True, False])
def test_a_tunnel_that_never_shook_hands_has_a_grace_period(probing: bool) -> None:
    """What was just made is used at once; without any handshake it is dead after a while, with or without probes."""
    clock = Clock(KEPT_ALIVE)
    hands = {"mt.0": UNIX_S, "mt.1": 0.0, "mt.2": UNIX_S}
    assert clock.steps(GRACE_S - 1, (), hands, probing=probing) == []
    assert clock.steps(2, (), hands, probing=probing) == ["mt.1 dead"]
    assert clock.health.report().judged_by == ("echo" if probing else "handshake")


def test_one_that_never_answers_beside_others_that_do() -> None:
    """The far end answers through other tunnels: this one is dead, but not before its grace period has passed."""
    clock = Clock()
    hands = dict.fromkeys(LINKS, UNIX_S)
    assert clock.steps(GRACE_S - 1, ("mt.0", "mt.2"), hands) == []
    assert clock.steps(2, ("mt.0", "mt.2"), hands) == ["mt.1 dead"]
    assert clock.health.in_question(clock.now_s) == []
    assert clock.steps(HOLD_FIRST_S + 1, LINKS) == ["mt.1 alive"]


def test_what_was_found_withdrawn_has_to_prove_itself() -> None:
    """After a restart a withdrawn tunnel stays so, until it has answered for a while; an old handshake proves nothing."""
    clock = Clock(found=("mt.1",))
    assert clock.withdrawn == ["mt.1"]
    old = dict.fromkeys(LINKS, UNIX_S - 5)
    assert clock.steps(60, ("mt.0", "mt.2"), old) == []
    assert clock.steps(HOLD_FIRST_S + 1, LINKS) == ["mt.1 alive"]


@pytest.mark.parametrize("lost_each", [3, 5, 10])
def test_answers_lost_now_and_then_keep_nothing_out(lost_each: int) -> None:
    """A path that loses so many answers kills no tunnel, and so it does not keep one away that is back."""
    clock = Clock(found=("mt.1",))
    said: list[str] = []
    for number in range(int(2 * HOLD_FIRST_S / PERIOD_S)):
        said += clock.step({"mt.0", "mt.2"} if number % lost_each == lost_each - 1 else LINKS)
    assert said == ["mt.1 alive"]


def test_a_new_plan_keeps_what_is_known_of_the_same_tunnels() -> None:
    """A tunnel more, or one less, changes nothing for the others; one that is made otherwise begins anew."""
    clock = Clock()
    clock.steps(2, LINKS)
    clock.steps(5, ("mt.0", "mt.2"))
    more = Tunnel("mt.3", Address("169.254.18.13"), Address("169.254.18.14"), ())
    clock.health.watch([*TUNNELS, more], clock.now_s, clock.at_s)
    assert clock.withdrawn == ["mt.1"]
    clock.health.watch(TUNNELS[1:], clock.now_s, clock.at_s)
    assert clock.withdrawn == ["mt.1"]
    moved = replace(TUNNELS[1], make=(WireguardLink("mt.1", 9, 1440),))
    clock.health.watch([TUNNELS[0], moved, TUNNELS[2]], clock.now_s, clock.at_s)
    assert clock.withdrawn == []


def test_nothing_to_watch_is_nothing_to_say() -> None:
    """A host without tunnels has no verdicts."""
    clock = Clock([])
    assert clock.steps(20, ()) == []
    assert clock.health.report().withdrawn == ()
    assert clock.health.count() == {"alive": 0, "withdrawn": 0, "dead": 0}


@given(st.lists(st.sets(st.sampled_from(LINKS)), min_size=1, max_size=120), st.sets(st.sampled_from(LINKS), max_size=2))
def test_it_never_flaps_faster_than_it_may(answers: list[set[str]], found: set[str]) -> None:
    """Whatever answers come: never are all withdrawn, nothing is without enough misses, and nothing comes back before its time, but
    when everything is dead."""
    clock = Clock(found=found)
    withdrawn_s = dict.fromkeys(found, clock.now_s)
    unanswered = dict.fromkeys(LINKS, 0)
    hopeless_s = float("-inf")
    for answered in answers:
        before = set(clock.withdrawn)
        clock.step(answered)
        unanswered = {link: 0 if link in answered else unanswered[link] + 1 for link in LINKS}
        after = set(clock.withdrawn)
        if clock.health.report().dead:
            hopeless_s = clock.now_s
        assert len(after) < len(LINKS)
        for link in after - before:
            assert unanswered[link] >= MISSES or hopeless_s >= clock.now_s - PERIOD_S
            withdrawn_s[link] = clock.now_s
        for link in before - after:
            assert clock.now_s - withdrawn_s[link] >= HOLD_FIRST_S or hopeless_s >= withdrawn_s[link]


# What there is to watch -----------------------------------------------------------------------------------------------------------------

PLAN = settled_plans([*two_clusters(2, 3), *keys()])[ROME_GATEWAY]


def test_the_tunnels_of_a_plan() -> None:
    """Each tunnel with its two addresses; what it is made of tells one make from another."""
    found = tunnels_of(PLAN.objects())
    assert [(item.link, item.own, item.far) for item in found] == [
        ("mt.0", "169.254.18.1", "169.254.18.2"),
        ("mt.1", "169.254.18.5", "169.254.18.6"),
        ("mt.2", "169.254.18.9", "169.254.18.10"),
    ]
    assert {type(part).__name__ for part in found[0].make} == {"WireguardLink", "LinkAddress", "WireguardPeer"}


def test_a_tunnel_of_ipv6_alone_is_probed_by_that() -> None:
    """Where a tunnel has addresses of both families, the IPv4 one is probed; where there is none, the IPv6 one."""
    link, route = WireguardLink("mt.0", 1, 1440), Route(7001, Prefix("10.61.0.0/16"), hops=(NextHop("mt.0"),))
    new, old = LinkAddress("mt.0", Address("fd00::5"), 126), LinkAddress("mt.0", Address("169.254.18.6"), 30)
    for items, far in (
        ((link, route, new), "fd00::6"),
        ((link, route, new, old), "169.254.18.5"),
        ((old, new, link, route), "169.254.18.5"),
    ):
        (tunnel,) = tunnels_of({item.key: item for item in items})
        assert tunnel.far == far


def test_tunnels_without_routes_or_without_two_ends_are_not_watched() -> None:
    """A tunnel that is still being rolled out, or a device with many peers, is none of ours."""
    lacking = {key: item for key, item in PLAN.objects().items() if not isinstance(item, Route)}
    assert tunnels_of(lacking) == []
    many = [WireguardLink("mn", 1, 1440), LinkAddress("mn", Address("10.0.0.1"), 32), Route(10, Prefix("0.0.0.0/0"), hops=(NextHop("mn"),))]
    assert tunnels_of({item.key: item for item in many}) == []


def test_what_an_applier_before_has_withdrawn_is_recognised() -> None:
    """Hops that lack while the tunnel's own route is there; a tunnel that is new lacks both."""
    objects = PLAN.objects()
    observed = dict(objects)
    for key, item in objects.items():
        if isinstance(item, Route) and len(item.hops) > 1:
            observed[key] = replace(item, hops=(item.hops[0],))
    assert found_withdrawn(objects, objects) == frozenset()
    assert found_withdrawn(objects, observed) == {"mt.1", "mt.2"}
    by_hand = next(key for key, item in objects.items() if isinstance(item, Route) and len(item.hops) > 1)
    assert found_withdrawn(objects, {**objects, by_hand: observed[by_hand]}) == frozenset()
    del observed["route 7001 169.254.18.8/30 0"]
    assert found_withdrawn(objects, observed) == {"mt.1"}
    assert found_withdrawn(objects, {}) == frozenset()
