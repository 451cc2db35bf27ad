"""nft text: golden transcripts of a plan and of a batch, and the order inside a transaction."""

from __future__ import annotations

from textwrap import dedent

import pytest

from schemas.host_objects import LinkAddress, NftChain, NftElement, NftSet, NftTable, PlanObject
from schemas.nft import (
    ClampMss,
    Comment,
    CopyMark,
    Counter,
    Limit,
    Log,
    Masquerade,
    Match,
    Nat,
    NatTo,
    Notrack,
    Reject,
    Rule,
    SetCtMark,
    SetMark,
    Verdict,
    VerdictMap,
)
from schemas.values import IPV6, Address
from services.kernel.nft.statements import element_text, rule_text
from services.kernel.nft.text import Context, batch_text, needs_refill, table_text
from services.kernel.transaction import Change, Listed, ListedChain, Marker, changes, with_dependents
from services.runtime.errors import Permanent

T = "meshmark.t"
RULES = {
    'iifname "mo.*"': (Match("iifname", ("mo.*",)),),
    'iifname != { "mo.*", "eth0" } drop': (Match("iifname", ("mo.*", "eth0"), "!="), Verdict("drop")),
    "oifname @tunnels": (Match("oifname", ("@tunnels",)),),
    "ip daddr 10.61.0.0/16 accept": (Match("ip daddr", ("10.61.0.0/16",)), Verdict("accept")),
    "meta mark & 0xff00 == 0xff00": (Match("meta mark", ("0xff00",), mask=0xFF00),),
    "meta mark & 0xff00 != 0x0": (Match("meta mark", ("0x0",), "!=", 0xFF00),),
    "meta mark 0x4d2": (Match("meta mark", ("0x4d2",)),),
    "udp dport { 4789, 51840-51850 } notrack": (Match("udp dport", ("4789", "51840-51850")), Notrack()),
    "ct state != related": (Match("ct state", ("related",), "!="),),
    "fib saddr . mark . iif oif missing counter drop": (Match("fib saddr . mark . iif oif", ("missing",)), Counter(), Verdict("drop")),
    'fib saddr . mark oifname != "mt.*"': (Match("fib saddr . mark oifname", ("mt.*",), "!="),),
    "fib daddr type local": (Match("fib daddr type", ("local",)),),
    "tcp flags & (syn | rst) == syn tcp option maxseg size set rt mtu": (Match("tcp flags & (syn | rst)", ("syn",)), ClampMss()),
    "iifname vmap @class": (VerdictMap("iifname", "class"),),
    "meta mark set meta mark & 0xffff00ff | 0xfe00": (SetMark(0xFE00, 0xFF00),),
    "meta mark set meta mark & 0xffff00ff": (SetMark(0, 0xFF00),),
    "meta mark set 0x7": (SetMark(7, 0xFFFFFFFF),),
    "meta mark set meta mark & 0xfffffff0 | 0x5": (SetMark(0xF5, 0xF),),
    "dnat ip prefix to ip daddr map @dn": (Nat("dnat", "dn"),),
    "snat ip to ip saddr map @hosts": (Nat("snat", "hosts", prefix=False),),
    "dnat ip6 prefix to ip6 daddr map @dn6": (Nat("dnat", "dn6", family=IPV6),),
    "snat ip6 to ip6 saddr map @hosts6": (Nat("snat", "hosts6", prefix=False, family=IPV6),),
    "ip6 saddr != { ::, fe80::/10 }": (Match("ip6 saddr", ("::", "fe80::/10"), "!="),),
    "jump next": (Verdict("jump", "next"),),
    "ip6 saddr fd00::/64 reject": (Match("ip6 saddr", ("fd00::/64",)), Reject()),
    "tcp flags syn tcp option maxseg size set 1200": (Match("tcp flags", ("syn",)), ClampMss(1200)),
    "meta mark set ct mark": (CopyMark("meta", 0xFFFFFFFF),),
    "ct mark set meta mark & 0xff": (CopyMark("ct", 0xFF),),
    "ct mark set ct mark & 0xffffff00 | 0x5": (SetCtMark(5, 0xFF),),
    "ct mark set 0x1": (SetCtMark(1, 0xFFFFFFFF),),
    "dnat ip prefix to 10.200.0.0/16": (NatTo("dnat", "ip", "10.200.0.0/16"),),
    "snat ip to 10.0.0.1": (NatTo("snat", "ip", "10.0.0.1"),),
    "dnat ip to 10.0.0.1:80": (NatTo("dnat", "ip", "10.0.0.1", 80),),
    "dnat ip6 to [fd00::1]:80": (NatTo("dnat", "ip6", "fd00::1", 80),),
    'masquerade comment "it\'s so"': (Masquerade(), Comment("it's so")),
    'limit rate 10/second burst 20 packets log prefix "in pods" group 77 snaplen 160': (Limit(10, 20), Log(77, "in pods", 160)),
    "udp sport 1 udp dport 2": (Match("udp sport", ("1",)), Match("udp dport", ("2",))),
    "udp sport != 1 udp dport != 2/16": (Match("udp sport", ("1",), "!="), Match("udp dport", ("2",), "!=")),
    "udp sport 1 counter udp dport 2/16": (Match("udp sport", ("1",)), Counter(), Match("udp dport", ("2",))),
    "udp sport { 1, 2 } udp dport != 3": (Match("udp sport", ("1", "2")), Match("udp dport", ("3",), "!=")),
}


