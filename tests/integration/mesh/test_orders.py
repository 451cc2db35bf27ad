"""The planner and the appliers' cores over real kernels: whatever the order of events, every kernel lists the same in the end."""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from services.planner.core import Said
from services.planner.state import HostId
from tests.emulated import examples
from tests.histories import ANY_KEY, EVENTS, LAST_WORDS, PRIVATE_KEYS, ROME_WORKERS, orders
from tests.hosts import LinuxHost
from tests.meshes import Mesh
from tests.topologies import MILAN_GATEWAY, ROME_GATEWAY

pytestmark = [pytest.mark.privileged, pytest.mark.timeout(480)]

Lines = Counter[str]
"""What some kernels list, each line with its host; counted, for a rule may be there twice."""


class Machines:
    """A network namespace for each host that a planner ever plans for; each mesh finds all of them empty."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._hosts: dict[HostId, LinuxHost] = {}
        self._empty: Lines = Counter()
        self.expected: Lines = Counter()
        """What the kernels list when all that is still true was said in order."""

    def mesh(self) -> Mesh[LinuxHost]:
        for host in self._hosts.values():
            host.empty()
        assert_same(lines(self._hosts), self._empty)
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
            self._empty += lines({name: self._hosts[name]})
        return self._hosts[name]


def lines(hosts: Mapping[HostId, LinuxHost]) -> Lines:
    return Counter(f"{name}: {line}" for name, host in hosts.items() for found in host.listed().values() for line in found)


def assert_same(found: Lines, expected: Lines) -> None:
    assert (found - expected, expected - found) == (Counter(), Counter()), "listed and not expected, expected and not listed"


def listed(mesh: Mesh[LinuxHost]) -> Lines:
    """What the kernels list; each holds the very plan, in the layers too that no tool lists."""
    for name, host in mesh.hosts.items():
        assert host.differences(mesh.core.published[name]) == []
    return lines({name: host for name, host in mesh.hosts.items() if mesh.core.published[name].units})


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    made = Machines(tmp_path_factory.mktemp("machines"))
    try:
        mesh = made.mesh()
        mesh.hear(LAST_WORDS)
        made.expected = listed(mesh)
        yield made
    finally:
        made.close()


@pytest.mark.any_kernel
def test_what_is_expected_is_a_whole_mesh(machines: Machines) -> None:
    """The comparison is not one of nothing: six hosts with rules, routes, links and tables of ours, tunnels at both gateways, devices that
    encrypt on the nodes of rome, and what is published on its gateway."""

    def hosts(*words: str) -> Lines:
        """How many lines with these words each host has."""
        return Counter(line.partition(":")[0] for line in machines.expected if all(word in line for word in words))

    for words in (
        (" lookup ", "proto 77"),
        (" dev mo.", "proto 77"),
        ("mo.", "link/ether"),
        ("mo.", "inet "),
        ("meshmark.rome.rome-milan",),
    ):
        assert len(hosts(*words)) == 6, words
    assert hosts("mt.", "link/none") == {str(host): 3 for host in (ROME_GATEWAY, MILAN_GATEWAY)}
    assert hosts("me.0", "link/none") == {str(host): 1 for host in ROME_WORKERS}
    for words in (("tcp dport 22 drop",), ("10.9.0.0/16", "proto 77", "table")):
        assert hosts(*words).keys() == {str(ROME_GATEWAY)}, words


# Of a failure no simpler form is looked for: with a second for each order that would take minutes.
@settings(max_examples=examples(16), derandomize=True, phases=[Phase.generate])
@given(order=orders(rests=st.booleans()))
@pytest.mark.any_kernel
def test_any_order_leads_to_the_same_kernels(machines: Machines, order: list[tuple[Said, bool]]) -> None:
    """Messages in any order, some of them twice and old ones late, with hosts that apply what is planned in between."""
    mesh = machines.mesh()
    mesh.hear_resting(order)
    assert_same(listed(mesh), machines.expected)
    turns = mesh.turns
    mesh.hear(EVENTS)
    assert mesh.turns == turns, "all of it once more changes nothing"
