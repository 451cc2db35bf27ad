"""What doctor makes of a survey: each finding one verdict, with what to do; nothing that was not looked at is called fine."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from schemas.topology import Encryption, Overlay
from services.cli.doctor import abilities, collisions
from services.cli.doctor.check import Check, Role
from services.cli.doctor.collisions import Plans
from services.cli.doctor.owners import owner
from services.kernel.survey.values import (
    Ability,
    Filter,
    ForeignRoutes,
    ForeignRule,
    LinkSeen,
    MarkUse,
    Netfilter,
    PortSeen,
    Survey,
    Unknown,
    Uplink,
)
from services.planner import layout

YES, NO, MAYBE, THERE = (
    Ability("yes", "tried"),
    Ability("no", "no such thing"),
    Ability("unknown", "may not ask"),
    Ability("installed", "a file"),
)
NAMES = ("nftables", "conntrack", "vxlan", "geneve", "wireguard", "nflog", "nftrace", "resilient")
FINE = Survey(
    release="6.12.0",
    is_admin=True,
    libnftables=True,
    abilities=dict.fromkeys(NAMES, YES),
    wireguard_go=False,
    tun=False,
    sysctls={
        "net/ipv4/ip_forward": "0",
        "net/ipv4/fib_multipath_hash_policy": "0",
        "net/ipv4/fib_multipath_hash_fields": "7",
        "net/ipv6/conf/all/disable_ipv6": "0",
    },
    sysctls_writable=True,
    netfilter=Netfilter(),
    legacy=(),
    rules=(),
    routes=(),
    links=(LinkSeen("lo", "", is_own=False),),
    ports=(),
    uplinks=(Uplink("eth0", 2),),
)
BLIND = Unknown("Operation not permitted")


NODE_PORTS = (51871, 51872)


def checks(
    survey: Survey, role: Role = "gateway", overlay: Overlay = "vxlan", encryption: Encryption = "none", mask: int = 0xFFF
) -> dict[str, Check]:
    plans = Plans(role, encryption, mask, NODE_PORTS if role == "node" else (51840,))
    found = (*abilities.checks(survey, role, overlay, encrypts=plans.encrypts), *collisions.checks(survey, plans))
    return {check.name: check for check in found}


def having(**changed: Ability) -> Survey:
    return replace(FINE, abilities={**FINE.abilities, **changed})


@pytest.mark.parametrize("role", ["gateway", "node"])
def test_a_fine_host_is_fine(role: Role):
    found = checks(FINE, role).values()
    assert {check.verdict for check in found} == {"ok"}
    assert not any(check.advice for check in found)


@pytest.mark.parametrize(
    "survey, name, verdict, words",
    [
        (having(vxlan=NO), "vxlan", "problem", "no such thing"),
        (having(vxlan=THERE), "vxlan", "ok", "a file"),
        (having(vxlan=MAYBE), "vxlan", "unknown", "may not ask"),
        (having(nftables=NO), "nftables", "problem", "no such thing"),
        (replace(FINE, libnftables=False), "nftables", "problem", "no libnftables"),
        (having(conntrack=NO), "connection tracking", "problem", ""),
        (having(geneve=NO), "geneve", "ok", "a cluster with vxlan does not need it"),
        (having(nflog=MAYBE), "NFLOG", "unknown", "nodes that encrypt need it"),
        (having(wireguard=NO), "WireGuard", "problem", "there is no wireguard-go"),
        (having(wireguard=MAYBE), "WireGuard", "unknown", "may not ask"),
        (having(wireguard=THERE), "WireGuard", "ok", "in the kernel"),
        (replace(having(wireguard=NO), wireguard_go=True), "WireGuard", "problem", "there is no /dev/net/tun"),
        (replace(having(wireguard=NO), wireguard_go=True, tun=True), "WireGuard", "ok", "wireguard-go and /dev/net/tun are here"),
        (replace(FINE, is_admin=False), "rights", "unknown", "CAP_NET_ADMIN"),
        (replace(FINE, sysctls={}), "multipath hash", "problem", "fib_multipath_hash_policy"),
        (replace(FINE, sysctls={}), "IPv6", "warning", ""),
        (replace(FINE, sysctls={"net/ipv6/conf/all/disable_ipv6": "1"}), "IPv6", "warning", "disabled"),
        (replace(FINE, sysctls_writable=False), "/proc/sys/net", "problem", "not writable"),
        (replace(FINE, routes=(ForeignRoutes(4, 7001, 3),)), "route tables", "problem", "3 IPv4 routes of others in table 7001"),
        (replace(FINE, rules=(ForeignRule(6, 100, 7002),)), "route tables", "warning", "IPv6 rule 100 lookup 7002"),
        (replace(FINE, routes=BLIND), "route tables", "unknown", "Operation not permitted"),
        (replace(FINE, rules=(ForeignRule(4, 900, 300, 1, 1),)), "rule priorities", "warning", "IPv4 rule 900 fwmark 0x1/0x1 lookup 300"),
        (replace(FINE, rules=BLIND), "rule priorities", "unknown", "Operation not permitted"),
        (replace(FINE, links=(LinkSeen("mo.a", "bridge", is_own=False),)), "link names", "problem", "mo.a (bridge)"),
        (replace(FINE, links=(LinkSeen("mo.a", "vxlan", is_own=True),)), "link names", "ok", ""),
        (replace(FINE, links=BLIND), "link names", "unknown", "Operation not permitted"),
        (replace(FINE, uplinks=(Uplink("eth0", 1),)), "rp_filter", "warning", "strict on the uplink eth0"),
        (replace(FINE, uplinks=()), "rp_filter", "unknown", "no IPv4 default route"),
        (replace(FINE, uplinks=BLIND), "rp_filter", "unknown", "Operation not permitted"),
        (replace(FINE, netfilter=Netfilter(drops=(Filter("ip", "filter", "FORWARD"),))), "forwarding", "warning", "ip filter FORWARD"),
        (replace(FINE, netfilter=BLIND), "forwarding", "unknown", "Operation not permitted"),
        (replace(FINE, legacy=("ip filter",)), "forwarding", "unknown", "ip filter"),
        (replace(FINE, legacy=("ip nat",)), "forwarding", "ok", ""),
    ],
)
def test_what_is_seen_is_judged(survey: Survey, name: str, verdict: str, words: str):
    check = checks(survey)[name]
    assert check.verdict == verdict
    assert words in check.detail
    assert check.advice or verdict in ("ok", "unknown")


def test_the_overlay_that_the_cluster_has_is_the_one_that_is_needed():
    assert checks(having(geneve=NO), overlay="geneve")["geneve"].verdict == "problem"
    assert "does not need it" in checks(having(vxlan=NO), overlay="geneve")["vxlan"].detail
    assert checks(FINE, overlay="geneve")["geneve"].verdict == "ok"


@pytest.mark.parametrize(
    "survey, verdict, words",
    [
        (
            replace(FINE, netfilter=Netfilter((MarkUse("ip nat M", "sets", 0x4000, 0x4000),))),
            "problem",
            "ip nat M sets 0x4000 (as kube-proxy)",
        ),
        (replace(FINE, netfilter=Netfilter((MarkUse("ip t c", "sets", 0xFFFFFFFF),))), "problem", "ip t c sets a mark"),
        (
            replace(FINE, rules=(ForeignRule(4, 32764, 51820, 0xCA6C, 0xFFFFFFFF),)),
            "problem",
            "policy rule 32764 matches 0xca6c (as wg-quick)",
        ),
        (replace(FINE, rules=(ForeignRule(4, 5210, 52, 0x80000, 0xFF0000),)), "ok", "1 uses of other bits"),
        (replace(FINE, netfilter=Netfilter(opaque=("ip mangle",))), "unknown", "rules in table ip mangle were not understood"),
        (replace(FINE, netfilter=BLIND), "unknown", "nftables cannot be read (Operation not permitted)"),
        (replace(FINE, rules=BLIND), "unknown", "policy rules cannot be read"),
        (replace(FINE, legacy=("ip mangle",)), "unknown", "iptables-legacy-save"),
        (replace(FINE, legacy=BLIND), "unknown", "cannot be read"),
    ],
)
def test_marks_collide_by_bits(survey: Survey, verdict: str, words: str):
    check = checks(survey)["marks"]
    assert check.verdict == verdict
    assert words in check.detail


@pytest.mark.parametrize(
    "ports, links, verdict, words",
    [
        ((PortSeen(4789, None),), (LinkSeen("mo.a", "vxlan", is_own=True, port=4789),), "ok", "meshmark's own"),
        ((PortSeen(4789, None),), (LinkSeen("flannel.1", "vxlan", is_own=False, port=4789),), "warning", "shared with flannel.1"),
        ((PortSeen(51840, None),), (LinkSeen("mt.0", "wireguard", is_own=True, port=51840),), "ok", ""),
        ((PortSeen(51840, "wireguard-go (7)"),), (LinkSeen("mt.0", "tun", is_own=True, port=51840),), "ok", ""),
        ((PortSeen(51840, "wireguard-go (7)"),), (LinkSeen("wg0", "tun", is_own=False, port=51840),), "problem", "tun device wg0"),
        ((PortSeen(51840, None),), (LinkSeen("wg0", "wireguard", is_own=False, port=51840),), "problem", "wireguard device wg0"),
        ((PortSeen(51840, None),), (LinkSeen("wg0", "wireguard", is_own=False, port=None),), "unknown", "cannot be seen"),
        ((PortSeen(51840, "wireguard-go (7)"),), (LinkSeen("mt.0", "tun", is_own=True, port=0),), "unknown", "in use by wireguard-go (7)"),
        ((PortSeen(6081, None),), (LinkSeen("genev_sys_6081", "geneve", is_own=False, port=6081),), "warning", "shared with genev_sys"),
        ((PortSeen(4789, "nc (9)"), PortSeen(4789, None)), (LinkSeen("mo.a", "vxlan", is_own=True, port=4789),), "problem", "nc (9)"),
    ],
)
def test_ports_of_our_own_are_no_collision(ports: tuple[PortSeen, ...], links: tuple[LinkSeen, ...], verdict: str, words: str):
    check = checks(replace(FINE, ports=ports, links=links))["UDP ports"]
    assert check.verdict == verdict
    assert words in check.detail


def test_a_node_needs_less():
    """No tunnels, no multipath; its own tables and priorities; and forwarding that is on already."""
    survey = replace(
        having(wireguard=NO), sysctls={"net/ipv4/ip_forward": "1"}, sysctls_writable=False, routes=(ForeignRoutes(4, 7001, 1),)
    )
    found = checks(survey, "node")
    assert [found[name].verdict for name in ("WireGuard", "multipath hash", "/proc/sys/net", "route tables")] == ["ok"] * 4
    assert checks(replace(FINE, routes=(ForeignRoutes(6, 7010, 1),)), "node")["route tables"].verdict == "problem"
    assert Plans("node").priorities == (900, 902, 903, 1000, 1001)


@pytest.mark.parametrize("table, need", [(10, "to encrypt"), (7011, "for the overlay"), (7101, "EgressPolicy"), (7354, "EgressPolicy")])
def test_what_not_all_nodes_need_is_a_warning(table: int, need: str):
    """Until it is said that a node encrypts; a gateway does not look there."""
    survey = replace(FINE, routes=(ForeignRoutes(4, table, 2),))
    found = checks(survey, "node")["route tables"]
    assert (found.verdict, need in found.detail) == ("warning", True)
    assert checks(survey, "node", encryption="wireguard")["route tables"].verdict == ("problem" if table == 10 else "warning")
    assert checks(survey)["route tables"].verdict == "ok"
    both = replace(survey, routes=(*survey.routes, ForeignRoutes(6, 7010, 1)))
    assert checks(both, "node")["route tables"].verdict == "problem"


@pytest.mark.parametrize("priority", [900, 902, 903, 1000, 1001])
def test_rules_of_others_at_a_nodes_priorities_are_told(priority: int):
    assert checks(replace(FINE, rules=(ForeignRule(4, priority, 52),)), "node")["rule priorities"].verdict == "warning"


def test_a_nodes_marks_are_those_of_its_cluster():
    """By default those of the seed, of which Cilium uses some; a node that does not encrypt is warned."""
    survey = replace(FINE, netfilter=Netfilter((MarkUse("ip t c", "sets", 0x0F00, 0x0200),)))
    found = checks(survey, "node", encryption="wireguard")["marks"]
    assert (found.verdict, "as Cilium" in found.detail, "`marks`" in found.advice) == ("problem", True, True)
    assert checks(survey, "node")["marks"].verdict == "warning"
    assert checks(survey, "node", encryption="wireguard", mask=0xFF0000)["marks"].verdict == "ok"
    assert checks(replace(FINE, netfilter=BLIND), "node")["marks"].verdict == "unknown"


@pytest.mark.parametrize("port", NODE_PORTS)
def test_a_node_needs_two_ports_of_wireguard(port: int):
    """The device's, and the next one for while keys change."""
    taken = replace(FINE, ports=(PortSeen(port, "nc (9)"),))
    found = checks(taken, "node", encryption="wireguard")["UDP ports"]
    assert (found.verdict, "wireguard.port" in found.advice) == ("problem", True)
    assert checks(taken, "node")["UDP ports"].verdict == "warning"
    own = replace(FINE, ports=(PortSeen(port, None),), links=(LinkSeen("me.0", "wireguard", is_own=True, port=port),))
    assert checks(own, "node", encryption="wireguard")["UDP ports"].verdict == "ok"


