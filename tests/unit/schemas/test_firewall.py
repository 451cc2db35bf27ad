"""Published firewalls: what is refused, at which field; canonical values; strict decoding."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas import firewall_values as values
from schemas.codec import DecodeError
from tests.firewalls import configuration, match, one_chain, rule

NAT = {"type": "nat", "hook": "prerouting", "priority": "dstnat"}
SNAT = {"type": "nat", "hook": "postrouting", "priority": "srcnat"}
RULE = "$.chains[0].rules[0]"


def refused(field: str, **fields: Any) -> str:
    """The reason why a configuration is refused, at this very field."""
    with pytest.raises(DecodeError) as error:
        configuration(**fields)
    assert error.value.field == field, error.value
    return error.value.reason


def refused_rule(field: str, *matches: dict[str, Any], action: str | dict[str, Any] = "accept", sets: Any = (), **chain: Any) -> str:
    """The same for a chain with one rule."""
    fields = {"name": "main", "hook": "forward", "rules": [rule(*matches, action=action)], **chain}
    return refused(f"{RULE}{field}", chains=[fields], sets=list(sets))


@pytest.mark.parametrize(
    "given, right",
    [
        (match("source", "10.61.5.9/16"), "write 10.61.0.0/16 for the prefix"),
        (match("source", "10.300.0.0/16"), "not an address"),
        (match("source", "10.0.0.9-10.0.0.1"), "a range of addresses"),
        (match("source", "10.0.0.0/255.0.0.0"), "a prefix"),
        (match("source", "fe80::1%eth0"), "not an address"),
        (match("source", 5), "not an address"),
        (match("inInterface", "a" * 16), "at most 15"),
        (match("inInterface", "a" * 15 + "*"), "at most 15"),
        (match("inInterface", "a" * 14 + "*"), None),
        (match("inInterface", "*"), "not the name of an interface"),
        (match("inInterface", "et h"), "visible characters"),
        (match("inInterface", 'e"'), "without quotes"),
        (match("inInterface", "a*b"), "'*' only at the end"),
        (match("outInterface", "a/b"), "not the name"),
        (match("mark", 0x1FFFFFFFF), "write a number from 0 to 4294967295"),
        (match("mark", "0xfe00x"), "decimal or as 0xff00"),
        (match("mark", "010"), "not a mark"),
        (match("mark", 0xFE01, mask=0xFF00), "bits outside of the mask"),
        (match("ctState", "old"), "established"),
        (match("protocol", "tpc"), "icmp, icmpv6"),
        (match("source", "@nowhere"), "there is no set 'nowhere'"),
        (match("source", "@tunnels"), "type ifname; source takes ipv4_addr or ipv6_addr"),
        (match("ctState", "@tunnels"), "takes no set"),
        (match("source", []), "at least one value"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_bad_value_names_its_field_and_says_what_is_right(given: dict[str, Any], right: str | None) -> None:
    """Of any kind of match; what reads like a mistake and is none is taken."""
    if right is None:
        one_chain(rule(given))
    else:
        assert right in refused_rule(".match[0].value", given)


def test_a_bad_value_of_several_is_named_alone() -> None:
    """The index is that of the value."""
    assert "host bits" in refused_rule(".match[1].value[1]", match("mark", 1), match("source", ["10.0.0.1", "10.0.0.1/8"]))
    assert "stands alone" in refused_rule(".match[0].value[1]", match("inInterface", ["eth0", "@tunnels"]))
    assert "matched alone" in refused_rule(".match[0].value[0]", match("inInterface", ["liqo\\*", "eth0"]))


@pytest.mark.parametrize(
    "field, matches, more, right",
    [
        (".match[1].value", [match("source", "10.0.0.1"), match("destination", "fd00::1")], {}, "IPv4 or about IPv6"),
        (".match[0].value", [match("source", ["10.0.0.1", "fd00::1"])], {}, "IPv4 or about IPv6"),
        (".match[0].field", [match("destinationPort", 80)], {}, "match on the protocol"),
        (".match[1].field", [match("protocol", "icmp"), match("sourcePort", 80)], {}, "match on the protocol"),
        (".match[1].field", [match("protocol", "tcp", "neq"), match("sourcePort", 80)], {}, "match on the protocol"),
        (".match[1].field", [match("protocol", "tcp"), match("protocol", "udp")], {}, "once"),
        (".match[0].mask", [match("source", "10.0.0.1", mask=1)], {}, "only marks"),
        (".match[0].mask", [match("mark", 0, mask=0)], {}, "leave it out"),
        (".match[0].field", [match("outInterface", "eth0")], {"hook": "prerouting"}, "no packet has that interface"),
        (".match[0].field", [match("inInterface", "eth0")], {"hook": "output"}, "no packet has that interface"),
        (".actions[0]", [], {"action": "masquerade"}, "nat chain at postrouting"),
        (".actions[0]", [], {"action": {"action": "snat", "to": "10.0.0.1"}, **NAT}, "postrouting or input"),
        (".actions[0]", [], {"action": "reject", "hook": "postrouting"}, "drop it"),
        (".actions[0]", [], {"action": "notrack"}, "priority below -200"),
        (".actions[0]", [], {"action": "clampMss", "hook": "prerouting"}, "give a size"),
        (".actions[0]", [match("protocol", "udp")], {"action": "clampMss"}, "only TCP"),
        (".actions[0].value", [], {"action": {"action": "setMark", "value": 0x1FF, "mask": 0xFF}}, "outside of the mask"),
        (".actions[0].mask", [], {"action": {"action": "setMark", "value": 0, "mask": 0}}, "leave it out"),
        (".actions[0].to", [], {"action": {"action": "dnat", "to": "10.0.0.1-10.0.0.9"}, **NAT}, "one address"),
        (".actions[0].to", [], {"action": {"action": "dnat", "to": "10.200.0.0/16"}, **NAT}, "needs a match on one destination prefix"),
        (
            ".actions[0].to",
            [match("destination", "10.61.0.0/16")],
            {"action": {"action": "dnat", "to": "10.200.0.0/24"}, **NAT},
            "10.61.0.0/16 and 10.200.0.0/24 differ in length",
        ),
        (
            ".actions[0].to",
            [match("destination", ["10.61.0.0/16", "10.62.0.0/16"])],
            {"action": {"action": "dnat", "to": "10.200.0.0/16"}, **NAT},
            "one destination prefix",
        ),
        (".actions[0].to", [match("source", "10.0.0.0/8")], {"action": {"action": "snat", "to": "fd00::1"}, **SNAT}, "family"),
        (".actions[0].port", [], {"action": {"action": "dnat", "to": "10.0.0.1", "port": 80}, **NAT}, "match on the protocol"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_the_kernel_cannot_hold_is_refused_before(field: str, matches: Any, more: dict[str, Any], right: str) -> None:
    """Combinations that nftables or Linux refuse, or take and never act on."""
    assert right in refused_rule(field, *matches, **more)


def test_chains_and_sets_have_names_and_places_of_their_own() -> None:
    """Names that nftables takes, none twice, one place for each chain."""
    chain = {"name": "one", "hook": "input", "priority": 5}
    assert "there twice" in refused("$.chains[1].name", chains=[chain, chain])
    assert "neither comes first" in refused("$.chains[1].priority", chains=[chain, {**chain, "name": "two"}])
    assert "word of nftables" in refused("$.chains[0].name", chains=[{**chain, "name": "mark"}])
    assert "letters, digits" in refused("$.chains[0].name", chains=[{**chain, "name": "a b"}])
    assert "prerouting or input" in refused("$.chains[0].hook", chains=[{**chain, "hook": "forward", "type": "nat"}])
    assert "above -200" in refused("$.chains[0].priority", chains=[{**chain, "type": "nat", "priority": -190}], order=-20)
    named = {"name": "one", "type": "mark"}
    assert "there twice" in refused("$.sets[1].name", chains=[chain], sets=[named, named])
    assert "tunnels of each host" in refused("$.sets[0].name", chains=[chain], sets=[{**named, "name": "tunnels"}])


@pytest.mark.parametrize(
    "kind, elements, at, right",
    [
        ("ipv4_addr", ["10.0.0.0/24", "10.0.0.7"], 1, "10.0.0.0/24 and 10.0.0.7 overlap"),
        ("ipv4_addr", ["10.0.0.7", "10.0.0.0/24"], 1, "overlap"),
        ("ipv4_addr", ["fd00::1"], 0, "not for a set of type ipv4_addr"),
        ("ipv6_addr", ["fd00::/64", "FD00:0::1"], 1, "overlap"),
        ("inet_service", [80, "70-90"], 1, "overlap"),
        ("ifname", ["eth*", "eth0"], 1, "'eth0' and 'eth*' overlap"),
        ("ifname", ["a", "eth0", "b", "eth0"], 3, "overlap"),
        ("ifname", ["eth0", "e*", "a"], 1, "'e*' and 'eth0' overlap"),
        ("ifname", ["et*", "eth*"], 1, "overlap"),
        ("ifname", ["eth0", "eth0*"], 1, "overlap"),
        ("ifname", ["eth0", "liqo\\*"], 1, "matched alone"),
        ("ifname", ["10.0.0.1"], 0, "would be a number or an address"),
        ("mark", [1, "0x1"], 1, "overlap"),
    ],
)
def test_an_element_is_in_a_set_once(kind: str, elements: list[Any], at: int, right: str) -> None:
    """The kernel refuses a whole batch for one element that overlaps with another."""
    chain = {"name": "main", "hook": "input"}
    assert right in refused(f"$.sets[0].elements[{at}]", chains=[chain], sets=[{"name": "a", "type": kind, "elements": elements}])


def test_decoding_is_strict() -> None:
    """A field or a word that is not known is an error at its place."""
    chain = {"name": "main", "hook": "input"}
    assert "unknown field" in refused("", chains=[chain], host={})
    assert "unknown field" in refused("$.chains[0].rules[0].match[0]", chains=[{**chain, "rules": [rule(match("mark", 1, masked=1))]}])
    assert "Invalid" in refused("$.chains[0].rules[0].actions[0].action", chains=[{**chain, "rules": [rule(action="log")]}])
    assert "Invalid" in refused("$.chains[0].hook", chains=[{**chain, "hook": "ingress"}])
    assert "pattern" in refused("$.hosts.names[0]", chains=[chain], hosts={"names": ["a b"]})


def test_nothing_can_come_after_the_end() -> None:
    """An action that ends the chain is the last; a rule that does nothing is a mistake."""
    both = {"actions": [{"action": "accept"}, {"action": "drop"}]}
    assert "ends the chain" in refused(f"{RULE}.actions[0]", chains=[{"name": "main", "hook": "input", "rules": [both]}])
    assert "does nothing" in refused(RULE, chains=[{"name": "main", "hook": "input", "rules": [{}]}])


@pytest.mark.parametrize(
    "written, text",
    [
        ("10.0.0.1/32", "10.0.0.1"),
        ("10.0.0.0-10.0.0.255", "10.0.0.0/24"),
        ("10.0.0.1-10.0.0.2", "10.0.0.1-10.0.0.2"),
        ("FD00:0:0::1", "fd00::1"),
        ("fd00::/128", "fd00::"),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.1"),
        ("0.0.0.0/0", "0.0.0.0/0"),
        ("0.0.0.0-255.255.255.255", "0.0.0.0/0"),
    ],
)
def test_addresses_have_one_form(written: str, text: str) -> None:
    """The one that nftables lists."""
    assert values.addresses(written).text == text
    assert values.addresses(text).text == text


LONG = "rome-" + "x" * 126


@pytest.mark.parametrize("text", [LONG, "é" * 65, "é" * 64, 'say "hello"', "two\nlines\x00", "", "🙂" * 40])
def test_a_comment_fits(text: str) -> None:
    """At most 128 bytes, cut between characters, no quotes and no other lines."""
    kept = values.comment(text)
    assert len(kept.encode()) <= 128
    assert not set(kept) & {'"', "\n", "\x00"}
    assert values.comment(kept) == kept


def test_long_comments_that_begin_alike_stay_two() -> None:
    """What is cut ends in a hash of the whole text."""
    one, other = values.comment(LONG + "1"), values.comment(LONG + "2")
    assert one != other
    assert one[:100] == other[:100] == LONG[:100]
    assert values.comment("é" * 64) == "é" * 64
    assert values.comment("é" * 65).startswith("é" * 57 + "~")


@given(st.text(max_size=300))
def test_any_text_can_be_a_comment(text: str) -> None:
    """Whatever people write, a comment does not stop a batch."""
    assert len(values.comment(text).encode()) <= 128
