"""The cluster changes live, under traffic: modes, nodes that go and come back, a node that opts out. What is lost is counted.

A stream goes both ways between pods of two nodes while these make the change, one after the other: what is lost is what goes from one to
the other while only one of them has turned. What was encrypted before and is after must not be seen in clear in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

import pytest
from msgspec.structs import replace

from schemas.topology import Pod, PublicKey
from schemas.values import FAMILIES, IPV4, Address, Family
from services.applier.newcomers import NewcomerWatch
from services.planner.state import HostId
from services.runtime import tasks
from tests.encryption import wire
from tests.encryption.conftest import Made
from tests.encryption.site import PORT, UPLINK, Mode, Site
from tests.encryption.streams import FLOWS, streams

pytestmark = [pytest.mark.privileged, pytest.mark.timeout(240)]

RUN_S = 1.0
"""Of undisturbed traffic before a change and after it."""
SOON_S = 2.5
"""Greetings that came to nothing are repeated within this time."""
REKEY_TIMEOUT_S = 5.0
"""WireGuard's, between two greetings of a peer."""
NATIVE, VXLAN, GENEVE = Mode("native"), Mode("vxlan"), Mode("geneve")


class Switch(NamedTuple):
    """From one mode to another (None: no encryption, which IPv4 alone gets by over this underlay).

    `lossless`: not one datagram may be lost. Else a packet that leaves a node that has turned finds the other one as it was, and may be
    lost for as long as nodes differ.
    """

    before: Mode | None
    after: Mode | None
    lossless: bool = False

    @property
    def families(self) -> tuple[Family, ...]:
        return FAMILIES if self.before is not None and self.after is not None else (IPV4,)

    def __str__(self) -> str:
        return " → ".join(str(mode or "none") for mode in (self.before, self.after))


SWITCHES = [
    Switch(None, NATIVE),
    Switch(NATIVE, None),
    Switch(NATIVE, Mode("native", nodes=True), lossless=True),
    Switch(Mode("native", nodes=True), NATIVE, lossless=True),
    Switch(NATIVE, VXLAN),
    Switch(VXLAN, NATIVE),
    Switch(NATIVE, GENEVE),
    Switch(GENEVE, NATIVE),
    Switch(None, VXLAN),
    Switch(VXLAN, None),
    Switch(VXLAN, Mode("vxlan", nodes=True), lossless=True),
    Switch(VXLAN, GENEVE),
    Switch(GENEVE, VXLAN),
]


def turn(made: Made, site: Site, mode: Mode | None) -> None:
    if mode is None:
        site.change(encryption="none", strict="off", routing="native")
    else:
        made(mode)


@pytest.mark.parametrize("switch", SWITCHES, ids=str)
async def test_a_stream_survives_a_switch(turned: Made, site: Site, switch: Switch, record_property: Callable[[str, object], None]) -> None:
    """Packets lost are counted; between two modes that encrypt nothing is in clear on either uplink."""
    turn(turned, site, switch.after)  # skips here where this kernel cannot
    turn(turned, site, switch.before)
    with wire.watched_on(UPLINK) as uplinks:
        async with streams(site, switch.families) as flows:
            await asyncio.sleep(RUN_S)
            before = flows.sent
            await asyncio.to_thread(turn, turned, site, switch.after)
            during = flows.sent - before
            await asyncio.sleep(RUN_S)
    record_property("lost", f"{switch}: {flows}, of which {during} were sent while nodes turned")
    if switch.before is not None and switch.after is not None:
        assert [wire.in_clear(uplink, site.cluster()) for uplink in uplinks] == [[], []]
    assert before > 10
    assert flows.lost <= (0 if switch.lossless else during + len(flows.flows) * FLOWS)
    assert site.differences() == {}


async def test_encryption_comes_as_keys_become_known(turned: Made, record_property: Callable[[str, object], None]) -> None:
    """As on a cluster that encrypts for the first time: packets go around the device until both keys are known, and then through it.

    What is lost is counted, and over soon: greetings that cross are made good by the watch for newcomers.
    """
    site = turned(NATIVE)
    site.change(encryption="none", strict="off")
    keys = [item for item in site.topology if isinstance(item, PublicKey)]
    site.forget(*(key.ref for key in keys))
    async with watched_newcomers(site) as have_turned, streams(site, (IPV4,)) as flows:
        before = flows.sent
        for said in ([replace(site.cluster(), **NATIVE.fields(), strict="audit")], *([key] for key in keys)):
            await asyncio.to_thread(site.say, said)
            have_turned()
        await asyncio.sleep(SOON_S)
        during = flows.sent - before
        await asyncio.sleep(RUN_S)
    record_property("lost", f"none → native for the first time: {flows}")
    assert flows.lost <= during
    with wire.watched_on(UPLINK) as uplinks:
        async with streams(site, (IPV4,)) as flows:
            await asyncio.sleep(RUN_S)
    assert flows.lost == 0
    assert [wire.in_clear(uplink, site.cluster()) for uplink in uplinks] == [[], []]