def test_a_node_that_encrypts_needs_wireguard():
    assert checks(having(wireguard=NO), "node", encryption="wireguard")["WireGuard"].verdict == "problem"


KNOWN_OTHERWISE = {
    "RULE_PUBLISHED": "which priorities published rules have is known when they are published, and admission asks hosts then",
    "RULE_PUBLISHED_STEP": "see there",
    "EGRESS_TABLE": "no table itself: slots count from 1",
    "OVERLAY_PORT": "the port of the overlay that is asked for is given to the survey by the command",
}


def test_every_number_of_the_layout_is_known_here():
    """Marks, tables and priorities that plans take on a host: who adds one adds it to what doctor looks at."""
    both = [Plans("gateway"), Plans("node", "wireguard")]
    known = {
        "TABLE": {number for plans in both for span in plans.table_spans for number in (span.start, span.stop - 1)}
        | {number for plans in both for number in plans.tables},
        "RULE": {number for plans in both for number in plans.priorities},
        "MASK": {plans.field for plans in both},
    }
    unknown = []
    for name, value in vars(layout).items():
        kinds = [kind for kind in known if kind in name.split("_") and isinstance(value, int)]
        unknown += [name for kind in kinds if name not in KNOWN_OTHERWISE and value not in known[kind]]
        if name.isupper() and "PORT" in name.split("_"):
            unknown += [name] if name not in KNOWN_OTHERWISE else []
    assert unknown == []
    assert set(layout.OWN_TABLES) <= known["TABLE"]
    assert known["RULE"] <= {number for span in layout.OWN_RULES for number in span}
    assert KNOWN_OTHERWISE.keys() <= vars(layout).keys()


