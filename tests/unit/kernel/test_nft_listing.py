"""JSON listings of nft 1.0.6 as values: canonical elements, masked counters, and what is not known kept as a difference."""

from __future__ import annotations

from typing import Any

import pytest

from schemas.host_objects import NftElement, NftSet, NftTable
from services.kernel.nft.engine import mapped
from services.kernel.nft.listing import marker_of, rule_form, table_objects, value_text
from services.kernel.transaction import Listed, ListedChain, Marker
from services.runtime.errors import Conflict, OutcomeUnknown, Permanent, Transient

T = "meshmark.t"


@pytest.mark.parametrize(
    "value,data_type,text",
    [
        ("10.9.0.1", "ipv4_addr", "10.9.0.1"),
        ({"prefix": {"addr": "10.61.0.0", "len": 16}}, "ipv4_addr", "10.61.0.0/16"),
        ({"prefix": {"addr": "10.8.0.1", "len": 32}}, "ipv4_addr", "10.8.0.1"),
        ({"range": ["13.0.0.1", "13.0.0.9"]}, "ipv4_addr", "13.0.0.1-13.0.0.9"),
        ({"prefix": {"addr": "fd00:61::", "len": 32}}, "ipv6_addr", "fd00:61::/32"),
        ({"prefix": {"addr": "fd00:63::7", "len": 128}}, "ipv6_addr", "fd00:63::7"),
        ("mo.*", "ifname", "mo.*"),
        (80, "inet_service", "80"),
        ({"range": [100, 200]}, "inet_service", "100-200"),
        (65280, "mark", "0xff00"),
        ({"jump": {"target": "from_overlay"}}, "verdict", "jump from_overlay"),
        ({"accept": None}, "verdict", "accept"),
        ({"elem": {"val": "10.0.0.1", "comment": "x"}}, "ipv4_addr", "10.0.0.1"),
        ({"concat": ["b", 5]}, "ifname . mark", "b . 5"),
        ({"novelty": 1}, "ipv4_addr", '{"novelty":1}'),
    ],
)
def test_a_value_has_the_form_that_plans_use(value: Any, data_type: str, text: str) -> None:
    assert value_text(value, data_type) == text


def test_a_table_is_read_object_by_object() -> None:
    """Sets, maps of prefixes, elements, chains with their rules in order."""
    rule = {"rule": {"family": "inet", "table": T, "chain": "c", "handle": 4, "expr": [{"accept": None}]}}
    drop = {
        "rule": {"family": "inet", "table": T, "chain": "c", "handle": 5, "expr": [{"counter": {"packets": 9, "bytes": 1}}, {"drop": None}]}
    }
    prefix = {"prefix": {"addr": "10.61.0.0", "len": 16}}, {"prefix": {"addr": "10.200.0.0", "len": 16}}
    listing = [
        {"metainfo": {"version": "1.0.6"}},
        {"table": {"family": "inet", "name": T, "handle": 1}},
        {"map": {"name": "dn", "table": T, "type": "ipv4_addr", "map": "ipv4_addr", "flags": ["interval"], "elem": [list(prefix)]}},
        {"set": {"name": "s", "table": T, "type": "ipv4_addr", "elem": ["10.0.0.1"]}},
        {"chain": {"name": "c", "table": T, "type": "filter", "hook": "prerouting", "prio": -150, "policy": "accept"}},
        rule,
        drop,
    ]
    assert list(table_objects(listing, {}).values()) == [
        NftTable(T),
        NftSet(T, "dn", "ipv4_addr", "ipv4_addr", interval=True, value_interval=True),
        NftElement(T, "dn", "10.61.0.0/16", "10.200.0.0/16"),
        NftSet(T, "s", "ipv4_addr"),
        NftElement(T, "s", "10.0.0.1"),
        ListedChain(T, "c", ('[{"accept":null}]', '[{"counter":null},{"drop":null}]'), "filter", "prerouting", -150, "accept"),
    ]


def test_an_empty_map_takes_what_is_wanted() -> None:
    """The listing does not say whether an empty map takes prefixes; nobody else can tell either."""
    wanted = NftSet(T, "dn", "ipv4_addr", "ipv4_addr", interval=True, value_interval=True)
    listing = [{"map": {"name": "dn", "table": T, "type": "ipv4_addr", "map": "ipv4_addr", "flags": ["interval"]}}]
    assert table_objects(listing, {wanted.key: wanted}) == {wanted.key: wanted}


@pytest.mark.parametrize(
    "listing,key",
    [
        ({"set": {"name": "s", "table": T, "type": "ipv4_addr", "flags": ["timeout"], "timeout": 9}}, f"set {T} s"),
        ({"set": {"name": "s", "table": T, "type": "ipv4_addr", "flags": ["dynamic"]}}, f"set {T} s"),
        ({"counter": {"name": "k", "table": T, "packets": 1, "bytes": 2}}, f"counter {T} k"),
        ({"flowtable": {"name": "f", "table": T}}, f"flowtable {T} f"),
        ({"table": {"name": T, "flags": "ip"}}, f"table {T}"),
    ],
)
def test_what_no_plan_can_ask_for_is_a_difference(listing: dict[str, Any], key: str) -> None:
    found = table_objects([listing], {})
    assert isinstance(found[key], Listed)


def test_anonymous_sets_are_sorted_and_comments_kept() -> None:
    """Two loads of one ruleset list hash sets in different order."""
    one, two = ({"expr": [{"match": {"right": {"set": values}}}]} for values in (["b", "a"], ["a", "b"]))
    assert rule_form(one) == rule_form(two)
    assert rule_form({**one, "comment": "x"}) != rule_form(one)


def test_a_marker_is_read_from_comments() -> None:
    listing = [{"rule": {"comment": "epoch 3 generation 17"}}, {"rule": {"comment": "unit ab cd"}}, {"rule": {}}, {"chain": {}}]
    assert marker_of(listing) == Marker(3, 17, {"ab": "cd"})
    assert marker_of(listing[1:]) is None


@pytest.mark.parametrize(
    "text,kind",
    [
        ("Error: Could not process rule: No such file or directory", Conflict),
        ("Error: Could not process rule: File exists", Conflict),
        ("Error: Could not process rule: Device or resource busy", Conflict),
        ("netlink: Error: interval overlaps with an existing one", Conflict),
        ("Error: Could not process rule: No buffer space available", OutcomeUnknown),
        ("Error: Could not process rule: Operation not permitted", Permanent),
        ("Error: syntax error, unexpected dnat, expecting string", Permanent),
        ("Error: Could not process rule: Invalid argument", Permanent),
        ("Error: Could not process rule: Cannot allocate memory", Transient),
        ("", Permanent),
    ],
)
def test_what_libnftables_says_is_in_the_error_tree(text: str, kind: type[Exception]) -> None:
    assert type(mapped(text, "add table inet x\n")) is kind
