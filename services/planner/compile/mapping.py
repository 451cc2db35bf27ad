"""An IpMapping's part of a peering: on the gateway, and on the node that leads to the real address.

All of it is elements of maps and sets and one route; the rules that look them up are there without any mapping.
"""

from __future__ import annotations

from collections.abc import Iterator

from schemas.host_objects import NextHop, NftElement, PlanObject, Route
from schemas.topology import IpMapping
from services.planner import layout, names
from services.planner.allocate import Allocations, peering_id
from services.planner.compile.words import WORDS
from services.planner.families import carried, overlay_address
from services.planner.mappings import is_behind, is_pods, leading_node, peering_to
from services.planner.state import Attachment, HostId, State


def on_gateway(state: State, allocations: Allocations, attachment: Attachment, item: IpMapping) -> Iterator[PlanObject]:
    """From the external address to the real one, which may be no pod's: then also the way there, and back under the external address."""
    family = item.real.family
    if family not in carried(state, attachment.peering) or is_behind(state, attachment, item):
        return
    table, suffix = names.table(*peering_id(attachment)), WORDS[family].suffix
    external = allocations.external(item)
    yield NftElement(table, f"mapped{suffix}", external, item.real)
    if is_pods(state, item):
        return
    yield NftElement(table, f"sources{suffix}", item.real)
    yield NftElement(table, f"to_external{suffix}", item.real, external)
    leader = leading_node(state, item)
    if leader is not None:
        via = overlay_address(state.clusters[item.cluster], allocations.number(HostId(item.cluster, leader.name)), family)
        hop = NextHop(names.overlay_link(leader.name), via, onlink=True)
        yield Route(layout.INCOMING_TABLE, item.real.host_prefix, hops=(hop,))


def on_node(state: State, attachment: Attachment, item: IpMapping) -> Iterator[PlanObject]:
    """What the leading node holds: packets for the real address may leave it, and what that sends keeps its source up to the gateway.

    Nothing where the real address is another cluster's: that is left by the overlay only. What is sent there is translated as all that no
    pod sends, and comes back without masquerading; what comes from there comes by the node that its destination wants, which may be any.
    """
    family = item.real.family
    if family not in carried(state, attachment.peering) or peering_to(state, item.cluster, item.real) is not None:
        return
    table, suffix = names.table(*peering_id(attachment)), WORDS[family].suffix
    yield NftElement(table, f"mapped{suffix}", item.real)
    yield NftElement(table, f"kept{suffix}", item.real, item.real)
    if item.masquerade:
        yield NftElement(table, f"masqueraded{suffix}", item.real)
