"""The planner and the appliers' cores over real kernels: whatever the order of events, every kernel lists the same in the end."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from services.planner.core import Said
from services.planner.state import HostId
from tests.histories import ANY_KEY, EVENTS, LAST_WORDS, PRIVATE_KEYS, orders
from tests.hosts import LinuxHost
from tests.meshes import Mesh
from tests.real_kernel.report import RESULTS_VARIABLE

pytestmark = [pytest.mark.privileged, pytest.mark.timeout(240)]

ORDERS = 3 if RESULTS_VARIABLE in os.environ else 30
"""An emulated machine needs twenty times as long for each."""
Listing = dict[str, list[str]]


class Machines:
    """A network namespace for each host that a planner ever plans for; each mesh finds all of them empty."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._hosts: dict[HostId, LinuxHost] = {}
        self._empty: dict[HostId, Listing] = {}

    def mesh(self) -> Mesh[LinuxHost]:
        for turn in [host.empty() for host in self._hosts.values()]:
            assert turn.result().outcome == "applied"
        assert {name: host.listed() for name, host in self._hosts.items()} == self._empty
        return Mesh(self._host)

    def close(self) -> None:
        for host in self._hosts.values():
            try:
                host.close()
            finally:
                subprocess.run(["ip", "netns", "del", host.namespace], check=True)

    def _host(self, name: HostId) -> LinuxHost:
        if name not in self._hosts:
            namespace = f"mm-test-{os.getpid()}-{len(self._hosts)}"
            folder = self._folder / namespace
            folder.mkdir()
            subprocess.run(["ip", "netns", "add", namespace], check=True)
            self._hosts[name] = LinuxHost(namespace, folder, PRIVATE_KEYS.get(name, ANY_KEY))
            self._empty[name] = self._hosts[name].listed()
        return self._hosts[name]


def listed(mesh: Mesh[LinuxHost]) -> dict[HostId, Listing]:
    """What each kernel lists; it holds the very plan, in the layers too that no tool lists."""
    for name, host in mesh.hosts.items():
        assert host.differences(mesh.core.published[name]) == []
    return {name: host.listed() for name, host in mesh.hosts.items() if mesh.core.published[name].units}


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    made = Machines(tmp_path_factory.mktemp("machines"))
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def expected(machines: Machines) -> dict[HostId, Listing]:
    """What the kernels list when all that is still true was said in order."""
    mesh = machines.mesh()
    mesh.hear(LAST_WORDS)
    return listed(mesh)


def test_what_is_expected_is_a_whole_mesh(expected: dict[HostId, Listing]) -> None:
    """The comparison is not one of nothing: six hosts with rules, routes, links and tables of ours, and tunnels at both gateways."""
    assert len(expected) == 6
    for found in expected.values():
        assert all(any(word in line for line in found[what]) for what, word in (("rules", "proto 77"), ("routes", "proto 77")))
        assert any(line.startswith("mo.") for line in found["links"])
        assert any(line.startswith("mo.") for line in found["addresses"])
        assert any("meshmark.rome.rome-milan" in table for table in found["nft"])
    assert all(sum(line.startswith("mt.") for line in expected[host]["links"]) == 3 for host in PRIVATE_KEYS)


# Of a failure no simpler form is looked for: with a second for each order that would take minutes.
@settings(max_examples=ORDERS, derandomize=True, phases=[Phase.generate])
@given(order=orders(rests=st.booleans()))
def test_any_order_leads_to_the_same_kernels(machines: Machines, expected: dict[HostId, Listing], order: list[tuple[Said, bool]]) -> None:
    """Messages in any order, some of them twice and old ones late, with hosts that apply what is planned in between."""
    mesh = machines.mesh()
    mesh.hear_resting(order)
    assert listed(mesh) == expected
    turns = mesh.turns
    mesh.hear(EVENTS)
    assert mesh.turns == turns, "all of it once more changes nothing"
