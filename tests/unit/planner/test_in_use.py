"""What hosts report as used by others, at admission: who comes later is refused, in whatever order the rest is said; who is in stays in."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from schemas.host_objects import PolicyRule
from schemas.in_use import InUse, Use
from schemas.plan import HostPlan
from schemas.status import ApplyReport
from schemas.topology import Node, Topology
from schemas.values import Name, Prefix
from services.planner import layout
from services.planner.core import Core, Said
from services.planner.state import HostId
from tests.firewalls import one_chain, rule
from tests.routes import routes, to
from tests.topologies import MILAN_GATEWAY, ROME_GATEWAY, cluster, gateway, node, peering, said, tell, two_clusters

WORKER = HostId("rome", "worker-1")
PEERING = "Peering/rome/rome-milan"
ENCRYPTING = cluster("rome", encryption="wireguard")
BLACKHOLE = to("10.9.0.0/16", type="blackhole")
BLACKHOLE6 = to("fd09::/64", type="blackhole")


def report(host: HostId, **uses: tuple[Use, ...] | None) -> ApplyReport:
    """A host's report; None of a kind: not looked at all."""
    seen = None if None in uses.values() else InUse(**uses)  # type: ignore[arg-type]
    return ApplyReport(Name(host.cluster), Name(host.name), 1, 1, (), in_use=seen)


def reporting(*reports: ApplyReport, items: list[Topology] | None = None) -> Core:
    """Two clusters without their peering, and what their hosts report."""
    core = Core()
    outcome = tell(core, [item for item in two_clusters() if item.ref != PEERING] if items is None else items)
    assert not outcome.refused
    for one in reports:
        core.note_in_use(one)
    return core


MARK = report(ROME_GATEWAY, marks=(Use(0x4000, "ip nat KUBE-MARK-MASQ sets 0x4000"),))


