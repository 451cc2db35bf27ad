"""``meshmark purge`` in a network namespace with a whole plan in it, and with other people's objects."""

from __future__ import annotations

import json
import os
import pty
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from schemas.plan import Entry, HostPlan
from schemas.values import Name
from services.applier.core import Applier
from services.kernel.namespace import enter_network
from services.runtime.neighbour import APPLIER
from tests.contract.kernel.gateway_plan import gateway_plan
from tests.contract.kernel.machines import LinuxMachine

pytestmark = pytest.mark.privileged

COMMAND = [sys.executable, "-m", "services.cli.main", "purge"]
SYSCTLS = "net.ipv4.(ip_forward|fwmark_reflect|fib_multipath.*|conf.*.(forwarding|rp_filter|accept_redirects))"


class Served:
    """A machine that an applier has served, and what was on it before."""

    def __init__(self, machine: LinuxMachine, folder: Path) -> None:
        self.machine = machine
        self.folder = folder
        machine.run("sysctl -qw net.ipv6.conf.default.accept_dad=0")  # what follows from an address is there at once
        machine.add_foreign()
        machine.run("ip route add 10.61.7.0/24 dev foreign0 table 7001; ip rule add pref 900 fwmark 0x1 lookup 300")
        machine.run("ip -6 route add unreachable 2001:db8:1::/48; ip -6 rule add pref 901 lookup 301")
        self.before = self.state()
        plan = {key: Entry(item, ()) for key, item in gateway_plan(machine.tag).items()}
        report = Applier(machine.kernel, time.time).apply(HostPlan(Name("rome"), Name("gateway"), {"u": plan}), 1, 1)
        assert report.outcome == "applied", report
        # Not named: sysctls that had their value before; link-local addresses, which are the kernel's to list and go with their link.
        self.keys = {key for key in plan if not key.startswith("sysctl") and " fe80:" not in key}

    def state(self) -> dict[str, str]:
        """Everything in the namespace, whoever's it is, in words that do not change by themselves."""
        listings = ("nft -s list ruleset", "ip rule", "ip -6 rule", "ip route show table all", "ip -6 route show table all", "ip -d link")
        found = {command: self.machine.run(command) for command in listings}
        found["ip addr"] = self.machine.run("ip -o addr")
        found["sysctl"] = self.machine.run(f"sysctl -a -r '{SYSCTLS}' 2>/dev/null | sort")
        return found

    def purge(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.command(*arguments), capture_output=True, text=True, check=False, timeout=60, stdin=subprocess.DEVNULL)

    def command(self, *arguments: str) -> list[str]:
        return ["ip", "netns", "exec", self.machine.namespace, *COMMAND, "--state-dir", str(self.folder), *arguments]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    machine = LinuxMachine(tmp_path)
    try:
        yield Served(machine, tmp_path)
    finally:
        machine.close()


def test_all_that_is_ours_goes_and_nothing_else(served: Served):
    """Byte for byte, with somebody else's tables, routes, rules, links and sysctls there; and there is nothing to do a second time."""
    done = served.purge("--yes", "--output", "json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert set(told["removed"]) >= served.keys
    assert (told["dryRun"], told["left"], told["error"]) == (False, [], "")
    assert served.state() == served.before
    again = served.purge("--yes", "--output", "table")
    assert (again.returncode, again.stdout) == (0, "there is nothing of meshmark in this network namespace\n")
    assert json.loads(served.purge("--output", "json").stdout)["removed"] == []
    assert served.state() == served.before


def test_a_dry_run_lists_and_changes_nothing(served: Served, tmp_path: Path):
    """Not even a key is made where there is none, as in a folder that is not the applier's."""
    planned = served.state()
    done = served.purge("--dry-run", "--output", "table")
    assert done.returncode == 0, done.stderr
    *lines, total = done.stdout.splitlines()
    keys = {line.removeprefix("would remove ") for line in lines}
    assert served.keys < keys
    assert total == f"would remove {len(keys)} objects"
    served.folder = tmp_path / "other"
    assert served.purge("--dry-run").returncode == 0
    assert not served.folder.exists()
    assert served.state() == planned


def test_it_refuses_while_an_applier_serves(served: Served):
    planned = served.state()
    with ThreadPoolExecutor(1) as thread:

        def serve() -> socket.socket:
            enter_network(Path("/run/netns") / served.machine.namespace)
            there = socket.socket(socket.AF_UNIX)
            there.bind(APPLIER)
            there.listen()
            return there

        with thread.submit(serve).result():
            done = served.purge("--yes")
    assert done.returncode == 1
    assert done.stderr.startswith("error: an applier (or another purge) serves this network namespace")
    assert done.stderr.count("\n") == 1
    assert served.state() == planned


def test_without_somebody_to_ask_it_wants_to_be_told(served: Served):
    planned = served.state()
    done = served.purge()
    assert done.returncode == 1
    assert "give --yes" in done.stderr
    assert served.state() == planned


@pytest.mark.parametrize("answer, goes", [("n", False), ("", False), ("yes", True)])
def test_on_a_terminal_it_asks(served: Served, answer: str, goes: bool):
    planned = served.state()
    code, said = on_a_terminal(served.command(), f"{answer}\n")
    assert "Remove " in said
    assert (code, served.state()) == ((0, served.before) if goes else (1, planned))
    assert ("nothing was removed" in said) != goes


def on_a_terminal(command: list[str], answer: str) -> tuple[int, str]:
    """Run a command on a terminal of its own, and answer when it asks."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        said = b""
        while part := read(ours):
            said += part
            if b"(y/N)" in part:
                os.write(ours, answer.encode())
    os.close(ours)
    return process.returncode, said.decode()


def read(terminal: int) -> bytes:
    """The next output; nothing when the other end is closed, which Linux says with an error."""
    try:
        return os.read(terminal, 1 << 16)
    except OSError:
        return b""


def test_without_the_right_to_it_is_one_line(served: Served):
    planned = served.state()
    unprivileged = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]
    command = served.command("--yes")
    done = subprocess.run([*command[:4], *unprivileged, *command[4:]], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert "CAP_NET_ADMIN is needed" in done.stderr
    assert done.stderr.count("\n") == 1
    assert served.state() == planned
