"""NFLOG over a real namespace: what rules show, by whom it can be heard, what is lost; and what rules have counted."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from schemas.host_objects import NftChain, NftTable
from schemas.nft import Comment, Counter, Limit, Log, Match, Verdict
from services.kernel.namespace import enter_network
from services.kernel.nflog import NflogSource, Shown, packet_of
from services.kernel.transaction import Change
from services.runtime.errors import Conflict
from tests.contract.kernel.machines import LinuxMachine

pytestmark = pytest.mark.privileged
LIMIT_S = 10.0
GROUP = 5187
PORT = 7000
TABLE = NftTable("meshmark.mesh.x")
T = TypeVar("T")


def rules(*limit: Limit) -> tuple[Change, ...]:
    out = Match("udp dport", (str(PORT),))
    chain = NftChain(
        TABLE.name,
        "out",
        ((out, *limit, Log(GROUP, "meshmark out pods", 40)), (out, Counter(), Verdict("accept"), Comment("all of it"))),
        "filter",
        "output",
    )
    return Change(None, TABLE), Change(None, chain)


def inside(machine: LinuxMachine, work: Callable[[], Awaitable[T]]) -> T:
    """Run this in the machine's namespace."""

    async def bounded() -> T:
        async with asyncio.timeout(LIMIT_S):
            return await work()

    def run() -> T:
        enter_network(Path("/run/netns") / machine.namespace)
        return asyncio.run(bounded())

    return machine._thread.submit(run).result(2 * LIMIT_S)


def say(count: int, size: int = 10) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as speaker:
        for _ in range(count):
            speaker.sendto(bytes(size), ("127.0.0.1", PORT))


def test_a_shown_packet_is_told_with_its_first_bytes(machine: LinuxMachine) -> None:
    """Its rule's prefix, the link, the 5-tuple, and no more bytes than the rule says."""
    machine.run("ip link set lo up")
    machine.kernel.commit(rules(), None)

    async def story() -> tuple[Shown, int]:
        async with NflogSource(GROUP) as source:
            say(1, size=500)
            return await anext(source), socket.if_nametoindex("lo")

    item, loopback = inside(machine, story)
    found = packet_of(item.data)
    assert (item.prefix, item.oif, item.iif, item.lost, len(item.data)) == ("meshmark out pods", loopback, 0, 0, 40)
    assert found is not None
    assert (found.source, found.destination, found.protocol, found.destination_port) == ("127.0.0.1", "127.0.0.1", 17, PORT)
    assert found.length == 528


def test_a_limit_bounds_what_is_shown_and_not_what_is_counted(machine: LinuxMachine) -> None:
    """Of many at once a few are told; all are counted, and the counts of a rule begin at 0 with its handle."""
    machine.run("ip link set lo up")
    machine.kernel.commit(rules(Limit(1, 5)), None)

    async def story() -> int:
        async with NflogSource(GROUP) as source:
            say(500)
            for number in range(500):
                try:
                    await asyncio.wait_for(anext(source), 0.3)
                except TimeoutError:
                    return number
        return 500

    assert 5 <= inside(machine, story) <= 10
    [count] = machine.kernel.counted(TABLE.name)
    assert (count.chain, count.comment, count.packets, count.bytes) == ("out", "all of it", 500, 500 * 38)
    assert machine.kernel.counted("meshmark.mesh.y") == []


def test_a_group_has_one_listener(machine: LinuxMachine) -> None:
    """The second one is told what to do, and gets it once the first is gone."""

    async def story() -> None:
        async with NflogSource(GROUP):
            with pytest.raises(Conflict, match="auditGroup"):
                await NflogSource(GROUP).__aenter__()
        async with NflogSource(GROUP):
            pass

    inside(machine, story)


def test_what_did_not_fit_is_said_with_the_next(machine: LinuxMachine) -> None:
    """The kernel's buffer runs over while nobody reads: the numbers tell how many are missing."""
    machine.run("ip link set lo up")
    machine.kernel.commit(rules(), None)

    async def story() -> tuple[int, int]:
        async with NflogSource(GROUP, buffer_bytes=1 << 14) as source:
            say(5000)  # the loop stands still meanwhile
            heard = lost = 0
            while heard + lost < 5001:
                item = await anext(source)
                heard, lost = heard + 1, lost + item.lost
                if heard == 1:
                    await asyncio.sleep(0)
                    say(1)
            return heard, lost

    heard, lost = inside(machine, story)
    assert heard + lost == 5001
    assert lost > 0
