"""Rules, elements and headers as nft text, one line each.

Owns nothing: values in, text out. Every form here is one that nft 1.0.6 loads; constants are masked here, since that version takes no
two operands that are not constant.
"""

from __future__ import annotations

import re

from msgspec.structs import replace

from schemas.host_objects import NftChain, NftElement, NftSet
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
    Statement,
    Trace,
    Verdict,
    VerdictMap,
)
from schemas.values import IPV6, Address

_NAME_SELECTORS = ("iifname", "oifname", "fib saddr . mark oifname")
_PORT_SELECTORS = ("sport", "dport")
_PAIR = 2
_FULL_MARK = 0xFFFFFFFF
_ONE_VALUE = r"(?:[0-9a-f]*:[0-9a-f:.]*|[0-9]+(?:\.[0-9]+){3}|0x[0-9a-f]+|[0-9]+)(?:/[0-9]+)?"
_VALUE = re.compile(f"{_ONE_VALUE}(?:-{_ONE_VALUE})?")


def rule_text(rule: Rule) -> str:
    return " ".join(_statement_text(item) for item in _kept_apart(rule))


def _kept_apart(rule: Rule) -> Rule:
    """The rule with ports written as prefixes of full length where nft must not join their comparisons.

    nft 1.0.6 makes one comparison of two ports of a header, whatever is between them: of ``!=`` and ``!=`` it makes ``!=`` of the pair, and
    a counter between them counts what it should not. Two equal ports side by side may be joined.
    """
    ports = {place: item for place, item in enumerate(rule) if isinstance(item, Match) and item.selector.endswith(_PORT_SELECTORS)}
    single = [place for place, item in ports.items() if len(item.values) == 1 and item.values[0].isdigit()]
    if len(single) < _PAIR or (list(ports) == [single[0], single[0] + 1] and all(item.op == "==" for item in ports.values())):
        return rule
    apart = {place: replace(ports[place], values=(f"{ports[place].values[0]}/16",)) for place in single[1:]}
    return tuple(apart.get(place, item) for place, item in enumerate(rule))


def _statement_text(item: Statement) -> str:  # noqa: C901, PLR0911, PLR0912 - one line for each kind of statement
    match item:
        case Match():
            return _match_text(item)
        case Counter():
            return "counter"
        case Verdict():
            return f"{item.verdict} {item.target}".rstrip()
        case VerdictMap():
            return f"{item.selector} vmap @{item.map}"
        case SetMark():
            return _mark_text("meta", item)
        case SetCtMark():
            return _mark_text("ct", item)
        case CopyMark():
            return _copy_text(item)
        case Nat():
            field = "saddr" if item.nat == "snat" else "daddr"
            protocol = "ip6" if item.family == IPV6 else "ip"
            return f"{item.nat} {protocol} {'prefix ' if item.prefix else ''}to {protocol} {field} map @{item.map}"
        case NatTo():
            return _nat_text(item)
        case Masquerade():
            return "masquerade"
        case Reject():
            return "reject"
        case Notrack():
            return "notrack"
        case ClampMss():
            return f"tcp option maxseg size set {item.size or 'rt mtu'}"
        case Limit():
            return f"limit rate {item.rate}/second burst {item.burst} packets"
        case Log():
            return f'log prefix "{item.prefix}" group {item.group} snaplen {item.snaplen}'
        case Trace():
            return "meta nftrace set 1"
        case Comment():
            return f'comment "{item.text}"'


def _match_text(item: Match) -> str:
    values = [_name_text(value) if item.selector in _NAME_SELECTORS else value for value in item.values]
    right = values[0] if len(values) == 1 else "{ " + ", ".join(values) + " }"
    left = item.selector if item.mask is None else f"{item.selector} & {item.mask:#x}"
    explicit = item.op == "!=" or "&" in left
    return f"{left} {item.op} {right}" if explicit else f"{left} {right}"


def _mark_text(whose: str, item: SetMark | SetCtMark) -> str:
    value, kept = item.value & item.mask, ~item.mask & _FULL_MARK
    if not kept:
        return f"{whose} mark set {value:#x}"
    left = f"{whose} mark & {kept:#010x}"
    return f"{whose} mark set {left} | {value:#x}" if value else f"{whose} mark set {left}"


def _copy_text(item: CopyMark) -> str:
    source = "ct" if item.to == "meta" else "meta"
    mask = "" if item.mask == _FULL_MARK else f" & {item.mask:#x}"
    return f"{item.to} mark set {source} mark{mask}"


def _nat_text(item: NatTo) -> str:
    if item.port is None:
        return f"{item.nat} {item.family} {'prefix ' if '/' in item.to else ''}to {item.to}"
    address = item.to if item.family == "ip" else f"[{item.to}]"
    return f"{item.nat} {item.family} to {address}:{item.port}"


def _name_text(name: str) -> str:
    return name if name.startswith("@") else f'"{name}"'


def element_text(item: NftElement, *, ranged_value: bool = False) -> str:
    """An element as it stands between the braces; with `ranged_value` an address as value gets a length."""
    key = f'"{item.element}"' if is_name(item.element) else item.element
    value = Address(item.value).host_prefix if ranged_value and is_address(item.value) else item.value
    return f"{key} : {value}" if value else key


def is_name(element: str) -> bool:
    """True for an element that names an interface: no address, no number and no range of them."""
    return _VALUE.fullmatch(element) is None


def is_address(value: str) -> bool:
    """True for a bare address, which is neither a prefix nor a range."""
    if ":" in value:
        return "/" not in value and "-" not in value
    return value.count(".") == 3 and value.replace(".", "").isdigit()  # noqa: PLR2004 - four numbers


def set_header(item: NftSet) -> tuple[str, str]:
    """What comes before and between the braces of a set's declaration."""
    kind = "set" if item.value_type is None else "map"
    values = "" if item.value_type is None else f" : {'interval ' if item.value_interval else ''}{item.value_type}"
    flags = [word for word, is_set in (("interval", item.interval), ("timeout", item.timeout)) if is_set]
    return kind, f"type {item.key_type}{values};" + (f" flags {', '.join(flags)};" if flags else "")


def chain_header(item: NftChain) -> str:
    """What comes between the braces of a chain's declaration before its rules; empty for a chain without a hook."""
    if item.hook is None:
        return ""
    return f"type {item.type} hook {item.hook} priority {item.priority}; policy {item.policy};"
