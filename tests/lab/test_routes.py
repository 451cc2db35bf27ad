"""Published routes in the lab: from a message to the kernel of a host, watched there, and gone without a trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from services.cli.files import load
from services.cli.lab import namespaces
from services.cli.lab.layout import PREFIX
from tests.routes import routes, to

pytestmark = pytest.mark.privileged

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "routes.yaml"
GATEWAY, WORKER = "rome.gateway", "rome.worker-1"
ACROSS = (("rome/shop", "milan/bank"), ("milan/post", "rome/stock"))
TABLE = "77245971"
RULES = """
17004:	from all to 10.200.2.0/24 iif mt.0 lookup 77865854 proto 77
17004:	from all to 10.200.2.0/24 iif mt.1 lookup 77865854 proto 77
17004:	from all to 10.200.2.0/24 iif mt.2 lookup 77865854 proto 77
17007:	from all to 10.200.1.0/24 fwmark 0xfe00/0xff00 lookup 77240157 proto 77
17008:	from all to 10.70.0.0 fwmark 0x2 lookup 77239208 proto 77
17129:	from all to 10.70.0.0 fwmark 0x1 lookup 77241979 proto 77
17133:	from all to 10.200.0.0/16 fwmark 0xff00/0xff00 lookup 77881533 proto 77
17133:	from all to 10.71.0.0/16 fwmark 0xff00/0xff00 lookup 77881533 proto 77
"""


def listed(mesh, host: str, *what: str) -> list[str]:
    """What `ip` lists, line by line; an empty list for a table that nothing is in."""
    return [line.strip() for line in mesh.run(host, "sh", "-c", f"ip {' '.join(what)} 2>/dev/null || true").splitlines()]


def by_tunnels(mesh, host: str = GATEWAY) -> list[str]:
    """The next hops of the route by all tunnels."""
    return [line for line in listed(mesh, host, "route", "list", "10.9.0.0/16", "table", TABLE) if line.startswith("nexthop")]


async def test_the_seeds_routes_come_to_a_gateway_that_carries_traffic_and_go(mesh, live):
    """They list as people know them, no flow loses a datagram, and deleted they leave nothing."""
    items = load([EXAMPLE])
    before = mesh.own_state(GATEWAY), mesh.own_state(WORKER)
    async with live.undisturbed(*ACROSS):
        await live.publish(*items)
        assert [line for line in listed(mesh, GATEWAY, "rule", "list") if " lookup 77" in line] == RULES.strip().splitlines()
        assert listed(mesh, GATEWAY, "route", "list", "table", "77881533") == [
            "unreachable default proto 77 metric 9999",
            *(
                line
                for prefix in ("10.71.0.0/16", "10.200.0.0/16")
                for line in (f"{prefix} proto 77 scope link", *(f"nexthop dev mt.{number} weight 1" for number in range(3)))
            ),
        ]
        assert mesh.own_state(WORKER) == before[1]
        units = {unit.unit for unit in live.board.reports["rome", "gateway"].units}
        assert {f"route/rome/{item.name}" for item in items} <= units
        generation = live.board.generations["rome", "gateway"]
        await live.publish(*items)
        assert live.board.generations["rome", "gateway"] == generation
        await live.delete(*items)
    assert (mesh.own_state(GATEWAY), mesh.own_state(WORKER)) == before


async def test_a_rule_leads_packets_where_its_table_says(mesh, live, eventually):
    """A blackhole for one pod's packets to another cluster, asked before meshmark's own rule; without it they pass again."""
    blocked = routes(
        rules=[{"from": "10.200.1.10", "priority": 800}], routes=[to("0.0.0.0/0", type="blackhole")], hosts={"names": ["worker-1"]}
    )
    await live.publish(blocked)
    async with live.traffic("rome/shop", "milan/bank") as flow, live.undisturbed(("rome/stock", "milan/bank")):
        await eventually(lambda: flow.sent > 100, "datagrams are sent")
    assert flow.lost == flow.sent
    await live.delete(blocked)
    async with live.undisturbed(("rome/shop", "milan/bank")):
        pass


async def test_what_is_changed_by_hand_is_told_and_put_back(mesh, live, eventually):
    """One event for a route that lost its source, one for a rule that is gone, each naming the configuration; both are repaired."""
    item = routes(rules=[{"to": "10.9.0.0/16"}], routes=[to("10.9.0.0/16", "eth0", source="172.18.0.10")], hosts={"names": ["gateway"]})
    await live.publish(item)
    before, told = mesh.own_state(GATEWAY), len(live.board.drift)
    # Both in one moment: the repair of the first that is seen reads, and mends, all.
    namespaces.script(
        [f"rule del to 10.9.0.0/16 lookup {TABLE}", f"route replace 10.9.0.0/16 dev eth0 table {TABLE} proto 77"], f"{PREFIX}{GATEWAY}"
    )

    def states() -> set[tuple[str, str]]:
        return {(event.key, event.state) for event in live.board.drift[told:]}

    keys = (f"route {TABLE} 10.9.0.0/16 0", "rule 17021 fwmark 0x0/0x0 iif - to 10.9.0.0/16")
    await eventually(lambda: states() == {(key, state) for key in keys for state in ("raised", "resolved")}, "told and repaired", states)
    assert all(item.ref in event.because for event in live.board.drift[told:])
    assert mesh.own_state(GATEWAY) == before


async def test_a_route_by_a_link_that_is_not_there_waits_for_it(mesh, live, eventually):
    """Its unit waits, with nothing of it in the kernel; the link's arrival lets it come, and come again when the link was made anew."""
    item = routes(rules=[{"to": "10.9.0.0/16"}], routes=[to("10.9.0.0/16", "late0")], hosts={"names": ["worker-1"]})
    before = mesh.own_state(WORKER)
    await live.publish(item, settle=False)

    def outcome() -> str:
        return next((unit.outcome for unit in live.board.reports["rome", "worker-1"].units if unit.unit == "route/rome/test"), "")

    await eventually(lambda: outcome() == "waiting", "the unit waits", outcome)
    assert mesh.own_state(WORKER) == before
    make = "ip link add late0 type veth peer name late1; ip link set late0 up; ip link set late1 up"
    there = ["10.9.0.0/16 dev late0 proto 77 scope link"]
    mesh.run(WORKER, "sh", "-ec", make)
    try:
        await eventually(lambda: outcome() == "applied", "the unit is applied", outcome)
        assert listed(mesh, WORKER, "route", "list", "table", TABLE) == there
        mesh.run(WORKER, "sh", "-ec", f"ip link del late0; {make}")
        await eventually(lambda: listed(mesh, WORKER, "route", "list", "table", TABLE) == there, "the route is there again")
        mesh.run(WORKER, "ip", "link", "del", "late0")
        await eventually(lambda: outcome() == "waiting", "the unit waits again", outcome)
        mesh.run(WORKER, "sh", "-ec", make)
        await eventually(lambda: listed(mesh, WORKER, "route", "list", "table", TABLE) == there, "the route is there again")
    finally:
        await live.delete(item)
        mesh.run(WORKER, "ip", "link", "del", "late0")


