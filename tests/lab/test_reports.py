"""What users of other meshes have hit, tried on hosts that carry traffic; ``docs/reports.md`` says which test is for what."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.cli.lab import namespaces
from services.cli.lab.layout import PREFIX
from services.kernel.conntrack import Conntrack
from services.kernel.port import Flow
from services.kernel.pyroute import Library

pytestmark = pytest.mark.privileged

UDP = 17
OUTER_PORTS = {4789, *range(51840, 51904)}
WIPE = """
nft flush ruleset
for link in $(ip -o link | cut -d: -f2 | cut -d@ -f1 | grep -E 'm[ot]\\.'); do ip link delete $link; done
for family in -4 -6; do ip $family rule | grep 'proto 77' | cut -d: -f1 | while read at; do ip $family rule delete pref $at; done
ip $family route flush proto 77 table all; done
sysctl -qw net.ipv4.ip_forward=0
"""
CHURN = """
import sys, time
import nftables
nft = nftables.Nftables()
nft.cmd("add table ip other; add chain ip other c")
end, count = time.monotonic() + float(sys.argv[1]), 0
while time.monotonic() < end:
    nft.cmd("add rule ip other c ip saddr 192.0.2.1 drop")
    nft.cmd("flush chain ip other c")
    count += 2
nft.cmd("delete table ip other")
print(count)
"""
CHURN_S, SHARE_S = 12.0, 2.0
CHURN_LEAST_S = 100
"""Transactions a second that are churn on a busy machine."""
SHARE_MAX = 0.35
"""Of one processor, for a service while others change their tables all the time."""


@pytest.mark.parametrize("services", ["running", "killed"])
@pytest.mark.parametrize("host", ["rome.gateway", "rome.worker-1"])
async def test_a_host_that_lost_everything_is_whole_when_packets_pass(mesh, live, eventually, host: str, services: str):
    """As after a reboot: no table, link, rule, route or sysctl is left. What is missing is told or found, all of it comes back, and pods
    reach each other; a host is not called whole before."""
    cluster, _, name = host.partition(".")
    before, told = sorted(mesh.own_state(host)), len(live.board.drift)
    mesh.run(host, "sh", "-c", WIPE)
    if services == "killed":
        for service in ("applier", "auditor"):
            await mesh.kill(f"{service}.{host}")
    await eventually(lambda: sorted(mesh.own_state(host)) == before, "all is there again")
    # Sysctls have no events: they are looked at in rounds.
    await eventually(lambda: mesh.run(host, "sysctl", "-n", "net.ipv4.ip_forward").strip() == "1", "it forwards again")
    if services == "running":

        def events() -> set[tuple[str, str]]:
            drift = live.board.drift[told:]
            return {(event.layer, event.state) for event in drift if (event.cluster, event.host) == (cluster, name)}

        await eventually(lambda: events() & {("nft", "raised"), ("link", "raised")}, "it is told")
    await live.settled()
    await live.carries()


def flows(host: str) -> list[Flow]:
    """The connections that a host of the lab tracks."""

    def read() -> list[Flow]:
        with contextlib.closing(Library()) as library:
            return list(Conntrack(library).flows())

    return namespaces.inside(f"{PREFIX}{host}", read)


async def test_outer_packets_are_no_connections(mesh, live):
    """While pods speak, no host tracks a packet of the overlay or of a tunnel, and gateways track and translate what is inside."""
    walk = live.walk("rome/shop", "milan/bank")
    for host in mesh.hosts:
        mesh.run(host, "conntrack", "--flush")  # what was tracked while a host had no rules
    async with live.undisturbed(("rome/shop", "milan/bank"), ("milan/post", "rome/stock")):
        for host in mesh.hosts:
            outer = [flow for flow in flows(host) if flow.protocol == UDP and {flow.source_port, flow.destination_port} & OUTER_PORTS]
            assert outer == [], host
        inner = [flow for flow in flows("rome.gateway") if flow.destination == walk.dial]
        assert inner
        assert {flow.reply_source for flow in inner} == set(live.pod("milan/bank").addresses)


def processor_s(pid: int) -> float:
    """The processor time that a process has used, all its threads together."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def churning(host: str) -> Iterator[subprocess.Popen[str]]:
    """Somebody who changes a table of their own, as fast as it goes, for a while."""
    command = ["ip", "netns", "exec", f"{PREFIX}{host}", sys.executable, "-c", CHURN, str(CHURN_S)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.wait(CHURN_S + 30)


async def test_others_who_change_their_tables_all_the_time_cost_little(mesh, live, eventually):
    """Hundreds of other people's transactions a second: applier and auditor stay at a small share of a processor, and a rule of ours
    that is taken away meanwhile comes back."""
    host = "rome.gateway"
    services = {name: mesh.pid(f"{name}.{host}") for name in ("applier", "auditor")}
    before = mesh.own_state(host)
    with churning(host) as process:
        used, since_s = {name: processor_s(pid) for name, pid in services.items()}, time.monotonic()
        await asyncio.sleep(SHARE_S)
        shares = {name: (processor_s(pid) - used[name]) / (time.monotonic() - since_s) for name, pid in services.items()}
        mesh.run(host, "ip", "rule", "delete", "pref", "900")
        await eventually(lambda: mesh.own_state(host) == before, "the rule is there again")
        assert process.poll() is None, "it was repaired while others went on"
        assert process.stdout is not None
        counted = await asyncio.to_thread(process.stdout.read)
    assert int(re.findall(r"\d+", counted)[0]) > CHURN_LEAST_S * CHURN_S
    assert max(shares.values()) < SHARE_MAX, shares
