"""Traced packets over a real namespace: what is heard, what is said to be lost, and the comment of a rule that dropped one."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from services.kernel.namespace import enter_network
from services.kernel.tracing import Heard, TraceSource, rule_comment
from tests.contract.kernel.machines import LinuxMachine

pytestmark = pytest.mark.privileged
LIMIT_S = 10.0
RULES = """
table inet somebodys {
 chain out {
  type filter hook output priority 0
  udp dport 7001 meta nftrace set 1 udp dport 7001 drop comment "not out of here"
 }
}
"""
INET = 1


def heard(machine: LinuxMachine, packets: int, queue: int = 1000) -> tuple[Heard, str]:
    """What a source inside the machine's namespace hears of packets that are dropped, and the comment of the rule that did it."""

    async def collect() -> tuple[Heard, str]:
        async with asyncio.timeout(LIMIT_S), TraceSource(queue=queue) as source:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
                for _ in range(packets):
                    with pytest.raises(PermissionError):
                        sender.sendto(b"x", ("127.0.0.1", 7001))
            found = await source.heard(LIMIT_S)
            drop = next(event for _, event in found.events if event.verdict == "drop")
            return found, rule_comment(drop.family, drop.table, drop.chain, drop.handle)

    def work() -> tuple[Heard, str]:
        enter_network(Path("/run/netns") / machine.namespace)
        return asyncio.run(collect())

    machine.run(f"ip link set lo up; nft '{RULES}'")
    return machine._thread.submit(work).result(2 * LIMIT_S)


def test_a_dropped_packet_is_heard_of_with_the_rule_that_dropped_it(machine: LinuxMachine) -> None:
    """In the kernel's order, each later than the one before, and nothing is lost."""
    found, comment = heard(machine, 2)
    assert [event.verdict for _, event in found.events] == ["drop", "drop"]
    times = [at_s for at_s, _ in found.events]
    assert times == sorted(set(times))
    assert (found.overruns, found.dropped) == (0, 0)
    assert comment == "not out of here"


def test_what_does_not_fit_the_queue_is_counted(machine: LinuxMachine) -> None:
    """What came first is kept."""
    found, _ = heard(machine, 10, queue=4)
    assert (len(found.events), found.dropped) == (4, 6)


def test_a_rule_that_is_gone_has_no_comment(machine: LinuxMachine) -> None:
    """Nor has one of a table that never was."""
    _, comment = heard(machine, 1)
    machine.run("nft delete table inet somebodys")
    assert comment
    assert machine._thread.submit(rule_comment, INET, "somebodys", "out", 2).result(LIMIT_S) == ""
