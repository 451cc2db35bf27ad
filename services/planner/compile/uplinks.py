"""What says which of a host's links is its uplink: any other link that is not ours is an endpoint's, for who looks at packets.

These objects are part of each unit of a host, peering or mesh, and the same in all of them. Nothing looks them up but the auditor, in the
plan: a table without chains costs a packet nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from schemas.host_objects import HOST_TABLE, UPLINKS, NftElement, NftSet, NftTable, PlanObject
from schemas.topology import Gateway, Node


def objects(host: Node | Gateway) -> Iterator[PlanObject]:
    """The table, the set and the uplink in it."""
    yield NftTable(HOST_TABLE)
    yield NftSet(HOST_TABLE, UPLINKS, "ifname")
    yield NftElement(HOST_TABLE, UPLINKS, host.uplink)
