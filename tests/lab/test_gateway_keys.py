"""Gateways change their keys by the command, with all services: flows through all tunnels lose nothing, whatever is killed meanwhile."""

from __future__ import annotations

import asyncio
import subprocess

import pytest

from schemas.status import TunnelHealth
from services.cli.lab.layout import PREFIX
from tests.lab.conftest import Live, Mesh, eventually
from tests.lab.test_tunnel_loss import GATEWAYS, PORT, TUNNELS, blocked, flows, hops, withdrawn
from tests.talks import overrun

pytestmark = [pytest.mark.privileged, pytest.mark.timeout(300)]

BESIDE = "mt.beside"
WORDS = [
    "a device with the new key comes beside the tunnels, at both ends",
    *(words for link in TUNNELS for words in (f"packets of {link} go by the device beside", f"{link} gets the new key")),
    "packets go by all tunnels again",
    "the device beside and the old key go",
    "done",
]


def key(mesh: Mesh, host: str) -> str:
    """The public key of a gateway, which all of its devices have."""
    (found,) = {mesh.run_in_view(host, "wg", "show", link, "public-key").strip() for link in TUNNELS}
    return found


def has_beside(mesh: Mesh) -> bool:
    return any(BESIDE in mesh.run(host, "ip", "-o", "link") for host in GATEWAYS)


def assert_changed(mesh: Mesh, host: str, before: str, done: subprocess.CompletedProcess[str]) -> None:
    """The command said each step at most once, in order, and the key is another one; all else is as it was."""
    assert done.returncode == 0, done.stderr
    name, after = host.replace(".", "/"), key(mesh, host)
    assert after != before
    lines = [line.removeprefix(f"{name}: ") for line in done.stdout.splitlines()]
    assert lines[-1] == f"its public key is {after}"
    said = [WORDS.index(words) for words in lines[:-1]]
    assert said == sorted(set(said))


def dead(live: Live) -> list[TunnelHealth]:
    """What both gateways last reported of their tunnels."""
    return [live.board.reports[host].tunnels for host in live.plans() if host.name == "gateway"]


def no_room() -> int:
    """Datagrams for which a gateway's WireGuard had no room until now, since it was not given a processor (``tests.talks``)."""
    return sum(overrun(f"{PREFIX}{host}") for host in GATEWAYS)


@pytest.mark.parametrize(
    "host, killed",
    [
        ("rome.gateway", ""),
        ("milan.gateway", ""),
        ("rome.gateway", "applier.milan.gateway"),
        ("rome.gateway", "applier.rome.gateway"),
        ("milan.gateway", "planner"),
    ],
)
async def test_a_gateway_changes_its_key_and_no_flow_notices(live: Live, host: str, killed: str) -> None:
    """Whichever end it is: no datagram of many flows is lost, no tunnel stays dead, and no auditor calls it drift."""
    mesh, told = live.mesh, len(live.board.drift)
    before, room = key(mesh, host), no_room()
    async with flows(live, "rome/shop", "milan/bank") as seen, flows(live, "milan/post", "rome/stock") as others:
        changing = asyncio.create_task(live.meshmark("rotate", host.replace(".", "/")))
        if killed:
            await eventually(lambda: changing.done() or has_beside(mesh), "a device beside", lambda: changing)
            await mesh.kill(killed)
        done = await changing
        await eventually(lambda: not has_beside(mesh), "the device beside is gone")
        # A tunnel of which only one end has the next key yet is dead for as long as the other end's applier is away.
        assert not any(withdrawn(live).values()) or "applier" in killed
        await eventually(lambda: not any(withdrawn(live).values()), "all tunnels are in use", lambda: dead(live))
    lost = {port: each.lost(port) for each in (seen, others) for port in each.sent if each.lost(port)}
    assert sum(map(len, lost.values())) <= no_room() - room, lost
    assert_changed(mesh, host, before, done)

    def left() -> dict[tuple[str, str], str]:
        return {(event.host, event.key): event.state for event in live.board.drift[told:]}

    # What an applier that was killed had begun is missing until the next one goes on.
    assert left() == {} or "applier" in killed
    await eventually(lambda: set(left().values()) <= {"resolved"}, "nothing differs", left)
    await live.settled()


async def test_a_dead_tunnel_is_waited_for(live: Live) -> None:
    """It is named, and stays out of the routes; the others' flows lose nothing. When it carries again, the change goes on."""
    mesh = live.mesh
    before = key(mesh, "rome.gateway")
    with blocked(mesh, 1):
        await eventually(lambda: set(map(tuple, withdrawn(live).values())) == {("mt.1",)}, "both ends report it withdrawn")
        async with flows(live, "rome/shop", "milan/bank") as seen:
            changing = asyncio.create_task(live.meshmark("rotate", "rome/gateway"))

            def is_in_turn() -> bool:
                return all(BESIDE in hops(mesh, name) and not {"mt.1"} & hops(mesh, name) for name in GATEWAYS)

            await eventually(is_in_turn, "the device beside has taken the dead tunnel's place")
            await asyncio.sleep(2.0)  # the time of a verdict: nobody brings it back
            assert is_in_turn()
            words = f"milan/gateway and rome/gateway have not shaken hands on mt.1: is UDP port {PORT + 1} let through between them?"

            async def is_told() -> bool:
                said = await live.meshmark("rotate", "rome/gateway", "--status")
                assert said.returncode == 2
                return f"UTC: {words}" in said.stdout

            await eventually(is_told, "it is told what the change waits for")
            table = await live.meshmark("status", "--output", "table")
            assert f"changes its key, and waits: {words}" in " ".join(table.stdout.split())
            late = await live.meshmark("rotate", "rome/gateway", "--abort")
            assert (late.returncode, "packets have the next key already" in late.stderr) == (1, True)
        assert {port: seen.lost(port) for port in seen.sent if seen.lost(port)} == {}
        assert not changing.done()
    done = await changing
    assert_changed(mesh, "rome.gateway", before, done)
    said = await live.meshmark("rotate", "rome/gateway", "--status")
    assert said.returncode == 0
    assert f"its public key is {key(mesh, 'rome.gateway')} since " in said.stdout