@pytest.mark.parametrize("text", RULES)
def test_a_rule_is_one_line(text: str) -> None:
    rule: Rule = RULES[text]
    assert rule_text(rule) == text


@pytest.mark.parametrize(
    "element,value,text",
    [
        ("mo.*", "jump x", '"mo.*" : jump x'),
        ("10.61.0.0/16", "10.200.0.0/16", "10.61.0.0/16 : 10.200.0.0/16"),
        ("10.61.0.1", "", "10.61.0.1"),
        ("fd00:61::/32", "fd00:200::/32", "fd00:61::/32 : fd00:200::/32"),
        ("fd00:61::1", "", "fd00:61::1"),
        ("fd00::-fd00::9", "", "fd00::-fd00::9"),
        ("80-90", "", "80-90"),
        ("0xff00", "drop", "0xff00 : drop"),
        ("6in4-wan6", "", '"6in4-wan6"'),
        ("6*", "", '"6*"'),
        ("fd00::/64", "", "fd00::/64"),
        ("::ffff:10.0.0.1", "", "::ffff:10.0.0.1"),
        ("fd00::1-fd00::9", "", "fd00::1-fd00::9"),
        ("10.0.0.1-10.0.0.9", "", "10.0.0.1-10.0.0.9"),
    ],
)
def test_an_element_quotes_names_only(element: str, value: str, text: str) -> None:
    assert element_text(NftElement(T, "s", element, value)) == text


PLAN: dict[str, PlanObject] = {
    item.key: item
    for item in (
        NftChain(T, "late", ((Verdict("accept"),),), "filter", "forward", 0),
        NftChain(T, "early", ((VerdictMap("iifname", "class"),),), "filter", "prerouting", -150),
        NftChain(T, "mark", ((SetMark(0xFF00, 0xFF00),),)),
        NftSet(T, "class", "ifname", "verdict", interval=True),
        NftElement(T, "class", "mo.*", "jump mark"),
        NftSet(T, "dn", "ipv4_addr", "ipv4_addr", interval=True, value_interval=True),
        NftElement(T, "dn", "10.100.0.0/16", "10.2.0.0/16"),
        NftElement(T, "dn", "10.20.0.1", "10.3.0.1"),
        NftTable(T),
        LinkAddress("mo.x", Address("10.1.1.1"), 32),
    )
}


