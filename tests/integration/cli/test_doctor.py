"""``meshmark doctor`` in a network namespace where others have planted what collides, and in one that an applier serves."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas.plan import Entry, HostPlan
from schemas.values import Name
from services.applier.core import Applier
from tests.contract.kernel.gateway_plan import gateway_plan
from tests.contract.kernel.machines import LinuxMachine

pytestmark = pytest.mark.privileged

COMMAND = [sys.executable, "-m", "services.cli.main", "doctor"]
LISTINGS = ("nft -s list ruleset", "ip rule", "ip -6 rule", "ip route show table all", "ip link", "ip nexthop", "cat /proc/net/udp")
MARKS = """
table ip other {
    map byport { type inet_service : mark; elements = { 80 : 0x1 } }
    chain KUBE-MARK-MASQ { meta mark set meta mark or 0x4000; }
    chain FORWARD {
        type filter hook forward priority 0; policy drop;
        meta mark and 0x4000 == 0x4000 accept
        meta mark 0xca6c accept
        meta mark and 0xff0000 == 0x80000 accept
    }
    chain whole { meta mark set 0x7; }
    chain restore { meta mark set ct mark; }
    chain mapped { meta mark set tcp dport map @byport; }
    chain masked { meta mark set meta mark and 0xffffff00 xor 0x12; }
    chain unrelated { ip daddr 10.0.0.1 meta cpu 0 counter; ct mark set 0xff00; }
}
table inet meshmark.rome {
    chain own { meta mark set meta mark and 0xffff00ff or 0xff00; }
}
"""


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[LinuxMachine]:
    made = LinuxMachine(tmp_path)
    made.run("sysctl -qw net.ipv6.conf.default.accept_dad=0")  # what follows from an address is there at once
    try:
        yield made
    finally:
        made.close()


def doctor(machine: LinuxMachine, *arguments: str, prefix: tuple[str, ...] = ()) -> tuple[int, dict[str, dict[str, str]]]:
    """The exit code and the checks by name. Nothing in the namespace may have changed."""
    before = [machine.run(listing) for listing in LISTINGS]
    command = ["ip", "netns", "exec", machine.namespace, *prefix, *COMMAND, "--output", "json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert [machine.run(listing) for listing in LISTINGS] == before
    assert done.stderr == ""
    told = json.loads(done.stdout)
    assert told["ok"] == (done.returncode == 0) == all(check["verdict"] != "problem" for check in told["checks"])
    return done.returncode, {check["name"]: check for check in told["checks"]}


def test_a_fresh_namespace_is_fine(machine: LinuxMachine):
    code, found = doctor(machine)
    assert code == 0, found
    assert {name for name, check in found.items() if check["verdict"] != "ok"} <= {"rp_filter", "geneve"}


def test_what_a_node_that_encrypts_would_meet_is_found(machine: LinuxMachine):
    """Its tables, also the last one of many, its priorities, its field of marks, and both ports of WireGuard; a gateway does not look."""
    machine.run(
        "ip link set lo up; ip route add 10.99.0.0/24 dev lo table 10; ip -6 route add fd99::/64 dev lo table 7354; "
        "ip route add 10.99.1.0/24 dev lo table 77000123; ip rule add fwmark 0x4d2/0xfff lookup 300 priority 1000"
    )
    machine.take_port(51872)
    code, found = doctor(machine, "--role", "node", "--encryption", "wireguard")
    assert code == 1
    for table in (10, 7354, 77000123):
        assert f"in table {table}" in found["route tables"]["detail"]
    assert "IPv4 rule 1000" in found["rule priorities"]["detail"]
    assert "policy rule 1000 matches 0x4d2" in found["marks"]["detail"]
    assert "port 51872 is taken" in found["UDP ports"]["detail"]
    assert {found[name]["verdict"] for name in ("route tables", "marks", "UDP ports")} == {"problem"}
    # What encryption alone needs is a warning without it, and a table of published routes is a problem on any host.
    _, without = doctor(machine, "--role", "node")
    assert [without[name]["verdict"] for name in ("route tables", "marks", "UDP ports")] == ["problem", "warning", "warning"]
    assert doctor(machine, "--role", "node", "--encryption", "wireguard", "--marks", "0xff0000")[1]["marks"]["verdict"] == "ok"
    assert doctor(machine)[1]["UDP ports"]["verdict"] == "ok"


def test_what_others_planted_is_found(machine: LinuxMachine):
    """Marks in rules of every form, routes, rules, links, ports, rp_filter, a chain that drops; our own table is not taken for theirs."""
    (machine._folder / "marks.nft").write_text(MARKS)
    machine.run(f"nft -f {machine._folder}/marks.nft")
    machine.run(
        "ip link add mt.0 type bridge; ip link set mt.0 up; ip addr add 192.0.2.1/24 dev mt.0; ip route add default via 192.0.2.2;"
        "sysctl -qw net.ipv4.conf.mt.0.rp_filter=1 || echo 1 > /proc/sys/net/ipv4/conf/mt.0/rp_filter;"
        "ip route add blackhole 10.250.0.0/16 table 7001; ip rule add pref 900 fwmark 0x1/0x1 lookup 300;"
        "ip rule add pref 32764 not fwmark 0xca6c lookup 51820; ip -6 rule add pref 500 lookup 7002;"
        "ip link add flannel.1 type vxlan id 1 dstport 4789 local 192.0.2.1; ip link set flannel.1 up"
    )
    listener = "import socket,sys; s=socket.socket(type=socket.SOCK_DGRAM); s.bind(('',51840)); print(flush=True); sys.stdin.read()"
    command = ["ip", "netns", "exec", machine.namespace, sys.executable, "-c", listener]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as taken:
        assert taken.stdout is not None
        taken.stdout.readline()
        code, found = doctor(machine)
        taken.communicate()
    assert code == 1
    verdicts = {
        name: found[name]["verdict"] for name in ("marks", "route tables", "rule priorities", "link names", "rp_filter", "forwarding")
    }
    assert verdicts == {
        "marks": "problem",
        "route tables": "problem",
        "rule priorities": "warning",
        "link names": "problem",
        "rp_filter": "warning",
        "forwarding": "warning",
    }
    assert found["marks"]["detail"] == (
        "bits of 0xff00 are used by others: policy rule 32764 matches 0xca6c (as wg-quick); "
        "ip other KUBE-MARK-MASQ sets 0x4000 (as kube-proxy); ip other FORWARD matches 0x4000 (as kube-proxy); "
        "ip other FORWARD matches 0xca6c (as wg-quick); and 3 more"
    )
    assert found["route tables"]["detail"] == "1 IPv4 routes of others in table 7001"
    assert found["rule priorities"]["detail"] == "used by others: IPv4 rule 900 fwmark 0x1/0x1 lookup 300"
    assert "mt.0 (bridge)" in found["link names"]["detail"]
    assert found["rp_filter"]["detail"] == "strict on the uplink mt.0"
    assert found["forwarding"]["detail"] == "dropped unless a rule accepts it, by ip other FORWARD"
    ports = found["UDP ports"]
    assert ports["verdict"] == "problem"
    assert "port 4789 is shared with flannel.1" in ports["detail"]
    assert "port 51840 is taken by python" in ports["detail"]
    assert all(found[name]["advice"] for name in (*verdicts, "UDP ports"))
    machine.run("ip link del mt.0; ip link del flannel.1")


def test_marks_are_no_problem_of_a_node_that_does_not_encrypt(machine: LinuxMachine):
    """And those of a gateway none at all, nor are its tables."""
    (machine._folder / "marks.nft").write_text(MARKS)
    machine.run(f"nft -f {machine._folder}/marks.nft; ip route add blackhole 10.250.0.0/16 table 7001")
    code, found = doctor(machine, "--role", "node")
    assert code == 0
    assert (found["marks"]["verdict"], found["route tables"]["verdict"]) == ("warning", "ok")


def test_what_an_applier_made_is_no_collision(machine: LinuxMachine):
    """Its tables, routes, rules, tunnels and their ports."""
    plan = {key: Entry(item, ()) for key, item in gateway_plan(machine.tag).items()}
    assert Applier(machine.kernel, time.time).apply(HostPlan(Name("rome"), Name("gateway"), {"u": plan}), 1, 1).outcome == "applied"
    code, found = doctor(machine, "--port", "51840", "--port", "51841")
    assert code == 0, found
    names = ("marks", "route tables", "rule priorities", "link names", "UDP ports", "forwarding")
    assert {name: found[name]["verdict"] for name in names} == dict.fromkeys(names, "ok"), found


def test_without_rights_it_says_what_it_does_not_know(machine: LinuxMachine):
    """Nothing is called fine, or a problem, that was not looked at."""
    code, found = doctor(machine, prefix=("setpriv", "--bounding-set=-all", "--inh-caps=-all"))
    unknown = {name for name, check in found.items() if check["verdict"] == "unknown"}
    assert {"rights", "nftables", "connection tracking", "vxlan", "marks", "forwarding", "nftrace"} <= unknown
    assert {check["name"] for check in found.values() if check["verdict"] == "problem"} <= {"/proc/sys/net"}
    assert code == int(found["/proc/sys/net"]["verdict"] == "problem")


def test_on_a_terminal_it_is_a_table(machine: LinuxMachine):
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
    command = ["ip", "netns", "exec", machine.namespace, *COMMAND]
    done = subprocess.run(command, stdout=theirs, check=False, env=environment, timeout=60)
    os.close(theirs)
    said = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert done.returncode == 0
    header, *rows = said.splitlines()
    assert header.split() == ["CHECK", "VERDICT", "DETAIL", "WHAT", "TO", "DO"]
    assert any(row.startswith("vxlan") and " ok " in row for row in rows)
