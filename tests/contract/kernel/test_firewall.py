"""Published firewalls in a real kernel: they load, list as people know them, and are told from what somebody changes by hand."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schemas.codec import DecodeError
from schemas.firewall import FirewallConfiguration
from schemas.firewall_values import identifier
from schemas.host_objects import NftElement, NftTable
from services.kernel.nft.text import table_text
from services.kernel.transaction import changes
from services.runtime.errors import Permanent
from tests.contract.kernel.firewall_host import TABLE, Host, seed
from tests.emulated import examples
from tests.firewalls import compiled, configuration, configurations, match, one_chain, rule

pytestmark = [pytest.mark.privileged, pytest.mark.any_kernel]

GOLDEN = Path(__file__).parent / "golden" / "seed_firewall.nft"


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[Host]:
    made = Host()
    try:
        yield made
    finally:
        made.close()


def as_the_seed(text: str) -> str:
    """A listing with the seed's table name. Our tables are of family inet, where nft says which family a translation is of."""
    text = text.replace("table inet meshmark.fw.", "table ip ")
    return re.sub(r"\b([sd]nat) ip (prefix )?to", r"\1 \2to", text)


# What is listed --------------------------------------------------------------------------------------------------------------------


def test_the_seeds_rules_load_and_list_as_the_seed_shows_them(host: Host) -> None:
    """All tables, chains, sets and rules of traffic marking by hand, beside each other on one host."""
    host.hold(*seed().values())
    listed = "".join(as_the_seed(host.listing(f"meshmark.fw.{name}")) for name in seed())
    assert listed == GOLDEN.read_text(encoding="utf-8")
    assert host.differences() == []


