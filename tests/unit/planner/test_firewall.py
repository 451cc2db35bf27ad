"""Published firewalls in plans: which hosts hold them, as what units, and what contradicts them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from schemas.firewall import FirewallConfiguration
from schemas.host_objects import NftChain, NftElement, NftSet
from schemas.plan import diff_units
from schemas.topology import Topology
from services.cli.files import load
from services.cli.render import plan_text
from services.planner import names
from services.planner.core import Core
from services.planner.state import HostId
from tests.firewalls import compiled, configuration, match, one_chain, rule
from tests.topologies import EXAMPLE, ROME_GATEWAY, cluster, gateway, keys, node, peering, said, settled_plans, tell, two_clusters

GOLDEN = Path(__file__).parent / "golden_firewall"
UNIT = "firewall/rome/test"
DROPPING = rule(match("source", "10.9.0.0/16"), action="drop")
MARKING = rule(action={"action": "setMark", "value": 0x100})


def hosts_with(*items: Topology) -> set[str]:
    """Names of rome's hosts that hold the unit of the configuration `test`."""
    return {host.name for host, plan in settled_plans([*two_clusters(), *items]).items() if UNIT in plan.units}


def test_golden_plan_of_the_example() -> None:
    """The gateway's plan with the example's firewalls; write it anew with ``meshmark plan`` of both example files."""
    plan = settled_plans(load([EXAMPLE, EXAMPLE.with_name("firewall.yaml")]))[ROME_GATEWAY]
    firewalls = {name: unit for name, unit in plan.units.items() if name.startswith("firewall/")}
    golden = (GOLDEN / "rome.gateway.txt").read_text(encoding="utf-8")
    assert plan_text(replace(plan, units=firewalls)) == golden


@pytest.mark.parametrize(
    "selector, hosts",
    [
        ({}, {"gateway", "spare", "worker-1", "worker-2"}),
        ({"role": "node"}, {"worker-1", "worker-2"}),
        ({"role": "gateway"}, {"gateway", "spare"}),
        ({"names": ["worker-2", "spa*"]}, {"worker-2", "spare"}),
        ({"names": ["worker-?"], "role": "gateway"}, set()),
        ({"peering": "rome-milan"}, {"gateway", "worker-1", "worker-2"}),
        ({"peering": "rome-milan", "role": "gateway"}, {"gateway"}),
        ({"peering": "rome-oslo"}, set()),
    ],
)
def test_a_selector_picks_hosts_of_its_cluster(selector: dict[str, Any], hosts: set[str]) -> None:
    """By name, role and peering; all that is given must fit, and no other cluster has it."""
    assert hosts_with(gateway("rome", "spare", 77), one_chain(DROPPING, hosts=selector)) == hosts


def test_every_configuration_is_a_unit_with_a_table() -> None:
    """Two on one host share nothing; each names what it comes from."""
    items = [one_chain(DROPPING, hosts={"names": ["worker-1"]}), one_chain(DROPPING, name="other", hosts={"role": "node"})]
    plan = settled_plans([*two_clusters(), *items])[HostId("rome", "worker-1")]
    units = {name: unit for name, unit in plan.units.items() if name.startswith("firewall/")}
    assert units.keys() == {UNIT, "firewall/rome/other"}
    assert not set(units[UNIT]) & set(units["firewall/rome/other"])
    assert {entry.because for entry in units[UNIT].values()} == {("FirewallConfiguration/rome/test",)}


def test_hosts_that_hold_the_same_share_it() -> None:
    """A long list is made into a plan once, not for each host; with tunnels in it, once for each host that has others."""
    core = settled_core(one_chain(DROPPING), one_chain(rule(match("outInterface", "@tunnels")), name="tunnels"))
    first, second = (
        core._compiler._passing.unit("FirewallConfiguration/rome/test", HostId("rome", name)) for name in ("worker-1", "gateway")
    )
    assert first is second
    named = [core.published[HostId("rome", name)].units["firewall/rome/tunnels"] for name in ("worker-1", "gateway")]
    assert {entry.because for entry in named[0].values()} == {("FirewallConfiguration/rome/tunnels",)}
    assert {entry.because for entry in named[1].values()} == {("FirewallConfiguration/rome/tunnels", "Peering/rome/rome-milan")}


