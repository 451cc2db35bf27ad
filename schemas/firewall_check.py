"""Whether a published firewall can be in a kernel: its names, values and their places. DecodeError names the field.

What nftables 1.0.6 and Linux refuse, or take and never act on, is refused here, so that nothing of it reaches a host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from schemas import firewall_values as values
from schemas.codec import DecodeError
from schemas.firewall import (
    ALL_TUNNELS,
    FAMILIES,
    Accept,
    Action,
    ClampMssTo,
    CtMarkFromMark,
    CtMarkWith,
    DestinationNat,
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
    Reject,
    SetType,
    SourceNat,
)
from schemas.firewall_values import PORT_PROTOCOLS, Span

T = TypeVar("T")
_ENDING = (Accept, Drop, Reject, Masquerade, SourceNat, DestinationNat)
_NAT_HOOKS = {SourceNat: ("postrouting", "input"), DestinationNat: ("prerouting", "output"), Masquerade: ("postrouting",)}
_CONNTRACK_PRIORITY = -200
_TCP = values.PROTOCOLS["tcp"]
_SET_TYPES: dict[str, tuple[SetType, ...]] = {
    "source": ("ipv4_addr", "ipv6_addr"),
    "destination": ("ipv4_addr", "ipv6_addr"),
    "sourcePort": ("inet_service",),
    "destinationPort": ("inet_service",),
    "inInterface": ("ifname",),
    "outInterface": ("ifname",),
    "mark": ("mark",),
    "ctMark": ("mark",),
}


def check(item: FirewallConfiguration) -> None:
    """Raise DecodeError for the first thing that is wrong."""
    types: dict[str, SetType] = {ALL_TUNNELS: "ifname"}
    for index, found in enumerate(item.sets):
        _check_set(found, f"$.sets[{index}]", types)
        types[found.name] = found.type
    names: set[str] = set()
    places: dict[tuple[str, int], str] = {}
    for index, chain in enumerate(item.chains):
        at = f"$.chains[{index}]"
        _read(values.identifier, chain.name, f"{at}.name")
        _refuse_if(chain.name in names, f"the chain {chain.name!r} is there twice", f"{at}.name")
        names.add(chain.name)
        _check_place(chain, item.order, at)
        meets = places.setdefault((chain.hook, chain.place(item.order)), chain.name)
        _refuse_if(
            meets != chain.name,
            f"at hook {chain.hook}, {chain.name!r} and {meets!r} have the same priority, so neither comes first; give them two",
            f"{at}.priority",
        )
        for number, rule in enumerate(chain.rules):
            _Rule(rule, chain, chain.place(item.order), types, f"{at}.rules[{number}]").check()


def values_of(match: FirewallMatch) -> tuple[int | str, ...]:
    """The values of a match, one or several."""
    return match.value if isinstance(match.value, tuple) else (match.value,)


def set_name(match: FirewallMatch) -> str:
    """The named set that a match looks up; empty when it has values of its own."""
    return match.value[1:] if isinstance(match.value, str) and match.value.startswith("@") else ""


def _read(parse: Callable[[str], T] | Callable[[int | str], T], value: int | str, field: str) -> T:
    try:
        return parse(value)  # type: ignore[arg-type]
    except ValueError as error:
        raise DecodeError(str(error), field) from None


def _refuse_if(wrong: object, reason: str, field: str) -> None:
    if wrong:
        raise DecodeError(reason, field)


# Sets and chains -----------------------------------------------------------------------------------------------------------------


def _check_set(item: FirewallSet, at: str, known: dict[str, SetType]) -> None:
    _read(values.identifier, item.name, f"{at}.name")
    taken = "stands for the tunnels of each host" if item.name == ALL_TUNNELS else "is there twice"
    _refuse_if(item.name in known, f"the set {item.name!r} {taken}", f"{at}.name")
    if item.type == "ifname":
        _check_interfaces(item, at)
        return
    spans = [_read(_parser(item.type), value, f"{at}.elements[{index}]") for index, value in enumerate(item.elements)]
    for index, span in enumerate(spans):
        wrong = FAMILIES.get(item.type, "") != span.family
        _refuse_if(wrong, f"{span.text} is not for a set of type {item.type}", f"{at}.elements[{index}]")
    if (meeting := values.overlapping(spans)) is not None:
        field = f"{at}.elements[{max(index for index, span in enumerate(spans) if span in meeting)}]"
        reason = f"{meeting[0].text} and {meeting[1].text} overlap; an element of a set is there once"
        raise DecodeError(reason, field)


def _check_interfaces(item: FirewallSet, at: str) -> None:
    names = [_read(values.member_interface, value, f"{at}.elements[{index}]") for index, value in enumerate(item.elements)]
    if (meeting := values.overlapping_names(names)) is not None:
        one, other = sorted(meeting)
        reason = f"{names[other]!r} and {names[one]!r} overlap; an element of a set is there once"
        raise DecodeError(reason, f"{at}.elements[{other}]")


def _parser(kind: SetType) -> Callable[[int | str], Span]:
    if kind == "inet_service":
        return values.port
    return _mark_span if kind == "mark" else values.addresses


def _mark_span(value: int | str) -> Span:
    found = values.mark(value)
    return Span(found, found, f"{found:#x}")


def _check_place(chain: FirewallChain, order: int, at: str) -> None:
    allowed = {"nat": ("prerouting", "input", "output", "postrouting"), "route": ("output",)}.get(chain.type, (chain.hook,))
    _refuse_if(chain.hook not in allowed, f"a chain of type {chain.type} can be at {' or '.join(allowed)} only", f"{at}.hook")
    early = chain.type == "nat" and chain.place(order) <= _CONNTRACK_PRIORITY
    reason = f"a nat chain comes after connection tracking: a priority above {_CONNTRACK_PRIORITY} (with the order {order} added)"
    _refuse_if(early, reason, f"{at}.priority")


# Rules ---------------------------------------------------------------------------------------------------------------------------


class _Rule:
    """One rule, where it stands and what its matches have said so far."""

    def __init__(self, rule: FirewallRule, chain: FirewallChain, priority: int, sets: dict[str, SetType], at: str) -> None:
        self._rule = rule
        self._chain = chain
        self._priority = priority
        self._sets = sets
        self._at = at
        self._family = ""
        protocols = [match for match in rule.match if match.field == "protocol"]
        self._protocol = protocols[0] if protocols else None

    def check(self) -> None:
        seen_protocol = False
        for index, match in enumerate(self._rule.match):
            at = f"{self._at}.match[{index}]"
            _refuse_if(seen_protocol and match.field == "protocol", "a rule matches on the protocol once", f"{at}.field")
            seen_protocol = seen_protocol or match.field == "protocol"
            self._check_match(match, at)
        for index, action in enumerate(self._rule.actions):
            at = f"{self._at}.actions[{index}]"
            last = index == len(self._rule.actions) - 1
            _refuse_if(isinstance(action, _ENDING) and not last, "nothing can come after this action: it ends the chain", at)
            self._check_action(action, at)
        _refuse_if(not self._rule.actions and not self._rule.counter, "the rule does nothing; give an action or a counter", self._at)

    def _check_match(self, match: FirewallMatch, at: str) -> None:
        parsed: Sequence[Span] = ()
        if set_name(match):
            self._check_set_name(match, at)
        else:
            parsed = self._parsed(match, at)
        _refuse_if(match.mask is not None and match.field not in ("mark", "ctMark"), "only marks have a mask", f"{at}.mask")
        if match.mask is not None:
            self._check_masked(match, at)
        if match.field in ("source", "destination"):
            kind = self._sets.get(set_name(match))
            for family in [FAMILIES[kind]] if kind else [span.family for span in parsed]:
                mixed = self._family not in ("", family)
                _refuse_if(mixed, "a rule is about IPv4 or about IPv6; write one for each", f"{at}.value")
                self._family = family
        if match.field in ("sourcePort", "destinationPort"):
            _refuse_if(not self._has_ports(), self._ports_reason(), f"{at}.field")
        unknown = {"inInterface": ("output",), "outInterface": ("prerouting", "input")}.get(match.field, ())
        _refuse_if(self._chain.hook in unknown, f"no packet has that interface at {self._chain.hook}", f"{at}.field")

    def _check_set_name(self, match: FirewallMatch, at: str) -> None:
        name, field = set_name(match), f"{at}.value"
        _refuse_if(name not in self._sets, f"there is no set {name!r}; the sets are {', '.join(sorted(self._sets))}", field)
        allowed = _SET_TYPES.get(match.field, ())
        reason = f"the set {name!r} has the type {self._sets.get(name)}; {match.field} takes {' or '.join(allowed) or 'no set'}"
        _refuse_if(self._sets[name] not in allowed, reason, field)

    def _parsed(self, match: FirewallMatch, at: str) -> list[Span]:
        """The values of a match, each read; spans of what is not a span are empty."""
        given, several = values_of(match), isinstance(match.value, tuple)
        _refuse_if(not given, "give at least one value", f"{at}.value")
        found = []
        for index, value in enumerate(given):
            field = f"{at}.value[{index}]" if several else f"{at}.value"
            _refuse_if(str(value).startswith("@"), "a set stands alone, not in a list", field)
            found.append(_read(_match_parser(match), value, field))
        return found

    def _check_masked(self, match: FirewallMatch, at: str) -> None:
        mask = _read(values.mask, match.mask or 0, f"{at}.mask")
        _refuse_if(set_name(match), "a named set is matched without a mask; list the marks here", f"{at}.mask")
        for value in values_of(match):
            mark = values.mark(value)
            _refuse_if(mark & ~mask, f"{mark:#x} has bits outside of the mask {mask:#x}: no packet is like that", f"{at}.value")

    def _has_ports(self) -> bool:
        match = self._protocol
        return match is not None and match.op == "eq" and all(_number(value) in PORT_PROTOCOLS for value in values_of(match))

    @staticmethod
    def _ports_reason() -> str:
        return f"ports need a match on the protocol in the same rule: eq {', '.join(sorted(PORT_PROTOCOLS.values()))}"

    # Actions -------------------------------------------------------------------------------------------------------------------

    def _check_action(self, action: Action, at: str) -> None:
        hook = self._chain.hook
        match action:
            case MarkWith() | CtMarkWith():
                mask = values.LAST_MARK if action.mask is None else _read(values.mask, action.mask, f"{at}.mask")
                mark = _read(values.mark, action.value, f"{at}.value")
                _refuse_if(mark & ~mask, f"{mark:#x} has bits outside of the mask {mask:#x}", f"{at}.value")
            case MarkFromCtMark() | CtMarkFromMark():
                if action.mask is not None:
                    _read(values.mask, action.mask, f"{at}.mask")
            case Reject():
                _refuse_if(hook == "postrouting", "nothing can be rejected at postrouting any more; drop it", at)
            case NoTrack():
                late = hook not in ("prerouting", "output") or self._priority >= _CONNTRACK_PRIORITY or self._chain.type == "nat"
                reason = f"connection tracking has seen the packet here; take prerouting or output, priority below {_CONNTRACK_PRIORITY}"
                _refuse_if(late, reason, at)
            case ClampMssTo():
                early = not action.size and hook not in ("forward", "output", "postrouting")
                _refuse_if(early, f"at {hook} the route is not known; give a size, or take forward, output or postrouting", at)
                other = self._protocol is not None and not (self._protocol.op == "eq" and _numbers(self._protocol) == [_TCP])
                _refuse_if(other, "only TCP has a maximum segment size; match on tcp, or on no protocol", at)
            case Masquerade():
                self._check_nat_place(action, at)
            case SourceNat() | DestinationNat():
                self._check_nat_place(action, at)
                self._check_nat(action, at)

    def _check_nat_place(self, action: Masquerade | SourceNat | DestinationNat, at: str) -> None:
        hooks = _NAT_HOOKS[type(action)]
        right = self._chain.type == "nat" and self._chain.hook in hooks
        _refuse_if(not right, f"this translation can be in a nat chain at {' or '.join(hooks)} only", at)

    def _check_nat(self, action: SourceNat | DestinationNat, at: str) -> None:
        span = _read(values.addresses, action.to, f"{at}.to")
        _refuse_if("-" in span.text, "translate to one address, or prefix to prefix", f"{at}.to")
        _refuse_if(self._family not in ("", span.family), f"{span.text} is not of the family that the rule matches on", f"{at}.to")
        if action.port is not None:
            _refuse_if(not self._has_ports(), self._ports_reason(), f"{at}.port")
        if span.low == span.high:
            return
        _refuse_if(action.port is not None, "prefix to prefix keeps the port; give none", f"{at}.port")
        field = "source" if isinstance(action, SourceNat) else "destination"
        fitting = [match for match in self._rule.match if match.field == field and match.op == "eq" and not set_name(match)]
        given = [values.addresses(value) for match in fitting for value in values_of(match)]
        what = f"prefix to prefix needs a match on one {field} prefix of the same length, so that the host part is kept"
        _refuse_if(len(given) != 1 or "-" in given[0].text, what, f"{at}.to")
        lengths = [one.text.partition("/")[2] or "whole" for one in (given[0], span)]
        _refuse_if(lengths[0] != lengths[1], f"{given[0].text} and {span.text} differ in length; {what}", f"{at}.to")
        _refuse_if(lengths[0] == "0", "all addresses cannot be translated to all addresses", f"{at}.to")


def _match_parser(match: FirewallMatch) -> Callable[[int | str], Span]:
    """What reads a value of this match; what has no extent is the span of nothing."""
    several = isinstance(match.value, tuple) and len(match.value) > 1
    match match.field:
        case "source" | "destination":
            return values.addresses
        case "sourcePort" | "destinationPort":
            return values.port
        case "protocol":
            return _nothing(values.protocol)
        case "ctState":
            return _nothing(values.ct_state)
        case "mark" | "ctMark":
            return _mark_span
        case _:
            return _nothing(values.member_interface if several else values.interface)


def _nothing(parse: Callable[[int | str], object]) -> Callable[[int | str], Span]:
    def read(value: int | str) -> Span:
        parse(value)
        return Span(0, 0, "")

    return read


def _number(value: int | str) -> int:
    """The protocol's number; -1 for what is none, which is refused where it stands."""
    try:
        return values.protocol(value)
    except ValueError:
        return -1


def _numbers(match: FirewallMatch) -> list[int]:
    return [_number(value) for value in values_of(match)]
