"""A hypothesis strategy for nftables objects of a plan: sets and maps of every type with elements, and rules of every statement."""

from __future__ import annotations

import ipaddress
from typing import Any

from hypothesis import strategies as st

from schemas.host_objects import NftChain, NftElement, NftSet, NftTable, PlanObject
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
from schemas.values import IPV4, IPV6

TABLE = "meshmark.any"
_ADDRESS = {"ipv4_addr": (ipaddress.IPv4Address, 32), "ipv6_addr": (ipaddress.IPv6Address, 128)}
_NETWORK = {"ipv4_addr": ipaddress.IPv4Network, "ipv6_addr": ipaddress.IPv6Network}
_NAMES = ("eth0", "eth1", "lo", "wg0", "mn.worker-1", "x" * 15)
_STEMS = ("mo.*", "mt.*", "y" * 14 + "*", "q*")
_mark = st.integers(0, 0xFFFFFFFF)
_mask = st.integers(1, 0xFFFFFFFF)


def _number(kind: str, number: int) -> str:
    return str(_ADDRESS[kind][0](number)) if kind in _ADDRESS else str(number) if kind == "inet_service" else f"{number:#x}"


@st.composite
def _keys(draw: st.DrawFn, kind: str, interval: bool) -> list[str]:
    """Keys that do not overlap: single values, and with `interval` prefixes, ranges and patterns."""
    if kind == "ifname":
        return draw(st.lists(st.sampled_from(_NAMES + _STEMS if interval else _NAMES), unique=True, max_size=5))
    bits = {"ipv4_addr": 32, "ipv6_addr": 128, "inet_service": 16, "mark": 32}[kind]
    edges = sorted(draw(st.sets(st.one_of(st.integers(0, (1 << bits) - 1), st.sampled_from([0, (1 << bits) - 1])), max_size=8)))
    if not interval:
        return [_number(kind, number) for number in edges]
    found = []
    for low, high in zip(edges[::2], edges[1::2], strict=False):
        found.append(f"{_number(kind, low)}-{_number(kind, high)}")
    if kind in _ADDRESS and not found:
        length = draw(st.integers(0, bits))
        found.append(str(_NETWORK[kind]((draw(st.integers(0, (1 << bits) - 1)), length), strict=False)))
    return [_as_listed(kind, text) for text in found]


def _as_listed(kind: str, text: str) -> str:
    """A range that is a prefix as one, and a prefix of one address as that."""
    if kind in _ADDRESS and "-" in text:
        low, high = map(_ADDRESS[kind][0], text.split("-"))
        nets = list(ipaddress.summarize_address_range(low, high))
        text = str(nets[0]) if len(nets) == 1 else text
    return text.removesuffix(f"/{_ADDRESS[kind][1]}") if kind in _ADDRESS else text


@st.composite
def _value(draw: st.DrawFn, kind: str, ranged: bool) -> str:
    if kind == "verdict":
        return draw(st.sampled_from(["accept", "drop", "return", "jump inner"]))
    if kind == "mark":
        return f"{draw(_mark):#x}"
    bits = _ADDRESS[kind][1]
    number = draw(st.integers(0, (1 << bits) - 1))
    if not ranged:
        return _number(kind, number)
    return _as_listed(kind, str(_NETWORK[kind]((number, draw(st.integers(1, bits))), strict=False)))


_HEADERS = (
    *((kind, None, interval, False) for kind in ("ipv4_addr", "ipv6_addr", "inet_service", "ifname") for interval in (False, True)),
    ("mark", None, False, False),
    *((kind, kind, interval, ranged) for kind in ("ipv4_addr", "ipv6_addr") for interval, ranged in ((0, 0), (1, 0), (1, 1))),
    *(("ifname", "verdict", interval, False) for interval in (False, True)),
    ("ipv4_addr", "mark", False, False),
    ("ipv6_addr", "verdict", True, False),
)


@st.composite
def _sets(draw: st.DrawFn) -> list[PlanObject]:
    found: list[PlanObject] = []
    for number, (key, value, interval, ranged) in enumerate(draw(st.lists(st.sampled_from(_HEADERS), max_size=5))):
        header = NftSet(TABLE, f"s{number}", key, value, bool(interval), bool(ranged))
        found.append(header)
        texts = draw(_keys(key, header.interval))
        found += (NftElement(TABLE, header.name, text, draw(_value(value, header.value_interval)) if value else "") for text in texts)
    return found


_ONE_OF: dict[str, st.SearchStrategy[str]] = {
    "iifname": st.sampled_from((*_NAMES, *_STEMS, "wg\\*")),
    "oifname": st.sampled_from((*_NAMES, *_STEMS)),
    "meta mark": _mark.map(hex),
    "ct mark": _mark.map(hex),
    "ct state": st.sampled_from(["new", "established", "related", "invalid", "untracked"]),
    "ct status": st.sampled_from(["snat", "dnat", "assured", "seen-reply"]),
    "ct direction": st.sampled_from(["original", "reply"]),
    "fib saddr type": st.sampled_from(["local", "unicast", "broadcast"]),
    "fib daddr type": st.sampled_from(["local", "multicast"]),
    "fib saddr . mark . iif oif": st.sampled_from(["missing", "exists"]),
    "fib saddr . mark oifname": st.sampled_from((*_NAMES, *_STEMS)),
    "tcp flags": st.sampled_from(["syn", "rst", "fin"]),
    "tcp flags & (syn | rst)": st.sampled_from(["syn", "rst"]),
}
_ALONE = ("fib saddr . mark . iif oif", "tcp flags & (syn | rst)", "ct status")


