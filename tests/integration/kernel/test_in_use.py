"""What others use on a host, seen on the real kernel beside a whole gateway plan of ours, of which nothing is ever told as theirs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from schemas.host_objects import PlanObject
from schemas.in_use import InUse, Use
from services.kernel.survey import netfilter
from services.kernel.survey.in_use import Look
from tests.contract.kernel.machines import LinuxMachine, converge

pytestmark = [pytest.mark.privileged, pytest.mark.any_kernel]

LISTENER = "import socket,sys; s=socket.socket(type=socket.SOCK_DGRAM); s.bind(('',5300)); print(flush=True); sys.stdin.read()"


@pytest.fixture
def look(machine: LinuxMachine) -> Callable[[], InUse]:
    """One that looks into the machine's namespace, again and again."""
    looking = Look()
    return lambda: machine._thread.submit(looking).result(20)


def test_nothing_of_our_own_is_others(machine: LinuxMachine, plan: dict[str, PlanObject], look: Callable[[], InUse]) -> None:
    """A gateway's whole plan, applied, changed nothing in what others use: there is none; nor does what is left when it goes."""
    assert look() == InUse()
    converge(machine.kernel, plan)
    assert look() == InUse()
    converge(machine.kernel, {})
    assert look() == InUse()


def test_what_others_use_is_seen_and_no_more_when_it_is_gone(
    machine: LinuxMachine, plan: dict[str, PlanObject], look: Callable[[], InUse]
) -> None:
    """Rules and routes of either family, marks of rules and of nftables, a device's port, a socket's port once it lasts."""
    converge(machine.kernel, plan)
    machine.run(
        "nft 'add table ip other; add chain ip other c { type filter hook input priority 0; };"
        "add rule ip other c meta mark set meta mark or 0x4000';"
        "ip rule add pref 500 fwmark 0x1/0xf lookup 300; ip -6 rule add pref 501 lookup main;"
        "ip route add blackhole 10.250.0.0/16 table 7001; ip -6 route add blackhole fd99::/64 table 7001;"
        "ip route add blackhole 10.251.0.0/16;"
        "ip link add flannel.1 type vxlan id 9 local 127.0.0.1 dstport 8472; ip link set flannel.1 up"
    )
    rule = "IPv4 rule 500 fwmark 0x1/0xf lookup 300"
    expected = InUse(
        marks=(Use(0xF, rule), Use(0x4000, "ip other c sets 0x4000")),
        tables=(Use(300, rule, 4), Use(7001, "IPv4 routes", 4), Use(7001, "IPv6 routes", 6)),
        priorities=(Use(500, rule, 4), Use(501, "IPv6 rule 501 lookup 254", 6)),
        ports=(Use(8472, "vxlan device flannel.1"),),
    )
    assert look() == expected
    command = ["ip", "netns", "exec", machine.namespace, sys.executable, "-c", LISTENER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as taken:
        assert taken.stdout is not None
        taken.stdout.readline()
        assert look().ports == expected.ports
        assert look().ports == (Use(5300, "a UDP socket"), *expected.ports)
        taken.communicate()
    assert look() == expected
    machine.run(
        "nft delete table ip other; ip rule del pref 500; ip -6 rule del pref 501; ip link del flannel.1;"
        "ip route del blackhole 10.250.0.0/16 table 7001; ip -6 route del blackhole fd99::/64 table 7001"
    )
    assert look() == InUse()


def test_rules_of_nftables_are_read_again_only_after_a_change(
    machine: LinuxMachine, look: Callable[[], InUse], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look costs one small question as long as nobody changed a table, however long the tables are."""
    reads = []
    read = netfilter.read
    monkeypatch.setattr(netfilter, "read", lambda: reads.append(1) or read())
    look()
    look()
    assert len(reads) == 1
    machine.run("nft 'add table ip other; add chain ip other c; add rule ip other c meta mark set 7'")
    assert look().marks == (Use(0xFFFFFFFF, "ip other c sets 0x7"),)
    assert len(reads) == 2