async def test_another_tunnel_is_another_next_hop(mesh, live):
    """``@tunnels`` are the tunnels that a gateway has, with the weights of the peering; none on a node."""
    await live.publish(routes(routes=[to("10.9.0.0/16", "@tunnels")]))
    assert by_tunnels(mesh) == [f"nexthop dev mt.{number} weight 1" for number in range(3)]
    assert listed(mesh, WORKER, "route", "list", "table", TABLE) == []
    await live.publish(replace(mesh.object("Peering/rome/rome-milan"), tunnels=4, weights=(1, 2, 3, 4)))
    assert by_tunnels(mesh) == [f"nexthop dev mt.{number} weight {number + 1}" for number in range(4)]


async def test_a_bad_one_is_refused_and_the_one_before_stays(live, mesh):
    """A default route for the host's own packets: the refusal names the rule, and the kernel keeps what was."""
    good = routes(rules=[{"iif": "lo", "to": "10.9.0.0/16"}], routes=[to("10.9.0.0/16", "eth0")], hosts={"role": "gateway"})
    await live.publish(good)
    before, refused = mesh.own_state(GATEWAY), len(live.board.refusals)
    bad = routes(rules=[{"iif": "lo"}], routes=[to("0.0.0.0/0", "eth0")], hosts={"role": "gateway"})
    await live.publish(bad, settle=False)
    found = await live.refusal(good.ref, refused)
    assert found.field == "$.rules[0]"
    assert "add a route of type throw" in found.reason
    await live.settled()
    assert mesh.own_state(GATEWAY) == before
    assert json.loads(mesh.run(GATEWAY, "ip", "-j", "route", "get", "10.9.0.5"))[0]["dev"] == "eth0"
