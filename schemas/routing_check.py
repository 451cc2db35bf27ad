"""Whether a published route configuration can be in a kernel. DecodeError names the field.

What Linux refuses, or takes and shows in another form, is refused here, so that nothing of it reaches a host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from schemas import firewall_values as values
from schemas.codec import DecodeError
from schemas.routes import kernel_metric
from schemas.routing import ALL_TUNNELS, PublishedRoute, PublishedRule, RouteConfiguration, RouteHop
from schemas.values import FAMILIES, IPV4, IPV6, Address, Family, Prefix

T = TypeVar("T")
_KERNEL_TABLES = {253: "default", 255: "local"}
_NO_NEIGHBOUR = tuple(map(Prefix, ("0.0.0.0/8", "127.0.0.0/8", "224.0.0.0/3", "::/8", "ff00::/8")))
_NO_SOURCE = tuple(map(Prefix, ("0.0.0.0/8", "224.0.0.0/3", "::/128", "ff00::/8")))


def check(item: RouteConfiguration) -> None:
    """Raise DecodeError for the first thing that is wrong."""
    _refuse_if(not item.routes and not item.rules, "the configuration is empty; give a route or a rule", "$")
    kernels = _KERNEL_TABLES.get(item.table or 0, "")
    _refuse_if(
        kernels, f"table {item.table} ({kernels}) is the kernel's own; take another number, or leave it out for one of its own", "$.table"
    )
    seen: dict[tuple[Prefix, int], int] = {}
    for index, route in enumerate(item.routes):
        at = f"$.routes[{index}]"
        _check_route(route, at)
        other = seen.setdefault((route.prefix, metric(route)), index)
        _refuse_if(other != index, f"{route.prefix} with metric {metric(route)} is there already ($.routes[{other}])", f"{at}.prefix")
    rules: dict[tuple[object, ...], int] = {}
    for index, rule in enumerate(item.rules):
        _check_rule(rule, f"$.rules[{index}]")
        place = rules.setdefault(_matches(rule, item), index)
        _refuse_if(place != index, f"the same rule is there already ($.rules[{place}])", f"$.rules[{index}]")


def metric(route: PublishedRoute) -> int:
    """The metric under which the kernel holds the route."""
    return kernel_metric(route.metric, route.prefix.family)


def mark(rule: PublishedRule) -> tuple[int, int]:
    """What a rule asks of a packet's mark: the value and the mask, which is 0 when nothing is asked."""
    if rule.fwmark is None:
        return 0, 0
    return values.mark(rule.fwmark), values.LAST_MARK if rule.mask is None else values.mask(rule.mask)


def families(rule: PublishedRule, item: RouteConfiguration) -> tuple[Family, ...]:
    """The families that a rule is made for."""
    own = {prefix.family for prefix in (rule.source, rule.to) if prefix}
    wanted = own or {route.prefix.family for route in item.routes} or set(FAMILIES)
    return tuple(sorted(wanted))


def _matches(rule: PublishedRule, item: RouteConfiguration) -> tuple[object, ...]:
    """All that the kernel tells a configuration's rules apart by."""
    return rule.priority, families(rule, item), match_prefix(rule.source), match_prefix(rule.to), rule.iif, rule.oif, mark(rule)


def match_prefix(prefix: Prefix | None) -> Prefix | None:
    """A prefix of a rule as the kernel holds it: of length 0 it matches everything of its family, as none does."""
    return prefix if prefix is not None and prefix.length else None


def _read(parse: Callable[[int | str], T], value: int | str, at: str) -> T:
    try:
        return parse(value)
    except ValueError as error:
        raise DecodeError(str(error), at) from None


def _refuse_if(wrong: object, reason: str, at: str) -> None:
    if wrong:
        raise DecodeError(reason, at)


# Routes --------------------------------------------------------------------------------------------------------------------------


