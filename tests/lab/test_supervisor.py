"""Labs without services, in real namespaces: the wiring carries, and nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas.topology import Cluster, Peering, Pod, Topology
from services.cli.files import load
from services.cli.lab import namespaces, probe, teardown
from services.cli.lab.detach import Progress, in_background
from services.cli.lab.layout import layout
from services.cli.lab.state import CURRENT, Folder
from services.cli.lab.supervisor import supervise
from services.cli.lab.wiring import Wiring
from services.runtime.errors import Conflict, Permanent

pytestmark = pytest.mark.privileged
EXAMPLE = load([Path("examples/two-clusters.yaml")])


class Quiet:
    def say(self, text: str) -> None:
        pass

    def ready(self) -> None:
        pass


@pytest.fixture(autouse=True)
def _alone() -> None:
    if namespaces.existing():
        pytest.skip("a lab is up on this machine")


def start(folder: Folder) -> int:
    def run(progress: Progress) -> None:
        supervise(folder, EXAMPLE, progress, log=folder.log("lab"), services=False)

    return in_background(run, Quiet())


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[tuple[Folder, int]]:
    folder = Folder(tmp_path / "lab")
    pid = start(folder)
    yield folder, pid
    teardown.down(folder)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def nothing_left(folder: Folder) -> bool:
    return not namespaces.existing() and not folder.path.exists() and not CURRENT.exists()


def test_pods_of_a_cluster_reach_each_other_and_others_are_out_of_reach(lab):
    within = asyncio.run(probe.check([item for item in EXAMPLE if not isinstance(item, Peering)]))
    assert len(within) == 8
    assert all(check.ok for check in within), within
    across = asyncio.run(probe.check([item for item in EXAMPLE if not (isinstance(item, Pod) and item.name in ("stock", "post"))]))
    assert len(across) == 4
    assert not any(check.ok for check in across), across


def test_down_leaves_nothing_and_twice_is_fine(lab):
    folder, _ = lab
    assert teardown.down(folder)
    assert nothing_left(folder)
    assert not teardown.down(folder)
    assert nothing_left(folder)


def test_down_leaves_nothing_after_the_supervisor_was_killed(lab):
    """Not even a process in a pod, a mount view, or a link."""
    folder, pid = lab
    sleeper = subprocess.Popen(["ip", "netns", "exec", "mm.rome.pod.shop", "sleep", "600"])
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert teardown.down(folder)
    assert sleeper.wait(5) != 0
    assert nothing_left(folder)


def test_a_second_lab_says_where_the_first_one_is(lab, tmp_path: Path):
    folder, _ = lab
    with pytest.raises(Permanent, match=f"already up on this machine, in {folder.path}"):
        start(Folder(tmp_path / "other"))
    with pytest.raises(Conflict, match="already up"):
        teardown.down(Folder(tmp_path / "other"))
    assert folder.read() is not None


def test_a_lab_comes_up_over_what_a_crash_left(lab, tmp_path: Path):
    folder, pid = lab
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    second = start(folder)
    teardown.down(folder)
    os.waitpid(second, 0)
    assert nothing_left(folder)


def routes(namespace: str) -> str:
    return subprocess.run(["ip", "-n", namespace, "route"], capture_output=True, text=True, check=True).stdout


@pytest.fixture
def wiring() -> Iterator[Wiring]:
    made = Wiring()
    made.make_underlay()
    yield made
    namespaces.remove(namespaces.existing())


def without(*names: str) -> list[Topology]:
    return [item for item in EXAMPLE if item.name not in names and not isinstance(item, Peering)]


def test_the_wiring_follows_the_topology(wiring: Wiring):
    """A host that comes later is routed to and from; one that goes takes its routes along; the others are not touched."""
    wiring.turn_into(layout(without("worker-2", "stock", "post")))
    before = (namespaces.FOLDER / "mm.rome.worker-1").stat().st_ino
    assert "10.200.2.0/24" not in routes("mm.rome.worker-1")
    wiring.turn_into(layout(without()))
    assert "10.200.2.0/24 via 172.18.0.12 dev eth0 proto static onlink" in routes("mm.rome.worker-1")
    assert all(check.ok for check in asyncio.run(probe.check(without())))
    wiring.turn_into(layout(without("worker-2", "stock", "post")))
    assert "10.200.2.0/24" not in routes("mm.rome.worker-1")
    assert "172.18.0.12" not in routes("mm.underlay")
    assert (namespaces.FOLDER / "mm.rome.worker-1").stat().st_ino == before
    assert "mm.rome.worker-2" not in namespaces.existing()


def test_a_new_underlay_mtu_makes_the_hosts_anew(wiring: Wiring):
    def with_mtu(mtu: int) -> list[Topology]:
        clusters = [
            Cluster(name=item.name, pod_prefixes=item.pod_prefixes, internal_prefixes=item.internal_prefixes, mtu=mtu)
            for item in EXAMPLE
            if isinstance(item, Cluster)
        ]
        return [*clusters, *(item for item in without() if not isinstance(item, Cluster))]

    for mtu in (1500, 1400):
        wiring.turn_into(layout(with_mtu(mtu)))
        shown = subprocess.run(["ip", "-n", "mm.rome.gateway", "link", "show", "eth0"], capture_output=True, text=True, check=True).stdout
        assert f"mtu {mtu}" in shown
    assert all(check.ok for check in asyncio.run(probe.check(with_mtu(1400))))
