"""A gateway-like plan for the contract suite: every layer, every kind of nft statement."""

from schemas.host_objects import (
    GUARD_METRIC,
    MAIN_TABLE,
    FdbEntry,
    LinkAddress,
    Neighbour,
    NextHop,
    NftChain,
    NftElement,
    NftSet,
    NftTable,
    PlanObject,
    PolicyRule,
    Route,
    Sysctl,
    VxlanLink,
    WireguardLink,
    WireguardPeer,
)
from schemas.nft import ClampMss, Counter, Masquerade, Match, Nat, Notrack, SetMark, Verdict, VerdictMap
from schemas.values import IPV6, Address, Endpoint, Key, Mac, Prefix
from services.kernel.curve25519 import public_key

TABLE = "meshmark.rome"
PEERS = tuple(public_key(bytes([number]) * 32) for number in range(1, 4))
_DROP = (Counter(), Verdict("drop"))
_OUT, _IN = Match("meta mark", ("0x1000",), mask=0x3000), Match("meta mark", ("0x2000",), mask=0x3000)
_NEW = Match("ct state", ("related",), "!=")


def gateway_plan(tag: str) -> dict[str, PlanObject]:
    """All objects by key. `tag` makes interface names of its own: WireGuard's sockets are in one folder for all namespaces."""
    objects = [*_system(tag), *_mesh(tag), *_firewall(tag), *_routing(tag), *_second_family(tag)]
    return {item.key: item for item in objects}


def overlay(tag: str, number: int = 1) -> str:
    return f"mo.{tag}{number}"


def tunnel(tag: str, number: int = 0) -> str:
    return f"mt.{tag}{number}"


def _system(tag: str) -> list[PlanObject]:
    objects: list[PlanObject] = [
        Sysctl("net/ipv4/ip_forward", "1"),
        Sysctl("net/ipv4/fwmark_reflect", "1"),
        Sysctl("net/ipv4/fib_multipath_hash_policy", "1"),
    ]
    for number in (1, 2):
        link = overlay(tag, number)
        mac = Mac(f"02:4d:01:00:00:0{number}")
        objects.append(VxlanLink(link, 0x10000 + number, Address("127.0.0.1"), Address(f"127.0.0.{number + 1}"), mac, 1450))
        objects.append(LinkAddress(link, Address("10.80.2.1"), 32))
    for number in (0, 1):
        link = tunnel(tag, number)
        objects.append(WireguardLink(link, 51840 + number, 1440, fwmark=0x4D00 * number))
        objects.append(LinkAddress(link, Address(f"169.254.18.{4 * number + 1}"), 30))
        endpoint = Endpoint(f"127.0.0.9:{51840 + number}")
        objects.append(WireguardPeer(link, Key(PEERS[number]), endpoint, (Prefix("0.0.0.0/0"),), 25))
    allowed = (Prefix("10.9.0.0/16"), Prefix("10.8.1.0/24"), Prefix("10.8.0.0/32"))
    objects.append(WireguardPeer(tunnel(tag), Key(PEERS[2]), Endpoint("127.0.0.9:51899"), allowed))
    return objects


def _mesh(tag: str) -> list[PlanObject]:
    """A device to many hosts, each with its forwarding entry and its neighbours."""
    link, near, far = overlay(tag, 3), Mac("02:4d:03:00:00:01"), Mac("02:4d:03:00:00:02")
    return [
        VxlanLink(link, 0x10003, Address("127.0.0.1"), None, near, 1450),
        LinkAddress(link, Address("10.80.3.1"), 24),
        FdbEntry(link, far, Address("127.0.0.2")),
        FdbEntry(link, Mac("02:4d:03:00:00:03"), Address("127.0.0.3")),
        Neighbour(link, Address("10.80.3.2"), far),
        Neighbour(link, Address("fd00:80:3::2"), far),
    ]


def _routing(tag: str) -> list[PlanObject]:
    hops = (NextHop(tunnel(tag, 0), weight=3), NextHop(tunnel(tag, 1)))
    via = Address("10.80.2.11")
    everything = Prefix("0.0.0.0/0")
    return [
        Route(MAIN_TABLE, Prefix("10.61.0.0/16"), "unreachable", GUARD_METRIC),
        Route(7001, everything, "unreachable", GUARD_METRIC),
        Route(7002, everything, "unreachable", GUARD_METRIC),
        Route(7002, Prefix("10.99.0.0/16"), "throw"),
        Route(7002, Prefix("10.98.0.0/16"), "blackhole", 5),
        Route(7001, Prefix("10.200.0.0/16"), hops=hops),
        Route(7001, Prefix("169.254.18.0/30"), hops=(NextHop(tunnel(tag)),)),
        Route(7002, Prefix("10.80.2.11/32"), hops=(NextHop(overlay(tag)),)),
        Route(7002, Prefix("10.200.1.0/24"), hops=(NextHop(overlay(tag), via, onlink=True),)),
        PolicyRule(890, 7002, 0x1000, 0x3000, iif="lo"),
        PolicyRule(900, 7001, 0x1000, 0x3000),
        PolicyRule(901, 7002, 0x2000, 0x3000),
        PolicyRule(902, 10, to=Prefix("10.200.0.0/16")),
        PolicyRule(903, 7001),
    ]