@pytest.mark.parametrize(
    "mask, value, name",
    [
        (0x4000, 0x4000, "kube-proxy"),
        (0x8000, 0x8000, "kube-proxy"),
        (0x2000, 0x2000, "CNI plugins and netavark"),
        (0x0F00, 0x0200, "Cilium"),
        (0xFF0000, 0x80000, "Tailscale"),
        (0xFFFF0000, 0x10000000, "Calico"),
        (0xFFFFFFFF, 0xCA6C, "wg-quick"),
        (0xFFFFFFFF, 0x6D6F6C65, "Mullvad"),
        (0xFFFFFFFF, 0x1, ""),
        (0xFF, 0x1, ""),
    ],
)
def test_known_marks_have_owners(mask: int, value: int, name: str):
    assert owner(mask, value) == name


def test_a_node_that_encrypts_needs_to_show_packets():
    """By NFLOG, and by a group that nobody else hears; a gateway does without."""
    without = having(nflog=NO)
    assert (checks(without, "node")["NFLOG"].verdict, checks(without)["NFLOG"].verdict) == ("warning", "ok")
    for who, verdict in (("", "warning"), ("ulogd", "warning"), ("meshmark", "ok")):
        found = checks(replace(FINE, listeners={5187: who, 1: "other"}), "node")["NFLOG groups"]
        assert (found.verdict, "auditGroup" in found.advice) == (verdict, verdict != "ok")
    assert checks(FINE, "node")["NFLOG groups"].detail == "nobody listens to 5187 or 5188"


@pytest.mark.parametrize("role", ["node", "gateway"])
def test_traces_show_packets_on_any_host(role: Role):
    """By a group of their own, which somebody else may hear; the other one is none of a gateway's business."""
    for who, verdict in (("", "warning"), ("ulogd", "warning"), ("meshmark", "ok")):
        found = checks(replace(FINE, listeners={5188: who}), role)["NFLOG groups"]
        assert (found.verdict, "traces do not show" in found.advice) == (verdict, verdict != "ok")
    assert checks(replace(FINE, listeners={5187: "ulogd"}))["NFLOG groups"].detail == "nobody listens to 5188"
