"""Published routes as plan objects: one table, and the rules that look it up. ``@tunnels`` becomes the tunnels of each host.

As a next hop it stands for the tunnels that carry traffic, so a route by tunnels only is not there while there are none; as an
interface of a rule, for those that have a device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from itertools import product

from schemas.host_objects import NextHop, PlanObject, PolicyRule, Route
from schemas.objects import ORDER_LIMIT
from schemas.routing import ALL_TUNNELS, PublishedRoute, PublishedRule, RouteConfiguration
from schemas.routing_check import families, mark, match_prefix
from schemas.values import FAMILIES
from services.planner import layout
from services.planner.allocate import Allocations
from services.planner.compile.facts import NO_FACTS, Facts, tunnels
from services.planner.compile.tunnels import tunnel_hops
from services.planner.state import HostId, State


def facts(item: RouteConfiguration, host: HostId, state: State, allocations: Allocations) -> Facts:
    """What of a host the configuration looks at: its tunnels, where a route or rule names them."""
    named = {hop.dev for route in item.routes for hop in route.next_hops} | {name for rule in item.rules for name in (rule.iif, rule.oif)}
    attachment = state.attachments[host.cluster].get(host.name)
    if ALL_TUNNELS not in named or attachment is None:
        return NO_FACTS
    hops = tuple((family, tunnel_hops(state, allocations, attachment, family)) for family in FAMILIES)
    return tunnels(host, state, allocations)._replace(hops=hops)


def build(item: RouteConfiguration, known: Facts) -> Iterator[PlanObject]:
    """All that the configuration is on a host."""
    table, tunnel = table_of(item), dict(known.hops)
    for route in item.routes:
        hops = tuple(_hops(route, tunnel.get(route.prefix.family, ())))
        if hops or route.type != "unicast":
            yield Route(table, route.prefix, route.type, route.metric, hops, route.source, route.scope)
    for rule in item.rules:
        to, source, (value, mask) = match_prefix(rule.to), match_prefix(rule.source), mark(rule)
        ways = product(families(rule, item), _interfaces(rule.iif, known.tunnels), _interfaces(rule.oif, known.tunnels))
        for family, iif, oif in ways:
            yield PolicyRule(priority_of(item, rule), table, value, mask, iif, to, family, source, oif)


def table_of(item: RouteConfiguration) -> int:
    """The number of a configuration's table: as given, or made from the name, the same on every host and at any time."""
    return item.table or layout.PUBLISHED_TABLE + _hash(item.name) % layout.PUBLISHED_TABLES


def priority_of(item: RouteConfiguration, rule: PublishedRule) -> int:
    """The priority of a rule: as given, or the configuration's, so that a lower `order` comes first."""
    place = (item.order + ORDER_LIMIT) * layout.RULE_PUBLISHED_STEP + _hash(item.name) % layout.RULE_PUBLISHED_STEP
    return rule.priority or layout.RULE_PUBLISHED + place


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")


def _hops(route: PublishedRoute, tunnel: Iterable[NextHop]) -> Iterator[NextHop]:
    for hop in route.next_hops:
        if hop.dev == ALL_TUNNELS:
            yield from tunnel
        else:
            yield NextHop(hop.dev, hop.via, hop.onlink, hop.weight or 1)


def _interfaces(name: str | None, tunnels: Iterable[str]) -> Iterable[str]:
    """The interfaces of a rule, each a rule of its own; empty for any."""
    return tunnels if name == ALL_TUNNELS else (name or "",)
