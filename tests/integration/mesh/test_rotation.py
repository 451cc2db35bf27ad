"""A node of three changes its key while all of them talk: not one packet is lost, whoever is away or restarts meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from schemas.topology import Cluster, Node, PublicKey, Topology, WireguardSettings
from schemas.values import Address, Name
from services.applier import greetings
from services.cli.files import load
from services.cli.lab import namespaces
from services.cli.lab.layout import UNDERLAY, Layout, host_namespace, layout
from services.cli.lab.wiring import Wiring
from services.kernel.curve25519 import new_private_key, public_key
from services.planner.state import HostId
from tests.hosts import LinuxHost
from tests.speakers import opened
from tests.topologies import EXAMPLES
from tests.turnovers import Turnovers

pytestmark = [pytest.mark.privileged, pytest.mark.timeout(300)]

PORT, WIREGUARD = 7100, 51871
EVERY_S = 0.01
PATIENCE_S = 120.0
HOSTS = [HostId("rome", f"worker-{number}") for number in (1, 2, 3)]
TURNING = HOSTS[1]
PODS = {HOSTS[0]: "rome.pod.shop", HOSTS[1]: "rome.pod.stock", HOSTS[2]: "rome.pod.post"}
STAGES = ["beside", "moved", "rekeyed", "back", "leaving", "done"]


NODES = WireguardSettings(nodes=True)
MODES: dict[str, dict[str, object]] = {
    "native": {},
    "nodes": {"wireguard": NODES, "strict": "enforce"},
    "vxlan": {"routing": "overlay", "strict": "enforce"},
}


@pytest.fixture(params=["native"])
def rome(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Turnovers[LinuxHost]]:
    """Three nodes that encrypt."""
    if namespaces.existing():
        pytest.skip("a lab is up on this machine")
    wiring, private = Wiring(), {host: new_private_key() for host in HOSTS}

    def make(host: HostId) -> LinuxHost:
        place = tmp_path / host.name
        place.mkdir()
        return LinuxHost(host_namespace(*host), place, private[host])

    turnovers = Turnovers(make)
    items = [_changed(item, MODES[request.param]) for item in load([EXAMPLES / "encryption.yaml"])]
    public: list[Topology] = [PublicKey(name=Name(host.name), cluster=Name("rome"), key=public_key(key)) for host, key in private.items()]
    try:
        wiring.make_underlay()
        wiring.turn_into(layout(items))
        turnovers.hear([*items, *public])
        while turnovers.round():
            pass
        yield turnovers
    finally:
        for host in turnovers.hosts.values():
            host.close()
        wiring.turn_into(Layout({}, {}))
        namespaces.remove([UNDERLAY])


def _changed(item: Topology, changes: dict[str, object]) -> Topology:
    if isinstance(item, Node):
        return replace(item, opt_out=False)
    return replace(item, **changes) if isinstance(item, Cluster) else item


class Talk:
    """Datagrams that somebody sends to somebody else, numbered; which of them came."""

    def __init__(self, here: str, there: str, to: Address) -> None:
        self.name = f"{here} → {there} {to}"
        self.sent = 0
        self.came: set[int] = set()
        self._to = to

    def send(self, at: socket.socket, port: int) -> None:
        at.sendto(self.sent.to_bytes(8, "big"), (self._to, port))
        self.sent += 1

    @property
    def lost(self) -> list[int]:
        return sorted(set(range(self.sent)) - self.came)


def pods(among: Iterable[HostId]) -> list[tuple[str, Address]]:
    """A pod of each of these nodes, and its addresses."""
    found = {host.name[-1]: PODS[host] for host in among}
    return [(place, Address(form.format(number))) for number, place in found.items() for form in ("10.200.{}.10", "fd00:200:0:{}::10")]


def nodes(among: Iterable[HostId]) -> list[tuple[str, Address]]:
    """The nodes themselves, and their IPv4 addresses."""
    return [(f"rome.{host.name}", Address(f"172.18.0.1{host.name[-1]}")) for host in among]


@contextlib.asynccontextmanager
async def talking(places: list[tuple[str, Address]]) -> AsyncIterator[list[Talk]]:
    """All of these talk to all others of their family, for the time of the body.

    They have done so before, and at the end all that they said had time to come.
    """
    pairs = [(here, there, to) for here, own in places for there, to in places if here != there and own.family == to.family]
    talks, loop = [Talk(*pair) for pair in pairs], asyncio.get_running_loop()
    with contextlib.ExitStack() as stack:
        ends = []
        for index, (talk, (here, there, to)) in enumerate(zip(talks, pairs, strict=True)):
            family = to.family
            sender, receiver = (
                stack.enter_context(opened(here, family)),
                stack.enter_context(opened(there, family, port=PORT + index)),
            )
            loop.add_reader(receiver, lambda talk=talk, receiver=receiver: talk.came.add(int.from_bytes(receiver.recv(64), "big")))
            stack.callback(loop.remove_reader, receiver)
            ends.append((talk, sender, PORT + index))
        await until(lambda: all(talk.came for talk in talks), lambda: [talk.send(sender, port) for talk, sender, port in ends])
        for talk in talks:
            talk.sent = 0
            talk.came.clear()

        async def send() -> None:
            while True:
                for talk, sender, port in ends:
                    talk.send(sender, port)
                await asyncio.sleep(EVERY_S)

        task = asyncio.create_task(send())
        try:
            yield talks
        finally:
            task.cancel()
        with contextlib.suppress(TimeoutError):
            await until(lambda: not any(talk.lost for talk in talks), lambda: None, 3.0)


async def until(condition: Callable[[], bool], work: Callable[[], object], patience_s: float = PATIENCE_S) -> None:
    """Do some work again and again until a condition holds; TimeoutError when it does not in time."""
    async with asyncio.timeout(patience_s):
        while True:
            if condition():
                return
            work()
            await asyncio.sleep(0.1)


async def turn_over(rome: Turnovers[LinuxHost], after: Callable[[str], None] = lambda _stage: None) -> None:
    """Let the node change its key, to the end; `after` is called with each stage when the hosts hold its plans."""
    old = rome.core.state.keys[TURNING].key
    rome.rotate(TURNING)  # asked again, it is the same
    async with asyncio.timeout(PATIENCE_S):
        while rome.stage(TURNING) != "done":
            before = rome.stage(TURNING)
            was_new = await asyncio.to_thread(rome.round)
            if rome.stage(TURNING) != before:
                after(rome.stage(TURNING))
            if not was_new:
                await asyncio.sleep(0.1)
    assert rome.stages == STAGES
    assert rome.core.state.keys[TURNING].key != old
    assert rome.hosts[TURNING].ask(lambda kernel, _: kernel.keys().all) == (rome.core.state.keys[TURNING].key,)
    assert "me.1" not in rome.hosts[HOSTS[0]].run("ip", "link")


def assert_none_lost(talks: list[Talk]) -> None:
    """Nothing that was sent is missing; says how much that was."""
    assert {talk.name: talk.lost for talk in talks if talk.lost} == {}
    print(f"rotation: sent={sum(talk.sent for talk in talks)} lost=0")  # noqa: T201 - a figure of the suite


@pytest.mark.parametrize("rome", MODES, indirect=True)
async def test_no_packet_is_lost(rome: Turnovers[LinuxHost]) -> None:
    """All pairs talk in both directions and families while one node changes its key; where nodes' packets are encrypted, nodes, too."""
    places = pods(HOSTS)
    if rome.core.state.clusters["rome"].wireguard.nodes:
        places += nodes(HOSTS)
    async with talking(places) as talks:
        await turn_over(rome)
    assert_none_lost(talks)