def _check_route(route: PublishedRoute, at: str) -> None:
    if route.type != "unicast":
        _refuse_if(route.next_hops, f"a route of type {route.type} leads nowhere, so it has no next hops", f"{at}.nextHops")
        _refuse_if(route.source, f"a route of type {route.type} gives no packet a source", f"{at}.source")
        _refuse_if(route.scope, f"a route of type {route.type} has no scope", f"{at}.scope")
        return
    _refuse_if(not route.next_hops, "give a next hop, or a type: blackhole, prohibit, unreachable or throw", f"{at}.nextHops")
    for index, hop in enumerate(route.next_hops):
        field = f"{at}.nextHops[{index}]"
        _check_hop(hop, route, field)
        places = [(earlier.dev, earlier.via) for earlier in route.next_hops[:index]]
        _refuse_if((hop.dev, hop.via) in places, "the same next hop is there already; give it a weight instead", field)
    if route.source is not None:
        _check_family(route.source, route, f"{at}.source")
        _refuse_if(_in(route.source, _NO_SOURCE), f"{route.source} cannot be the source of a packet", f"{at}.source")
    if route.scope is not None:
        _check_scope(route, f"{at}.scope")


def _check_hop(hop: RouteHop, route: PublishedRoute, at: str) -> None:
    if hop.dev == ALL_TUNNELS:
        reason = "all tunnels have their neighbours and weights from their peering; leave this out"
        for name in ("via", "onlink", "weight"):
            _refuse_if(getattr(hop, name), reason, f"{at}.{name}")
        return
    _check_interface(hop.dev, f"{at}.dev")
    _refuse_if(hop.onlink and hop.via is None, "on-link is said of a neighbour; give via", f"{at}.onlink")
    if hop.via is not None:
        _check_family(hop.via, route, f"{at}.via")
        _refuse_if(_in(hop.via, _NO_NEIGHBOUR), f"{hop.via} cannot be a neighbour's address", f"{at}.via")
    elif route.prefix.family == IPV6:
        _refuse_if(len(route.next_hops) > 1, "the kernel wants an address for each of several IPv6 next hops; give via", f"{at}.via")


def _check_family(address: Address, route: PublishedRoute, at: str) -> None:
    wrong = address.family != route.prefix.family
    _refuse_if(wrong, f"{address} is not of the family of {route.prefix}; write an IPv{route.prefix.family} address", at)


def _check_scope(route: PublishedRoute, at: str) -> None:
    _refuse_if(route.prefix.family != IPV4, "only IPv4 routes have a scope; leave it out", at)
    if route.scope in ("link", "host"):
        far = any(hop.via for hop in route.next_hops)
        _refuse_if(far, f"what is behind a neighbour is not in scope {route.scope}; leave it out, or write global or site", at)
    several = len(route.next_hops) > 1 or any(hop.dev == ALL_TUNNELS for hop in route.next_hops)
    _refuse_if(route.scope == "host" and several, "a route of scope host has one next hop", at)


def _in(address: Address, prefixes: tuple[Prefix, ...]) -> bool:
    return any(prefix.covers(address) for prefix in prefixes)


def _check_interface(name: str, at: str) -> None:
    found = _read(values.interface, name, at)
    reason = f"{name!r} stands for several interfaces; routing knows exact names only, and {ALL_TUNNELS!r} for all tunnels"
    _refuse_if(found.endswith("*"), reason, at)


# Rules ---------------------------------------------------------------------------------------------------------------------------


def _check_rule(rule: PublishedRule, at: str) -> None:
    if rule.source is not None and rule.to is not None:
        mixed = rule.source.family != rule.to.family
        _refuse_if(mixed, f"{rule.to} is not of the family of {rule.source}; write a rule for each", f"{at}.to")
    for name, value in (("iif", rule.iif), ("oif", rule.oif)):
        if value is not None and value != ALL_TUNNELS:
            _check_interface(value, f"{at}.{name}")
    if rule.fwmark is None:
        _refuse_if(rule.mask is not None, "a mask is for a mark; give fwmark", f"{at}.mask")
        return
    found = _read(values.mark, rule.fwmark, f"{at}.fwmark")
    bits = values.LAST_MARK if rule.mask is None else _read(values.mask, rule.mask, f"{at}.mask")
    _refuse_if(found & ~bits, f"{found:#x} has bits outside of the mask {bits:#x}: no packet is like that", f"{at}.fwmark")
