"""``meshmark plan --diff``: "no difference" is said of what was compared, and of nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from schemas import codec, subjects
from schemas.plan import HostPlan
from schemas.topology import Topology
from schemas.values import Name
from services.cli.plan import plan
from services.planner.allocate import Allocations
from services.planner.compile import compile_all
from services.planner.core import settle_rollouts
from services.planner.state import State
from services.runtime.errors import Permanent
from tests.topologies import EXAMPLE, gateway, two_clusters
from tests.unit.cli.broker import StubBroker


def write(folder: Path, items: list[Topology]) -> Path:
    file = folder / "topology.yaml"
    file.write_text(yaml.safe_dump_all(codec.to_builtins(item) for item in items))
    return file


@pytest.fixture
def running(broker: StubBroker) -> StubBroker:
    """Two clusters whose hosts hold what the topology in force says; all appliers answer that their kernels are so."""
    items = two_clusters()
    state, allocations = State(items), Allocations()
    allocations.allocate(state, items)
    settle_rollouts(state, allocations)
    broker.admit(*items)
    for what, cluster, name in allocations.take_changes():
        broker.put(subjects.allocation(what, cluster, name), codec.encode(allocations.value(what, cluster, name)))
    for host, found in compile_all(state, allocations).items():
        broker.publish_plan(found)
        broker.answers[subjects.command(*host, "diff")] = b"[]"
    return broker


async def differences(capsys: pytest.CaptureFixture[str], *arguments: str, **options: object) -> tuple[int, dict[str, list[str]]]:
    code = await plan(*arguments, diff=True, output="json", **options)
    found = json.loads(capsys.readouterr().out)
    assert found["different"] == (code == 2)
    return code, found["hosts"]


async def test_hosts_that_hold_their_plan_do_not_differ(running: StubBroker, capsys: pytest.CaptureFixture[str]):
    code, hosts = await differences(capsys, nats=running)
    assert code == 0
    assert len(hosts) == 6
    assert not any(hosts.values())


@pytest.mark.parametrize("diff", [True, False])
async def test_a_host_that_is_not_there_is_an_error(running: StubBroker, diff: bool):
    with pytest.raises(Permanent, match="no host rome/gatewy; did you mean rome/gateway"):
        await plan("rome/gatewy", diff=diff, nats=running)


async def test_a_host_that_is_not_there_is_an_error_on_paper_too():
    with pytest.raises(Permanent, match="no host rome/typo"):
        await plan("rome/typo", file=[EXAMPLE], diff=True, against=[EXAMPLE])


async def test_a_word_without_a_slash_names_no_host():
    with pytest.raises(Permanent, match="write it as CLUSTER/NAME"):
        await plan("rome", file=[EXAMPLE])


async def test_hosts_that_the_files_remove_are_compared(running: StubBroker, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Nothing is left of the mesh in the files, so that everything that gateways hold is to go."""
    left = [item for item in two_clusters() if item.home == "rome" and item.kind in ("Cluster", "Node")]
    code, hosts = await differences(capsys, file=[write(tmp_path, left)], nats=running)
    assert code == 2
    assert {"rome/gateway", "milan/gateway", "milan/worker-1"} <= hosts.keys()
    assert hosts["milan/gateway"]
    assert all(line.startswith("- ") for line in hosts["milan/gateway"])


async def test_a_removed_host_that_is_named_is_compared(running: StubBroker, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    left = [item for item in two_clusters() if item.home == "rome" and item.kind in ("Cluster", "Node")]
    code, hosts = await differences(capsys, "milan/gateway", file=[write(tmp_path, left)], nats=running)
    assert (code, list(hosts)) == (2, ["milan/gateway"])


async def test_a_host_that_was_removed_and_does_not_answer_does_not_differ(running: StubBroker, capsys: pytest.CaptureFixture[str]):
    running.publish_plan(HostPlan(Name("rome"), Name("old"), {}), 7)
    code, hosts = await differences(capsys, nats=running)
    assert (code, "rome/old" in hosts) == (0, False)
    assert await differences(capsys, "rome/old", nats=running) == (0, {"rome/old": []})


async def test_a_kernel_that_nobody_can_ask_is_said_to_be_unknown(running: StubBroker, capsys: pytest.CaptureFixture[str]):
    del running.answers[subjects.command("rome", "gateway", "diff")]
    code, hosts = await differences(capsys, "rome/gateway", nats=running)
    assert code == 2
    assert hosts["rome/gateway"] == ["? its kernel is not known: nobody serves mesh.cmd.rome.gateway.diff"]


@pytest.mark.parametrize("count, cut", [(499, False), (500, True)])
async def test_an_answer_that_was_cut_is_said_to_be(running: StubBroker, capsys: pytest.CaptureFixture[str], count: int, cut: bool):
    found = [{"key": f"route 7001 10.0.{number}.0/32 0", "unit": "", "wanted": "x", "found": ""} for number in range(count)]
    running.answers[subjects.command("rome", "gateway", "diff")] = codec.encode(found)
    assert await plan("rome/gateway", diff=True, nats=running) == 2
    printed = capsys.readouterr().out
    assert (f"{count} differences, as far as is known" in printed) == cut
    assert ("at most 500 differences" in printed) == cut


async def test_against_is_for_diff():
    with pytest.raises(Permanent, match="--against is for --diff"):
        await plan(against=[EXAMPLE])


async def test_files_are_compared_without_any_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    other = write(tmp_path, [*two_clusters(), gateway("rome", "spare", 99)])
    code, hosts = await differences(capsys, "rome/spare", file=[other], against=[EXAMPLE])
    assert (code, list(hosts)) == (0, ["rome/spare"])
