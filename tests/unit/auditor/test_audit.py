"""Comparison and ledger: one finding per cause, silence while a unit is on its way, and the story of each difference."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import pytest
from msgspec import structs

from schemas.drift import Suspect
from schemas.host_objects import (
    Layer,
    LinkAddress,
    NftChain,
    NftElement,
    NftTable,
    PolicyRule,
    Route,
    Sysctl,
    VxlanLink,
    WireguardLink,
    WireguardPeer,
)
from schemas.plan import Entry, HostPlan
from schemas.topology import DriftPolicy
from schemas.values import Address, Endpoint, Key, Mac, Prefix
from services.applier.core import Applier
from services.auditor.compare import MARKER_KEY, compare
from services.auditor.findings import LAYERS, Finding, View
from services.auditor.ledger import CONTESTED_AFTER, WINDOW_S, Ledger
from services.kernel.fake import FakeHost, FakeKernel
from tests.topologies import ROME_GATEWAY, keys, settled_plans, two_clusters

OWN_KEY = FakeKernel().public_key()
PLAN = settled_plans([*two_clusters(), *keys(OWN_KEY)])[ROME_GATEWAY]
PUBLIC = Key("x" * 42 + "A=")
PEER = next(key for key, item in PLAN.objects().items() if isinstance(item, WireguardPeer) and item.link == "mt.0")
RULE = "rule 900 fwmark 0xff00/0xff00 iif - to -"


def applied() -> FakeHost:
    host = FakeHost()
    Applier(FakeKernel(host), lambda: 0.0).apply(PLAN, 1, 1)
    return host


def look(host: FakeHost, plan: HostPlan = PLAN, reported: dict[str, str] = PLAN.digests()) -> list[Finding]:  # noqa: B008
    kernel = FakeKernel(host, looks_only=True)
    wanted = plan.objects()
    view = View(kernel.reference(wanted), kernel.read(wanted, LAYERS), kernel.marker(), reported, kernel.links())
    return compare(view, plan, set(LAYERS))


def test_every_layer_of_a_plan_is_compared() -> None:
    """A layer that plans can have is one that the auditor looks at, and one that a cluster's policy names."""
    assert set(LAYERS) == set(get_args(Layer)) == set(DriftPolicy.__struct_fields__)


def test_what_was_applied_is_no_drift() -> None:
    """An untouched kernel has no findings."""
    assert look(applied()) == []


@pytest.mark.parametrize("key", [key for key, item in PLAN.objects().items() if not isinstance(item, NftTable | Sysctl)])
def test_each_missing_object_is_found(key: str) -> None:
    """Whatever goes missing by itself is one finding, with its unit and the topology behind it."""
    host = applied()
    del host.objects[key]
    (finding,) = look(host)
    assert (finding.key, finding.found, finding.unit) == (key, "", "peering/rome/rome-milan")
    assert "Peering/rome/rome-milan" in finding.because


def test_a_missing_table_stands_for_all_in_it() -> None:
    """After ``flush ruleset`` there is a finding for each table, and one for the marker."""
    host = applied()
    for key in [key for key, item in host.objects.items() if item.layer == "nft"]:
        del host.objects[key]
    host.marker = None
    assert [finding.key for finding in look(host)] == [MARKER_KEY, "table meshmark.host", "table meshmark.rome.rome-milan"]


