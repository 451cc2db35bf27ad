"""What published firewalls and the rest of the topology can contradict each other in. Pure.

Each finding is the reason, the field at fault and the other object (none: empty).
"""

from __future__ import annotations

from collections.abc import Iterator

from schemas.firewall import FirewallConfiguration
from services.planner import layout, names
from services.planner.compile.firewall import mark_bits
from services.planner.compile.passing import selects
from services.planner.state import Attachment, State

Finding = tuple[str, str, str]


def taken_table(item: FirewallConfiguration, state: State) -> Iterator[Finding]:
    """Two configurations whose names lead to one table."""
    for other in state.passing[item.cluster].values():
        same = isinstance(other, FirewallConfiguration) and names.firewall_table(other.name) == names.firewall_table(item.name)
        if same and other.name != item.name:
            yield f"the name leads to the same table as {other.ref}", "$.name", other.ref


def class_marks(item: FirewallConfiguration, state: State) -> Iterator[Finding]:
    """Writes of the class bits on a gateway that serves a peering, unless the configuration says that it means them."""
    at = _class_field(item)
    for attachment in state.attachments[item.cluster].values() if at else ():
        gateway = state.gateways[item.cluster].get(attachment.end.gateway)
        if gateway is not None and selects(item.hosts, gateway, (attachment.peering.name,)):
            yield _reason(f"{gateway.ref} serves {attachment.peering.ref}"), at, attachment.peering.ref


def marks_on_gateway(attachment: Attachment, state: State, field: str) -> Iterator[Finding]:
    """The same, seen from a peering that comes after the configuration."""
    gateway = state.gateways[attachment.end.cluster].get(attachment.end.gateway)
    if gateway is None:
        return
    for item in state.passing[attachment.end.cluster].values():
        if isinstance(item, FirewallConfiguration) and _class_field(item) and selects(item.hosts, gateway, (attachment.peering.name,)):
            yield _reason(f"{item.ref} is on this gateway"), field, item.ref


def _class_field(item: FirewallConfiguration) -> str:
    """The first action that writes class bits; empty when there is none, or when they are written on purpose."""
    if item.class_marks:
        return ""
    return next((at for bits, at in mark_bits(item) if bits & layout.CLASS_MASK), "")


def _reason(who: str) -> str:
    free = ~layout.CLASS_MASK & 0xFFFFFFFF
    return (
        f"{who}: the bits {layout.CLASS_MASK:#x} of a mark say there where a packet goes; "
        f"write with a mask inside {free:#x}, or say classMarks: true to change them on purpose"
    )
