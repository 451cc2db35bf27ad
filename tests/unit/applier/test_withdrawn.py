"""Turns of a gateway whose tunnels die: their hops leave the class routes, and nothing else changes."""

from __future__ import annotations

from schemas.host_objects import Route
from schemas.status import DeadTunnel, TunnelHealth
from services.kernel.fake import FakeHost
from services.kernel.transaction import Change
from services.runtime.errors import Permanent, Transient
from tests.topologies import ROME_GATEWAY, keys, settled_plans, two_clusters
from tests.unit.applier.test_turns import MORE, UNIT, applier, holds

THREE = settled_plans([*two_clusters(3, 3), *keys()])[ROME_GATEWAY]


CLASS_ROUTES = [key for key, item in THREE.objects().items() if isinstance(item, Route) and len(item.hops) > 1]


def dead(*links: str) -> TunnelHealth:
    return TunnelHealth(withdrawn=tuple(DeadTunnel(link, 5.0, "no answer") for link in links))


def links_in(host: FakeHost, key: str) -> set[str]:
    item = host.objects[key]
    assert isinstance(item, Route)
    return {hop.link for hop in item.hops}


def test_a_dead_tunnel_leaves_the_class_routes_and_nothing_else() -> None:
    """One replacement per class route; link, own route, digests and marker stay; the report lists it; it comes back the same way."""
    host = FakeHost()
    one = applier(host)
    one.apply(THREE, 1, 1)
    before, marker = dict(host.objects), host.marker
    report = one.apply(THREE, 1, 1, tunnels=dead("mt.1"))
    assert CLASS_ROUTES
    assert report.operations == len(CLASS_ROUTES)
    assert {key for key in before.keys() | host.objects.keys() if before.get(key) != host.objects.get(key)} == set(CLASS_ROUTES)
    assert all(links_in(host, key) == {"mt.0", "mt.2"} for key in CLASS_ROUTES)
    assert (report.outcome, report.tunnels, report.units[0].held) == ("applied", dead("mt.1"), THREE.digests()[UNIT])
    assert host.marker == marker
    assert (one.withdrawn(), one.differences(THREE)) == (("mt.1",), [])
    assert one.apply(THREE, 1, 1).operations == len(CLASS_ROUTES)
    assert holds(host, THREE)
    assert one.withdrawn() == ()


def test_a_host_that_stands_says_what_is_withdrawn() -> None:
    """One that leaves a plan alone reports what it holds, and so the tunnels whose hops it does not."""
    one = applier(FakeHost())
    one.apply(THREE, 1, 1, tunnels=dead("mt.1"))
    assert one.stand(THREE, 1, 1, "another store").tunnels == dead("mt.1")


def test_a_plan_that_changes_keeps_what_is_withdrawn() -> None:
    """A tunnel more, and a cold start, with one withdrawn: its hop is in no route at any time."""
    host = FakeHost()
    seen: list[set[str]] = []

    def watch(change: Change) -> None:
        if change.key in CLASS_ROUTES and isinstance(change.new, Route):
            seen.append({hop.link for hop in change.new.hops})

    one = applier(host, watch)
    one.apply(THREE, 1, 1, tunnels=dead("mt.1"))
    four = settled_plans([*two_clusters(3, 4), *keys()])[ROME_GATEWAY]
    assert one.apply(four, 1, 2, tunnels=dead("mt.1")).outcome == "applied"
    assert all(links_in(host, key) == {"mt.0", "mt.2", "mt.3"} for key in CLASS_ROUTES)
    again = applier(host, watch)
    assert again.found_withdrawn(four) == {"mt.1"}
    assert again.apply(four, 1, 2, tunnels=dead("mt.1")).operations == 0
    assert all("mt.1" not in links for links in seen)


def test_a_repair_brings_the_route_back_without_the_dead_hop() -> None:
    """Drift beside a withdrawal is repaired, and the withdrawal stays."""
    host = FakeHost()
    one = applier(host)
    one.apply(THREE, 1, 1, tunnels=dead("mt.1"))
    host.objects[CLASS_ROUTES[0]] = THREE.objects()[CLASS_ROUTES[0]]
    (difference,) = one.differences(THREE)
    assert difference.key == CLASS_ROUTES[0]
    assert one.repair(THREE, 1, 1, tunnels=dead("mt.1")).operations == 1
    assert links_in(host, CLASS_ROUTES[0]) == {"mt.0", "mt.2"}


def test_a_withdrawal_that_fails_is_undone_and_made_again() -> None:
    """Its routes are what they were; the next turn looks at the kernel and makes it."""
    host = FakeHost()
    fault: list[Exception | None] = [None]
    one = applier(host, lambda change: fault[0] if change.key == CLASS_ROUTES[-1] else None)
    one.apply(THREE, 1, 1)
    fault[0] = Transient("later")
    assert one.apply(THREE, 1, 1, tunnels=dead("mt.1")).outcome == "degraded"
    assert holds(host, THREE)
    fault[0] = None
    assert one.apply(THREE, 1, 1, tunnels=dead("mt.1")).outcome == "applied"
    assert all(links_in(host, key) == {"mt.0", "mt.2"} for key in CLASS_ROUTES)


def test_an_undo_goes_back_to_the_routes_without_the_dead_hop() -> None:
    """A change that fails while a tunnel is withdrawn, and makes links anew on its way back, does not bring the hop along."""
    host = FakeHost()
    fault: list[Exception | None] = [None]
    one = applier(host, lambda change: fault[0] if change.new == MORE.objects()[LAST] else None)
    one.apply(THREE, 1, 1, tunnels=dead("mt.1"))
    fault[0] = Permanent("no")
    assert one.apply(MORE, 1, 2, tunnels=dead("mt.1")).outcome == "degraded"
    assert all(links_in(host, key) == {"mt.0", "mt.2"} for key in CLASS_ROUTES)
    assert one.differences(THREE) == []


LAST = next(key for key, item in reversed(MORE.objects().items()) if isinstance(item, Route) and item.hops)