def test_a_plan_is_a_readable_file() -> None:
    """Sets by name, elements by address, chains as a packet meets them, chains without hook last; other layers are left out."""
    assert table_text(PLAN) == dedent(
        """\
        table inet meshmark.t {
        \tmap class {
        \t\ttype ifname : verdict
        \t\tflags interval
        \t\telements = {
        \t\t\t"mo.*" : jump mark
        \t\t}
        \t}
        \tmap dn {
        \t\ttype ipv4_addr : interval ipv4_addr
        \t\tflags interval
        \t\telements = {
        \t\t\t10.20.0.1 : 10.3.0.1/32,
        \t\t\t10.100.0.0/16 : 10.2.0.0/16
        \t\t}
        \t}
        \tchain early {
        \t\ttype filter hook prerouting priority -150; policy accept;
        \t\tiifname vmap @class
        \t}
        \tchain late {
        \t\ttype filter hook forward priority 0; policy accept;
        \t\taccept
        \t}
        \tchain mark {
        \t\tmeta mark set meta mark & 0xffff00ff | 0xff00
        \t}
        }
        """
    )


def test_the_text_of_a_plan_does_not_depend_on_its_order() -> None:
    assert table_text(dict(reversed(PLAN.items()))) == table_text(PLAN)


def test_a_step_is_written_in_the_order_that_the_kernel_needs() -> None:
    """Stale elements and rules first, headers, rules, elements, then what goes; the marker last."""
    old = {
        item.key: item
        for item in (
            NftTable(T),
            NftSet(T, "hosts", "ipv4_addr", "ipv4_addr"),
            NftElement(T, "hosts", "10.0.0.1", "10.9.0.1"),
            NftElement(T, "hosts", "10.0.0.2", "10.9.0.2"),
            NftSet(T, "old", "ipv4_addr", "verdict"),
            NftElement(T, "old", "10.0.0.1", "jump gone"),
            NftChain(T, "gone", ()),
            NftChain(T, "in", ((Verdict("accept"),),), "filter", "input", 0),
            NftTable("meshmark.gone"),
            NftChain("meshmark.gone", "c", ()),
        )
    }
    new = {
        item.key: item
        for item in (
            NftTable(T),
            NftSet(T, "hosts", "ipv4_addr", "ipv4_addr"),
            NftElement(T, "hosts", "10.0.0.2", "10.9.0.22"),
            NftElement(T, "hosts", "10.0.0.3", "10.9.0.3"),
            NftChain(T, "in", ((Verdict("drop"),),), "filter", "input", 5),
        )
    }
    step = changes(old, new)
    assert batch_text(step, Marker(1, 2, {"aa": "bb"})) == dedent(
        """\
        delete element inet meshmark.t hosts { 10.0.0.1, 10.0.0.2 }
        flush chain inet meshmark.t gone
        flush chain inet meshmark.t in
        delete chain inet meshmark.t in
        add chain inet meshmark.t in { type filter hook input priority 5; policy accept; }
        add rule inet meshmark.t in drop
        add element inet meshmark.t hosts { 10.0.0.2 : 10.9.0.22, 10.0.0.3 : 10.9.0.3 }
        flush map inet meshmark.t old
        delete map inet meshmark.t old
        delete chain inet meshmark.t gone
        delete table inet meshmark.gone
        add table inet meshmark.marker
        add chain inet meshmark.marker plan
        flush chain inet meshmark.marker plan
        add rule inet meshmark.marker plan return comment "epoch 1 generation 2"
        add rule inet meshmark.marker plan return comment "unit aa bb"
        """
    )


