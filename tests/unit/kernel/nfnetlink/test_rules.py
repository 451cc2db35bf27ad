"""Rules as messages: what their expressions are, which of them share a template, and what goes to libnftables."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from schemas.host_objects import NftChain
from schemas.nft import (
    ClampMss,
    Comment,
    Counter,
    Match,
    Nat,
    NatTo,
    Reject,
    Rule,
    SetMark,
    Verdict,
    VerdictMap,
)
from services.kernel.netlink import HEADER, attributes, text_of
from services.kernel.nfnetlink.batch import Batch, kind_of
from services.kernel.nfnetlink.rules import Encoders
from services.kernel.nfnetlink.values import Inexpressible
from services.kernel.nfnetlink.wire import Message
from services.kernel.nft.steps import Step

T = "meshmark.t"
ACCEPT = Verdict("accept")


def messages(*rules: Rule, encoders: Encoders | None = None) -> list[bytes]:
    chain = NftChain(T, "c", rules)
    return Batch([Step("add", "rules", T, "c", chain)], encoders or Encoders(), _no_header).messages


def _no_header(table: str, name: str) -> Any:
    raise AssertionError(table, name)


def expressions(message: bytes) -> str:
    """The names of a rule's expressions."""
    found = []
    body = attributes(message, HEADER.size + 4)[4]
    at = 0
    while at < len(body):
        length = struct.unpack_from("=H", body, at)[0]
        parts = attributes(body[at + 4 : at + length])
        found.append(text_of(parts[1]))
        at += (length + 3) & ~3
    return " ".join(found)


@pytest.mark.parametrize(
    "rule, names",
    [
        ((ACCEPT,), "immediate"),
        ((Match("ip saddr", ("10.0.0.1",)), ACCEPT), "meta cmp payload cmp immediate"),
        ((Match("ip saddr", ("10.0.0.1",)), Match("ip daddr", ("10.0.0.2",))), "meta cmp payload cmp payload cmp"),
        ((Match("meta nfproto", ("ipv4",)), Match("ip saddr", ("10.0.0.0/8",))), "meta cmp payload cmp"),
        ((Match("ip saddr", ("10.0.0.0/9",)),), "meta cmp payload bitwise cmp"),
        ((Match("ip6 saddr", ("fd00::1-fd00::9",)),), "meta cmp payload cmp cmp"),
        ((Match("ip6 saddr", ("fd00::1-fd00::9",), "!="),), "meta cmp payload range"),
        ((Match("tcp sport", ("1",)), Match("tcp dport", ("2",))), "meta cmp payload cmp"),
        ((Match("tcp sport", ("1",), "!="), Match("tcp dport", ("2",), "!=")), "meta cmp payload cmp payload cmp"),
        ((Match("tcp sport", ("1",)), Counter(), Match("tcp dport", ("2",))), "meta cmp payload cmp counter payload cmp"),
        ((Match("meta mark", ("0x1",), mask=3), SetMark(1, 3)), "meta bitwise cmp meta bitwise meta"),
        ((Match("ct state", ("new",)), SetMark(1, 0xFFFFFFFF)), "ct bitwise cmp immediate meta"),
        ((Match("oifname", ("@tunnels",)), ClampMss()), "meta lookup rt byteorder exthdr"),
        ((VerdictMap("iifname", "class"),), "meta lookup"),
        ((Nat("dnat", "dn"),), "meta cmp payload lookup nat"),
        ((NatTo("snat", "ip", "10.0.0.0/8"),), "immediate immediate nat"),
    ],
)
def test_a_rule_is_a_list_of_expressions(rule: Rule, names: str) -> None:
    (message,) = messages(rule)
    assert kind_of(message) == Message.NEW_RULE
    assert HEADER.unpack_from(message)[0] == len(message)
    assert expressions(message) == names


def test_values_of_a_match_are_a_set_before_the_rule() -> None:
    """Two messages for each set, numbered on."""
    found = messages((Match("ip saddr", ("10.0.0.1", "10.0.0.2")), Match("iifname", ("a*", "b"))), (ACCEPT,))
    kinds = [Message(kind_of(message)) for message in found]
    pair = [Message.NEW_SET, Message.NEW_ELEMENTS]
    assert kinds == [*pair, *pair, Message.NEW_RULE, Message.NEW_RULE]
    assert [HEADER.unpack_from(message)[3] for message in found] == list(range(2, 8))


def test_rules_that_differ_in_values_share_a_template() -> None:
    """Each has its own values in it all the same."""
    encoders = Encoders()
    rules = [
        (Match("meta mark", (f"{number:#x}",)), Match("ip daddr", (f"10.0.0.{number}",)), ACCEPT, Comment(f"rule {number}"))
        for number in range(5)
    ]
    found = messages(*rules, encoders=encoders)
    assert len(encoders.templates._found) == 1
    assert len(set(found)) == 5
    for number, message in enumerate(found):
        assert bytes((10, 0, 0, number)) in message
        assert f"rule {number}".encode() in message


@pytest.mark.parametrize(
    "order, holds",
    [(("tcp sport", "tcp dport"), b"\0\x01\0\x02"), (("tcp dport", "tcp sport"), b"\0\x02\0\x01")],
)
def test_joined_ports_stand_as_in_the_header(order: tuple[Any, Any], holds: bytes) -> None:
    """Whichever comes first in the rule."""
    (message,) = messages((Match(order[0], ("1",)), Match(order[1], ("2",)), ACCEPT))
    assert holds in message


@pytest.mark.parametrize(
    "rule",
    [
        (Match("ip saddr", ("10.0.0.1",)), Match("ip6 saddr", ("fd00::1",))),
        (Match("meta nfproto", ("ipv6",), "!="), Match("ip saddr", ("10.0.0.1",))),
        (Match("meta l4proto", ("tcp", "udp")), Match("tcp dport", ("80",))),
        (Match("meta l4proto", ("udp",)), Match("tcp dport", ("80",))),
        (Match("ip saddr", ()),),
        (Match("ip saddr", ("@a", "@b")),),
        (Match("ip saddr", ("10.0.0.1",), mask=3),),
        (Match("meta mark", ("@marks",), mask=3),),
        (Match("meta mark", ("1-5", "7"), mask=3),),
        (Match("ct state", ("unheard-of",)),),
        (NatTo("dnat", "ip", "10.0.0.1", 80),),
        (NatTo("dnat", "ip", "10.0.0.1-10.0.0.9"),),
        (Comment('say "no"'),),
        (Comment("x" * 129),),
    ],
)
def test_what_has_no_form_is_told_before_anything_is_sent(rule: Rule) -> None:
    """These are libnftables' to load or to refuse."""
    with pytest.raises(Inexpressible):
        messages(rule)


def test_templates_and_forms_are_forgotten_before_they_are_too_many() -> None:
    """A long life with ever new forms costs no memory, and the rules are right all the time."""
    encoders = Encoders()
    for number in range(5000):
        (message,) = messages((Match("ip saddr", (f"@set{number}",)), Reject()), encoders=encoders)
        assert f"set{number}\0".encode() in message
    assert len(encoders.templates._found) <= 4096
    assert len(encoders.templates.forms.known) <= 4096