def _second_family(tag: str) -> list[PlanObject]:
    """What a plan holds besides where IPv6 is in use, and a link over an IPv6 underlay."""
    link, everything = overlay(tag, 6), Prefix("::/0")
    hops = tuple(
        NextHop(tunnel(tag, number), Address(f"fd00:169::{4 * number + 2:x}"), onlink=True, weight=3 - number) for number in (0, 1)
    )
    objects: list[PlanObject] = [
        Sysctl("net/ipv6/conf/all/forwarding", "1"),
        Sysctl("net/ipv6/fwmark_reflect", "1"),
        VxlanLink(link, 0x10006, Address("fd00:18::1"), Address("fd00:18::2"), Mac("02:4d:01:00:00:06"), 1430),
        LinkAddress(link, Address("fd00:80::1"), 128),
        LinkAddress(link, Address("fe80::1"), 64),
        Route(MAIN_TABLE, Prefix("fd00:61::/32"), "unreachable", GUARD_METRIC),
        Route(7001, everything, "unreachable", GUARD_METRIC),
        Route(7002, Prefix("fd00:99::/32"), "throw"),
        Route(7002, Prefix("fd00:98::/32"), "blackhole", 5),
        Route(7001, Prefix("fd00:200::/32"), hops=hops),
        Route(7001, Prefix("fd00:169::/126"), hops=(NextHop(tunnel(tag)),)),
        Route(7002, Prefix("fd00:80::2/128"), hops=(NextHop(link),)),
        Route(7002, Prefix("fd00:200:1::/64"), hops=(NextHop(link, Address("fd00:80::2"), onlink=True),)),
        PolicyRule(890, 7002, 0x1000, 0x3000, iif="lo", family=IPV6),
        PolicyRule(900, 7001, 0x1000, 0x3000, family=IPV6),
        PolicyRule(902, 10, to=Prefix("fd00:200::/32"), family=IPV6),
        PolicyRule(903, 7001, family=IPV6),
        NftSet(TABLE, "local6", "ipv6_addr", interval=True),
        NftElement(TABLE, "local6", "fd00:200::/32"),
        NftSet(TABLE, "everybody6", "ipv6_addr", "ipv6_addr", interval=True),
        NftElement(TABLE, "everybody6", "::/0", "fd00:70::1"),
        NftElement(TABLE, "local6", "fd00:70::1"),
        NftSet(TABLE, "hosts6", "ipv6_addr", "ipv6_addr"),
        NftElement(TABLE, "hosts6", "fd00:70::4", "fd00:200:2::10"),
        NftSet(TABLE, "empty6", "ipv6_addr", "ipv6_addr", interval=True, value_interval=True),
        NftSet(TABLE, "dn6", "ipv6_addr", "ipv6_addr", interval=True, value_interval=True),
        NftElement(TABLE, "dn6", "fd00:61::/32", "fd00:200::/32"),
        NftElement(TABLE, "dn6", "fd00:63::7", "fd00:72::7"),
        NftChain(TABLE, "outgoing6", ((_OUT, Nat("dnat", "dn6", family=IPV6)),), "nat", "prerouting", -101),
        NftChain(TABLE, "incoming6", ((_IN, Nat("snat", "hosts6", prefix=False, family=IPV6)),), "nat", "postrouting", 102),
        NftChain(
            TABLE,
            "checks6",
            (
                (Match("ip6 saddr", ("::", "fe80::/10"), "!="), Match("fib saddr . mark . iif oif", ("missing",)), *_DROP),
                (Match("ip6 saddr", ("@local6",), "!="), Match("ip6 daddr", ("fd00::/8",)), *_DROP),
            ),
            "filter",
            "prerouting",
            -149,
        ),
    ]
    objects += [LinkAddress(tunnel(tag, number), Address(f"fd00:169::{4 * number + 1:x}"), 126) for number in (0, 1)]
    allowed = (Prefix("fd00:9::/32"), Prefix("fd00:8:1::/64"), Prefix("fd00:8::/128"))
    objects.append(WireguardPeer(tunnel(tag, 1), Key(PEERS[2]), Endpoint("[fd00:18::9]:51899"), allowed))
    return objects