def test_order_is_added_to_priorities() -> None:
    """So the kernel itself keeps the order of configurations, by whatever way they came."""
    (chain,) = [
        item
        for item in compiled(configuration(chains=[{"name": "main", "hook": "output", "priority": "mangle"}], order=7)).values()
        if isinstance(item, NftChain)
    ]
    assert chain.priority == -143


def publishing(core: Core, item: FirewallConfiguration, number: int, *, delete: bool = False) -> dict[str, list[str]]:
    """Let the core hear it; the keys that change, by host."""
    event = said(item, number)
    outcome = core.hear([replace(event, payload=b"") if delete else event])
    assert not outcome.refused, outcome.refused
    found = {}
    for step in core.steps():
        core.published[step.host] = step.plan
        found[step.host.name] = [key for diff in step.diffs for key in (*(entry.key for entry in diff.put), *diff.drop)]
    return found


def settled_core(*items: Topology) -> Core:
    core = Core()
    tell(core, [*two_clusters(), *keys(), *items])
    core.published.update({step.host: step.plan for step in core.steps()})
    return core


def test_publishing_again_changes_nothing_and_deleting_leaves_nothing() -> None:
    """Also in another spelling; and only the hosts concerned get a plan."""
    core = settled_core()
    first = one_chain(rule(match("source", ["FD00::1", "fd00:0::/64"]), match("mark", 0xFE00)), hosts={"role": "node"})
    again = one_chain(rule(match("source", ["fd00::1", "fd00::/64"]), match("mark", "0xFE00")), hosts={"role": "node"})
    assert publishing(core, first, 100).keys() == {"worker-1", "worker-2"}
    assert publishing(core, first, 101) == {}
    assert publishing(core, again, 102) == {}
    gone = publishing(core, again, 103, delete=True)
    assert gone["worker-1"] == ["chain meshmark.fw.test main", "table meshmark.fw.test"]
    assert not any(name.startswith("firewall/") for plan in core.published.values() for name in plan.units)


def test_another_selector_moves_the_unit() -> None:
    """It leaves the hosts that are not selected any more."""
    core = settled_core()
    publishing(core, one_chain(DROPPING, hosts={"role": "node"}), 100)
    moved = publishing(core, one_chain(DROPPING, hosts={"names": ["worker-2", "gateway"]}), 101)
    assert moved.keys() == {"worker-1", "gateway"}


def test_another_tunnel_is_one_element_of_all_tunnels() -> None:
    """The rules and the set stay as they are; a node has none."""
    item = one_chain(rule(match("outInterface", "@tunnels"), action="clampMss"))
    few, more = (settled_plans([*two_clusters(tunnels=number), item]) for number in (3, 4))
    (diff,) = diff_units({UNIT: few[ROME_GATEWAY].units[UNIT]}, {UNIT: more[ROME_GATEWAY].units[UNIT]})
    assert [entry.object for entry in diff.put] == [NftElement("meshmark.fw.test", "tunnels", "mt.3")]
    assert diff.drop == ()
    node_unit = more[HostId("rome", "worker-1")].units[UNIT]
    assert [entry.object for entry in node_unit.values() if isinstance(entry.object, NftSet | NftElement)] == [
        NftSet("meshmark.fw.test", "tunnels", "ifname")
    ]


def test_tunnels_are_those_that_have_a_device() -> None:
    """While tunnels are rolled out, the set follows the host's devices."""
    core = settled_core(one_chain(rule(match("outInterface", "@tunnels")), hosts={"role": "gateway"}))
    for _ in range(2):
        for plan in core.published.values():
            links = {key.removeprefix("link ") for unit in plan.units.values() for key in unit if key.startswith("link mt.")}
            named = [item.object.element for item in plan.units.get(UNIT, {}).values() if isinstance(item.object, NftElement)]
            assert plan.cluster == "milan" or set(named) == links
        core.allocations.set_rollout(("rome", "rome-milan"), replace(core.allocations.rollout(("rome", "rome-milan")), present=3, joined=2))
        core._compiler.refresh([peering()])
        core._dirty.update(core.published)
        core.published.update({step.host: step.plan for step in core.steps()})


