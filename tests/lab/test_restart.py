"""Processes that are killed: what they leave goes on carrying packets, and who comes after them changes nothing that is right."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import AsyncIterator

import pytest

from schemas import codec, subjects
from schemas.plan import SnapshotHead
from schemas.topology import Pod
from schemas.values import Address, Name
from services.cli.lab import namespaces

pytestmark = pytest.mark.privileged

ACROSS = (("rome/shop", "milan/bank"), ("milan/post", "rome/stock"))
STREAMS = ("STATE", "ALLOCATION", "PLAN", "SNAPSHOT", "STATUS", "REFUSED", "DRIFT", "DEADLETTER")
NETLINK_ADD_MEMBERSHIP, SOL_NETLINK = 1, 270
# Protocol and groups: NFNLGRP_NFTABLES; RTNLGRP_LINK, _IPV4_IFADDR, _IPV4_ROUTE, _IPV4_RULE.
EVENTS = {"nft": (12, (7,)), "route": (0, (1, 5, 7, 8))}
KIOSK = Pod(name=Name("kiosk"), cluster=Name("rome"), node=Name("worker-2"), addresses=(Address("10.200.2.11"),))


async def places(live) -> dict[str, int]:
    """The last sequence of each stream but TOPOLOGY."""
    async with live.broker("reader") as broker:
        return {stream: (await broker.stream_info(stream)).last_sequence for stream in STREAMS}


@contextlib.contextmanager
def kernel_events(host: str):
    """Hear what changes in a host's nftables, links, addresses, routes and rules; the body gets a count of messages since it last asked."""

    def subscribe() -> dict[str, socket.socket]:
        found = {}
        for layer, (protocol, groups) in EVENTS.items():
            found[layer] = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol)
            found[layer].bind((0, 0))  # before the groups are joined: it would leave them again
            found[layer].setblocking(False)
            for group in groups:
                found[layer].setsockopt(SOL_NETLINK, NETLINK_ADD_MEMBERSHIP, group)
        return found

    sockets = namespaces.inside(f"mm.{host}", subscribe)

    def count() -> dict[str, int]:
        found = {}
        for layer, opened in sockets.items():
            found[layer] = 0
            with contextlib.suppress(BlockingIOError):
                while opened.recv(65536):
                    found[layer] += 1
        return found

    try:
        yield count
    finally:
        for opened in sockets.values():
            opened.close()


def wireguard(mesh, host: str) -> dict[str, list[str]]:
    """What WireGuard holds by link and peer: keys, endpoint, allowed prefixes, and the time of the last handshake."""
    lines = mesh.run_in_view(host, "wg", "show", "all", "dump").splitlines()
    return {" ".join(words[:2]): [*words[2:5], *words[5:6]] for words in (line.split() for line in lines)}


def counters(mesh, host: str) -> dict[str, int]:
    """Packets of each counter of our table, by chain and place; to be looked at while nothing else touches the table."""
    listed = json.loads(mesh.run(host, "nft", "-j", "list", "table", "inet", "meshmark.rome.rome-milan"))["nftables"]
    found = {}
    for item in listed:
        for statement in item.get("rule", {}).get("expr", ()):
            if "counter" in statement:
                found[f"{item['rule']['chain']} {item['rule']['handle']}"] = statement["counter"]["packets"]
    return found


async def test_a_planner_without_news_publishes_nothing(mesh, live, eventually):
    """A killed planner's successor reads everything and has nothing to say: no stream of its own grows, no host is planned anew."""
    before, told = await places(live), len(live.board.refusals)
    async with live.undisturbed(*ACROSS):
        await mesh.kill("planner")
        # It has started in earnest when it has taken what is said now; that one message is all that is new.
        async with live.broker() as broker:
            await broker.publish(subjects.topology("node", "rome", "nobody"), b"null")
        await live.refusal("Node/rome/nobody", told)
    after = await places(live)
    # Hosts may say meanwhile how many of their peers shake hands: that is no news of the planner's.
    assert after == {**before, "REFUSED": before["REFUSED"] + 1, "STATUS": after["STATUS"]}


@pytest.mark.parametrize("host", ["rome.gateway", "rome.worker-1"])
async def test_an_applier_that_comes_back_touches_nothing(mesh, live, eventually, host: str):
    """A killed applier's successor finds the kernel as planned: no change of nftables, links, addresses, routes or rules is heard;
    counters, handles and WireGuard's sessions are kept, and flows lose nothing."""
    cluster, _, name = host.partition(".")
    before = (mesh.own_state(host), counters(mesh, host), wireguard(mesh, host))
    reports = await places(live)
    async with live.undisturbed(*ACROSS):
        with kernel_events(host) as count:
            await mesh.kill(f"applier.{host}")
            async with live.broker() as broker:

                async def answers() -> bool:
                    return await broker.request(subjects.command(cluster, name, "diff"), b"", 5.0) == b"[]"

                await eventually(answers, "the new applier answers")
                await eventually(lambda: _status_grew(live, reports), "the new applier has reported")
            assert count() == {"nft": 0, "route": 0}
            mesh.run(host, "nft", "add table ip other; delete table ip other")
            mesh.run(host, "ip", "rule", "add", "priority", "31000", "lookup", "main")
            mesh.run(host, "ip", "rule", "delete", "priority", "31000")
            assert all(count().values()), "changes are heard"
    after = (mesh.own_state(host), counters(mesh, host), wireguard(mesh, host))
    assert after[0] == before[0]
    assert after[1].keys() == before[1].keys()
    assert all(after[1][rule] >= packets for rule, packets in before[1].items())
    assert after[2].keys() == before[2].keys()
    assert [entry[:3] for entry in after[2].values()] == [entry[:3] for entry in before[2].values()]
    assert len(after[2]) == (6 if host == "rome.gateway" else 0), "three devices and a peer of each"