def test_additions_to_what_is_ours_are_found() -> None:
    """A foreign element, rule or route with our protocol is a finding without a wanted form."""
    host = applied()
    table = "meshmark.rome.rome-milan"
    others = VxlanLink("mo.other", 9, Address("192.0.2.1"), Address("192.0.2.2"), Mac("02:00:00:00:00:09"), 1400)
    peer = WireguardPeer("mt.0", PUBLIC, Endpoint("192.0.2.9:51820"), (Prefix("192.0.2.0/24"),))
    items = (
        NftElement(table, "sources", "192.0.2.0/24"),
        PolicyRule(5, 7001),
        Route(7001, Prefix("192.0.2.0/24"), "unreachable", 3),
        LinkAddress("mt.0", Address("192.0.2.7"), 32),
        peer,
        others,
        LinkAddress("mo.other", Address("192.0.2.8"), 32),
    )
    host.objects.update({item.key: item for item in items})
    found = look(host)
    assert {finding.wanted for finding in found} == {""}
    assert sorted(finding.layer for finding in found) == ["address", "link", "nft", "route", "rule", "wireguard"], (
        "one on an added link is not told"
    )
    assert {finding.unit for finding in found if finding.layer in ("nft", "address", "wireguard")} == {"peering/rome/rome-milan"}


@pytest.mark.parametrize(
    "change",
    [
        lambda host: replaced(host, "link mt.0", mtu=1300),
        lambda host: replaced(host, "link mt.0", listen_port=4444),
        lambda host: replaced(host, "link mt.0", public_key=PUBLIC),
        lambda host: replaced(host, "link mo.worker-1", mac=Mac("02:00:00:00:00:77")),
        lambda host: replaced(host, PEER, allowed_ips=(Prefix("10.9.0.0/16"),)),
        lambda host: replaced(host, PEER, keepalive_seconds=7),
        lambda host: host.sysctls.update({"net/ipv4/ip_forward": "0"}) or "sysctl net/ipv4/ip_forward",
    ],
    ids=["MTU", "port", "private key", "MAC", "AllowedIPs", "keepalive", "sysctl"],
)
def test_each_field_is_compared(change: Callable[[FakeHost], str]) -> None:
    """A field of a link, a peer or a sysctl that somebody changed is one finding, with both values."""
    host = applied()
    key = change(host)
    (finding,) = look(host)
    assert (finding.key, finding.unit) == (key, "peering/rome/rome-milan")
    assert finding.wanted != finding.found != ""


def replaced(host: FakeHost, key: str, **fields: object) -> str:
    host.objects[key] = structs.replace(host.objects[key], **fields)  # type: ignore[type-var]
    return key


def test_any_key_will_do_until_the_planner_knows_the_host_s() -> None:
    """A plan from before the host published its key says nothing about the key."""
    plan = settled_plans(two_clusters())[ROME_GATEWAY]
    assert any(isinstance(item, WireguardLink) and item.public_key is None for item in plan.objects().values())
    host = FakeHost()
    Applier(FakeKernel(host), lambda: 0.0).apply(plan, 1, 1)
    assert look(host, plan, plan.digests()) == []


def test_the_stricter_rp_filter_counts() -> None:
    """A link is judged by the larger of its own value and that of all links; what is stricter than wanted is drift, and nothing else."""
    link = PLAN.objects()["link mo.worker-1"]
    loose = Sysctl("net/ipv4/conf/mo.worker-1/rp_filter", "2")
    plan = HostPlan(PLAN.cluster, PLAN.host, {"one": {item.key: Entry(item, ()) for item in (link, loose)}})
    host = FakeHost(sysctls={"net/ipv4/conf/all/rp_filter": "1"})
    Applier(FakeKernel(host), lambda: 0.0).apply(plan, 1, 1)
    assert host.sysctls == {"net/ipv4/conf/all/rp_filter": "1", loose.name: "2"}
    assert look(host, plan) == []
    host.sysctls[loose.name] = "1"
    assert [finding.key for finding in look(host, plan)] == [loose.key]
    host.sysctls["net/ipv4/conf/all/rp_filter"] = "2"
    assert look(host, plan) == []


def test_a_changed_chain_shows_the_rules_that_differ() -> None:
    """Of a chain with an extra rule, only that rule is shown."""
    host = applied()
    chain = PLAN.objects()["chain meshmark.rome.rome-milan forward"]
    assert isinstance(chain, NftChain)
    host.objects[chain.key] = NftChain(chain.table, chain.name, chain.rules[:-1], chain.type, chain.hook, chain.priority)
    (finding,) = look(host)
    assert "maxseg" in finding.wanted
    assert "\n" not in finding.wanted
    assert finding.found == ""


