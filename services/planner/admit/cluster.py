"""What a cluster can get wrong in what it says about itself. Pure.

Each finding is the reason and the field at fault: no other object can make it right.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product

from schemas.host_objects import TRACE_GROUP
from schemas.topology import Cluster
from schemas.values import IPV4, IPV6, Prefix
from services.planner import layout
from services.planner.families import IPV6_MTU_MIN

Finding = tuple[str, str]
_SMALLEST_INTERNAL_LENGTH = {IPV4: 29, IPV6: 112}


def contradictions(item: Cluster) -> Iterator[Finding]:
    """All of them, prefixes first."""
    own = [
        *_fields("podPrefixes", item.pod_prefixes),
        *_fields("externalPrefixes", item.external_prefixes),
        *_fields("internalPrefixes", item.internal_prefixes),
    ]
    pools = list(_fields("pools", item.pools))
    # A prefix of two pools would be given out twice. What is reserved may lie anywhere: it is shared.
    for (earlier, other), (field, prefix) in combinations([*own, *pools], 2):
        if prefix.overlaps(other):
            yield f"{prefix} overlaps {other} ({earlier}) of the same cluster", field
    for (theirs, other), (field, prefix) in product(own, _fields("control", item.control)):
        if prefix.overlaps(other):
            yield f"{prefix} overlaps {other} ({theirs}) of the same cluster; what is for pods never goes by the uplink", field
    yield from (found for field, prefix in own for found in beyond_use(prefix, field))
    for (field, prefix), reserved in product(pools, map(Prefix, layout.RESERVED)):
        # A pool that holds such a prefix and others is fine: what is taken goes around it.
        if reserved.contains(prefix):
            yield from beyond_use(prefix, field)
    yield from _taken_group(item)
    for field, prefix in _fields("internalPrefixes", item.internal_prefixes):
        smallest = _SMALLEST_INTERNAL_LENGTH[prefix.family]
        if prefix.length > smallest:
            yield f"{prefix} is too small for overlay addresses; give a /{smallest} or larger", field
    if IPV6 in item.families and item.mtu - layout.OVERLAY_OVERHEAD_BYTES[IPV4] < IPV6_MTU_MIN:
        yield too_little("the overlay's headers", layout.OVERLAY_OVERHEAD_BYTES[IPV4], item.mtu), "$.mtu"


def beyond_use(prefix: Prefix, field: str) -> Iterator[Finding]:
    """What no cluster may use, as its own or as a remap."""
    for reserved in layout.RESERVED:
        if prefix.overlaps(Prefix(reserved)):
            yield f"{prefix} overlaps {reserved}, which no cluster may use", field


def too_little(what: str, taken: int, mtu: int) -> str:
    """What is wrong with an MTU that leaves no room for IPv6."""
    least = IPV6_MTU_MIN + taken
    return f"{what} take {taken} of {mtu} bytes and leave {mtu - taken}; IPv6 needs {IPV6_MTU_MIN}, so the MTU must be at least {least}"


def _taken_group(item: Cluster) -> Iterator[Finding]:
    if item.wireguard.audit_group == TRACE_GROUP:
        yield f"traces show packets by NFLOG group {TRACE_GROUP}, which has one listener; give another number", "$.wireguard.auditGroup"


def _fields(name: str, prefixes: tuple[Prefix, ...]) -> Iterator[tuple[str, Prefix]]:
    yield from ((f"$.{name}[{index}]", prefix) for index, prefix in enumerate(prefixes))
