"""What hosts report as used by others, and an object would take there. Pure.

Who was there first stays: an object that is admitted is not asked again, whatever its hosts report later, and one that changes is asked for
what it takes in addition. So a replay of what was admitted leads to the same, and a report takes nothing away. A host that joins is not
asked: what it said when it was here before may be long untrue, and nobody would say another thing for as long as it has no plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from schemas.firewall import FirewallConfiguration
from schemas.host_objects import MAIN_TABLE
from schemas.in_use import Number
from schemas.objects import PassThrough
from schemas.routing import RouteConfiguration
from schemas.routing_check import families
from schemas.topology import TUNNELS_MAX, Cluster, EgressPolicy, Gateway, Node, Peering, Topology
from services.planner import layout
from services.planner.admit.problem import Problem
from services.planner.compile.firewall import mark_bits
from services.planner.compile.passing import selected
from services.planner.compile.routing import priority_of, table_of
from services.planner.mesh import is_meant_to_encrypt, ports
from services.planner.state import Attachment, HostId, State

_MARKS = "write other bits, by a mask, or take theirs away"
_ANOTHER = "take another one, or take theirs away"
_UNNAMED_TABLE = "give a table, or take theirs away"
_UNNAMED_PRIORITY = "give another order, or a priority, or take theirs away"
_PORTS = "take other ports, or end that"
_FIELD = "give the cluster other `marks`, take theirs away, or let the node opt out"
_OVERLAY = "meshmark needs it on nodes: take theirs away"
_EGRESS_MARKS = "give the cluster other `marks`, or take theirs away"
_ENCRYPTION = "meshmark needs it on nodes that encrypt: take theirs away, or let the node opt out"
_OWN = "meshmark needs it for itself: take theirs away, or give the gateway a network namespace of its own"


class _Taking(NamedTuple):
    """A number that an object takes on a host, by which field, and what can be done when others have it."""

    host: HostId
    number: Number
    field: str
    cure: str


def taken_by_others(item: Topology, before: Topology | None, state: State) -> Iterator[Problem]:
    """Numbers that others use on hosts where `item` would take them and `before`, which is admitted, does not."""
    if not state.in_use:
        return
    known: set[tuple[HostId, Number]] = set()
    bits: Counter[HostId] = Counter()
    for taking in _takings(before, state) if before is not None else ():
        known.add((taking.host, taking.number))
        if taking.number.kind == "mark":
            bits[taking.host] |= taking.number.number
    for taking in _takings(item, state):
        number = taking.number
        if number.kind == "mark":
            number = Number("mark", number.number & ~bits[taking.host])
        use, host = state.in_use[taking.host].met(number), state.host(taking.host)
        if use is not None and host is not None and (taking.host, number) not in known:
            yield Problem(f"{number.words}, used by others on {host.ref} ({use.by}): {taking.cure}", taking.field, host.ref)


def _takings(item: Topology, state: State) -> Iterator[_Taking]:
    """On hosts that report anything at all."""
    match item:
        case RouteConfiguration():
            numbers = list(_routing(item))
            yield from (_Taking(host, *found) for host in _selected(item, state) for found in numbers)
        case FirewallConfiguration():
            # Each mask once: a long list of rules writes few, and is asked for every host.
            written: dict[int, str] = {}
            for bits, field in mark_bits(item):
                written.setdefault(bits, field)
            hosts = _selected(item, state)
            yield from (_Taking(host, Number("mark", bits), field, _MARKS) for host in hosts for bits, field in written.items())
        case Peering():
            for place in (0, 1):
                yield from _peering(Attachment(item, place), f"$.ends[{place}]", state)
        case EgressPolicy() if item.cluster in state.clusters:
            known_cluster = state.clusters[item.cluster]
            leading = (host for host, known in _reporting(item.cluster, state) if isinstance(known, Node))
            yield from (_Taking(host, *found) for host in leading for found in _egress(known_cluster))
        case Node() if isinstance(state.nodes[item.cluster].get(item.name), Node) and item.cluster in state.clusters:
            # It is known, and may opt in now.
            host = HostId(item.cluster, item.name)
            found = _mesh(state.clusters[item.cluster], item) if host in state.in_use else ()
            yield from (_Taking(host, number, "$.optOut" if at != "$.routing" else "$.cluster", cure) for number, at, cure in found)
        case Cluster():
            nodes = ((host, known) for host, known in _reporting(item.name, state) if isinstance(known, Node))
            yield from (_Taking(host, *found) for host, known in nodes for found in _mesh(item, known))


def _reporting(cluster: str, state: State) -> Iterator[tuple[HostId, Node | Gateway]]:
    for host in sorted(host for host in state.in_use if host.cluster == cluster):
        if (known := state.host(host)) is not None:
            yield host, known


def _selected(item: PassThrough, state: State) -> Iterator[HostId]:
    return (host for host, known in _reporting(item.cluster, state) if selected(item.hosts, known, state))


def _routing(item: RouteConfiguration) -> Iterator[tuple[Number, str, str]]:
    """The numbers of published routes and rules, each with its field and what can be done."""
    table = table_of(item)
    if table != MAIN_TABLE:
        used = {route.prefix.family for route in item.routes}.union(*(families(rule, item) for rule in item.rules))
        at, cure = ("$.table", _ANOTHER) if item.table else ("$.name", _UNNAMED_TABLE)
        yield from ((Number("table", table, family), at, cure) for family in sorted(used))
    for index, rule in enumerate(item.rules):
        at, cure = (f"$.rules[{index}].priority", _ANOTHER) if rule.priority else (f"$.rules[{index}]", _UNNAMED_PRIORITY)
        yield from ((Number("priority", priority_of(item, rule), family), at, cure) for family in families(rule, item))


def _mesh(cluster: Cluster, node: Node) -> Iterator[tuple[Number, str, str]]:
    """What a node needs for its cluster's overlay and encryption, each with the cluster's field and what can be done."""
    if cluster.routing == "overlay":
        yield Number("table", layout.MESH_TABLE), "$.routing", _OVERLAY
        yield Number("priority", layout.RULE_MESH), "$.routing", _OVERLAY
    if is_meant_to_encrypt(cluster, node):
        yield Number("mark", cluster.marks.mask), "$.marks", _FIELD
        yield from ((Number("port", port), "$.wireguard.port", _ANOTHER) for port in ports(cluster))
        yield Number("table", layout.ENCRYPT_TABLE), "$.encryption", _ENCRYPTION
        for priority in (layout.RULE_ENCRYPT, layout.RULE_OWN_ENCRYPT):
            yield Number("priority", priority), "$.encryption", _ENCRYPTION


def _egress(cluster: Cluster) -> Iterator[tuple[Number, str, str]]:
    """What nodes need to lead pods to where they leave the cluster. Which tables, the planner chooses: none of them may be others'."""
    yield Number("mark", cluster.marks.mask), "$.cluster", _EGRESS_MARKS
    yield Number("priority", layout.RULE_EGRESS), "$.cluster", _OVERLAY
    yield from ((Number("table", table), "$.cluster", _OVERLAY) for table in (layout.MESH_TABLE, *layout.EGRESS_TABLES))


def _peering(attachment: Attachment, at: str, state: State) -> Iterator[_Taking]:
    """What a peering takes on its gateway, and on the nodes of its cluster."""
    item = attachment.peering
    for host, known in _reporting(attachment.end.cluster, state):
        if isinstance(known, Node):
            numbers = [Number("table", layout.NODE_TABLE), Number("priority", layout.RULE_NODE)]
            yield from (_Taking(host, number, f"{at}.cluster", _OWN) for number in numbers)
        elif host == attachment.host:
            numbers = [Number("mark", layout.CLASS_MASK)]
            numbers += [Number("table", table) for table in layout.GATEWAY_TABLES]
            numbers += [Number("priority", priority) for priority in layout.GATEWAY_RULES]
            yield from (_Taking(host, number, f"{at}.gateway", _OWN) for number in numbers)
            # One more than there are tunnels: it is taken, too, while keys change.
            ports = [Number("port", item.port + index) for index in range(min(item.tunnels + 1, TUNNELS_MAX))]
            yield from (_Taking(host, number, "$.port", _PORTS) for number in ports)
