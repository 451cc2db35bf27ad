"""Drift on hosts that carry traffic: what cuts a host off is repaired, and what changes by plan is no drift."""

from __future__ import annotations

import asyncio
import json
import os
import signal

import pytest
from msgspec.structs import replace

from schemas.drift import DriftEvent

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

    def story() -> list[tuple[str, str]]:
        return [(event.host, event.state) for event in live.board.drift[told:]]

    await eventually(lambda: story() == [("gateway", "raised"), ("gateway", "resolved")], "the story is told", lambda: [str(story())])
    assert rules() == before, "as planned"
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


def told_of(live, host: str, first: int) -> list[tuple[str, str]]:
    return [(event.key, event.state) for event in live.board.drift[first:] if f"{event.cluster}.{event.host}" == host]


TOUCHES = {
    "tunnel deleted": (GATEWAY, "ip link del mt.1", "link mt.1"),
    "tunnel flaps": (GATEWAY, "ip link set mt.0 down; ip link set mt.0 up", "link mt.0"),
    "address removed": (GATEWAY, "ip addr del {address} dev mt.2", "address mt.2 {address}"),
    "overlay link deleted": ("rome.worker-1", "ip link del mo.gateway", "link mo.gateway"),
    "MTU": ("rome.worker-1", "ip link set mo.gateway mtu 1300", "link mo.gateway"),
}


@pytest.mark.parametrize("touch", TOUCHES)
async def test_a_link_that_a_hand_touches_is_one_event_and_is_as_before(mesh, live, eventually, touch: str):
    """Whatever the kernel drops with it, one difference is told, and the host is soon as before."""
    host, commands, key = TOUCHES[touch]
    before, told = mesh.own_state(host), len(live.board.drift)
    address = mesh.run(GATEWAY, "ip", "-4", "-o", "addr", "show", "dev", "mt.2").split()[3]
    mesh.run(host, "sh", "-ec", commands.format(address=address))
    await eventually(lambda: len(told_of(live, host, told)) > 1, "it is told", lambda: live.board.drift[told:], timeout_s=15.0)
    assert told_of(live, host, told) == [(key.format(address=address), state) for state in ("raised", "resolved")]
    await eventually(lambda: mesh.own_state(host) == before, "all is as before")
    await live.carries()
    assert len(live.board.drift) == told + 2, live.board.drift[told:]


async def test_a_peer_that_a_hand_removes_comes_back_within_seconds(mesh, live, eventually):
    """The kernel says nothing of WireGuard: it is found in the next round, told with the topology behind it, and the tunnel works again."""
    told = len(live.board.drift)
    peer = mesh.run_in_view(GATEWAY, "wg", "show", "mt.1", "peers").strip()
    mesh.run_in_view(GATEWAY, "wg", "set", "mt.1", "peer", peer, "remove")
    await eventually(lambda: len(told_of(live, GATEWAY, told)) > 1, "it is told", lambda: live.board.drift[told:], timeout_s=30.0)
    assert told_of(live, GATEWAY, told) == [(f"peer mt.1 {peer}", state) for state in ("raised", "resolved")]
    assert "Peering/rome/rome-milan" in live.board.drift[told].because
    assert mesh.run_in_view(GATEWAY, "wg", "show", "mt.1", "peers").strip() == peer
    await live.carries()
    assert len(live.board.drift) == told + 2, live.board.drift[told:]


INSISTS = "for _ in $(seq 600); do [ ! -e {stop} ] || exit 0; ip rule del pref 900 2>/dev/null; sleep 0.05; done"


async def test_what_is_contested_when_its_auditor_ends_does_not_stay_so(mesh, live, eventually, tmp_path):
    """Nobody deletes the rule any more, and who knew that it was contested is gone: the next auditor says that it is over."""
    key, told, stop = "rule 900 fwmark 0xff00/0xff00 iif - to -", len(live.board.drift), tmp_path / "stop"
    insists = asyncio.create_task(asyncio.to_thread(mesh.run, GATEWAY, "sh", "-c", INSISTS.format(stop=stop)))

    def story() -> list[tuple[str, str]]:
        return told_of(live, GATEWAY, told)

    try:
        await eventually(lambda: (key, "contested") in story(), "it is contested", story)
        auditor = mesh.pid(f"auditor.{GATEWAY}")
        os.kill(auditor, signal.SIGSTOP)
    finally:
        stop.touch()
        await insists
    assert story()[-1] == (key, "contested")
    assert (await live.meshmark("status", "rome/gateway")).returncode == 2
    await mesh.kill(f"applier.{GATEWAY}")  # the next one puts the rule back
    await eventually(lambda: "900:" in mesh.run(GATEWAY, "ip", "rule"), "the rule is back")
    await mesh.kill(f"auditor.{GATEWAY}")
    await eventually(lambda: ("layer rule", "resolved") in story(), "the next auditor says that it is over", story)
    assert (await live.meshmark("status", "rome/gateway")).returncode == 0
    assert "no drift" in (await live.meshmark("drift", "--output", "table")).stdout


async def test_somebody_who_insists_is_contested_and_status_says_so(mesh, live, eventually, tmp_path):
    """A rule that is deleted twenty times a second is never seen whole: it is contested within seconds, with the time of the next repair.
    It is back, and that is told, once that is due and nobody deletes it any more."""
    key, told, stop = "rule 900 fwmark 0xff00/0xff00 iif - to -", len(live.board.drift), tmp_path / "stop"
    insists = asyncio.create_task(asyncio.to_thread(mesh.run, GATEWAY, "sh", "-c", INSISTS.format(stop=stop)))

    def last() -> DriftEvent | None:
        return next((event for event in reversed(live.board.drift[told:]) if (event.host, event.key) == ("gateway", key)), None)

    def is_contested() -> bool:
        event = last()
        return event is not None and event.state == "contested" and event.next_repair_s > event.at_s

    try:
        await eventually(is_contested, "it is contested", lambda: live.board.drift[told:])
        said = await live.meshmark("status", "rome/gateway", "--output", "json")
        assert said.returncode == 2
        assert [event["key"] for event in json.loads(said.stdout)["contested"]] == [key]
        assert "next repair at" in (await live.meshmark("drift", "--output", "table")).stdout
    finally:
        stop.touch()
        await insists
    await eventually(lambda: last().state == "resolved", "it is back", lambda: live.board.drift[told:], timeout_s=40.0)
    assert {event.key for event in live.board.drift[told:]} == {key}
    assert (await live.meshmark("status", "rome/gateway")).returncode == 0
    await live.carries()
