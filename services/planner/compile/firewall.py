"""A published firewall as plan objects: one table of its own, with its sets, chains and rules as they were written.

Values are made canonical on the way, as nftables lists them; what the kernel cannot hold was refused at admission
(``schemas.firewall_check``). ``@tunnels`` becomes a named set of the host's tunnels, one element each.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from msgspec.structs import replace

from schemas import firewall_values as values
from schemas.firewall import (
    ALL_TUNNELS,
    FAMILIES,
    Accept,
    Action,
    ClampMssTo,
    CtMarkFromMark,
    CtMarkWith,
    Drop,
    FirewallChain,
    FirewallConfiguration,
    FirewallMatch,
    FirewallRule,
    FirewallSet,
    MarkFromCtMark,
    MarkWith,
    Masquerade,
    NoTrack,
    Number,
    Reject,
    SetType,
    SourceNat,
)
from schemas.firewall_check import set_name, values_of
from schemas.host_objects import NftChain, NftElement, NftSet, NftTable, PlanObject
from schemas.nft import (
    ClampMss,
    Comment,
    CopyMark,
    Counter,
    Match,
    NatTo,
    Notrack,
    Rule,
    Selector,
    SetCtMark,
    SetMark,
    Statement,
    Verdict,
)
from schemas.nft import Masquerade as MasqueradeStatement
from schemas.nft import Reject as RejectStatement
from services.planner import names
from services.planner.allocate import Allocations
from services.planner.compile import control
from services.planner.compile.facts import NO_FACTS, Facts, tunnels
from services.planner.state import HostId, State

_PLAIN_SELECTORS: dict[str, Selector] = {
    "inInterface": "iifname",
    "outInterface": "oifname",
    "mark": "meta mark",
    "ctMark": "ct mark",
    "ctState": "ct state",
    "protocol": "meta l4proto",
}


def facts(item: FirewallConfiguration, host: HostId, state: State, allocations: Allocations) -> Facts:
    """What of a host the configuration looks at: its tunnels, where a rule names them, and the cluster's control prefixes."""
    found = tunnels(host, state, allocations) if _names_tunnels(item) else NO_FACTS
    cluster = state.clusters.get(host.cluster)
    if cluster is None or not cluster.control:
        return found
    return found._replace(control=cluster.control, because=(*found.because, cluster.ref))


def build(item: FirewallConfiguration, known: Facts) -> Iterator[PlanObject]:
    """All that the configuration is on a host."""
    table = names.firewall_table(item.name)
    yield NftTable(table)
    for found in item.sets:
        yield from _set(table, found)
    if _names_tunnels(item):
        yield NftSet(table, ALL_TUNNELS, "ifname")
        yield from (NftElement(table, ALL_TUNNELS, link) for link in known.tunnels)
    types = {found.name: found.type for found in item.sets}
    for chain in item.chains:
        made = _chain(table, chain, item.order, types)
        yield replace(made, rules=(*control.kept(known.control, chain.hook), *made.rules))


def mark_bits(item: FirewallConfiguration) -> Iterator[tuple[int, str]]:
    """The bits of packets' marks that each action writes, with the action's field."""
    for place, chain in enumerate(item.chains):
        for number, rule in enumerate(chain.rules):
            for index, action in enumerate(rule.actions):
                at = f"$.chains[{place}].rules[{number}].actions[{index}]"
                if isinstance(action, MarkWith):
                    yield _mask(action.mask), at
                elif isinstance(action, MarkFromCtMark):
                    yield values.LAST_MARK, at


def _names_tunnels(item: FirewallConfiguration) -> bool:
    return any(set_name(match) == ALL_TUNNELS for chain in item.chains for rule in chain.rules for match in rule.match)


def _set(table: str, item: FirewallSet) -> Iterator[PlanObject]:
    if item.type == "ifname":
        texts = [values.member_interface(value) for value in item.elements]
    elif item.type == "mark":
        texts = [f"{values.mark(value):#x}" for value in item.elements]
    else:
        read = values.port if item.type == "inet_service" else values.addresses
        texts = [read(value).text for value in item.elements]
    yield NftSet(table, item.name, item.type, interval=_has_intervals(item.type, texts))
    yield from (NftElement(table, item.name, text) for text in texts)