async def _status_grew(live, before: dict[str, int]) -> bool:
    return (await places(live))["STATUS"] > before["STATUS"]


async def test_auditors_that_come_back_keep_silent(mesh, live, eventually):
    """Auditors that start on hosts where all is well say nothing, and one of them still sees what goes wrong after that."""
    before = await places(live)
    pids = [mesh.pid(f"auditor.{host}") for host in mesh.hosts]
    for host in mesh.hosts:
        await mesh.kill(f"auditor.{host}")
    assert not {mesh.pid(f"auditor.{host}") for host in mesh.hosts} & set(pids)
    for host in mesh.hosts:
        await eventually(lambda host=host: audits(mesh, host) > 0, f"the new auditor of {host} has looked")
    assert (await places(live))["DRIFT"] == before["DRIFT"]
    first = len(live.board.drift)
    state = mesh.own_state("rome.gateway")
    mesh.run("rome.gateway", "ip", "rule", "delete", "priority", "901")
    await eventually(lambda: [event.state for event in live.board.drift[first:]] == ["raised", "resolved"], "drift is told and repaired")
    assert mesh.own_state("rome.gateway") == state


def audits(mesh, host: str) -> int:
    """How often a host's auditor has compared kernel and plan, by its own metrics."""
    text = mesh.run(host, "python3", "-c", "import urllib.request as r; print(r.urlopen('http://127.0.0.1:9502/metrics').read().decode())")
    counts = [line.split()[-1] for line in text.splitlines() if "audit_seconds_count" in line and not line.startswith("#")]
    return int(float(counts[0]))


async def test_the_broker_may_be_away(mesh, live, eventually):
    """While nats-server is killed and comes back, flows lose nothing; what is published afterwards comes into force."""
    before = {host: mesh.own_state(host) for host in mesh.hosts}
    async with live.undisturbed(*ACROSS):
        await mesh.kill("nats-server")

        async def said() -> bool:
            await live.publish(KIOSK, settle=False)  # raises while the broker is away
            return True

        await eventually(said, "the broker takes messages again")
        await live.publish(KIOSK)
        checks = await live.carries()
        assert sum("rome/kiosk" in check.name for check in checks) == 16
        await live.delete(KIOSK)
    assert {host: mesh.own_state(host) for host in mesh.hosts} == before


@contextlib.asynccontextmanager
async def same_everywhere(mesh, live) -> AsyncIterator[None]:
    """Every host's kernel is the same before and after, and flows lose nothing in between."""
    before = {host: mesh.own_state(host) for host in mesh.hosts}
    async with live.undisturbed(*ACROSS):
        yield
    assert {host: mesh.own_state(host) for host in mesh.hosts} == before


async def test_repeated_and_late_copies_change_nothing(mesh, live):
    """The whole example published twice more, and once in reverse order: no plan, no kernel and no flow changes."""
    before = await places(live)
    async with same_everywhere(mesh, live):
        for items in (mesh.topology, mesh.topology, list(reversed(mesh.topology))):
            await live.publish(*items)
        await taken(live)
    after = await places(live)
    assert {stream: after[stream] for stream in ("ALLOCATION", "PLAN", "SNAPSHOT", "REFUSED")} == {
        stream: before[stream] for stream in ("ALLOCATION", "PLAN", "SNAPSHOT", "REFUSED")
    }
    assert len(await live.carries()) == 24


async def taken(live) -> None:
    """Until the planner has taken all that was said."""
    peering = live.mesh.object("Peering/rome/rome-milan")
    async with live.broker() as broker, live.broker("reader") as reader:
        spoken = (peering.kind, peering.cluster, peering.name)
        sequence = await broker.publish(subjects.topology(*spoken), codec.encode(peering))

        async def admitted() -> bool:
            last = await reader.last("STATE", subjects.state(*spoken))
            return last is not None and last.headers["Meshmark-Sequence"] == str(sequence)

        await live.eventually(admitted, "all that was said is taken")


async def test_generations_only_grow(mesh, live):
    """After a planner was killed its successor writes with a higher epoch, and the next plan has the next generation."""

    async def head() -> SnapshotHead:
        async with live.broker("reader") as reader:
            last = await reader.last("SNAPSHOT", subjects.snapshot("rome", "gateway", "head"))
            assert last is not None
            return codec.decode(last.data, SnapshotHead)

    await live.publish(Pod(name=Name("stall"), cluster=Name("rome"), node=Name("worker-1"), addresses=(Address("10.200.99.1"),)))
    first = await head()
    await mesh.kill("planner")
    await live.publish(Pod(name=Name("stand"), cluster=Name("rome"), node=Name("worker-1"), addresses=(Address("10.200.99.2"),)))
    second = await head()
    assert second.epoch > first.epoch
    assert second.generation == first.generation + 1
    assert len(await live.carries()) == 24 + 4 * (4 + 5)
