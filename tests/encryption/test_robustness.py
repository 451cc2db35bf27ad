"""What goes on under traffic without anybody's noticing: appliers that start anew, the same plan again and again, peers that roam, ports
and keys that are not what they should be."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from schemas.topology import Pod
from schemas.values import IPV4, Address, Name
from tests.emulated import examples
from tests.encryption import wire
from tests.encryption.conftest import Made
from tests.encryption.site import DEVICE, OUTSIDE, PORT, Mode, Site
from tests.encryption.streams import streams

NATIVE = Mode("native")
pytestmark = [pytest.mark.privileged, pytest.mark.timeout(400)]
AGAIN, AGAIN_S = examples(100), 90.0
"""Turns, and how long all of them may take on a slow machine: peers greet each other anew after 120 s by themselves."""
LOOP_BYTES = 1_000_000
"""Less than a second of a loop makes, and more than this module says."""
NODES = ("worker-1", "worker-2", "worker-3")
NAT = (
    "table ip nat-of-worker-2 { chain leaves { type nat hook postrouting priority 100; "
    f"ip saddr {{node}} udp sport {PORT} snat to {OUTSIDE[IPV4]}:40001; }}; }}"
)


def sessions(site: Site) -> dict[str, tuple[dict[str, str], dict[str, str]]]:
    """Endpoints and handshakes of the nodes between which packets go, by node and peer's key; no handshake is left out."""
    found = {}
    for name in wire.NODES:
        handshakes = {key: at for key, at in site.wg(name, "latest-handshakes") if at != "0"}
        found[name] = {key: place for key, place in site.wg(name, "endpoints") if key in handshakes}, handshakes
    return found


@pytest.mark.parametrize("mode", [NATIVE, Mode("vxlan"), Mode("geneve")], ids=str)
async def test_a_hundred_turns_and_a_new_applier_change_nothing(
    turned: Made, mode: Mode, record_property: Callable[[str, object], None]
) -> None:
    """No packet of a stream is lost, no handshake is made anew, and an endpoint that was learned, of a peer behind a NAT, stays."""
    site = turned(mode)
    learned = f"{OUTSIDE[IPV4]}:40001"
    site.run("underlay", "nft", NAT.replace("{node}", site.address("worker-2")))
    try:
        site.run("underlay", "conntrack", "-F")
        await wire.talk("rome.pod.stock", "rome.pod.shop", site.pod("shop", IPV4), IPV4)
        async with streams(site, (IPV4,)) as flows:
            before = sessions(site)
            assert learned in before["worker-1"][0].values()
            end = time.monotonic() + AGAIN_S
            for turn in range(AGAIN):  # every other one by an applier that has to read the kernel: who remembers has nothing to do
                await asyncio.to_thread(site.again, "rome", "worker-1", restart=turn % 2 == 0)
                assert time.monotonic() < end, f"{turn + 1} turns of {AGAIN} took {AGAIN_S:g} s"
            await asyncio.to_thread(site.again, "rome", "worker-2", restart=True)
            assert sessions(site) == before
            assert site.differences() == {}
        record_property("lost", f"{AGAIN} turns, every other one by a new applier, {mode}: {flows}")
        assert flows.lost == 0
        assert flows.sent > 50
    finally:
        site.run("underlay", "nft", "delete", "table", "ip", "nat-of-worker-2")
        site.run("underlay", "conntrack", "-F")
    # Whoever has moved is the one to speak first: until then, the other end looks for it where it was.
    await wire.talk("rome.pod.stock", "rome.pod.shop", site.pod("shop", IPV4), IPV4)


async def test_a_peer_taken_away_by_hand_is_given_back(turned: Made) -> None:
    """Whoever applies looks into the device, not at what it remembers."""
    site = turned(NATIVE)
    key, before = key_of(site, "10.200.2.0/24"), site.wg("worker-1", "allowed-ips")
    site.hand("worker-1", "wg", "set", DEVICE, "peer", key, "remove")
    assert len(site.wg("worker-1", "allowed-ips")) == len(before) - 1
    site.again("rome", "worker-1", restart=True)
    assert sorted(map(sorted, site.wg("worker-1", "allowed-ips"))) == sorted(map(sorted, before))
    await wire.talk("rome.pod.shop", "rome.pod.stock", site.pod("stock", IPV4), IPV4)


