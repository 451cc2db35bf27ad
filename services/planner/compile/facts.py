"""What a pass-through object's form on a host can depend on besides the object itself."""

from __future__ import annotations

from typing import NamedTuple

from schemas.host_objects import NextHop
from schemas.values import Family, Prefix
from services.planner.allocate import Allocations
from services.planner.compile.tunnels import tunnel_links
from services.planner.state import HostId, State


class Facts(NamedTuple):
    """Hosts of equal facts hold the same of an object. `because` names the topology objects that the facts come from.

    `hops` are the tunnels that carry traffic, in each family that they carry; `control` is where broker and management are.
    """

    tunnels: tuple[str, ...] = ()
    because: tuple[str, ...] = ()
    hops: tuple[tuple[Family, tuple[NextHop, ...]], ...] = ()
    control: tuple[Prefix, ...] = ()


NO_FACTS = Facts()


def tunnels(host: HostId, state: State, allocations: Allocations) -> Facts:
    """The tunnel links that a host has now, as tunnels are rolled out and keys changed; only the gateway of a peering has some."""
    attachment = state.attachments[host.cluster].get(host.name)
    if attachment is None:
        return NO_FACTS
    return Facts(tunnel_links(allocations, attachment), (attachment.peering.ref,))
