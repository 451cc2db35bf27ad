"""What the kernel is given to trace a flow."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from schemas.commands import TraceFlow
from schemas.nft import Match
from schemas.values import Address
from services.kernel.nft.statements import rule_text
from services.kernel.trace_rules import BEGINNING, Session, chains

WISH = TraceFlow(
    (Address("10.200.1.10"), Address("10.200.2.10"), Address("10.200.1.10")),
    (Address("172.18.0.11"), Address("172.18.0.12")),
    (51871, 4789),
    overlay_ports=(4789,),
)
BETWEEN = "ip saddr @flows_1 ip daddr @flows_1"
INNER, OUTER = "limit rate 200/second burst 100 packets", "limit rate 400/second burst 200 packets"


BETWEEN_OUTER = "ip saddr @outer_1 ip daddr @outer_1"
SHOWN = 'log prefix "meshmark trace" group 5188 snaplen 192'


def texts(wish: TraceFlow, *, shows: bool = True) -> list[str]:
    return [rule_text(rule) for rule in Session(1, wish).rules(shows=shows)]


def test_a_flow_and_what_carries_it() -> None:
    """Between any two of its addresses, and outer packets by their port; each sampled. An overlay's is shown by what tells of it."""
    assert texts(WISH) == [
        f"{BETWEEN} {INNER} meta nftrace set 1",
        f"{BETWEEN_OUTER} udp dport @ports_1 {OUTER} meta nftrace set 1",
        f"{BETWEEN_OUTER} udp dport @overlays_1 {OUTER} {SHOWN} meta nftrace set 1 accept",
    ]
    assert [(item.set, item.element) for item in Session(1, WISH).elements()] == [
        ("flows_1", "10.200.1.10"),
        ("flows_1", "10.200.2.10"),
        ("outer_1", "172.18.0.11"),
        ("outer_1", "172.18.0.12"),
        ("ports_1", "51871"),
        ("overlays_1", "4789"),
    ]
    assert [(item.name, item.key_type, item.timeout) for item in Session(1, WISH).sets()] == [
        ("flows_1", "ipv4_addr", True),
        ("outer_1", "ipv4_addr", True),
        ("ports_1", "inet_service", True),
        ("overlays_1", "inet_service", True),
    ]


def test_what_a_kernel_cannot_show_it_tells_of_all_the_same() -> None:
    """Without NFLOG, as others are told of."""
    (rule,) = (text for text in texts(WISH, shows=False) if "@overlays_1" in text)
    assert rule == f"{BETWEEN_OUTER} udp dport @overlays_1 {OUTER} meta nftrace set 1"


def test_whoever_names_no_overlay_has_nothing_shown() -> None:
    """As a command of before; and outer packets may be an overlay's alone."""
    before = replace(WISH, overlay_ports=())
    assert texts(before)[1:] == [f"{BETWEEN_OUTER} udp dport @ports_1 {OUTER} meta nftrace set 1"]
    assert [item.element for item in Session(1, before).elements() if item.set == "ports_1"] == ["51871", "4789"]
    alone = replace(WISH, ports=(4789,))
    assert [("@ports_1" in text, "@overlays_1" in text) for text in texts(alone)[1:]] == [(False, True)]


@pytest.mark.parametrize(
    "fields,expected",
    [
        ({"protocols": ("icmp",)}, ["meta l4proto { icmp, icmpv6 }"]),
        ({"sample": 2}, [f"@nh,40,8 {{ {', '.join(map(str, range(0, 256, 2)))} }}"]),
        ({"sample": 64}, ["@nh,40,8 { 0, 64, 128, 192 }"]),
        ({"sample": 128, "protocols": ("udp",)}, ["meta l4proto udp @nh,40,8 { 0, 128 }"]),
        ({"protocols": ("tcp", "udp")}, ["meta l4proto { tcp, udp }"]),
        ({"flow_ports": (443,), "protocols": ("icmp",)}, []),
        ({"flow_ports": (443,)}, ["meta l4proto { tcp, udp, sctp } th dport 443", "meta l4proto { tcp, udp, sctp } th sport 443"]),
        (
            {"flow_ports": (443, 80), "protocols": ("icmp", "tcp")},
            ["meta l4proto tcp th dport { 443, 80 }", "meta l4proto tcp th sport { 443, 80 }"],
        ),
    ],
)
def test_only_what_is_meant_of_a_flow(fields: dict[str, object], expected: list[str]) -> None:
    """A busy pair of hosts with one traced port tells of that alone; a port is the one of either end."""
    found = texts(replace(WISH, **fields))[:-2]
    assert found == [f"{BETWEEN} {which} {INNER} meta nftrace set 1" for which in expected]


def test_a_family_with_one_address_has_no_rule() -> None:
    """Nothing passes between one and itself that a trace asks for."""
    both = replace(WISH, flow=(Address("10.200.1.10"), Address("fd00:200::1"), Address("fd00:200::2")), outer=(Address("2001:db8::1"),))
    assert [(rule[0].selector, rule[0].values) for rule in Session(2, both).rules() if isinstance(rule[0], Match)] == [
        ("ip6 saddr", ("@flows6_2",))
    ]


def test_ipv6_is_not_sampled() -> None:
    """Its packets have no number of their own: where IPv4's is, there is something else."""
    ipv6 = replace(WISH, flow=(Address("fd00:200::1"), Address("fd00:200::2")), sample=64)
    assert texts(ipv6)[-1] == f"ip6 saddr @flows6_1 ip6 daddr @flows6_1 {INNER} meta nftrace set 1"


def test_only_two_chains_have_rules() -> None:
    """Those where a packet comes into a stack; the others are where it is seen again."""
    found = chains([Session(1, WISH), Session(2, WISH)])
    assert {(chain.name, chain.hook) for chain in found if chain.rules} == set(BEGINNING)
    assert {chain.hook for chain in found} == {"prerouting", "input", "forward", "output", "postrouting"}
    assert len(found[0].rules) == 6
