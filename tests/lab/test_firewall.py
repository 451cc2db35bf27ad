"""Published firewalls in the lab: from a message to the kernel of a host, watched there, and gone without a trace."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from services.cli.files import load
from tests.firewalls import match, one_chain, rule

pytestmark = pytest.mark.privileged

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "firewall.yaml"
GOLDEN = Path(__file__).parent.parent / "contract" / "kernel" / "golden" / "seed_firewall.nft"
GATEWAY, WORKER = "rome.gateway", "rome.worker-1"
ACROSS = (("rome/shop", "milan/bank"), ("milan/post", "rome/stock"))


def listed(mesh, host: str, table: str) -> str:
    """A table as nft prints it, without counts."""
    return mesh.run(host, "nft", "--stateless", "list", "table", "inet", f"meshmark.fw.{table}")


def tunnels(text: str) -> list[str]:
    """The tunnels that stand in the set of a listed table."""
    return sorted(re.findall(r'"(mt\.\d+)"', text))


async def test_the_seeds_rules_come_to_a_gateway_that_carries_traffic_and_go(mesh, live):
    """They list as the seed shows them but for the table's name and family, no flow loses a datagram, and deleted they leave nothing."""
    items = load([EXAMPLE])
    before = mesh.own_state(GATEWAY), mesh.own_state(WORKER)
    async with live.undisturbed(*ACROSS):
        await live.publish(*items)
        text = "".join(listed(mesh, GATEWAY, item.name) for item in items).replace("table inet meshmark.fw.", "table ip ")
        assert re.sub(r"\b([sd]nat) ip (prefix )?to", r"\1 \2to", text) == GOLDEN.read_text(encoding="utf-8")
        assert mesh.own_state(WORKER) == before[1]
        units = {unit.unit for unit in live.board.reports["rome", "gateway"].units}
        assert {f"firewall/rome/{item.name}" for item in items} <= units
        generation = live.board.generations["rome", "gateway"]
        await live.publish(*items)
        assert live.board.generations["rome", "gateway"] == generation
        await live.delete(*items)
    assert (mesh.own_state(GATEWAY), mesh.own_state(WORKER)) == before


async def test_a_rule_drops_what_it_matches_on_the_hosts_it_is_for(mesh, live, eventually):
    """Packets of one pod to another cluster are dropped and counted on its node; without the rule they pass again."""
    seen = live.walk("rome/shop", "milan/bank").dial
    blocked = one_chain(
        rule(match("source", "10.200.1.10"), match("destination", f"{seen}/32"), action="drop", counter=True),
        hosts={"names": ["worker-1"]},
        name="block",
    )
    await live.publish(blocked)
    async with live.traffic("rome/shop", "milan/bank"), live.undisturbed(("rome/stock", "milan/bank")):
        count = ["nft", "list", "table", "inet", "meshmark.fw.block"]
        await eventually(lambda: re.search(r"counter packets [1-9]\d\d", mesh.run(WORKER, *count)), "dropped packets are counted")
    await live.delete(blocked)
    async with live.undisturbed(("rome/shop", "milan/bank")):
        pass


async def test_what_is_deleted_by_hand_is_told_and_put_back(mesh, live, eventually):
    """One event for the chain that lost a rule, naming the configuration; the auditor has it repaired."""
    item = one_chain(
        rule(match("source", "fd00::/64"), comment="first"), rule(match("mark", "0x1", mask=0xFF), action="drop"), hosts={"role": "gateway"}
    )
    await live.publish(item)
    before, told = listed(mesh, GATEWAY, "test"), len(live.board.drift)
    mesh.run(
        GATEWAY, "sh", "-ec", "nft delete rule inet meshmark.fw.test main handle $(nft -a list ruleset | sed -n 's/.*first.*handle //p')"
    )

    def states() -> list[tuple[str, str, str]]:
        return [(event.host, event.key, event.state) for event in live.board.drift[told:]]

    key = "chain meshmark.fw.test main"
    await eventually(lambda: states() == [("gateway", key, "raised"), ("gateway", key, "resolved")], "told and repaired", states)
    assert item.ref in live.board.drift[told].because
    assert listed(mesh, GATEWAY, "test") == before


async def test_another_tunnel_is_another_element(mesh, live):
    """``@tunnels`` lists the tunnels that a gateway has, none on a node; the rules stay as they are."""
    await live.publish(one_chain(rule(match("protocol", "tcp"), match("outInterface", "@tunnels"), action="clampMss", counter=True)))
    before = listed(mesh, GATEWAY, "test")
    assert tunnels(before) == ["mt.0", "mt.1", "mt.2"]
    assert tunnels(listed(mesh, WORKER, "test")) == []
    await live.publish(replace(mesh.object("Peering/rome/rome-milan"), tunnels=4))
    after = listed(mesh, GATEWAY, "test")
    assert tunnels(after) == ["mt.0", "mt.1", "mt.2", "mt.3"]
    assert after[after.index("chain") :] == before[before.index("chain") :]


async def test_a_bad_one_is_refused_and_the_one_before_stays(live, mesh):
    """Prefixes of unequal length: the refusal names the field, and the kernel keeps the translation that was."""
    at = {"hook": "prerouting", "type": "nat", "priority": "dstnat", "hosts": {"role": "gateway"}}
    good = one_chain(rule(match("destination", "10.99.0.0/16"), action={"action": "dnat", "to": "10.98.0.0/16"}), **at)
    await live.publish(good)
    before, refused = listed(mesh, GATEWAY, "test"), len(live.board.refusals)
    (wrong,) = good.chains[0].rules[0].actions
    bad = replace(
        good, chains=(replace(good.chains[0], rules=(replace(good.chains[0].rules[0], actions=(replace(wrong, to="10.98.0.0/24"),)),)),)
    )
    await live.publish(bad, settle=False)
    assert (await live.refusal(good.ref, refused)).field == "$.chains[0].rules[0].actions[0].to"
    await live.settled()
    assert listed(mesh, GATEWAY, "test") == before