@pytest.mark.any_kernel
async def test_who_is_away_holds_nobody_up(rome: Turnovers[LinuxHost], monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that neither follows nor answers is waited for until that is sure; when it is back, it meets the others by the new key."""
    monkeypatch.setattr(greetings, "ASKED_S", 4.0)
    gone = HOSTS[2]
    rome.away.add(gone)
    rome.hosts[gone].run("nft", blocking("{ 51871, 51872 }"))
    async with talking(pods(HOSTS[:2])) as talks:
        started_s = time.monotonic()
        await turn_over(rome)
        assert time.monotonic() - started_s >= 4.0
    assert_none_lost(talks)
    rome.away.clear()
    rome.hosts[gone].run("nft", "delete table inet blocked")
    while rome.round():
        pass
    async with talking(pods(HOSTS)) as talks:
        await asyncio.sleep(0.5)
    assert_none_lost(talks)


@pytest.mark.any_kernel
async def test_an_applier_restarts_at_every_stage(rome: Turnovers[LinuxHost]) -> None:
    """Of the node that changes its key, and of another one: what they have forgotten, they find in the kernel and in the key files."""

    def restart(_stage: str) -> None:
        rome.hosts[TURNING].restart()
        rome.hosts[HOSTS[0]].restart()

    async with talking(pods(HOSTS)) as talks:
        await turn_over(rome, restart)
    assert_none_lost(talks)


@pytest.mark.any_kernel
async def test_a_port_that_is_not_let_through_is_named(rome: Turnovers[LinuxHost]) -> None:
    """A node that cannot be met at the second port holds the change up and loses nothing; when it can, the change goes on."""
    blocked = rome.hosts[HOSTS[0]]
    blocked.run("nft", blocking(str(WIREGUARD + 1)))
    async with talking(pods(HOSTS)) as talks:
        rome.rotate(TURNING)
        await until(lambda: met(rome), rome.round)
        assert rome.core.allocations.rotations[TURNING].reasons == (
            f"{ref(HOSTS[0])} and {ref(TURNING)} have not shaken hands on me.1: is UDP port {WIREGUARD + 1} let through between them?",
        )
        rome.stages.clear()
        blocked.run("nft", "delete table inet blocked")
        await turn_over(rome)
    assert_none_lost(talks)


def blocking(ports: str) -> str:
    """A table of somebody else that lets nothing to or from these UDP ports through."""
    chain = "type filter hook {} priority 0; udp dport {} drop"
    return f"table inet blocked {{ chain in {{ {chain.format('input', ports)}; }}; chain out {{ {chain.format('output', ports)}; }}; }}"


def met(rome: Turnovers[LinuxHost]) -> bool:
    """Whether only one peer has not shaken hands on the second device, and the planner says so."""
    devices = rome.core.reports[TURNING].greetings.devices
    return bool(devices) and devices[-1].lacking == 1 and rome.core.allocations.rotations[TURNING].waiting == 1


def ref(host: HostId) -> str:
    return f"Node/{host.cluster}/{host.name}"
