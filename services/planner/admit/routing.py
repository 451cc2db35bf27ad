"""What published routes and the rest of the topology can contradict each other in. Pure.

Each finding is the reason, the field at fault and the other object (none: empty). Two configurations contradict each other when there
can be a host that both select, be it there already or not: so the order in which hosts and configurations come does not matter.

A host must go on reaching the others. So no published route may take the packets that a host itself sends to an underlay address: not in
main, and not in a table that a rule looks up for packets without a mark; and none to the control prefixes of its cluster (broker and
management). The planner does not know where the router is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from schemas.host_objects import MAIN_TABLE
from schemas.routing import ALL_TUNNELS, PublishedRoute, PublishedRule, RouteConfiguration
from schemas.routing_check import families, mark, match_prefix, metric
from schemas.topology import Node
from schemas.values import Address, Prefix
from services.planner import layout, names
from services.planner.compile.passing import may_meet
from services.planner.compile.routing import priority_of, table_of
from services.planner.state import Attachment, State, seen_prefixes

Finding = tuple[str, str, str]


def problems(item: RouteConfiguration, state: State) -> Iterator[Finding]:
    """All that keeps a configuration out; its cluster is there."""
    yield from _own_numbers(item)
    for other in _configurations(item.cluster, state):
        if other.ref != item.ref and may_meet(item.hosts, other.hosts):
            yield from _tables(item, other)
            yield from _rules(item, other)
    for address, owner in (*_underlay(item.cluster, state), *_control(item, state)):
        yield from (
            (f"the host's own packets to {address} of {owner} would go this way: {found.reason}", found.field, owner)
            for found in _taking(item, address, state)
            if found.item == item
        )
    for attachment in state.attachments[item.cluster].values():
        yield from _remote_in_main(item, attachment, state)


def underlay_taken(cluster: str, address: Address, field: str, state: State) -> Iterator[Finding]:
    """Configurations of a cluster by which its hosts would not reach an underlay address any more."""
    for item in _configurations(cluster, state):
        for found in _taking(item, address, state):
            if found.item == item:
                yield f"packets to {address} would go by {found.field} of {item.ref}: {found.reason}", field, item.ref


def remote_taken(attachment: Attachment, field: str, state: State) -> Iterator[Finding]:
    """Configurations by which packets for the other cluster of a peering would leave its tunnels."""
    for item in _configurations(attachment.end.cluster, state):
        for reason, at, _ in _remote_in_main(item, attachment, state):
            yield f"{at} of {item.ref}: {reason}", field, item.ref


def _configurations(cluster: str, state: State) -> list[RouteConfiguration]:
    return [item for item in state.passing[cluster].values() if isinstance(item, RouteConfiguration)]


# Numbers -------------------------------------------------------------------------------------------------------------------------


def _own_numbers(item: RouteConfiguration) -> Iterator[Finding]:
    if item.table in layout.OWN_TABLES:
        yield f"table {item.table} is meshmark's own; take another number, or leave it out for one of its own", "$.table", ""
    for index, rule in enumerate(item.rules):
        own = next((priorities for priorities in layout.OWN_RULES if rule.priority in priorities), None)
        if own is not None:
            first, last = own[0], own[-1]
            reason = (
                f"priority {rule.priority} is among meshmark's own ({first} to {last}); take a lower one to come before, or a higher one"
            )
            yield reason, f"$.rules[{index}].priority", ""
    if item.table == MAIN_TABLE:
        for index, route in enumerate(item.routes):
            if not route.metric:
                reason = "a route in main needs a metric, so that it stands beside the host's own routes and takes the place of none"
                yield reason, f"$.routes[{index}].metric", ""


def _tables(item: RouteConfiguration, other: RouteConfiguration) -> Iterator[Finding]:
    number = table_of(item)
    if number != table_of(other):
        return
    if item.table is None or other.table is None:
        field = "$.name" if item.table is None else "$.table"
        yield (
            f"table {number} is that of {other.ref}, made from {'both names' if item.table == other.table else 'its name'}",
            field,
            other.ref,
        )
        return
    taken = {(route.prefix, metric(route)): place for place, route in enumerate(other.routes)}
    for index, route in enumerate(item.routes):
        if (place := taken.get((route.prefix, metric(route)))) is not None:
            reason = (
                f"table {number} has {route.prefix} with metric {metric(route)} from {other.ref} ($.routes[{place}]); give another metric"
            )
            yield reason, f"$.routes[{index}].prefix", other.ref


def _rules(item: RouteConfiguration, other: RouteConfiguration) -> Iterator[Finding]:
    """Rules of one priority that look up two tables and can match the same packet: the kernel asks the one that came first."""
    if table_of(item) == table_of(other):
        return
    for index, rule in enumerate(item.rules):
        for place, theirs in enumerate(other.rules):
            if priority_of(item, rule) == priority_of(other, theirs) and _overlap(rule, item, theirs, other):
                what = "priority" if rule.priority else "order, or a priority"
                reason = (
                    f"$.rules[{place}] of {other.ref} matches the same packets at priority {priority_of(item, rule)}; give another {what}"
                )
                yield reason, f"$.rules[{index}]{'.priority' if rule.priority else ''}", other.ref


def _overlap(rule: PublishedRule, item: RouteConfiguration, theirs: PublishedRule, other: RouteConfiguration) -> bool:
    (value, mask), (their_value, their_mask) = mark(rule), mark(theirs)
    return (
        bool(set(families(rule, item)) & set(families(theirs, other)))
        and _prefixes_meet(rule.source, theirs.source)
        and _prefixes_meet(rule.to, theirs.to)
        and _interfaces_meet(rule.iif, theirs.iif)
        and _interfaces_meet(rule.oif, theirs.oif)
        and not (value ^ their_value) & mask & their_mask
    )


def _prefixes_meet(one: Prefix | None, other: Prefix | None) -> bool:
    found = match_prefix(one), match_prefix(other)
    return None in found or found[0].overlaps(found[1])  # type: ignore[union-attr,arg-type]


def _interfaces_meet(one: str | None, other: str | None) -> bool:
    given = {one, other}
    if None in given or len(given) == 1:
        return True
    return ALL_TUNNELS in given and any(name.startswith(names.TUNNEL_LINK_PREFIX) for name in given if name)


# The way to other hosts ----------------------------------------------------------------------------------------------------------


class _Taking(NamedTuple):
    """The route or rule of a configuration that takes packets, and why."""

    item: RouteConfiguration
    field: str
    reason: str


def _underlay(cluster: str, state: State) -> Iterator[tuple[Address, str]]:
    """The addresses that hosts of a cluster must reach, with their owners: each other's, and those of the far gateways."""
    for host in state.hosts_of(cluster):
        if (known := state.host(host)) is not None:
            yield from ((address, known.ref) for address in known.addresses)
            if isinstance(known, Node) and known.endpoint is not None and (place := known.endpoint.address) is not None:
                yield place, known.ref
    for attachment in state.attachments[cluster].values():
        far = state.gateways[attachment.far.cluster].get(attachment.far.gateway)
        given = attachment.far.endpoint.address if attachment.far.endpoint is not None else None
        if given is not None:
            yield given, attachment.peering.ref
        elif far is not None:
            yield from ((address, far.ref) for address in far.addresses)


