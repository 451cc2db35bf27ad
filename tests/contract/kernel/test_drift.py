"""What any kernel promises about changes by hand: each is seen as a difference of exactly that object, and repaired."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec
import pytest

from schemas.host_objects import GUARD_METRIC, LinkAddress, NftChain, NftElement, NftTable, PlanObject, PolicyRule, Route, WireguardPeer
from schemas.values import Address, Prefix
from services.kernel.fake import FakeHost
from services.kernel.transaction import Change, Listed, ListedChain
from tests.contract.kernel.gateway_plan import PEERS, TABLE
from tests.contract.kernel.machines import OVER_BOTH_ENGINES, Machine, converge, differences, make

pytestmark = OVER_BOTH_ENGINES


class Tampering(NamedTuple):
    """A change by hand: commands for a real host ({o}, {t}: link names' beginnings), its like on the fake, the keys that then differ."""

    commands: str
    fake: Callable[[FakeHost, str], None]
    keys: tuple[str, ...]


def _drop(*keys: str) -> Callable[[FakeHost, str], None]:
    def change(host: FakeHost, tag: str) -> None:
        for key in keys:
            del host.objects[_named(key, tag)]

    return change


def _put(item: object) -> Callable[[FakeHost, str], None]:
    return lambda host, _tag: host.objects.update({item.key: item})  # type: ignore[attr-defined]


def _edit(key: str, **fields: object) -> Callable[[FakeHost, str], None]:
    def change(host: FakeHost, tag: str) -> None:
        host.objects[_named(key, tag)] = msgspec.structs.replace(host.objects[_named(key, tag)], **fields)  # type: ignore[type-var]

    return change


def _named(key: str, tag: str) -> str:
    return key.format(o=f"mo.{tag}", t=f"mt.{tag}")


def _stranger(tag: str) -> WireguardPeer:
    return WireguardPeer(f"mt.{tag}0", PEERS[1], None, (Prefix("10.44.0.0/16"),))


def _theft(host: FakeHost, tag: str) -> None:
    for edit in _THEFT:
        edit(host, tag)


ROUTE = "route 7002 10.200.1.0/24 0"
ROUTE6, ROUTES6 = "route 7002 fd00:200:1::/64 1024", "route 7001 fd00:200::/32 1024"
PEER = f"peer {{t}}0 {PEERS[2]}"
_THEFT = (
    _edit(PEER, allowed_ips=(Prefix("10.8.0.0/32"), Prefix("10.8.1.0/24"))),
    _edit(f"peer {{t}}0 {PEERS[0]}", allowed_ips=(Prefix("0.0.0.0/0"), Prefix("10.9.0.0/16"))),
)
TAMPERINGS = {
    "rule added to a chain": Tampering(
        f"nft insert rule inet {TABLE} classify accept",
        _put(ListedChain(TABLE, "classify", ("accept",), "filter", "prerouting", -150)),
        (f"chain {TABLE} classify",),
    ),
    "rule bound to an interface's number": Tampering(
        f"nft insert rule inet {TABLE} classify iif lo accept",
        _put(ListedChain(TABLE, "classify", ("iif 1 accept",), "filter", "prerouting", -150)),
        (f"chain {TABLE} classify",),
    ),
    "chain emptied": Tampering(
        f"nft flush chain inet {TABLE} forward", _edit(f"chain {TABLE} forward", rules=()), (f"chain {TABLE} forward",)
    ),
    "chain policy": Tampering(
        f"nft add chain inet {TABLE} forward '{{{{ policy drop; }}}}'",
        _put(ListedChain(TABLE, "forward", (), "filter", "forward", 0, "drop")),
        (f"chain {TABLE} forward",),
    ),
    "foreign chain in our table": Tampering(
        f"nft add chain inet {TABLE} intruder", _put(NftChain(TABLE, "intruder", ())), (f"chain {TABLE} intruder",)
    ),
    "foreign set in our table": Tampering(
        f"nft add set inet {TABLE} odd '{{{{ type ipv4_addr; flags timeout; }}}}'",
        _put(Listed("nft", f"set {TABLE} odd", "a set with timeout")),
        (f"set {TABLE} odd",),
    ),
    "foreign table of our name": Tampering(
        "nft add table inet meshmark.stale", _put(NftTable("meshmark.stale")), ("table meshmark.stale",)
    ),
    "element removed": Tampering(
        f"nft delete element inet {TABLE} dn '{{{{ 10.61.0.0/16 }}}}'",
        _drop(f"element {TABLE} dn 10.61.0.0/16"),
        (f"element {TABLE} dn 10.61.0.0/16",),
    ),
    "element added": Tampering(
        f"nft add element inet {TABLE} local '{{{{ 10.1.0.0/16 }}}}'",
        _put(NftElement(TABLE, "local", "10.1.0.0/16")),
        (f"element {TABLE} local 10.1.0.0/16",),
    ),
    "name with * added to a set": Tampering(
        f"nft add element inet {TABLE} tunnels '{{{{ \"wg*\" }}}}'",
        _put(NftElement(TABLE, "tunnels", "wg*")),
        (f"element {TABLE} tunnels wg*",),
    ),
    "verdict of a name with *": Tampering(
        # nft finds a false overlap when it adds this one alone
        """nft 'flush map inet meshmark.rome class; add element inet meshmark.rome class {{ "lo" : return, "wg*" : accept,
        "{o}*" : jump from_overlay, "{t}*" : jump from_tunnel }}'""",
        _put(NftElement(TABLE, "class", "wg*", "accept")),
        (f"element {TABLE} class wg*",),
    ),
    "element's value": Tampering(
        f"nft 'delete element inet {TABLE} hosts {{{{ 10.70.0.4 }}}}; add element inet {TABLE} hosts {{{{ 10.70.0.4 : 10.9.9.9 }}}}'",
        _edit(f"element {TABLE} hosts 10.70.0.4", value="10.9.9.9"),
        (f"element {TABLE} hosts 10.70.0.4",),
    ),
    "prefix element's value": Tampering(
        f"nft 'delete element inet {TABLE} dn {{{{ 10.63.0.7 }}}}; add element inet {TABLE} dn {{{{ 10.63.0.7 : 10.9.9.9/32 }}}}'",
        _edit(f"element {TABLE} dn 10.63.0.7", value="10.9.9.9"),
        (f"element {TABLE} dn 10.63.0.7",),
    ),
    "policy rule removed": Tampering(
        "ip rule del pref 900", _drop("rule 900 fwmark 0x1000/0x3000 iif - to -"), ("rule 900 fwmark 0x1000/0x3000 iif - to -",)
    ),
    "policy rule added": Tampering(
        "ip rule add pref 899 fwmark 1 lookup 5 proto 77",
        _put(PolicyRule(899, 5, 1, 0xFFFFFFFF)),
        ("rule 899 fwmark 0x1/0xffffffff iif - to -",),
    ),
    "policy rule of another table": Tampering(
        "ip rule del pref 901; ip rule add pref 901 fwmark 0x2000/0x3000 lookup 7001 proto 77",
        _edit("rule 901 fwmark 0x2000/0x3000 iif - to -", table=7001),
        ("rule 901 fwmark 0x2000/0x3000 iif - to -",),
    ),
    "policy rule doubled": Tampering(
        "ip rule add pref 901 fwmark 0x2000/0x3000 lookup 7001 proto 77",
        _put(Listed("rule", "rule 901 fwmark 0x2000/0x3000 iif - to -", "twice")),
        ("rule 901 fwmark 0x2000/0x3000 iif - to -",),
    ),
    "route removed": Tampering("ip route del 10.200.1.0/24 table 7002", _drop(ROUTE), (ROUTE,)),
    "route by another hop": Tampering(
        "ip route replace 10.200.1.0/24 via 10.80.2.12 dev {o}2 onlink table 7002 proto 77", _edit(ROUTE, hops=()), (ROUTE,)
    ),
    "route with a source": Tampering(
        "ip route replace 10.200.1.0/24 via 10.80.2.11 dev {o}1 onlink src 127.0.0.1 table 7002 proto 77",
        _edit(ROUTE, source=Address("127.0.0.1")),
        (ROUTE,),
    ),
    "guard removed": Tampering(
        f"ip route del unreachable 10.61.0.0/16 metric {GUARD_METRIC}",
        _drop(f"route 254 10.61.0.0/16 {GUARD_METRIC}"),
        (f"route 254 10.61.0.0/16 {GUARD_METRIC}",),
    ),
    "route by a next hop object": Tampering(
        "ip nexthop add id 7 dev {o}1; ip route add 10.77.0.0/16 nhid 7 table 7001 proto 77",
        _put(Listed("route", "route 7001 10.77.0.0/16 0", "a next hop object")),
        ("route 7001 10.77.0.0/16 0",),
    ),
    "IPv6 route by a next hop object": Tampering(
        "ip -6 nexthop add id 8 dev {o}1; ip -6 route add fd00:77::/64 nhid 8 table 7001 proto 77",
        _put(Listed("route", "route 7001 fd00:77::/64 1024", "a next hop object")),
        ("route 7001 fd00:77::/64 1024",),
    ),
    "IPv6 route removed": Tampering("ip route del fd00:200:1::/64 table 7002", _drop(ROUTE6), (ROUTE6,)),
    "IPv6 route of two hops by one": Tampering(
        "ip route del fd00:200::/32 table 7001 via fd00:169::6 dev {t}1", _edit(ROUTES6, hops=()), (ROUTES6,)
    ),
    "IPv6 route appended": Tampering(
        "ip -6 route append fd00:169::/126 dev {t}1 table 7001 proto 77",
        _put(Listed("route", "route 7001 fd00:169::/126 1024", "twice")),
        ("route 7001 fd00:169::/126 1024",),
    ),
    "IPv6 route of another metric": Tampering(
        "ip -6 route add blackhole fd00:200:1::/64 table 7002 metric 1025 proto 77",
        _put(Route(7002, Prefix("fd00:200:1::/64"), "blackhole", 1025)),
        ("route 7002 fd00:200:1::/64 1025",),
    ),
    "IPv6 guard removed": Tampering(
        f"ip route del unreachable fd00:61::/32 metric {GUARD_METRIC}",
        _drop(f"route 254 fd00:61::/32 {GUARD_METRIC}"),
        (f"route 254 fd00:61::/32 {GUARD_METRIC}",),
    ),
    "IPv6 policy rule removed": Tampering(
        "ip -6 rule del pref 900",
        _drop("rule inet6 900 fwmark 0x1000/0x3000 iif - to -"),
        ("rule inet6 900 fwmark 0x1000/0x3000 iif - to -",),
    ),
    "IPv6 policy rule of another table": Tampering(
        "ip -6 rule del pref 902; ip -6 rule add pref 902 to fd00:200::/32 lookup 11 proto 77",
        _edit("rule inet6 902 fwmark 0x0/0x0 iif - to fd00:200::/32", table=11),
        ("rule inet6 902 fwmark 0x0/0x0 iif - to fd00:200::/32",),
    ),
    "IPv6 element removed": Tampering(
        f"nft delete element inet {TABLE} dn6 '{{{{ fd00:63::7 }}}}'",
        _drop(f"element {TABLE} dn6 fd00:63::7"),
        (f"element {TABLE} dn6 fd00:63::7",),
    ),
    "IPv6 prefix element's value": Tampering(
        f"nft 'delete element inet {TABLE} dn6 {{{{ fd00:61::/32 }}}}; add element inet {TABLE} dn6 {{{{ fd00:61::/32 : fd00:9::/32 }}}}'",
        _edit(f"element {TABLE} dn6 fd00:61::/32", value="fd00:9::/32"),
        (f"element {TABLE} dn6 fd00:61::/32",),
    ),
    "IPv6 address removed": Tampering(
        "ip addr del fd00:80::1/128 dev {o}6", _drop("address {o}6 fd00:80::1/128"), ("address {o}6 fd00:80::1/128",)
    ),
    "IPv6 link-local address removed": Tampering(
        "ip addr del fe80::1/64 dev {o}6", _drop("address {o}6 fe80::1/64"), ("address {o}6 fe80::1/64",)
    ),
    "IPv6 address added": Tampering(
        "ip addr add fd00:4::4/128 dev {o}1",
        lambda host, tag: host.objects.update({(item := LinkAddress(f"mo.{tag}1", Address("fd00:4::4"), 128)).key: item}),
        ("address {o}1 fd00:4::4/128",),
    ),
    "route of ours added": Tampering(
        "ip route add blackhole 10.77.0.0/16 proto 77",
        _put(Route(254, Prefix("10.77.0.0/16"), "blackhole")),
        ("route 254 10.77.0.0/16 0",),
    ),
    "MTU": Tampering("ip link set {o}1 mtu 1300", _edit("link {o}1", mtu=1300), ("link {o}1",)),
    "MAC": Tampering("ip link set {o}1 address 02:00:00:00:00:77", _edit("link {o}1", mac="02:00:00:00:00:77"), ("link {o}1",)),
    "WireGuard MTU": Tampering("ip link set {t}0 mtu 1300", _edit("link {t}0", mtu=1300), ("link {t}0",)),
    "WireGuard port": Tampering("wg set {t}0 listen-port 4444", _edit("link {t}0", listen_port=4444), ("link {t}0",)),
    "WireGuard mark": Tampering("wg set {t}1 fwmark 0", _edit("link {t}1", fwmark=0), ("link {t}1",)),
    "address removed": Tampering(
        "ip addr del 169.254.18.5/30 dev {t}1", _drop("address {t}1 169.254.18.5/30"), ("address {t}1 169.254.18.5/30",)
    ),
    "address added": Tampering(
        "ip addr add 10.4.4.4/32 dev {o}1",
        lambda host, tag: host.objects.update({(item := LinkAddress(f"mo.{tag}1", Address("10.4.4.4"), 32)).key: item}),
        ("address {o}1 10.4.4.4/32",),
    ),
    "peer removed": Tampering(f"wg set {{t}}0 peer {PEERS[2]} remove", _drop(PEER), (PEER,)),
    "peer's AllowedIPs": Tampering(
        f"wg set {{t}}0 peer {PEERS[2]} allowed-ips 10.9.0.0/16,10.3.0.0/16",
        _edit(PEER, allowed_ips=(Prefix("10.3.0.0/16"), Prefix("10.9.0.0/16"))),
        (PEER,),
    ),
    "peer's AllowedIP given to another": Tampering(
        f"wg set {{t}}0 peer {PEERS[0]} allowed-ips 0.0.0.0/0,10.9.0.0/16",
        _theft,
        (PEER,),
    ),
    "peer added": Tampering(
        f"wg set {{t}}0 peer {PEERS[1]} allowed-ips 10.44.0.0/16",
        lambda host, tag: host.objects.update({(item := _stranger(tag)).key: item}),
        (f"peer {{t}}0 {PEERS[1]}",),
    ),
    "peer's keepalive": Tampering(f"wg set {{t}}0 peer {PEERS[2]} persistent-keepalive 9", _edit(PEER, keepalive_seconds=9), (PEER,)),
    "sysctl": Tampering(
        "sysctl -qw net.ipv4.ip_forward=0",
        lambda host, _tag: host.sysctls.update({"net/ipv4/ip_forward": "0"}),
        ("sysctl net/ipv4/ip_forward",),
    ),
}


@pytest.mark.parametrize("name", TAMPERINGS)
def test_a_change_by_hand_is_exactly_one_difference_and_is_repaired(machine: Machine, plan: dict[str, PlanObject], name: str) -> None:
    """Nothing else is blamed, and the repair brings the plan back."""
    tampering = TAMPERINGS[name]
    converge(machine.kernel, plan)
    machine.tamper(tampering.commands, tampering.fake)
    found = differences(machine.kernel, plan)
    assert {change.key for change in found} == {_named(key, machine.tag) for key in tampering.keys}
    make(machine.kernel, found)
    assert differences(machine.kernel, plan) == []


def test_a_link_that_is_down_is_a_difference_and_is_set_up_again(machine: Machine, plan: dict[str, PlanObject]) -> None:
    """A link that is down takes its routes along; both are found, and the link comes up before its routes do."""

    def down(host: FakeHost, tag: str) -> None:
        link = f"mo.{tag}1"
        host.objects[f"link {link}"] = Listed("link", f"link {link}", "down")
        for key in [key for key, item in host.objects.items() if isinstance(item, Route) and any(hop.link == link for hop in item.hops)]:
            del host.objects[key]

    converge(machine.kernel, plan)
    machine.tamper("ip link set {o}1 down", down)
    found = {change.key for change in differences(machine.kernel, plan)}
    assert found == {f"link mo.{machine.tag}1", ROUTE, "route 7002 10.80.2.11/32 0"}
    converge(machine.kernel, plan)
    assert differences(machine.kernel, plan) == []


def test_a_tunnel_that_is_down_is_set_up_again(machine: Machine, plan: dict[str, PlanObject]) -> None:
    """Its port is its own all the while, also where a userspace WireGuard keeps it: nothing is in the way."""

    def down(host: FakeHost, tag: str) -> None:
        host.objects[f"link mt.{tag}1"] = Listed("link", f"link mt.{tag}1", "down")

    converge(machine.kernel, plan)
    machine.tamper("ip link set {t}1 down", down)
    assert f"link mt.{machine.tag}1" in {change.key for change in differences(machine.kernel, plan)}
    converge(machine.kernel, plan)
    assert differences(machine.kernel, plan) == []


def test_a_lost_table_is_built_again(machine: Machine, plan: dict[str, PlanObject]) -> None:
    """After somebody deleted our table, all that was in it differs and nothing outside of it."""

    def delete(host: FakeHost, _tag: str) -> None:
        host.objects = {key: item for key, item in host.objects.items() if item.layer != "nft"}

    converge(machine.kernel, plan)
    machine.tamper(f"nft delete table inet {TABLE}", delete)
    found = differences(machine.kernel, plan)
    assert {change.key for change in found} == {key for key, item in plan.items() if item.layer == "nft"}
    make(machine.kernel, found)
    assert differences(machine.kernel, plan) == []


def test_a_lost_link_takes_its_addresses_peers_and_routes_along(machine: Machine, plan: dict[str, PlanObject]) -> None:
    """Removal of one link shows as the link and what was on it, and one pass brings all of it back."""
    converge(machine.kernel, plan)
    machine.kernel.write(Change(plan[f"link mt.{machine.tag}0"], None))
    found = {change.key for change in differences(machine.kernel, plan)}
    lost = {key for key, item in plan.items() if _is_on(item, f"mt.{machine.tag}0")}
    assert found == lost
    converge(machine.kernel, plan)
    assert differences(machine.kernel, plan) == []


def _is_on(item: PlanObject, link: str) -> bool:
    if isinstance(item, Route):
        return any(hop.link == link for hop in item.hops)
    return item.key == f"link {link}" or (isinstance(item, LinkAddress | WireguardPeer) and item.link == link)