@pytest.mark.parametrize(
    "item, host, uses, field, number",
    [
        (routes(table=100, routes=[BLACKHOLE]), WORKER, {"tables": (Use(100, "IPv4 routes", 4),)}, "$.table", "table 100"),
        (routes(table=100, rules=[{"iif": "eth1"}]), WORKER, {"tables": (Use(100, "a rule", 6),)}, "$.table", "table 100"),
        (routes(routes=[BLACKHOLE]), WORKER, {"tables": (Use(77245971, "a rule", 4),)}, "$.name", "table 77245971"),
        (
            routes(rules=[{"to": "10.9.0.0/16", "priority": 500}], routes=[BLACKHOLE]),
            ROME_GATEWAY,
            {"priorities": (Use(500, "a rule", 4),)},
            "$.rules[0].priority",
            "priority 500",
        ),
        (
            routes(rules=[{"to": "10.9.0.0/16"}], routes=[BLACKHOLE]),
            ROME_GATEWAY,
            {"priorities": (Use(17021, "a rule", 4),)},
            "$.rules[0]",
            "priority 17021",
        ),
        (
            one_chain(rule(action={"action": "setMark", "value": 0x100})),
            WORKER,
            {"marks": (Use(0x4000, "kube-proxy"),)},
            "$.chains[0].rules[0].actions[0]",
            "mark bits 0xffffffff",
        ),
        (peering(), ROME_GATEWAY, {"marks": (Use(0x4000, "kube-proxy"),)}, "$.ends[0].gateway", "mark bits 0xff00"),
        (peering(), MILAN_GATEWAY, {"tables": (Use(7002, "IPv6 routes", 6),)}, "$.ends[1].gateway", "table 7002"),
        (peering(), MILAN_GATEWAY, {"priorities": (Use(890, "a rule", 4),)}, "$.ends[1].gateway", "priority 890"),
        (peering(tunnels=3), MILAN_GATEWAY, {"ports": (Use(51842, "a UDP socket"),)}, "$.port", "UDP port 51842"),
        (peering(), WORKER, {"tables": (Use(7010, "IPv4 routes", 4),)}, "$.ends[0].cluster", "table 7010"),
        (peering(), WORKER, {"priorities": (Use(900, "a rule", 4),)}, "$.ends[0].cluster", "priority 900"),
        (ENCRYPTING, WORKER, {"marks": (Use(0x200, "Cilium"),)}, "$.marks", "mark bits 0xfff"),
        (ENCRYPTING, WORKER, {"tables": (Use(10, "IPv4 routes", 4),)}, "$.encryption", "table 10"),
        (ENCRYPTING, WORKER, {"priorities": (Use(1001, "a rule", 4),)}, "$.encryption", "priority 1001"),
        (ENCRYPTING, WORKER, {"ports": (Use(51871, "cilium_wg0"),)}, "$.wireguard.port", "UDP port 51871"),
        (ENCRYPTING, WORKER, {"ports": (Use(51872, "cilium_wg0"),)}, "$.wireguard.port", "UDP port 51872"),
        (cluster("rome", routing="overlay"), WORKER, {"tables": (Use(7011, "IPv4 routes", 4),)}, "$.routing", "table 7011"),
        (cluster("rome", routing="overlay"), WORKER, {"priorities": (Use(902, "a rule", 4),)}, "$.routing", "priority 902"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_others_use_is_refused_and_admitted_when_they_are_gone(
    item: Topology, host: HostId, uses: dict[str, Any], field: str, number: str
) -> None:
    """The refusal names the field, the host, the number and who has it; a report without it lets the object in, without another word."""
    core = reporting(report(host, **uses))
    outcome = tell(core, [item], first=50)
    (refusal,) = outcome.refused
    (use,) = next(iter(uses.values()))
    ref = core.state.host(host).ref  # type: ignore[union-attr]
    assert (refusal.field, refusal.other) == (field, ref)
    assert refusal.reason.startswith(f"{number}, used by others on {ref} ({use.by}): ")
    assert not core.hear([]), "nothing has changed"
    core.note_in_use(report(host))
    assert [entry.ref for entry in core.hear([]).admitted] == [item.ref]


@pytest.mark.parametrize(
    "item, uses",
    [
        (routes(table=100, routes=[BLACKHOLE]), {"tables": (Use(100, "IPv6 routes", 6),)}),
        (routes(table=100, routes=[BLACKHOLE6]), {"tables": (Use(100, "IPv4 routes", 4),)}),
        (routes(table=100, routes=[BLACKHOLE], hosts={"role": "gateway"}), {"tables": (Use(100, "IPv4 routes", 4),)}),
        (routes(table=254, routes=[{**BLACKHOLE, "metric": 9}]), {"tables": (Use(254, "IPv4 routes", 4),)}),
        (routes(routes=[BLACKHOLE], rules=[{"fwmark": "0x4000", "mask": "0x4000"}]), {"marks": (Use(0x4000, "kube-proxy"),)}),
        (one_chain(rule(action={"action": "setMark", "value": 0x100, "mask": 0x100})), {"marks": (Use(0x4000, "kube-proxy"),)}),
        (one_chain(rule(action={"action": "setCtMark", "value": 0x4000, "mask": 0x4000})), {"marks": (Use(0x4000, "kube-proxy"),)}),
        (ENCRYPTING, {"marks": (Use(0x4000, "kube-proxy"),), "tables": (Use(7011, "IPv4 routes", 4),)}),
        (peering(), {"marks": (Use(0x4000, "kube-proxy"),), "tables": (Use(7001, "IPv4 routes", 4),), "ports": (Use(51840, "x"),)}),
    ],
    ids=["family", "other family", "other hosts", "main", "matches", "other bits", "ct mark", "encryption", "gateway's numbers on a node"],
)
def test_what_does_not_meet_is_admitted(item: Topology, uses: dict[str, Any]) -> None:
    """Another family's table, hosts that are not selected, main, marks that are only matched, other bits, what a node does not use."""
    core = reporting(report(WORKER, **uses))
    assert [entry.ref for entry in tell(core, [item], first=50).admitted] == [item.ref]


def test_who_is_in_stays_in_whatever_is_reported_later() -> None:
    """A report takes nothing away: no plan changes, the same said again is no news, and what an object has already it keeps in a change."""
    core = reporting(items=two_clusters())
    tell(core, [routes(table=100, routes=[BLACKHOLE])], first=50)
    plans = {step.host: step.plan for step in core.steps()}
    for host in (ROME_GATEWAY, WORKER):
        uses = (Use(100, "IPv4 routes", 4), Use(7001, "IPv4 routes", 4), Use(7010, "IPv4 routes", 4))
        core.note_in_use(report(host, marks=(Use(0x4000, "kube-proxy"),), tables=uses, ports=(Use(51840, "x"),)))
    assert not core.hear([])
    assert not core.steps() or all(plans[step.host] == step.plan for step in core.steps())
    assert not tell(core, [peering(), routes(table=100, routes=[BLACKHOLE])], first=60).refused
    wider = [peering(4), routes(table=100, routes=[BLACKHOLE, to("10.10.0.0/16", type="throw")])]
    assert {entry.ref for entry in tell(core, wider, first=70).admitted} == {item.ref for item in wider}


def test_a_change_is_asked_for_what_it_takes_in_addition() -> None:
    """One more tunnel's port or that after it, another table, more bits of a mark: refused, and the object before stays in force."""
    writing = one_chain(rule(action={"action": "setMark", "value": 0x1, "mask": 0x1}), hosts={"role": "node"})
    core = reporting(items=[*two_clusters(tunnels=2), routes(table=100, routes=[BLACKHOLE]), writing])
    core.note_in_use(report(ROME_GATEWAY, ports=(Use(51843, "x"),)))
    core.note_in_use(report(WORKER, tables=(Use(101, "x", 4),), marks=(Use(0x3, "x"),)))
    wider = one_chain(rule(action={"action": "setMark", "value": 0x3, "mask": 0x3}), hosts={"role": "node"})
    outcome = tell(core, [peering(3), routes(table=101, routes=[BLACKHOLE]), wider], first=50)
    numbers = [refusal.reason.partition(",")[0] for refusal in outcome.refused]
    assert numbers == ["UDP port 51843", "table 101", "mark bits 0x2"]
    assert core.state.objects[PEERING] == peering(2)


def test_a_host_that_comes_later_is_admitted_with_what_selects_it() -> None:
    """Only what takes numbers is asked: a node joins, whatever it reported when it was here before."""
    core = reporting(report(HostId("rome", "late"), tables=(Use(100, "x", 4), Use(7010, "x", 4))), items=two_clusters())
    outcome = tell(core, [routes(table=100, routes=[BLACKHOLE]), node("late", 9)], first=50)
    assert not outcome.refused


def test_a_node_that_opts_in_is_asked_for_what_it_needs_to_encrypt() -> None:
    """It stays opted out while others have that, and any other change of it is nobody's business."""
    items = two_clusters()
    known = next(item for item in items if isinstance(item, Node) and item.name == "worker-1")
    out = replace(known, opt_out=True)
    core = reporting(report(WORKER, tables=(Use(10, "IPv4 routes", 4),)), items=[*items, ENCRYPTING, out])
    (refusal,) = tell(core, [replace(out, opt_out=False)], first=70).refused
    assert (refusal.field, refusal.other) == ("$.optOut", out.ref)
    assert refusal.reason.startswith("table 10, used by others on Node/rome/worker-1")
    assert not tell(core, [replace(out, roaming=True)], first=80).refused
    core = reporting(report(WORKER, tables=(Use(10, "IPv4 routes", 4),)), items=[*items, ENCRYPTING])
    assert not tell(core, [replace(out, opt_out=False, roaming=True)], first=70).refused


def test_a_replay_of_what_was_admitted_leads_to_the_same() -> None:
    """A planner that starts anew reads what was admitted and the newest reports: nothing else is admitted, no plan differs."""
    core = reporting(items=two_clusters())
    tell(core, [routes("first", table=100, routes=[BLACKHOLE])], first=50)
    against = report(WORKER, tables=(Use(100, "x", 4), Use(200, "x", 4)), priorities=(Use(900, "x", 4),))
    core.note_in_use(against)
    tell(core, [routes("second", table=200, routes=[BLACKHOLE])], first=60)
    published: dict[HostId, HostPlan] = {step.host: step.plan for step in core.steps()}
    again = Core()
    again.allocations.rollouts.update(core.allocations.rollouts)
    for number in core.allocations.numbers.items():
        again.allocations.put_number(*number)
    objects = [(item, core.sequences[item.ref]) for item in core.state.objects.values()]
    again.restore(objects, published, {WORKER: against})
    everything = [*(said(item, sequence) for item, sequence in objects), said(routes("second", table=200, routes=[BLACKHOLE]), 60)]
    assert not again.hear(sorted(everything, key=lambda one: one.sequence), quiet=True)
    assert again.state.objects == core.state.objects
    assert again.steps() == []
    again.note_in_use(report(WORKER, tables=(Use(100, "x", 4),)))
    assert [entry.ref for entry in again.hear([]).admitted] == ["RouteConfiguration/rome/second"]


def test_a_host_that_has_not_looked_is_not_asked() -> None:
    """Of a report without the field, as older appliers send it, nothing follows; nor does it take back what was known."""
    core = reporting(report(ROME_GATEWAY, marks=None))
    assert not tell(core, [peering()], first=50).refused
    core = reporting(MARK, report(ROME_GATEWAY, marks=None))
    assert tell(core, [peering()], first=50).refused


def test_objects_that_wait_for_each_other_come_in_when_the_host_is_free() -> None:
    """A cluster with one more prefix and its peering with one more remap, held up by a port that somebody has on the new gateway."""
    items = two_clusters()
    spare = gateway("rome", "spare", 77)
    core = reporting(report(HostId("rome", "spare"), ports=(Use(51840, "x"),)), items=[*items, spare])
    rome, milan = peering().ends
    wider = replace(core.state.clusters["milan"], pod_prefixes=(*core.state.clusters["milan"].pod_prefixes, Prefix("10.201.0.0/16")))
    moved = peering(ends=(replace(rome, gateway=Name("spare"), remap_pods=(*rome.remap_pods, Prefix("10.65.0.0/16"))), milan))
    outcome = tell(core, [wider, moved], first=50)
    assert not outcome.admitted
    core.note_in_use(report(HostId("rome", "spare")))
    assert {entry.ref for entry in core.hear([]).admitted} == {"Cluster/milan/milan", PEERING}


def test_what_is_deleted_and_said_again_is_new() -> None:
    """Who left is asked as anybody else."""
    core = reporting(items=two_clusters())
    core.note_in_use(MARK)
    assert core.hear([Said(("peering", "rome", "rome-milan"), b"", 50)]).admitted
    assert [refusal.field for refusal in tell(core, [peering()], first=51).refused] == ["$.ends[0].gateway"]


def test_gateways_priorities_are_those_of_its_plan() -> None:
    """What is asked for is what a plan has: a rule that is added to gateways or nodes must be added there as well."""
    core = reporting(items=two_clusters())
    priorities: dict[str, set[int]] = {"gateway": set(), "worker-1": set()}
    for step in core.steps():
        if step.host.name in priorities:
            priorities[step.host.name] |= {item.priority for item in step.plan.objects().values() if isinstance(item, PolicyRule)}
    assert priorities["worker-1"] == {layout.RULE_NODE}
    assert priorities["gateway"] == set(layout.GATEWAY_RULES) - {layout.RULE_CONTROL}