def test_a_set_of_names_is_filled_again_as_a_whole() -> None:
    """nft cannot delete a name with a star: what stays is added again in the same transaction."""
    held = (NftElement(T, "class", "mo.*", "accept"), NftElement(T, "class", "lo", "return"))
    step = [Change(held[0], None), Change(None, NftElement(T, "class", "mt.*", "drop"))]
    assert needs_refill(step) == {(T, "class")}
    lines = batch_text(step, None, Context(refilled={(T, "class"): held})).splitlines()
    assert lines[:2] == [f"flush map inet {T} class", f'add element inet {T} class {{ "lo" : return, "mt.*" : drop }}']


@pytest.mark.parametrize(
    "step",
    [
        [Change(None, NftSet(T, "s", "ifname", interval=True)), Change(None, NftElement(T, "s", "mo.*"))],
        [Change(NftTable(T), None), Change(NftElement(T, "s", "mo.*"), None)],
        [Change(NftSet(T, "s", "ifname"), None), Change(NftElement(T, "s", "mo.*"), None)],
        [Change(None, NftElement(T, "s", "10.0.0.1"))],
    ],
    ids=["new set", "table goes", "set goes", "addresses"],
)
def test_only_a_set_that_stays_is_filled_again(step: list[Change]) -> None:
    assert needs_refill(step) == set()


def test_a_set_that_is_made_anew_brings_its_elements_and_users() -> None:
    """with_dependents adds what the kernel needs again, and nothing to other batches."""
    wanted = {
        item.key: item
        for item in (
            NftTable(T),
            NftSet(T, "s", "ipv4_addr", interval=True),
            NftElement(T, "s", "10.0.0.1"),
            NftChain(T, "user", ((Match("ip saddr", ("@s",)),),)),
            NftChain(T, "other", ()),
        )
    }
    step = [Change(NftSet(T, "s", "ipv4_addr"), wanted[f"set {T} s"])]
    assert {item.key for item in with_dependents(step, wanted)} == {f"set {T} s", f"element {T} s 10.0.0.1", f"chain {T} user"}
    quiet = [Change(None, NftElement(T, "s", "10.0.0.2"))]
    assert with_dependents(quiet, wanted) == quiet


def test_what_is_known_by_its_listing_only_can_be_removed() -> None:
    """Chains, odd sets, counters and dormant tables that somebody put under our name."""
    step = [
        Change(ListedChain(T, "c", ("{}",)), None),
        Change(Listed("nft", f"set {T} odd", "a map with timeout"), None),
        Change(Listed("nft", f"counter {T} k", "{}"), None),
        Change(Listed("nft", "table meshmark.dormant", "a table with flags"), None),
    ]
    assert batch_text(step, None).splitlines()[:6] == [
        f"flush chain inet {T} c",
        f"flush map inet {T} odd",
        f"delete map inet {T} odd",
        f"delete chain inet {T} c",
        f"delete counter inet {T} k",
        "delete table inet meshmark.dormant",
    ]


def test_other_layers_do_not_belong_into_a_batch() -> None:
    with pytest.raises(Permanent, match=r"address mo\.x"):
        batch_text([Change(None, LinkAddress("mo.x", Address("10.1.1.1"), 32))], None)


def test_chains_are_made_as_a_packet_meets_them() -> None:
    """nft lists chains in the order in which they were made: by hook and priority, those without a hook first."""
    places = {"after": ("postrouting", 100), "early": ("prerouting", -150), "late": ("prerouting", -100), "all": ("forward", 0)}
    chains = [NftChain(T, name, (), "filter", hook, priority, "drop") for name, (hook, priority) in sorted(places.items())]  # type: ignore[arg-type]
    lines = batch_text([Change(None, item) for item in (*chains, NftChain(T, "zero", ()))], None).splitlines()
    made = [line.split()[4] for line in lines if line.startswith("add chain")]
    assert made == ["zero", "early", "late", "all", "after"]
    assert "add chain inet meshmark.t all { type filter hook forward priority 0; policy drop; }" in lines


def test_an_empty_batch_without_marker_removes_the_marker() -> None:
    assert batch_text([], None) == "add table inet meshmark.marker\ndelete table inet meshmark.marker\n"
