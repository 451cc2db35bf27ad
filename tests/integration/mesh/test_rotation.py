"""A node of three changes its key while all of them talk: not one packet is lost, whoever is away or restarts meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from schemas.topology import Cluster, Node, Topology, WireguardSettings
from schemas.values import Address
from services.applier import greetings
from services.cli.files import load
from services.planner.state import HostId
from tests.hosts import LinuxHost
from tests.integration.mesh.turning import turn_over, up
from tests.talks import assert_none_lost, blocking, talking, until
from tests.topologies import EXAMPLES
from tests.turnovers import Turnovers

pytestmark = [pytest.mark.privileged, pytest.mark.timeout(300)]

WIREGUARD = 51871
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
    with up([_changed(item, MODES[request.param]) for item in load([EXAMPLES / "encryption.yaml"])], HOSTS, tmp_path) as found:
        yield found


def _changed(item: Topology, changes: dict[str, object]) -> Topology:
    if isinstance(item, Node):
        return replace(item, opt_out=False)
    return replace(item, **changes) if isinstance(item, Cluster) else item


def pods(among: Iterable[HostId]) -> list[tuple[str, Address]]:
    """A pod of each of these nodes, and its addresses."""
    found = {host.name[-1]: PODS[host] for host in among}
    return [(place, Address(form.format(number))) for number, place in found.items() for form in ("10.200.{}.10", "fd00:200:0:{}::10")]


def nodes(among: Iterable[HostId]) -> list[tuple[str, Address]]:
    """The nodes themselves, and their IPv4 addresses."""
    return [(f"rome.{host.name}", Address(f"172.18.0.1{host.name[-1]}")) for host in among]


def everybody(places: list[tuple[str, Address]]) -> list[tuple[str, str, Address]]:
    """All of these to all others of their family."""
    return [(here, there, to) for here, own in places for there, to in places if here != there and own.family == to.family]


@pytest.mark.parametrize("rome", MODES, indirect=True)
async def test_no_packet_is_lost(rome: Turnovers[LinuxHost]) -> None:
    """All pairs talk in both directions and families while one node changes its key; where nodes' packets are encrypted, nodes, too."""
    places = pods(HOSTS)
    if rome.core.state.clusters["rome"].wireguard.nodes:
        places += nodes(HOSTS)
    async with talking(everybody(places)) as talks:
        await turn_over(rome, TURNING, STAGES)
    assert_none_lost(talks)


@pytest.mark.any_kernel
async def test_who_is_away_holds_nobody_up(rome: Turnovers[LinuxHost], monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that neither follows nor answers is waited for until that is sure; when it is back, it meets the others by the new key."""
    monkeypatch.setattr(greetings, "ASKED_S", 4.0)
    gone = HOSTS[2]
    rome.away.add(gone)
    rome.hosts[gone].run("nft", blocking("{ 51871, 51872 }"))
    async with talking(everybody(pods(HOSTS[:2]))) as talks:
        started_s = time.monotonic()
        await turn_over(rome, TURNING, STAGES)
        assert time.monotonic() - started_s >= 4.0
    assert_none_lost(talks)
    rome.away.clear()
    rome.hosts[gone].run("nft", "delete table inet blocked")
    while rome.round():
        pass
    async with talking(everybody(pods(HOSTS))) as talks:
        await asyncio.sleep(0.5)
    assert_none_lost(talks)


@pytest.mark.any_kernel
async def test_an_applier_restarts_at_every_stage(rome: Turnovers[LinuxHost]) -> None:
    """Of the node that changes its key, and of another one: what they have forgotten, they find in the kernel and in the key files."""

    def restart() -> None:
        rome.hosts[TURNING].restart()
        rome.hosts[HOSTS[0]].restart()

    async with talking(everybody(pods(HOSTS))) as talks:
        await turn_over(rome, TURNING, STAGES, restart)
    assert_none_lost(talks)


@pytest.mark.any_kernel
async def test_a_port_that_is_not_let_through_is_named(rome: Turnovers[LinuxHost]) -> None:
    """A node that cannot be met at the second port holds the change up and loses nothing; when it can, the change goes on."""
    blocked = rome.hosts[HOSTS[0]]
    blocked.run("nft", blocking(str(WIREGUARD + 1)))
    async with talking(everybody(pods(HOSTS))) as talks:
        rome.rotate(TURNING)
        closed = f"{HOSTS[0]} and {TURNING} have not shaken hands on me.1: is UDP port {WIREGUARD + 1} let through between them?"
        await until(lambda: met(rome) and rome.core.allocations.rotations[TURNING].reasons == (closed,), rome.round)
        rome.stages.clear()
        blocked.run("nft", "delete table inet blocked")
        await turn_over(rome, TURNING, STAGES)
    assert_none_lost(talks)


def met(rome: Turnovers[LinuxHost]) -> bool:
    """Whether only one peer has not shaken hands on the second device, and the planner says so."""
    devices = rome.core.reports[TURNING].greetings.devices
    return bool(devices) and devices[-1].lacking == 1 and rome.core.allocations.rotations[TURNING].waiting == 1