def test_a_unit_on_its_way_is_no_drift() -> None:
    """While the marker names another digest than the plan, the unit's objects, old and new, are left alone."""
    host = applied()
    newer = settled_plans([*two_clusters(3, 5), *keys(OWN_KEY)])[ROME_GATEWAY]
    assert look(host, newer) == []


def test_a_unit_that_is_not_planned_yet_or_any_more_is_no_drift() -> None:
    """An applier may know a newer plan, or still have to remove: while the marker names a unit beyond the plan, nothing is a stray."""
    assert look(applied(), HostPlan(PLAN.cluster, PLAN.host, {})) == []


def test_a_plan_that_is_not_held_yet_is_no_drift() -> None:
    """On a host that never held the plan, nothing is missing: it is still to come."""
    assert look(FakeHost(), reported={}) == []
    assert look(FakeHost(), reported={"peering/rome/rome-milan": ""}) == []


# The ledger ----------------------------------------------------------------------------------------------------------------------------


def finding(found: str = "", key: str = RULE) -> Finding:
    return Finding("rule", key, "wanted", found, "unit", ("Peering/rome/rome-milan",))


def states(ledger: Ledger, findings: list[Finding], now_s: float) -> list[tuple[str, str]]:
    return [(event.key, event.state) for event in ledger.observe(findings, LAYERS, now_s, {"rule": Suspect(7, "ip")}, 4)]


def test_raised_once_and_resolved() -> None:
    """A difference is told when it comes and when it goes, not in between."""
    ledger = Ledger("rome", "gateway", 0.5)
    assert states(ledger, [finding()], 1.0) == [(RULE, "raised")]
    assert states(ledger, [finding()], 2.0) == []
    assert states(ledger, [finding("other")], 3.0) == [(RULE, "changed")]
    assert states(ledger, [], 4.0) == [(RULE, "resolved")]
    assert states(ledger, [], 5.0) == []


def test_the_event_says_who_when_and_why() -> None:
    """Suspect, first seen, generation and the topology objects are in the event."""
    (event,) = Ledger("rome", "gateway", 0.5).observe([finding()], LAYERS, 12.5, {"rule": Suspect(7, "ip")}, 4)
    assert event.suspect == Suspect(7, "ip")
    assert (event.first_seen_s, event.generation, event.because) == (12.5, 4, ("Peering/rome/rome-milan",))


def test_a_layer_that_was_not_looked_at_resolves_nothing() -> None:
    """Looking at routes says nothing about rules."""
    ledger = Ledger("rome", "gateway", 0.5)
    states(ledger, [finding()], 1.0)
    assert ledger.observe([], ("route",), 2.0, {}, 1) == []


def test_somebody_who_insists_is_contested_and_repaired_more_slowly() -> None:
    """The third time within a minute is contested; repairs wait longer each time, and a quiet minute forgives."""
    ledger = Ledger("rome", "gateway", 0.5)
    seen, delays = [], []
    for number in range(CONTESTED_AFTER + 3):
        seen += [state for _, state in states(ledger, [finding()], float(number)) if state != "resolved"]
        delays.append(ledger.repair_delay_s(LAYERS, float(number)))
        states(ledger, [], number + 0.5)
    assert seen == ["raised"] * (CONTESTED_AFTER - 1) + ["contested"] * 4
    assert delays == [0.0, 0.0, 1.0, 2.0, 4.0, 8.0]
    assert states(ledger, [finding()], 2 * WINDOW_S) == [(RULE, "raised")]
    assert ledger.repair_delay_s(LAYERS, 2 * WINDOW_S) == 0.0