async def test_a_prefix_stolen_by_hand_is_one_difference_and_goes_back(turned: Made) -> None:
    """The thief loses what is not its own, and the owner has it again; nobody else is written."""
    site = turned(NATIVE)
    owners = {prefix: key for key, *prefixes in site.wg("worker-1", "allowed-ips") for prefix in prefixes}
    owner, thief = owners["10.200.2.0/24"], owners["10.200.3.0/24"]
    site.hand("worker-1", "wg", "set", DEVICE, "peer", thief, "allowed-ips", "10.200.3.0/24,fd00:200:0:3::/64,10.200.2.0/24")
    (differing,) = site.differences().values()
    assert {owner, thief} == {word for item in differing for word in str(item).replace("'", " ").split() if word in (owner, thief)}
    site.again("rome", "worker-1", restart=True)
    assert {prefix: key for key, *prefixes in site.wg("worker-1", "allowed-ips") for prefix in prefixes} == owners
    await wire.talk("rome.pod.shop", "rome.pod.stock", site.pod("stock", IPV4), IPV4)


async def test_a_pod_that_moves_takes_its_address_along(turned: Made, record_property: Callable[[str, object], None]) -> None:
    """From one peer's AllowedIPs to another's, at once: who speaks to it loses at most what is on the way while nodes turn."""
    site = turned(NATIVE)
    mover = Pod(name=Name("mover"), cluster=Name("rome"), node=Name("worker-2"), addresses=(Address("10.200.3.99"),))
    site.say([mover])
    try:
        await wire.talk("rome.pod.shop", "rome.pod.mover", mover.addresses[0], IPV4)
        async with streams(site, (IPV4,)) as flows:
            await asyncio.to_thread(site.say, [replace(mover, node=Name("worker-3"))])
            await wire.talk("rome.pod.shop", "rome.pod.mover", mover.addresses[0], IPV4)
        record_property("lost", f"an AllowedIP moves from a peer to another one, the peers' other ones: {flows}")
        assert flows.lost == 0
    finally:
        site.forget(mover.ref)


async def test_what_is_off_is_gone(turned: Made) -> None:
    """Without encryption no device, peer, rule, route or table of it is left on any node, and none of its processes."""
    site = turned(NATIVE)
    site.change(encryption="none", strict="off")
    try:
        for name in NODES:
            left = site.hand(name, "sh", "-c", "ip -o link; ip rule; ip -6 rule; ip route show table all; nft list tables")
            assert not [line for line in left.splitlines() if DEVICE in line or "proto 77" in line or wire.TABLE in line]
            assert site.hand(name, "wg", "show", "interfaces").strip() == ""
    finally:
        site.turn_to(NATIVE, strict="audit")
    await wire.talk("rome.pod.shop", "rome.pod.stock", site.pod("stock", IPV4), IPV4)


async def test_outer_packets_are_no_connections(turned: Made) -> None:
    """Neither end tracks WireGuard's own, and the packets inside are tracked as ever."""
    site = turned(NATIVE)
    await wire.talk("rome.pod.shop", "rome.pod.stock", site.pod("stock", IPV4), IPV4)
    for name in wire.NODES:
        tracked = site.hand(name, "conntrack", "-L")
        assert f"dport={PORT}" not in tracked
        assert "10.200.2.10" in tracked


async def test_a_loop_is_cut(turned: Made) -> None:
    """A rule of somebody else that leads WireGuard's own packets back into the device makes nothing grow."""
    site = turned(Mode("native", nodes=True))
    site.hand("worker-1", "ip", "rule", "add", "priority", "900", "to", site.address("worker-2"), "lookup", "10")
    try:
        with contextlib.suppress(TimeoutError):  # an implementation may go on by the way that it had
            await wire.talk("rome.pod.shop", "rome.pod.stock", site.pod("stock", IPV4), IPV4, patience_s=1.0)
        (sent,) = [int(sent) for key, _, sent in site.wg("worker-1", "transfer") if key == key_of(site, "10.200.2.0/24")]
        assert sent < LOOP_BYTES
    finally:
        site.hand("worker-1", "ip", "rule", "delete", "priority", "900")
    await wire.talk("rome.pod.shop", "rome.pod.stock", site.pod("stock", IPV4), IPV4)


def key_of(site: Site, prefix: str) -> str:
    """The peer of worker-1 that owns a prefix."""
    return next(key for key, *prefixes in site.wg("worker-1", "allowed-ips") if prefix in prefixes)