def _firewall(tag: str) -> list[PlanObject]:
    own, far = f"mo.{tag}*", f"mt.{tag}*"
    prefixes = (("10.61.0.0/16", "10.200.0.0/16"), ("10.62.0.0/16", "10.71.0.0/16"), ("10.63.0.7", "10.72.0.7"))
    objects: list[PlanObject] = [
        NftTable(TABLE),
        NftSet(TABLE, "class", "ifname", "verdict", interval=True),
        NftElement(TABLE, "class", own, "jump from_overlay"),
        NftElement(TABLE, "class", far, "jump from_tunnel"),
        NftElement(TABLE, "class", "lo", "return"),
        NftSet(TABLE, "tunnels", "ifname", interval=True),
        NftElement(TABLE, "tunnels", far),
        NftSet(TABLE, "local", "ipv4_addr", interval=True),
        NftElement(TABLE, "local", "10.200.0.0/17"),
        NftElement(TABLE, "local", "10.200.128.0/17"),
        NftElement(TABLE, "local", "10.70.0.1"),
        NftSet(TABLE, "hosts", "ipv4_addr", "ipv4_addr"),
        NftElement(TABLE, "hosts", "10.70.0.4", "10.200.2.10"),
        NftSet(TABLE, "marks", "ipv4_addr", "mark"),
        NftElement(TABLE, "marks", "10.70.0.4", "0x1000"),
        NftSet(TABLE, "ports", "inet_service", interval=True),
        NftElement(TABLE, "ports", "4789"),
        NftElement(TABLE, "ports", "51840-51850"),
        NftSet(TABLE, "everybody", "ipv4_addr", "ipv4_addr", interval=True),
        NftElement(TABLE, "everybody", "0.0.0.0/0", "10.70.0.1"),
        NftSet(TABLE, "empty", "ipv4_addr", "ipv4_addr", interval=True, value_interval=True),
        NftSet(TABLE, "dn", "ipv4_addr", "ipv4_addr", interval=True, value_interval=True),
        NftSet(TABLE, "sn", "ipv4_addr", "ipv4_addr", interval=True, value_interval=True),
    ]
    objects += [NftElement(TABLE, "dn", seen, real) for seen, real in prefixes]
    objects += [NftElement(TABLE, "sn", real, seen) for seen, real in prefixes]
    return objects + _chains(own, far)


def _chains(own: str, far: str) -> list[PlanObject]:
    outer = Match("udp dport", ("4789", "51840-51850"))
    classify = (
        (VerdictMap("iifname", "class"),),
        (Match("iifname", (own,)), _NEW, Match("meta nfproto", ("ipv4",)), Match("fib saddr . mark . iif oif", ("missing",)), *_DROP),
        (Match("iifname", (far,)), _NEW, Match("fib saddr . mark oifname", (far,), "!="), *_DROP),
    )
    forward = (
        (_OUT, Match("oifname", (far,), "!="), *_DROP),
        (_OUT, _NEW, Match("ip saddr", ("@local",), "!="), *_DROP),
        (Match("iifname", (own, far), "!="), Match("oifname", (own, far)), *_DROP),
        (Match("oifname", ("@tunnels",)), Match("tcp flags & (syn | rst)", ("syn",)), ClampMss()),
        (Match("meta l4proto", ("tcp", "udp")), Match("ct state", ("new", "related")), Counter()),
        (Match("udp dport", ("@ports",)), Verdict("accept")),
        (Match("ct direction", ("reply",)), Match("ct status", ("snat",)), Verdict("accept")),
        (Match("ip daddr", ("10.0.0.0/8", "192.168.0.1"), "!="), Verdict("jump", "from_overlay")),
        (Match("meta mark", ("0x1000", "0x2000"), mask=0x3000), Verdict("return")),
    )
    return [
        NftChain(TABLE, "from_overlay", ((SetMark(0x1000, 0x3000),),)),
        NftChain(TABLE, "from_tunnel", ((SetMark(0x2000, 0x3000),),)),
        NftChain(TABLE, "raw_in", ((Match("fib daddr type", ("local",)), outer, Notrack()),), "filter", "prerouting", -300),
        NftChain(TABLE, "raw_out", ((Match("fib saddr type", ("local",)), outer, Notrack()),), "filter", "output", -300),
        NftChain(TABLE, "classify", classify, "filter", "prerouting", -150),
        NftChain(TABLE, "outgoing", ((_OUT, Nat("dnat", "dn")), (_IN, Nat("dnat", "hosts", prefix=False))), "nat", "prerouting", -100),
        NftChain(TABLE, "forward", forward, "filter", "forward"),
        NftChain(TABLE, "incoming", ((_IN, Nat("snat", "sn")), (_IN, *_DROP)), "nat", "postrouting", 100),
        NftChain(
            TABLE,
            "hosts_out",
            (
                (_OUT, Nat("snat", "hosts", prefix=False)),
                (_OUT, Nat("snat", "everybody", prefix=False)),
                (Match("iifname", (own,)), Match("ip daddr", ("@local",)), Masquerade()),
            ),
            "nat",
            "postrouting",
            101,
        ),
        NftChain(TABLE, "last", ((Match("oifname", (own,)), SetMark(0, 0x3000)), (SetMark(7, 0xFFFFFFFF),)), "filter", "postrouting", 300),
    ]
