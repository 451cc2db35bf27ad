"""Which peers are greeted again, by which end, and when no more."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from types import SimpleNamespace

import pytest

from schemas.host_objects import WireguardLink, WireguardPeer
from schemas.plan import Entry, HostPlan
from schemas.values import Endpoint, Key, Name
from services.applier import newcomers
from services.applier.newcomers import AGAIN_S, CROSSED_S, LOOK_S, NEW_S, OTHER_S, UNHEARD_S, Newcomers, NewcomerWatch
from services.kernel.curve25519 import public_key
from services.kernel.port import PeerSeen
from services.runtime import tasks
from services.runtime.errors import Transient

LOW, MINE, HIGH = sorted(Key(public_key(bytes([number]) * 32)) for number in range(1, 4))
LINK = "me.0"


def plan(*keys: Key, link: str = LINK) -> HostPlan:
    objects = [WireguardLink(link, 51871, 1420, MINE), *(WireguardPeer(link, key, Endpoint("192.0.2.1:1"), ()) for key in keys)]
    return HostPlan(Name("rome"), Name("worker-1"), {"mesh/rome": {item.key: Entry(item, ()) for item in objects}})


def seen(*keys: Key, sent_bytes: int = 148, received_bytes: int = 0, handshake_s: float = 0.0) -> list[PeerSeen]:
    return [PeerSeen(key, None, handshake_s, received_bytes, sent_bytes) for key in keys]


@pytest.mark.parametrize("received_bytes, first_s", [(0, UNHEARD_S), (148, CROSSED_S)], ids=["unheard", "crossed"])
def test_the_end_with_the_lower_key_greets_first(received_bytes: int, first_s: float) -> None:
    """Soon where greetings have crossed, later where nothing was heard. Both go on while nothing comes back, and never at one time."""
    newcomers = Newcomers()
    newcomers.follow(plan(LOW, HIGH), 0.0)
    times = [number / 100 for number in range(int(NEW_S * 100) + 100)]
    found = {now_s: due for now_s in times if (due := newcomers.due(LINK, seen(LOW, HIGH, received_bytes=received_bytes), now_s))}
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
    assert newcomers.due(LINK, seen(HIGH, sent_bytes=0), 5.0) == []
    assert newcomers.due(LINK, seen(HIGH), 6.0) == []
    assert newcomers.due(LINK, seen(HIGH), 6.0 + UNHEARD_S) == [HIGH]
    assert newcomers.due(LINK, seen(HIGH, handshake_s=1.0), 8.0) == []
    assert newcomers.links == frozenset()
    assert newcomers.due(LINK, seen(HIGH), 9.0) == []


def test_only_who_comes_is_new() -> None:
    """A further turn makes nobody new who was there, and forgets who went."""
    newcomers = Newcomers()
    newcomers.follow(plan(HIGH), 0.0)
    assert newcomers.due(LINK, seen(HIGH, handshake_s=1.0), 0.1) == []
    newcomers.follow(plan(HIGH, LOW), 1.0)
    assert newcomers.due(LINK, seen(HIGH, LOW), 1.0) == []
    assert newcomers.due(LINK, seen(HIGH, LOW), 1.0 + OTHER_S) == [LOW]
    newcomers.follow(plan(HIGH), 4.0)
    assert newcomers.links == frozenset()
    newcomers.follow(plan(HIGH, LOW), 5.0)
    assert newcomers.links == {LINK}


def test_who_cannot_be_seen_is_new_for_no_longer_than_others() -> None:
    """A device that does not answer is not asked for ever."""
    newcomers = Newcomers()
    newcomers.follow(plan(HIGH), 0.0)
    assert newcomers.due(LINK, (), NEW_S) == []
    assert newcomers.links == {LINK}
    assert newcomers.due(LINK, (), NEW_S + 0.1) == []
    assert newcomers.links == frozenset()


async def test_a_device_that_does_not_answer_keeps_no_other_waiting() -> None:
    """The peers of the others are seen and greeted in the same look, also where one of them cannot be greeted."""
    broken, deaf, sound = "me.0", "me.1", "me.2"
    greeted = asyncio.Queue[str]()

    async def peers(links: Collection[str]) -> dict[str, list[PeerSeen]]:
        (link,) = links
        if link == broken:
            msg = f"{link} does not answer"
            raise Transient(msg)
        return {link: seen(HIGH)}

    async def greet(link: str, keys: Collection[Key]) -> None:
        if link == deaf:
            msg = f"{link} cannot be written"
            raise Transient(msg)
        greeted.put_nowait(link)

    watch = NewcomerWatch(peers, greet)
    watching = asyncio.create_task(watch.run())
    ones = [plan(HIGH, link=link).units["mesh/rome"] for link in (broken, deaf, sound)]
    watch.made(HostPlan(Name("rome"), Name("worker-1"), {"mesh/rome": {key: entry for unit in ones for key, entry in unit.items()}}))
    assert await asyncio.wait_for(greeted.get(), 10) == sound
    watching.cancel()


async def test_the_watch_greets_and_rests() -> None:
    """From a turn that brings peers until all of them have answered."""
    answered, greeted = asyncio.Event(), asyncio.Queue[tuple[str, list[Key]]]()

    async def peers(links: Collection[str]) -> dict[str, list[PeerSeen]]:
        assert list(links) == [LINK]
        return {LINK: seen(HIGH, handshake_s=1.0 if answered.is_set() else 0.0)}

    async def greet(link: str, keys: Collection[Key]) -> None:
        greeted.put_nowait((link, list(keys)))

    watch = NewcomerWatch(peers, greet)
    watching = asyncio.create_task(watch.run())
    watch.made(plan(HIGH))
    assert await asyncio.wait_for(greeted.get(), 10) == (LINK, [HIGH])
    answered.set()
    watching.cancel()


async def test_a_look_that_waits_for_a_turn_keeps_nobody_waiting_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest after it is a second at most, whatever it took."""
    rests: asyncio.Queue[float] = asyncio.Queue()
    waits = [0.3, 0.0]

    async def sleep(seconds: float) -> None:
        rests.put_nowait(seconds)
        await asyncio.sleep(0)

    async def peers(_: Collection[str]) -> dict[str, list[PeerSeen]]:
        await asyncio.sleep(waits.pop(0) if waits else 60)
        return {LINK: seen(HIGH)}

    async def greet(link: str, keys: Collection[Key]) -> None:
        pytest.fail(f"{keys} are greeted at once by {link}")

    watch = NewcomerWatch(peers, greet)
    monkeypatch.setattr(newcomers, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": sleep}))
    watching = asyncio.create_task(watch.run())
    watch.made(plan(HIGH))
    try:
        late, quick = [await asyncio.wait_for(rests.get(), 10) for _ in range(2)]
        assert (late, LOOK_S <= quick <= late) == (1.0, True)
    finally:
        await tasks.end([watching])