def _control(item: RouteConfiguration, state: State) -> Iterator[tuple[Address, str]]:
    """Addresses of broker and management, with their cluster: where a control prefix begins, and where a route begins inside of one."""
    cluster = state.clusters[item.cluster]
    for kept in cluster.control:
        inside = (route.prefix for route in item.routes if kept.contains(route.prefix))
        yield from ((prefix.address(0), cluster.ref) for prefix in (kept, *inside))


def _taking(item: RouteConfiguration, address: Address, state: State) -> Iterator[_Taking]:
    """What of a configuration, and of those that share its table, takes the packets that a host itself sends to an address."""
    table = table_of(item)
    others = (other for other in _configurations(item.cluster, state) if other.ref != item.ref and table_of(other) == table)
    sharing = [item, *(other for other in others if may_meet(item.hosts, other.hosts))]
    way = _way(sharing, address)
    if way is None or (way[1].type == "throw" and table != MAIN_TABLE):
        return
    owner, route, field = way
    if table == MAIN_TABLE:
        yield _Taking(owner, field, f"{route.prefix} in main holds it; take a table of its own, with rules for what is meant")
        return
    for one in sharing:
        for index, rule in enumerate(one.rules):
            if _is_for_own_packets(rule, one, address, state):
                throw = f"add a route of type throw for {address.host_prefix}"
                reason = f"the rule finds {route.prefix}; match on a mark or an interface, or {throw}"
                # The rule is at fault, and so is the configuration that added the route to the table of the other's rule.
                yield _Taking(one, f"$.rules[{index}]", reason)
                if owner != one:
                    yield _Taking(owner, field, reason)


def _way(items: list[RouteConfiguration], address: Address) -> tuple[RouteConfiguration, PublishedRoute, str] | None:
    """The route of a table by which packets to an address go: the longest prefix, of these the lowest metric."""
    fitting = [
        (route.prefix.length, -metric(route), (item, route, f"$.routes[{index}]"))
        for item in items
        for index, route in enumerate(item.routes)
        if route.prefix.covers(address)
    ]
    return max(fitting, key=lambda found: found[:2])[2] if fitting else None


def _is_for_own_packets(rule: PublishedRule, item: RouteConfiguration, address: Address, state: State) -> bool:
    """Whether a rule matches packets without a mark from a host itself to an address."""
    value, _ = mark(rule)
    here = (own for host in state.hosts_of(item.cluster) if (known := state.host(host)) for own in known.addresses)
    return (
        not value
        and rule.iif in (None, "lo")
        and rule.oif is None
        and address.family in families(rule, item)
        and (rule.to is None or rule.to.covers(address))
        and (rule.source is None or any(rule.source.covers(own) for own in here))
    )


def _remote_in_main(item: RouteConfiguration, attachment: Attachment, state: State) -> Iterator[Finding]:
    """Routes in main for what a peering's tunnels lead to: better than the guard that keeps it off the uplink."""
    if item.table != MAIN_TABLE:
        return
    for seen, _ in seen_prefixes(state, attachment):
        for index, route in enumerate(item.routes):
            if route.prefix.overlaps(seen):
                reason = f"{route.prefix} in main overlaps {seen} of {attachment.peering.ref}, which the tunnels lead to"
                yield reason, f"$.routes[{index}].prefix", attachment.peering.ref
