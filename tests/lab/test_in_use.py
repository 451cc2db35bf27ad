"""What others use on hosts of the lab: who comes later is kept out, and let in when they are gone; who is in stays."""

from __future__ import annotations

import json

import pytest

from schemas.in_use import InUse
from services.planner import layout
from tests.routes import routes, to

pytestmark = pytest.mark.privileged

WORKER, GATEWAY = ("rome", "worker-1"), ("rome", "gateway")
THEIRS = "ip rule add pref 700 fwmark 0x4000/0x4000 lookup 100; ip route add blackhole 10.250.0.0/16 table 100"
GONE = "ip rule del pref 700; ip route flush table 100"


def seen(live, host: tuple[str, str]) -> InUse:
    """What a host reports; nothing while it has not looked."""
    return live.board.reports[host].in_use or InUse()


async def test_hosts_that_nobody_else_uses_report_nothing(live, eventually):
    """A whole mesh with its tunnels, overlay and tables, none of which is told as somebody else's."""

    def reported() -> dict[tuple[str, str], InUse | None]:
        return {host: live.board.reports[host].in_use for host in live.plans()}

    await eventually(lambda: None not in reported().values(), "every host has looked")
    assert {host: found for host, found in reported().items() if found} == {}
    assert not any(live.board.reports[host].collisions for host in live.plans())


async def test_a_table_of_others_keeps_a_configuration_out_until_they_are_gone(mesh, live, eventually):
    """The refusal names the host, the table and who has it; on the host nothing changes; it comes in by itself, with nobody's help."""
    item = routes(table=100, routes=[to("10.9.0.0/16", type="blackhole")], hosts={"role": "node"})
    before = mesh.own_state("rome.worker-1")
    mesh.run("rome.worker-1", "sh", "-ec", THEIRS)
    try:
        await eventually(lambda: any(use.by == "IPv4 routes" for use in seen(live, WORKER).tables), "the host reports the table")
        refused = len(live.board.refusals)
        await live.publish(item, settle=False)
        refusal = await live.refusal(item.ref, refused)
        assert (refusal.field, refusal.other) == ("$.table", "Node/rome/worker-1")
        assert "table 100, used by others on Node/rome/worker-1 (IPv4 routes)" in refusal.reason
        await live.settled()
        assert mesh.own_state("rome.worker-1") == before
    finally:
        mesh.run("rome.worker-1", "sh", "-ec", GONE)
    await eventually(lambda: item.ref in live.objects, "it is admitted")
    await live.settled()
    assert "blackhole 10.9.0.0/16" in mesh.run("rome.worker-1", "ip", "route", "show", "table", "100")
    await eventually(lambda: not seen(live, WORKER), "nothing of ours is told as theirs")


async def test_marks_of_others_on_a_gateway_keep_a_peering_out_until_they_are_gone(mesh, live, eventually):
    """Class bits that nftables rules of somebody else write; then the peering comes in, and carries."""
    peering = mesh.object("Peering/rome/rome-milan")
    await live.delete(peering)
    mesh.run("rome.gateway", "nft", "add table ip other; add chain ip other c; add rule ip other c meta mark set meta mark or 0x4000")
    try:
        await eventually(lambda: seen(live, GATEWAY).marks, "the gateway reports the mark")
        refused = len(live.board.refusals)
        await live.publish(peering, settle=False)
        refusal = await live.refusal(peering.ref, refused)
        assert (refusal.field, refusal.other) == ("$.ends[0].gateway", "Gateway/rome/gateway")
        assert "mark bits 0xff00, used by others on Gateway/rome/gateway (ip other c sets 0x4000)" in refusal.reason
    finally:
        mesh.run("rome.gateway", "nft", "delete table ip other")
    await eventually(lambda: peering.ref in live.objects, "it is admitted")
    await live.settled()
    assert all(check.ok for check in await live.carries())


async def test_who_is_in_stays_in_and_the_collision_is_said(mesh, live, eventually):
    """Somebody takes a priority and a table of a gateway that carries traffic: no datagram is lost, no plan changes, status says it."""
    generation = live.board.generations[GATEWAY]
    theirs = f"pref {layout.RULE_OUTGOING} iif nobody lookup 100"
    async with live.undisturbed(("rome/shop", "milan/bank"), ("milan/post", "rome/stock")):
        mesh.run("rome.gateway", "ip", "rule", "add", *theirs.split())
        try:
            await eventually(lambda: live.board.reports[GATEWAY].collisions, "the collision is reported")
            told = await live.meshmark("status", "--output", "json", "rome/gateway")
        finally:
            mesh.run("rome.gateway", "ip", "rule", "del", *theirs.split())
    assert told.returncode == 0, told.stderr
    assert json.loads(told.stdout)["report"]["collisions"] == ["priority 900: IPv4 rule 900 lookup 100"]
    await eventually(lambda: not live.board.reports[GATEWAY].collisions, "its end is reported as well")
    assert live.board.generations[GATEWAY] == generation
