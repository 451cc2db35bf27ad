"""Probes between two network namespaces: answered by the far kernel, through the link that they name, and by nobody else."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas.values import Address
from services.applier.health import Tunnel
from services.applier.probes import Prober
from tests.contract.kernel.machines import InThread, LinuxMachine

pytestmark = pytest.mark.privileged
LIMIT_S = 10.0
ENDS = (
    Tunnel("mo.p1", Address("169.254.18.1"), Address("169.254.18.2"), ()),
    Tunnel("mo.p2", Address("fd00:18::5"), Address("fd00:18::6"), ()),
)


@pytest.fixture
def near(tmp_path: Path) -> Iterator[LinuxMachine]:
    made = LinuxMachine(tmp_path / "near")
    yield made
    made.close()


@pytest.fixture
def far(near: LinuxMachine, tmp_path: Path) -> Iterator[LinuxMachine]:
    """Another host, with a cable to it for each tunnel."""
    made = LinuxMachine(tmp_path / "far")
    for tunnel in ENDS:
        near.run(f"ip link add {tunnel.link} type veth peer name {tunnel.link} netns {made.namespace}")
        for host, address in ((near, tunnel.own), (made, tunnel.far)):
            length = "126 nodad" if ":" in address else "30"
            host.run(f"ip addr add {address}/{length} dev {tunnel.link}; ip link set {tunnel.link} up")
    yield made
    made.close()


@contextlib.contextmanager
def prober(host: LinuxMachine) -> Iterator[InThread]:
    made = InThread(host._thread, Prober())
    try:
        yield made
    finally:
        made.close()


def answered(probes: InThread, wanted: set[str]) -> set[str]:
    """Links that answered one round, once those of `wanted` have or time is over."""
    found: set[str] = set()
    end = time.monotonic() + LIMIT_S
    while not wanted <= found and time.monotonic() < end:
        found |= probes.answered(ENDS)
        time.sleep(0.01)
    return found


def test_the_far_kernel_answers_in_both_families(near: LinuxMachine, far: LinuxMachine) -> None:
    """Every tunnel that is up answers each round; one that is cut does not, and the others do; it answers again once it is mended."""
    near.run("sysctl -qw 'net.ipv4.ping_group_range=0 2147483647'")
    everyone = {tunnel.link for tunnel in ENDS}
    with prober(near) as probes:
        for _ in range(3):
            assert probes.send(ENDS)
            assert answered(probes, everyone) == everyone
        far.run("ip link set mo.p1 down")
        probes.send(ENDS)
        assert answered(probes, {"mo.p2"}) == {"mo.p2"}
        near.run("ip link del mo.p2")
        far.run("ip link set mo.p1 up")
        probes.send(ENDS)
        assert answered(probes, {"mo.p1"}) == {"mo.p1"}


def test_an_answer_that_nobody_asked_for_does_not_count(near: LinuxMachine, far: LinuxMachine) -> None:
    """One to another prober of the same host is not this one's, and one to a round long ago comes too late."""
    near.run("sysctl -qw 'net.ipv4.ping_group_range=0 2147483647'")
    with prober(near) as probes, prober(near) as others:
        probes.send(ENDS)
        others.send(ENDS)
        assert answered(others, {"mo.p1"}) >= {"mo.p1"}  # and so is the answer to the one before
        for _ in range(10):
            probes.send(())
        assert probes.answered(ENDS) == set()
        others.send(())
        assert probes.answered(ENDS) == set()


def test_without_the_right_to_probe_it_is_said(near: LinuxMachine, far: LinuxMachine) -> None:
    """A group range that leaves this process out makes no error, but a prober that says so."""
    near.run("sysctl -qw net.ipv4.ping_group_range='1 0'")
    with prober(near) as probes:
        assert not probes.send(ENDS)
        assert probes.answered(ENDS) == set()
