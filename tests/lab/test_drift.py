"""Drift on hosts that carry traffic: what cuts a host off is repaired, and what changes by plan is no drift."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

TABLE = "meshmark.rome.rome-milan"
GATEWAY = "rome.gateway"
CUTS = {
    "a rule that drops all that arrives": ("nft", "insert", "rule", "inet", TABLE, "notrack_in", "counter", "drop"),
    "a chain that drops by policy": ("nft", "add", "chain", "inet", TABLE, "classify", "{ policy drop; }"),
}


@pytest.mark.parametrize("cut", CUTS)
async def test_a_host_that_is_cut_off_from_the_broker_is_repaired(mesh, live, eventually, cut: str):
    """Somebody's change keeps the host from hearing the broker: it is undone all the same, and told once the broker is heard again."""

    def rules() -> list[str]:  # a chain that is made again comes last in the listing
        return sorted(mesh.run(GATEWAY, "nft", "--stateless", "list", "table", "inet", TABLE).splitlines())

    before, told = rules(), len(live.board.drift)
    mesh.run(GATEWAY, *CUTS[cut])
    assert rules() != before
    await eventually(lambda: rules() == before, "the chain is as planned")

    def story() -> list[tuple[str, str]]:
        return [(event.host, event.state) for event in live.board.drift[told:]]

    await eventually(lambda: story() == [("gateway", "raised"), ("gateway", "resolved")], "the story is told", lambda: [str(story())])
    await live.carries()


async def test_a_peering_that_comes_back_at_once_is_no_drift(mesh, live, eventually):
    """Deleted and published again in one breath, over and over: tunnels and rules go and come, and no auditor takes that for drift."""
    peering = mesh.object("Peering/rome/rome-milan")
    told = len(live.board.drift)
    for _ in range(3):
        await live.feed.delete(peering)
        await live.feed.publish(peering)
    await live.publish(peering)
    await live.carries()
    for name in ("rome.gateway", "rome.worker-1", "milan.gateway"):
        mesh.run(name, "nft", "add table ip other; delete table ip other")
    await asyncio.sleep(1.5)  # a debounce, a look and a second one
    assert [(event.host, event.key, event.state) for event in live.board.drift[told:]] == []


async def test_ends_change_places(mesh, live):
    """The ends of a peering in the other order: every tunnel address moves to the other end, no route is lost with it, and all pods
    reach each other again."""
    peering, told = mesh.object("Peering/rome/rome-milan"), len(live.board.drift)
    await live.publish(replace(peering, ends=peering.ends[::-1]))
    await live.carries()
    assert [(event.host, event.key, event.state) for event in live.board.drift[told:]] == []
