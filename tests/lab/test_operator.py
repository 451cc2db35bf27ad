"""The commands of an operator on hosts that carry traffic: where an object comes from, what a host can do, and purging one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest
from msgspec.structs import replace

from schemas.topology import DriftPolicy
from services.cli.lab.crew import host_view
from services.cli.lab.namespaces import processes

pytestmark = pytest.mark.privileged

NODE, NODE_ID = "rome.worker-2", "rome/worker-2"
APPLIER = f"applier.{NODE}"
ROUTE = "route 7010 10.61.0.0/16 0"
LISTINGS = ("nft -s list ruleset", "ip rule", "ip route show table all", "ip -o link", "ip -o addr")


def on_host(mesh, *arguments: str, host: str = NODE) -> subprocess.CompletedProcess[str]:
    """Run the command on a host, with its /run/wireguard and its applier's folder."""
    command = [*host_view(mesh.folder, f"mm.{host}"), sys.executable, "-m", "services.cli.main", *arguments]
    environment = {**os.environ, "MESHMARK_STATE_DIR": str(mesh.folder.host(host))}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=environment)


def state(mesh) -> dict[str, str]:
    return {listing: mesh.run(NODE, "sh", "-c", listing) for listing in LISTINGS}


@contextlib.asynccontextmanager
async def stopped(mesh, eventually) -> AsyncIterator[None]:
    """The node's applier is stopped while the body runs: nobody starts another one while the supervisor is held."""
    supervisor, applier = mesh.folder.read().supervisor.pid, mesh.pid(APPLIER)
    os.kill(supervisor, signal.SIGSTOP)
    try:
        os.kill(applier, signal.SIGKILL)
        await eventually(lambda: applier not in processes([f"mm.{NODE}"]), "the applier is gone")
        yield
    finally:
        os.kill(supervisor, signal.SIGCONT)


async def explained(live, *words: str) -> dict:
    done = await live.meshmark("explain", *words, "--output", "json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


async def test_an_object_leads_back_to_its_messages(mesh, live):
    """Each topology object behind it is what is admitted, by a message that the broker holds; the host reports that it holds it."""
    found = await explained(live, *ROUTE.split(), "--host", NODE_ID)
    (place,) = found["places"]
    assert (place["standing"]["held"], place["drift"]) == ("yes", None)
    assert [origin["ref"] for origin in found["origins"]] == sorted(place["because"])
    async with live.broker("reader") as broker:
        said = {message.sequence: message async for message in broker.replay("TOPOLOGY", "mesh.topology.>")}
    for origin in found["origins"]:
        kind, cluster, name = origin["ref"].split("/")
        message = said[origin["sequence"]]
        assert message.subject == f"mesh.topology.{kind.lower()}.{cluster}.{name}"
        assert origin["publishedSeconds"] == message.stored_s <= origin["admittedSeconds"]
    unknown = await live.meshmark("explain", "route", "7010", "10.61.0.0/17", "0")
    assert (unknown.returncode, unknown.stderr.count("\n")) == (1, 1)
    assert f"did you mean '{ROUTE}'" in unknown.stderr


async def test_a_topology_object_leads_to_all_that_comes_of_it(mesh, live):
    node = await explained(live, f"Node/{NODE_ID}")
    assert {"link mo.worker-2"} == set(node["hosts"]["rome/gateway"]["link"])
    peering = await explained(live, "Peering/rome/rome-milan")
    assert set(peering["hosts"]) == {str(host) for host, plan in live.plans().items() if plan.units}


async def test_purge_takes_all_of_it_and_nothing_else(mesh, live, eventually):
    """Refused while the applier serves; then all goes, foreign objects stay byte for byte, and a new applier makes everything anew."""
    planted = (
        "nft 'add table ip other; add chain ip other c { type filter hook input priority 0; }; add rule ip other c counter accept';"
        "ip rule add pref 5000 fwmark 0x1/0x1 lookup 4000; ip route add blackhole 10.250.0.0/16 table 4000;"
        "ip route add blackhole 10.251.0.0/16"
    )
    gone = "nft delete table ip other; ip rule del pref 5000; ip route del table 4000 blackhole 10.250.0.0/16; ip route del 10.251.0.0/16"
    mesh.run(NODE, "sh", "-ec", planted)
    try:
        before = mesh.own_state(NODE)
        refused = on_host(mesh, "purge", "--yes")
        assert (refused.returncode, refused.stdout) == (1, "")
        assert "an applier (or another purge) serves this network namespace" in refused.stderr
        async with stopped(mesh, eventually):
            listed = json.loads(on_host(mesh, "purge", "--dry-run").stdout)["removed"]
            done = on_host(mesh, "purge", "--yes")
            assert done.returncode == 0, done.stderr
            assert json.loads(done.stdout)["removed"] == listed
            assert mesh.own_state(NODE) == []
            bare = state(mesh)
            assert "meshmark" not in "".join(bare.values())
            for words in (
                "chain c {",
                "5000:\tfrom all fwmark 0x1/0x1 lookup 4000",
                "blackhole 10.250.0.0/16 table 4000",
                "blackhole 10.251.0.0/16",
            ):
                assert words in "".join(bare.values())
            again = on_host(mesh, "purge", "--yes", "--output", "table")
            assert again.stdout == "there is nothing of meshmark in this network namespace\n"
            assert state(mesh) == bare
        await eventually(lambda: mesh.own_state(NODE) == before, "the node holds its plan again")
        await live.carries()
    finally:
        mesh.run(NODE, "sh", "-ec", gone)


async def test_open_drift_is_told_with_the_object(mesh, live, eventually):
    """While drift is only told, somebody removes a route; explain says that it is missing, until it is repaired."""
    rome = mesh.object("Cluster/rome/rome")
    await live.publish(replace(rome, drift=DriftPolicy(route="alert")))
    told = len(live.board.drift)

    def states() -> list[str]:
        return [event.state for event in live.board.drift[told:] if event.key == ROUTE]

    mesh.run(NODE, "ip", "route", "del", "10.61.0.0/16", "table", "7010", "proto", "77", "metric", "0")
    await eventually(lambda: states() == ["raised"], "drift is raised", lambda: live.board.drift[told:])
    (place,) = (await explained(live, ROUTE, "--host", NODE_ID))["places"]
    assert (place["drift"]["key"], place["drift"]["state"]) == (ROUTE, "raised")
    await live.publish(rome)
    await eventually(lambda: states() == ["raised", "resolved"], "drift is resolved", lambda: live.board.drift[told:])
    (place,) = (await explained(live, ROUTE, "--host", NODE_ID))["places"]
    assert place["drift"] is None
    await live.carries()


@pytest.mark.parametrize("name, role", [("rome.gateway", "gateway"), (NODE, "node")])
def test_a_host_of_the_lab_is_healthy(mesh, name: str, role: str):
    """Neither a gateway nor a node meets anybody: what is there is meshmark's own, the tunnels' ports too."""
    ports = [word for port in (51840, 51841, 51842) for word in ("--port", str(port))]
    done = on_host(mesh, "doctor", "--role", role, *ports, host=name)
    assert done.returncode == 0, done.stdout
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert {name for name, check in checks.items() if check["verdict"] != "ok"} <= {"rp_filter", "IPv6", "geneve"}, checks