@st.composite
def _match(draw: st.DrawFn, family: str, names: dict[str, list[str]], hook: str) -> Match:
    known = [item for item in _ONE_OF if hook != "postrouting" or not item.startswith("fib saddr .")]
    selector: Any = draw(st.sampled_from([*known, f"{family} saddr", f"{family} daddr", "tcp sport", "tcp dport"]))
    op: Any = draw(st.sampled_from(["==", "!="]))
    kind = {"ip": "ipv4_addr", "ip6": "ipv6_addr"}[family] if selector.startswith("ip") else ""
    kind = "inet_service" if selector.endswith("port") else "mark" if selector.endswith(" mark") else kind
    kind = "ifname" if selector in ("iifname", "oifname") else kind
    if names.get(kind) and draw(st.booleans()):
        return Match(selector, (f"@{draw(st.sampled_from(names[kind]))}",), op)
    if selector in _ONE_OF:
        several = selector not in _ALONE and draw(st.booleans())
        texts = draw(st.lists(_ONE_OF[selector], min_size=1, max_size=3 if several else 1, unique=True))
        texts = [text for text in texts if len(texts) == 1 or "\\" not in text] or ["eth0"]
        mask = draw(st.one_of(st.none(), _mask)) if kind == "mark" and len(texts) == 1 else None
        return Match(selector, tuple(texts), op, mask)
    single = _value(kind, True) if kind in _ADDRESS else st.integers(0, 65535).map(str)
    texts = draw(st.one_of(st.lists(single, min_size=1, max_size=3, unique=True), _keys(kind, True).filter(bool)))
    return Match(selector, tuple(texts), op)


_written = st.one_of(
    st.builds(SetMark, _mark, _mask),
    st.builds(SetCtMark, _mark, _mask),
    st.builds(CopyMark, st.sampled_from(["meta", "ct"]), st.one_of(_mask, st.just(0xFFFFFFFF))),
    st.builds(ClampMss, st.one_of(st.just(0), st.integers(1, 65535))),
    st.just(Counter()),
    st.builds(Limit, st.integers(1, 10_000), st.integers(1, 10_000)),
    st.builds(Log, st.integers(0, 0xFFFF), st.sampled_from(["a", "in pods", "x" * 63]), st.integers(1, 0xFFFF)),
)


@st.composite
def _rule(draw: st.DrawFn, names: dict[str, list[str]], maps: list[NftSet], kind: str, hook: str) -> Rule:
    family = draw(st.sampled_from(["ip", "ip6"]))
    found: list[Any] = draw(st.lists(_match(family, names, hook), max_size=4))
    if draw(st.booleans()):
        found.insert(0, Match("meta nfproto", ("ipv4" if family == "ip" else "ipv6",)))
    if draw(st.booleans()):
        found.insert(0, Match("meta l4proto", ("tcp",)))
    late = hook in ("forward", "postrouting")  # before, no route says what a packet's size may be
    found += [item for item in draw(st.lists(_written, max_size=2)) if late or item != ClampMss(0)]
    ends: list[Any] = [Verdict("accept"), Verdict("drop"), Verdict("return"), Verdict("jump", "inner")]
    if kind == "nat":
        way: Any = "snat" if hook == "postrouting" else "dnat"
        ends += [Masquerade()] * (way == "snat")
        ends.append(NatTo(way, family, draw(_value("ipv4_addr" if family == "ip" else "ipv6_addr", True))))
        of_family = [item for item in maps if item.key_type == item.value_type == ("ipv4_addr" if family == "ip" else "ipv6_addr")]
        ends += [Nat(way, item.name, item.value_interval, IPV4 if family == "ip" else IPV6) for item in of_family]
    else:
        ends += [Reject()] if hook != "postrouting" else []
        ends += [Notrack()] if hook == "prerouting" else []
    ends += [VerdictMap("iifname", item.name) for item in maps if (item.key_type, item.value_type) == ("ifname", "verdict")]
    found.append(draw(st.sampled_from(ends)))
    if draw(st.booleans()):
        found.append(Comment(draw(st.text(st.characters(exclude_categories=["C"], exclude_characters='"'), max_size=30))))
    return tuple(found)


@st.composite
def nft_plans(draw: st.DrawFn) -> dict[str, PlanObject]:
    """One table's objects by key, which the kernel takes."""
    members = draw(_sets())
    headers = [item for item in members if isinstance(item, NftSet)]
    names: dict[str, list[str]] = {}
    for item in headers:
        if item.value_type is None:
            names.setdefault(item.key_type, []).append(item.name)
    maps = [item for item in headers if item.value_type is not None]
    objects: list[PlanObject] = [NftTable(TABLE), NftChain(TABLE, "inner", ()), *members]
    for number in range(draw(st.integers(0, 3))):
        kind: Any = draw(st.sampled_from(["filter", "nat"]))
        hook: Any = draw(st.sampled_from(["prerouting", "postrouting"] + ["input", "forward"] * (kind == "filter")))
        priority = -350 if kind == "filter" and hook == "prerouting" else draw(st.integers(-150, 300))
        rules = tuple(draw(st.lists(_rule(names, maps, kind, hook), max_size=4)))
        policy: Any = draw(st.sampled_from(["accept", "drop"]))
        objects.append(NftChain(TABLE, f"c{number}", rules, kind, hook, priority, policy))
    return {item.key: item for item in objects}