# Contradictions --------------------------------------------------------------------------------------------------------------------


def refusals(*items: Topology) -> list[tuple[str, str, str]]:
    """Object, field and other object of each refusal."""
    outcome = tell(Core(), items)
    return [(f"{item.kind}/{item.cluster}/{item.name}", item.field, item.other) for item in outcome.refused]


FIELD = "$.chains[0].rules[0].actions[0]"


def test_class_bits_are_not_for_others_on_a_gateway_of_a_peering() -> None:
    """Neither by a constant nor from the connection's mark; with a mask beside them, on purpose, or elsewhere they may be written."""
    mesh = two_clusters()
    beside = rule(action={"action": "setMark", "value": 1, "mask": 0xFF})
    copied = rule(action={"action": "markFromCtMark", "mask": 0xFF})
    bad = ("FirewallConfiguration/rome/test", FIELD, "Peering/rome/rome-milan")
    assert refusals(*mesh, one_chain(MARKING)) == [bad]
    assert refusals(*mesh, one_chain(copied, hosts={"peering": "rome-milan"})) == [bad]
    assert refusals(*mesh, one_chain(MARKING, marks=True)) == []
    assert refusals(*mesh, one_chain(MARKING, hosts={"role": "node"})) == []
    assert refusals(*mesh, one_chain(MARKING, hosts={"peering": "rome-oslo"})) == []
    assert refusals(*mesh, one_chain(beside), one_chain(rule(action={"action": "setCtMark", "value": 0x100}), name="ct")) == []


def test_the_established_one_wins_also_against_a_peering() -> None:
    """A peering whose gateway a configuration marks on waits until that is gone."""
    *hosts, joined = two_clusters()[:-2]
    item = one_chain(MARKING, hosts={"role": "gateway"})
    assert joined.kind == "Peering"
    core = Core()
    refused = tell(core, [*hosts, item, joined]).refused
    assert [(one.kind, one.field, one.other) for one in refused] == [("Peering", "$.ends[0].gateway", item.ref)]
    assert "classMarks: true" in refused[0].reason
    outcome = core.hear([replace(said(item, 100), payload=b"")])
    assert [entry.ref for entry in outcome.admitted] == [item.ref, joined.ref]


def test_a_configuration_needs_its_cluster_and_holds_it() -> None:
    """Refused before, admitted with it; the cluster cannot go first."""
    item = one_chain(DROPPING)
    core = Core()
    assert [one.other for one in tell(core, [item]).refused] == ["Cluster/rome/rome"]
    assert [entry.ref for entry in tell(core, [cluster("rome")], 2).admitted] == ["Cluster/rome/rome", item.ref]
    assert core.hear([replace(said(cluster("rome"), 3), payload=b"")]).refused[0].other == item.ref


def test_two_names_do_not_lead_to_one_table() -> None:
    """A long name is hashed; the hash itself as a name is refused, and no peering's table is ever a firewall's."""
    long = "a-configuration-with-a-name-that-is-longer-than-a-table-takes"
    short = names.firewall_table(long).removeprefix("meshmark.fw.")
    assert refusals(cluster("rome"), one_chain(DROPPING, name=long), one_chain(DROPPING, name=short)) == [
        (f"FirewallConfiguration/rome/{short}", "$.name", f"FirewallConfiguration/rome/{long}")
    ]
    assert len(names.firewall_table(long)) < 48
    assert names.table("fw", "test") != names.firewall_table("test")


def test_a_host_that_comes_later_gets_what_selects_it() -> None:
    """A new node holds its cluster's configurations with its first plan."""
    core = settled_core(one_chain(DROPPING, hosts={"names": ["worker-*"]}))
    tell(core, [node("worker-3", 3)], 100)
    (step,) = [step for step in core.steps() if step.host.name == "worker-3"]
    assert UNIT in step.plan.units