def test_a_repair_that_is_undone_before_anybody_looks_counts() -> None:
    """What is there after a repair was made anew: from the third time on that is contested; one of another unit says nothing."""
    ledger = Ledger("rome", "gateway", 0.5)
    seen = []
    for number in range(CONTESTED_AFTER + 1):
        ledger.repaired(("rule",), ("unit",))
        seen += states(ledger, [finding()], float(number))
    assert seen == [(RULE, "raised"), (RULE, "contested"), (RULE, "contested")]
    assert states(ledger, [finding("other")], float(CONTESTED_AFTER) + 0.1) == [(RULE, "contested")], "a change does not hide that"
    assert ledger.repair_delay_s(LAYERS, float(CONTESTED_AFTER)) == 2.0
    assert states(ledger, [], 9.0) == [(RULE, "resolved")]
    other = finding(key="rule 901 - iif - to -")
    assert states(ledger, [other], 10.0) == [(other.key, "raised")]
    ledger.repaired(("rule",), ("another",))
    ledger.repaired(("route",), ("unit",))
    assert states(ledger, [other], 11.0) == []
    assert ledger.repair_delay_s(LAYERS, 11.0) == 0.0


def test_what_the_one_before_had_open_is_over_unless_it_is_raised_anew() -> None:
    """Said once of each layer that it may have left open, after a complete look; what is there still was raised after its time."""
    ledger = Ledger("rome", "gateway", 7.0)
    ledger.inherit(("rule", "route"))
    assert ledger.observe([], ("nft",), 8.0, {}, 1) == []
    ledger.unreadable("route", "no answer", 8.5)
    raised, over = ledger.observe([finding()], ("rule", "nft"), 9.0, {}, 1)
    assert (raised.key, raised.state, raised.at_s) == (RULE, "raised", 9.0)
    assert (over.key, over.state, over.first_seen_s, over.at_s) == ("layer rule", "resolved", 7.0, 9.0)
    assert [(event.key, event.state) for event in ledger.observe([finding()], LAYERS, 10.0, {}, 1)] == [("layer route", "resolved")]
    assert ledger.observe([finding()], LAYERS, 11.0, {}, 1) == []


def test_the_last_event_of_a_layer_says_whether_anything_is_left_open() -> None:
    """Whatever it is about: another difference, the layer as a whole, or what the one before had open, as long as that is not known."""
    ledger, other = Ledger("rome", "gateway", 0.5), finding(key="rule 901 - iif - to -")
    (raised,) = ledger.observe([finding()], LAYERS, 1.0, {}, 1)
    (resolved,) = ledger.observe([], LAYERS, 1.5, {}, 1)
    assert (raised.leaves_open, resolved.leaves_open) == (True, True), "nobody knows yet what was before"
    ledger.inherit(())
    ledger.observe([finding(), other], LAYERS, 2.0, {}, 1)
    assert [event.leaves_open for event in ledger.observe([other], LAYERS, 3.0, {}, 1)] == [True]
    assert [event.leaves_open for event in ledger.observe([finding()], LAYERS, 4.0, {}, 1)] == [False, True]
    assert [event.leaves_open for event in ledger.unreadable("nft", "no answer", 5.0)] == [True]
    assert [(event.layer, event.leaves_open) for event in ledger.observe([], LAYERS, 6.0, {}, 1)] == [("rule", False), ("nft", False)]
    ledger.inherit(("rule",))
    ledger.observe([other], ("route",), 7.0, {}, 1)
    assert [(event.key, event.leaves_open) for event in ledger.observe([], LAYERS, 8.0, {}, 1)][-1] == ("layer rule", False)


def test_an_unreadable_layer_is_told_once() -> None:
    """A reader that fails says unknown, once, and never that all is missing."""
    ledger = Ledger("rome", "gateway", 0.5)
    assert [event.state for event in ledger.unreadable("nft", "no answer", 1.0)] == ["unknown"]
    assert ledger.unreadable("nft", "no answer", 2.0) == []
    assert [(event.key, event.state) for event in ledger.observe([], ("nft",), 3.0, {}, 1)] == [("layer nft", "resolved")]
    assert [event.state for event in ledger.unreadable("nft", "no answer", 4.0)] == ["unknown"]