@pytest.mark.any_kernel
async def test_first_greetings_that_come_to_nothing_are_repeated_soon(turned: Made, record_property: Callable[[str, object], None]) -> None:
    """Both ends greet, and neither is heard: with the watch for newcomers they meet long before 5 s have passed."""
    site = turned(NATIVE)
    keys = [item for item in site.topology if isinstance(item, PublicKey)]
    site.forget(*(key.ref for key in keys))
    for name in wire.NODES:
        site.hand(name, "nft", f"table inet lost {{ chain c {{ type filter hook input priority 0; udp dport {PORT} drop; }}; }}")
    try:
        await asyncio.to_thread(site.say, keys)
        async with watched_newcomers(site), streams(site, (IPV4,), begun=False) as flows:
            await wire.eventually(lambda: all(sum(int(sent) > 0 for *_, sent in site.wg(name, "transfer")) for name in wire.NODES))
            for name in wire.NODES:
                site.hand(name, "nft", "delete", "table", "inet", "lost")
            began_s = time.monotonic()
            await wire.eventually(lambda: all(flow.sent > flow.lost for flow in flows.flows))
            took_s = time.monotonic() - began_s
    finally:
        for name in wire.NODES:
            site.hand(name, "sh", "-c", "nft delete table inet lost 2>&-; true")
    record_property("lost", f"first greetings lost: what both ends say arrives {took_s:.1f} s after they could be heard")
    assert took_s < REKEY_TIMEOUT_S - 1


@pytest.mark.parametrize("what", ["address", "key"])
@pytest.mark.any_kernel
async def test_a_node_that_was_removed_comes_back(turned: Made, what: str, record_property: Callable[[str, object], None]) -> None:
    """At another address, or with another key: it is reached, nobody keeps the peer that it was, and others notice nothing."""
    site = turned(NATIVE)
    node = site.node("worker-2")
    pods = [item for item in site.topology if isinstance(item, Pod) and item.node == node.name]
    back = replace(node, addresses=(Address("172.18.0.22"),)) if what == "address" else node
    (key,) = (key for key, prefixes in peers(site).items() if "10.200.2.0/24" in prefixes)
    async with streams(site, (IPV4,), "post") as flows:
        await asyncio.to_thread(site.forget, *(pod.ref for pod in pods), node.ref)
        assert key not in peers(site)
        if what == "key":
            site.lose_key("rome", "worker-2")
        try:
            await asyncio.to_thread(site.say, [back, *pods])
            assert (key in peers(site)) is (what == "address")
            assert [f"{back.addresses[0]}:" in endpoint for _, endpoint in site.wg("worker-1", "endpoints")].count(True) == 1
            await wire.talk("rome.pod.shop", "rome.pod.stock", site.pod("stock", IPV4), IPV4)
            await wire.talk("rome.pod.stock", "rome.pod.shop", site.pod("shop", IPV4), IPV4)
        finally:
            await asyncio.to_thread(site.forget, *(pod.ref for pod in pods), node.ref)
            await asyncio.to_thread(site.say, [node, *pods])
    record_property("lost", f"a peer goes and comes with another {what}, between the others: {flows}")
    assert flows.lost == 0


@pytest.mark.parametrize("mode", [NATIVE, VXLAN], ids=str)
async def test_a_node_opts_out_and_back_in(turned: Made, mode: Mode, record_property: Callable[[str, object], None]) -> None:
    """What is for it goes in clear, and strict mode takes that for no mistake; what is for others does not, and nothing of that is lost."""
    site = turned(mode)
    site.change(strict="enforce")
    counted = {name: wire.counted(site, name) for name in wire.NODES}
    try:
        async with streams(site, (IPV4,)) as flows:
            for out in (True, False):
                await asyncio.to_thread(site.change, "Node/rome/worker-3", opt_out=out)
                with wire.watched() as seen:
                    talk = await wire.talk("rome.pod.shop", "rome.pod.post", site.pod("post", IPV4), IPV4)
                for words, outgoing in ((talk.request, True), (talk.answer, False)):
                    assert wire.says(seen.uplinks[0], words, outgoing=outgoing) is out
                    assert wire.says(seen.devices[0], words, outgoing=outgoing) is not out
                assert wire.in_clear(seen.uplinks[1], site.cluster()) == []
        record_property("lost", f"a node opts out and back in, {mode}, between the others: {flows}")
        assert flows.lost == 0
        assert {name: wire.counted(site, name) for name in wire.NODES} == counted
    finally:
        site.change("Node/rome/worker-3", opt_out=False)
        site.change(strict="audit")


@contextlib.asynccontextmanager
async def watched_newcomers(site: Site) -> AsyncIterator[Callable[[], None]]:
    """Nodes watch their newcomers, as their appliers do. Yields what tells them that they have turned, as they had when this begins."""

    def watch(name: str) -> NewcomerWatch:
        host = site.host("rome", name)
        return NewcomerWatch(
            lambda links: asyncio.to_thread(host.ask, lambda _, applier: applier.peers(links)),
            lambda link, keys: asyncio.to_thread(host.ask, lambda _, applier: applier.greet(link, keys)),
        )

    def have_turned() -> None:
        for name, each in watches.items():
            each.made(site.mesh.core.published[HostId("rome", name)])

    watches = {name: watch(name) for name in wire.NODES}
    have_turned()
    watching = [asyncio.create_task(each.run()) for each in watches.values()]
    try:
        yield have_turned
    finally:
        await tasks.end(watching)


def peers(site: Site) -> dict[str, list[str]]:
    """The AllowedIPs of worker-1's peers, by key."""
    return {key: prefixes for key, *prefixes in site.wg("worker-1", "allowed-ips")}
