"""Which peers are greeted again, by which end, and when no more."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import pytest

from schemas.host_objects import WireguardLink, WireguardPeer
from schemas.plan import Entry, HostPlan
from schemas.values import Endpoint, Key, Name
from services.applier.newcomers import AGAIN_S, CROSSED_S, NEW_S, OTHER_S, UNHEARD_S, Newcomers, NewcomerWatch
from services.kernel.curve25519 import public_key
from services.kernel.port import PeerSeen

LOW, MINE, HIGH = sorted(Key(public_key(bytes([number]) * 32)) for number in range(1, 4))
LINK = "me.0"


def plan(*keys: Key) -> HostPlan:
    objects = [WireguardLink(LINK, 51871, 1420, MINE), *(WireguardPeer(LINK, key, Endpoint("192.0.2.1:1"), ()) for key in keys)]
    return HostPlan(Name("rome"), Name("worker-1"), {"mesh/rome": {item.key: Entry(item, ()) for item in objects}})


def seen(*keys: Key, sent_bytes: int = 148, received_bytes: int = 0, handshake_s: float = 0.0) -> dict[str, list[PeerSeen]]:
    return {LINK: [PeerSeen(key, None, handshake_s, received_bytes, sent_bytes) for key in keys]}


@pytest.mark.parametrize("received_bytes, first_s", [(0, UNHEARD_S), (148, CROSSED_S)], ids=["unheard", "crossed"])
def test_the_end_with_the_lower_key_greets_first(received_bytes: int, first_s: float) -> None:
    """Soon where greetings have crossed, later where nothing was heard. Both go on while nothing comes back, and never at one time."""
    newcomers = Newcomers()
    newcomers.follow(plan(LOW, HIGH), 0.0)
    times = [number / 100 for number in range(int(NEW_S * 100) + 100)]
    found = {now_s: due.get(LINK) for now_s in times if (due := newcomers.due(seen(LOW, HIGH, received_bytes=received_bytes), now_s))}
    quick = [now_s for now_s, keys in found.items() if keys == [HIGH]]
    slow = [now_s for now_s, keys in found.items() if keys == [LOW]]
    assert (*quick[:2], *slow[:2]) == pytest.approx((first_s, first_s + AGAIN_S, OTHER_S, OTHER_S + AGAIN_S), abs=0.02)
    assert len(quick) + len(slow) == len(found)
    assert max(found) <= NEW_S
    assert newcomers.links == frozenset()


def test_ends_of_tunnels_between_clusters_are_left_to_their_order() -> None:
    """One end is there before the other, and what is under way in a tunnel is not to be lost for a greeting."""
    newcomers = Newcomers()
    nodes = plan(HIGH)
    newcomers.follow(HostPlan(nodes.cluster, nodes.host, {"peering/rome/milan": nodes.units["mesh/rome"]}), 0.0)
    assert newcomers.links == frozenset()


def test_who_was_sent_nothing_is_waited_with() -> None:
    """The clock starts with what is sent; who shakes hands is new no more, and stays so."""
    newcomers = Newcomers()
    newcomers.follow(plan(HIGH), 0.0)
    assert newcomers.due(seen(HIGH, sent_bytes=0), 5.0) == {}
    assert newcomers.due(seen(HIGH), 6.0) == {}
    assert newcomers.due(seen(HIGH), 6.0 + UNHEARD_S) == {LINK: [HIGH]}
    assert newcomers.due(seen(HIGH, handshake_s=1.0), 8.0) == {}
    assert newcomers.links == frozenset()
    assert newcomers.due(seen(HIGH), 9.0) == {}


def test_only_who_comes_is_new() -> None:
    """A further turn makes nobody new who was there, and forgets who went."""
    newcomers = Newcomers()
    newcomers.follow(plan(HIGH), 0.0)
    assert newcomers.due(seen(HIGH, handshake_s=1.0), 0.1) == {}
    newcomers.follow(plan(HIGH, LOW), 1.0)
    assert newcomers.due(seen(HIGH, LOW), 1.0) == {}
    assert newcomers.due(seen(HIGH, LOW), 1.0 + OTHER_S) == {LINK: [LOW]}
    newcomers.follow(plan(HIGH), 4.0)
    assert newcomers.links == frozenset()
    newcomers.follow(plan(HIGH, LOW), 5.0)
    assert newcomers.links == {LINK}


async def test_the_watch_greets_and_rests() -> None:
    """From a turn that brings peers until all of them have answered."""
    answered, greeted = asyncio.Event(), asyncio.Queue[tuple[str, list[Key]]]()

    async def peers(links: Collection[str]) -> dict[str, list[PeerSeen]]:
        assert list(links) == [LINK]
        return seen(HIGH, handshake_s=1.0 if answered.is_set() else 0.0)

    async def greet(link: str, keys: Collection[Key]) -> None:
        greeted.put_nowait((link, list(keys)))

    watch = NewcomerWatch(peers, greet)
    watching = asyncio.create_task(watch.run())
    watch.made(plan(HIGH))
    assert await asyncio.wait_for(greeted.get(), 10) == (LINK, [HIGH])
    answered.set()
    watching.cancel()