def _has_intervals(kind: SetType, texts: list[str]) -> bool:
    """Whether the kernel must keep ranges. Addresses and ports always may, so that a first prefix does not make the set anew."""
    return kind not in ("ifname", "mark") or any(text.endswith("*") for text in texts)


def _chain(table: str, chain: FirewallChain, order: int, types: dict[str, SetType]) -> NftChain:
    rules = tuple(_rule(rule, types) for rule in chain.rules)
    return NftChain(table, chain.name, rules, chain.type, chain.hook, chain.place(order), chain.policy)


def _rule(rule: FirewallRule, types: dict[str, SetType]) -> Rule:
    protocols = [values.protocol(value) for match in rule.match if match.field == "protocol" for value in values_of(match)]
    ports = values.PORT_PROTOCOLS[protocols[0]] if len(set(protocols)) == 1 and protocols[0] in values.PORT_PROTOCOLS else "th"
    statements: list[Statement] = [_match(match, ports, types) for match in rule.match]
    if rule.counter:
        statements.append(Counter())
    for action in rule.actions:
        statements += _action(action)
    if text := values.comment(rule.comment):
        statements.append(Comment(text))
    return tuple(statements)


def _match(match: FirewallMatch, ports: str, types: dict[str, SetType]) -> Match:
    selector = _selector(match, ports, types)
    texts = tuple(dict.fromkeys(_text(match, value) for value in values_of(match)))
    mask = _mask(match.mask)
    return Match(selector, texts, "==" if match.op == "eq" else "!=", None if mask == values.LAST_MARK else mask)


def _selector(match: FirewallMatch, ports: str, types: dict[str, SetType]) -> Selector:
    match match.field:
        case "source" | "destination":
            name = set_name(match)
            family = FAMILIES[types[name]] if name else values.addresses(values_of(match)[0]).family
            return f"{family} {'saddr' if match.field == 'source' else 'daddr'}"  # type: ignore[return-value]
        case "sourcePort" | "destinationPort":
            return f"{ports} {'sport' if match.field == 'sourcePort' else 'dport'}"  # type: ignore[return-value]
        case field:
            return _PLAIN_SELECTORS[field]


def _text(match: FirewallMatch, value: int | str) -> str:
    if set_name(match):
        return str(value)
    match match.field:
        case "source" | "destination":
            return values.addresses(value).text
        case "sourcePort" | "destinationPort":
            return values.port(value).text
        case "mark" | "ctMark":
            return f"{values.mark(value):#x}"
        case "protocol":
            return values.protocol_text(values.protocol(value))
        case _:
            return str(value)


def _mask(mask: Number | None) -> int:
    return values.LAST_MARK if mask is None else values.mask(mask)


def _action(action: Action) -> tuple[Statement, ...]:  # noqa: C901, PLR0911 - one line for each kind of action
    match action:
        case Accept():
            return (Verdict("accept"),)
        case Drop():
            return (Verdict("drop"),)
        case Reject():
            return (RejectStatement(),)
        case NoTrack():
            return (Notrack(),)
        case MarkWith():
            return (SetMark(values.mark(action.value), _mask(action.mask)),)
        case CtMarkWith():
            return (SetCtMark(values.mark(action.value), _mask(action.mask)),)
        case MarkFromCtMark():
            return (CopyMark("meta", _mask(action.mask)),)
        case CtMarkFromMark():
            return (CopyMark("ct", _mask(action.mask)),)
        case ClampMssTo():
            return (Match("tcp flags", ("syn",)), ClampMss(action.size))
        case Masquerade():
            return (MasqueradeStatement(),)
        case _:
            span = values.addresses(action.to)
            kind: Literal["snat", "dnat"] = "snat" if isinstance(action, SourceNat) else "dnat"
            return (NatTo(kind, "ip6" if span.family == "ip6" else "ip", span.text, action.port),)
