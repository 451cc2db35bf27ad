"""Which other nodes a node speaks to in clear: on purpose, or as open alerts have it. Pure.

The kernel counts packets in clear by direction and by whose they are, for all far ends together: one counter for each pair would be one
rule, or one element with a counter, for each. An alert names both ends, of the few packets a second that the kernel shows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Literal

from msgspec import Struct

from schemas.drift import DriftEvent
from schemas.topology import Node
from schemas.values import wire_name
from services.cli.trace.ends import owner
from services.planner.state import HostId, State

Part = Literal["encrypts", "optedOut", "noKey", "off"]
"""A node's part in its cluster's encryption, by the topology."""
_NAMED = 20


class FarEnd(Struct, frozen=True, rename=wire_name):
    """Another node of the cluster, with which something goes in clear.

    `state` other than ``encrypts``: on purpose, all of it. `alerts` are the open ones about the two, `shown` the packets of these that the
    kernel showed: at least so many.
    """

    node: str
    state: Part
    alerts: int = 0
    shown: int = 0


def part(state: State, node: Node) -> Part:
    """What a node does."""
    cluster, has_key = state.clusters[node.cluster], HostId(node.cluster, node.name) in state.keys
    return "off" if cluster.encryption == "none" else "optedOut" if node.opt_out else "encrypts" if has_key else "noKey"


def far_ends(state: State, node: Node, alerts: Iterable[DriftEvent], *, on_purpose: bool) -> tuple[FarEnd, ...]:
    """Those with open alerts of the node's own, by name; with `on_purpose` also those that do not encrypt, where it does so itself."""
    events, shown = Counter[str](), Counter[str]()
    for event in alerts:
        if (far := _far(state, event)) is not None:
            events[far] += 1
            shown[far] += event.count
    nodes = state.nodes[node.cluster]
    others = nodes if on_purpose and part(state, node) in ("encrypts", "noKey") else events
    parts = {name: part(state, nodes[name]) for name in sorted(others) if name != node.name}
    return tuple(FarEnd(name, does, events[name], shown[name]) for name, does in parts.items() if events[name] or does != "encrypts")


def said(ends: Iterable[FarEnd]) -> Iterator[str]:
    """A line for each that leaks, and one for all that do so on purpose."""
    purpose = []
    for end in ends:
        if end.alerts:
            yield f"leaks with {end.node}: at least {_counted(end.shown, 'packet')}, by {_counted(end.alerts, 'open alert')}"
        if end.state != "encrypts":
            purpose.append(f"{end.node} ({'opted out' if end.state == 'optedOut' else 'no key yet'})")
    if purpose:
        more = f", and {len(purpose) - _NAMED} more" if len(purpose) > _NAMED else ""
        yield f"in clear, and meant to be, with {', '.join(purpose[:_NAMED])}{more}"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _far(state: State, event: DriftEvent) -> str | None:
    """The node at the far end of an alert's packets; None where the alert is of several pairs, or none was shown."""
    packet = event.packet
    if packet is None or event.key.endswith(" others"):
        return None
    ends = packet.tunnel or packet
    found = owner(state, event.cluster, ends.destination if packet.direction == "out" else ends.source)
    return found.host.name if found is not None and found.host is not None and found.host.name in state.nodes[event.cluster] else None