@settings(max_examples=examples(30), suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(items=st.lists(configurations(), min_size=1, max_size=3))
def test_any_valid_configuration_loads_and_lists_as_its_reference(shared: Host, items: list[FirewallConfiguration]) -> None:
    """From nothing, and each as a difference from the one before; published again it is no change, and deleted it leaves nothing."""
    try:
        for item in items:
            shared.hold(item)
            assert shared.differences() == []
            assert shared.hold(item) == []
        shared.call(shared.library.run, f"delete table inet {TABLE}\n{table_text(shared.held)}")
        assert shared.differences() == [], "as it is printed"
    finally:
        shared.held = {key: found for key, found in shared.held.items() if isinstance(found, NftTable)}
        shared.hold()
    assert shared.call(shared.library.tables) == []


def test_names_that_are_no_words_of_nftables_can_be_used(host: Host) -> None:
    """A chain and a set of an ordinary name are listed, flushed and removed; one that is a word of nftables is refused before."""
    for name in ("outgoing", "tunnel-list-3", "priority2", "_x", "in.put"):
        host.hold(one_chain(rule(match("mark", f"@{name}")), sets=[{"name": name, "type": "mark", "elements": [1]}]))
        assert f"set {name} {{" in host.listing()
        host.hold()
    for name in ("dnat", "mark", "fwd", "counter"):
        with pytest.raises(ValueError, match="word of nftables"):
            identifier(name)
        with pytest.raises(Permanent):
            host.call(host.library.run, f"add table inet {TABLE}\nadd set inet {TABLE} {name} {{ type mark; }}")


COMMENTS = [
    "rome-" + "x" * 126,
    "é" * 65,
    "é" * 64,
    'the "second" one',
    "a" * 128 + "1",
    "a" * 128 + "2",
    "two\nlines",
    *map(str, range(20)),
]


def test_long_and_odd_comments_stop_nothing(host: Host) -> None:
    """All rules are there, each with its comment, and those that begin alike stay apart."""
    host.hold(one_chain(*(rule(match("mark", number), comment=text) for number, text in enumerate(COMMENTS))))
    listed = re.findall(r'comment "(.*)"', host.listing())
    assert len(set(listed)) == len(COMMENTS)
    assert listed[2:4] == ["é" * 64, "the 'second' one"]
    assert all(len(text.encode()) <= 128 for text in listed)
    assert host.differences() == []


# What changes ----------------------------------------------------------------------------------------------------------------------


def test_unequal_prefixes_are_refused_and_the_rules_before_stay(host: Host) -> None:
    """nftables itself takes /16 onto /24 and then sends all hosts to the same few addresses."""
    good, at = match("destination", "10.61.0.0/16"), {"hook": "prerouting", "type": "nat", "priority": "dstnat"}
    host.hold(one_chain(rule(good, action={"action": "dnat", "to": "10.200.0.0/16"}), **at))
    before = host.listing()
    for to in ("10.200.0.0/24", "10.200.0.0/8", "fd00::/16"):
        with pytest.raises(DecodeError) as error:
            one_chain(rule(good, action={"action": "dnat", "to": to}), **at)
        assert error.value.field == "$.chains[0].rules[0].actions[0].to"
    assert host.listing() == before
    assert "dnat ip prefix to 10.200.0.0/16" in before


def test_an_element_changes_alone(host: Host) -> None:
    """Another prefix in a set is one change, and the chains and counters stay as they are."""
    elements = ["10.0.0.0/25", "10.0.0.128/25", "10.1.0.1-10.1.0.9"]

    def item(more: list[str]) -> FirewallConfiguration:
        named = {"name": "sources", "type": "ipv4_addr", "elements": elements + more}
        return one_chain(rule(match("source", "@sources"), counter=True), sets=[named])

    host.hold(item([]))
    batch = host.hold(item(["10.2.0.0/16"]))
    assert [change.key for change in batch] == [f"element {TABLE} sources 10.2.0.0/16"]
    assert host.differences() == []


def test_a_first_wildcard_makes_a_set_of_names_anew(host: Host) -> None:
    """The set can hold ranges then, and the rules that name it stay; the last wildcard that goes makes it plain again."""

    def item(*elements: str) -> FirewallConfiguration:
        return arriving("@links", sets=[{"name": "links", "type": "ifname", "elements": list(elements)}])

    for elements in (("eth0",), ("eth0", "wg*"), ("eth0", "mo.*", "wg*", "b"), ("b", "wg*"), ("b",), ()):
        host.hold()
        before = item(*elements)
        host.hold(before)
        for others in (("wg*",), ("a",), ("eth0", "lo*")):
            host.hold(item(*others))
            assert host.differences() == []
            host.hold(before)
            assert host.differences() == []


def test_a_rule_deleted_by_hand_is_one_difference_and_is_repaired(host: Host) -> None:
    """In a table with sets, several chains and comments."""
    items = seed()
    host.hold(*items.values())
    before = host.listing("meshmark.fw.remap-podcidr")
    host.run("nft", "flush", "chain", "inet", "meshmark.fw.remap-podcidr", "incoming")
    found = host.differences()
    assert [change.key for change in found] == ["chain meshmark.fw.remap-podcidr incoming"]
    host.call(host.engine.commit, found, None)
    assert host.listing("meshmark.fw.remap-podcidr") == before


@pytest.mark.parametrize("by_hand", ["dnat ip to 10.200.0.0/16", "dnat ip to 10.200.0.0", "dnat ip prefix to 10.201.0.0/16"])
def test_a_translation_that_lost_its_prefix_is_a_difference(host: Host, by_hand: str) -> None:
    """Without `prefix` nft takes the same words for a choice among addresses, and without a length for one: each is seen and repaired."""
    action = {"action": "dnat", "to": "10.200.0.0/16"}
    host.hold(one_chain(rule(match("destination", "10.61.0.0/16"), action=action), hook="prerouting", type="nat", priority="dstnat"))
    before = host.listing()
    assert "dnat ip prefix to 10.200.0.0/16" in before
    host.run("nft", f"flush chain inet {TABLE} main; add rule inet {TABLE} main ip daddr 10.61.0.0/16 {by_hand}")
    (found,) = host.differences()
    assert found.key == f"chain {TABLE} main"
    host.call(host.engine.commit, [found], None)
    assert host.listing() == before


def test_a_changed_policy_is_a_difference(host: Host) -> None:
    """A chain that drops and accepts again by hand, and one whose policy is published anew."""
    host.hold(one_chain(rule(match("source", "10.0.0.1")), policy="drop"))
    assert "policy drop" in host.listing()
    host.run("nft", "add", "chain", "inet", TABLE, "main", "{ policy accept; }")
    (found,) = host.differences()
    assert found.key == f"chain {TABLE} main"
    host.call(host.engine.commit, [found], None)
    assert host.differences() == []
    host.hold(one_chain(rule(match("source", "10.0.0.1")), policy="accept"))
    assert host.differences() == []


# Packets ---------------------------------------------------------------------------------------------------------------------------

FRAME = bytes.fromhex("ffffffffffff02000000000908004500001c00000000401154bd0a0909010a0909021388138900080000")
"""A broadcast Ethernet frame with an IPv4 UDP packet from 10.9.9.1 to 10.9.9.2."""
FRAME6 = bytes.fromhex(
    "ffffffffffff02000000000986dd6000000000081140" + "fd61" + "0" * 27 + "9" + "fd61" + "0" * 27 + "a" + "1388138900080000"
)
"""The same with an IPv6 packet from fd61::9 to fd61::a, ports 5000 and 5001."""


def link(host: Host, name: str) -> None:
    """A link of this name with its peer, both up."""
    host.run("ip", "link", "add", name, "type", "veth", "peer", "name", "far")
    for end in (name, "far"):
        host.run("ip", "link", "set", end, "up")


def arrive(host: Host, frame: bytes) -> None:
    """One packet comes in by the link."""

    def send() -> None:
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as sender:
            sender.bind(("far", 0))
            sender.send(frame)

    host.call(send)


def counts(host: Host, name: str, frame: bytes = FRAME) -> bool:
    """Whether the counter of the table counts a packet that comes in by a link of this name, made for it alone."""
    # No other packet than ours comes in: IPv6 says things of its own as soon as a link is up.
    host.run("sysctl", "-qw", f"net.ipv6.conf.default.disable_ipv6={int(frame is FRAME)}")
    before = host.counted()
    link(host, name)
    try:
        arrive(host, frame)
        # The frame is handled before its sender returns, or a moment later.
        ended = threading.Event()
        for _ in range(20):
            if host.counted() > before:
                return True
            ended.wait(0.01)
        return False
    finally:
        host.run("ip", "link", "delete", name)


def arriving(value: Any, **more: Any) -> FirewallConfiguration:
    found = {"match": [match("inInterface", value, **more.pop("op", {}))], "counter": True}
    return one_chain(found, hook="prerouting", priority="mangle", **more)


def test_rules_match_interfaces_that_come_later_and_come_again(host: Host) -> None:
    """A rule is there before its interface; after the interface was deleted and made again it matches as before, with no new batch."""
    host.hold(arriving("liqo-tunnel1"))
    for number in (1, 2):
        assert counts(host, "liqo-tunnel1")
        assert host.counted() == number
    assert not counts(host, "liqo-tunnel2")


def test_wildcards_and_exact_names_in_one_set(host: Host) -> None:
    """All that begins so, whoever made it, and the exact name; nothing else. Who means meshmark's own says ``@tunnels``."""
    names = ("liqo-tunnel", "liqo-tunnel1", "liqo-tunnel10", "liqo-tunnelX", "eth0", "eth01", "liqo-tunne", "liqo*")
    named = {"name": "arriving", "type": "ifname", "elements": ["liqo-tunnel*", "eth0"]}
    for item in (arriving("@arriving", sets=[named]), arriving(["liqo-tunnel*", "eth0"])):
        host.hold()
        host.hold(item)
        assert [name for name in names if counts(host, name)] == ["liqo-tunnel", "liqo-tunnel1", "liqo-tunnel10", "liqo-tunnelX", "eth0"]
        assert host.differences() == []


def test_a_star_in_a_name_is_itself_when_it_is_written_so(host: Host) -> None:
    r"""``liqo\*`` is the interface of that very name, ``liqo*`` is any that begins so; the audit tells them apart."""
    host.hold(arriving("liqo\\*"))
    assert counts(host, "liqo*")
    assert not counts(host, "liqo1")
    host.hold(arriving("liqo*"))
    assert counts(host, "liqo1")
    assert host.differences() == []
    host.held = compiled(arriving("liqo\\*"))
    assert [change.key for change in host.differences()] == [f"chain {TABLE} main"]


@pytest.mark.parametrize(
    "given, hit",
    [
        ([match("source", "fd61::/16")], True),
        ([match("source", ["fd60::1", "fd61::8-fd61::f"]), match("destination", "fd61::a")], True),
        ([match("source", "@sources"), match("protocol", "udp"), match("sourcePort", 5000), match("destinationPort", "5001-5002")], True),
        ([match("source", "fd61::/16"), match("protocol", ["tcp", "udp"]), match("destinationPort", [80, 5001])], True),
        ([match("source", "fd61::/16"), match("protocol", ["tcp", "udp"]), match("destinationPort", [80, 5001], "neq")], False),
        ([match("source", "fd61::9"), match("destination", "fd61::/64", "neq")], False),
        ([match("protocol", "udp"), match("sourcePort", 5000), match("destinationPort", 5001)], True),
        ([match("protocol", "udp"), match("sourcePort", 80, "neq"), match("destinationPort", 81, "neq")], True),
        # nft 1.0.6 would make one comparison of these two.
        ([match("protocol", "udp"), match("sourcePort", 5000, "neq"), match("destinationPort", 80, "neq")], False),
        ([match("protocol", "udp"), match("destinationPort", 5001, "neq"), match("sourcePort", 80, "neq")], False),
        ([match("source", "@sources", "neq"), match("source", "fd61::9")], False),
        ([match("source", "10.0.0.0/8")], False),
    ],
)
def test_ipv6_packets_are_matched_too(host: Host, given: list[dict[str, Any]], hit: bool) -> None:
    """By address, prefix, range, set and ports."""
    sets = [{"name": "sources", "type": "ipv6_addr", "elements": ["fd60::/16", "fd61::-fd61::ff"]}]
    host.hold(one_chain({"match": given, "counter": True}, hook="prerouting", sets=sets))
    assert counts(host, "eth0", FRAME6) == hit


def test_of_two_configurations_the_lower_order_comes_first(host: Host) -> None:
    """Each writes the mark and the last word counts: by order, whichever was loaded first."""

    def marking(name: str, order: int, value: int) -> FirewallConfiguration:
        chain = {"name": "main", "hook": "prerouting", "priority": "mangle", "rules": [rule(action={"action": "setMark", "value": value})]}
        return configuration(name, chains=[chain], order=order)

    probe = one_chain({"match": [match("mark", 2)], "counter": True}, hook="prerouting", priority="filter")
    for first, second in ((0, 1), (1, 0), (-5, -4)):
        host.hold()
        host.hold(marking("one", first, 1))
        host.hold(marking("one", first, 1), marking("two", second, 2))
        host.hold(marking("one", first, 1), marking("two", second, 2), probe)
        assert counts(host, "eth0") == (second > first)


def test_at_one_priority_the_newer_chain_comes_first(host: Host) -> None:
    """What documentation says of configurations without an order; it is the kernel's doing."""

    def marking(name: str, value: int) -> FirewallConfiguration:
        return one_chain(rule(action={"action": "setMark", "value": value}), name=name, hook="prerouting", priority="mangle")

    probe = one_chain({"match": [match("mark", 1)], "counter": True}, hook="prerouting", priority="filter")
    host.hold(marking("one", 1), probe)
    host.hold(marking("one", 1), marking("two", 2), probe)
    assert counts(host, "eth0")


def test_all_tunnels_are_a_set_of_names(host: Host) -> None:
    """On a host without tunnels the set is empty: nothing is eq, everything neq."""
    host.hold(arriving("@tunnels"))
    assert not counts(host, "mt.0")
    host.hold(arriving("@tunnels", op={"op": "neq"}))
    assert counts(host, "mt.0")
    wanted = {**host.held, (added := NftElement(TABLE, "tunnels", "mt.0")).key: added}
    host.call(host.engine.commit, changes(host.held, wanted), None)
    host.held = wanted
    assert not counts(host, "mt.0")
    assert host.differences() == []
