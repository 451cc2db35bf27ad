"""Three clusters in a row in network namespaces: the lab's hosts and pods, and the cores of planner and appliers in this process.

They are those of examples/three-clusters.yaml, rome ══ milan ══ turin, with IPv4 and IPv6 in all pods. Hosts of milan have both families,
those of rome and turin IPv6 alone: so overlay links go over either, and tunnels over IPv6.
"""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from schemas.topology import Cluster, Gateway, IpMapping, Node, Pod, Topology
from schemas.values import IPV4, IPV6, Address, Family, Name
from services.cli.files import load
from services.cli.lab.expected import Between, joined
from tests import sites
from tests.topologies import EXAMPLES

OUTSIDE = {IPV4: Address("192.0.2.50"), IPV6: Address("2001:db8:99::50")}
"""Addresses of the underlay's router, for an outsider that knows no cluster."""
AWARE = {IPV4: Address("192.0.2.51"), IPV6: Address("2001:db8:99::51")}
"""The same for one that knows how milan calls others, and that milan's second node leads there."""
_MILAN, _LEADER = Name("milan"), Name("worker-2")
_MORE = (
    # The example maps this pod of milan by IPv4 alone.
    IpMapping(name=Name("mint-6"), cluster=_MILAN, real=Address("fd00:200:0:2::10"), external=Address("fd00:71:0:200::20")),
    *(
        IpMapping(name=Name(f"outside-{item.family}"), cluster=_MILAN, real=item, node=_LEADER, masquerade=True)
        for item in OUTSIDE.values()
    ),
    *(IpMapping(name=Name(f"aware-{item.family}"), cluster=_MILAN, real=item, node=_LEADER) for item in AWARE.values()),
)


class Site(sites.Site):
    """The three clusters as they are now."""

    def __init__(self, folder: Path) -> None:
        objects = [*map(_placed, load([EXAMPLES / "three-clusters.yaml"])), *_MORE]
        super().__init__(folder, objects, Gateway, (*OUTSIDE.values(), *AWARE.values()))

    def turn_to(self, overlay: str, sources: str) -> None:
        """Let all clusters have this overlay and this mode of sources, live."""
        self.say([replace(item, overlay=overlay, sources=sources) for item in self.topology if isinstance(item, Cluster)])

    def external(self, mapping: str, family: Family) -> Address:
        """What rome dials for an address that milan maps."""
        item = self.object(f"IpMapping/milan/{mapping}")
        assert isinstance(item, IpMapping)
        found = self.chosen.external(item)
        assert found is not None
        return self.between("rome", "milan", family).dial(found)

    def address(self, ref: str, family: Family) -> Address:
        """The address of a node or pod."""
        item = self.object(ref)
        assert isinstance(item, Node | Pod)
        return next(address for address in item.addresses if address.family == family)

    def between(self, here: str, there: str, family: Family) -> Between:
        """The peering of two clusters."""
        found = joined(self.topology, here, there, family)
        assert found is not None
        return found


def _placed(item: Topology) -> Topology:
    """The object; a host outside milan without its IPv4 address."""
    if isinstance(item, Node | Gateway) and item.cluster != "milan":
        return replace(item, addresses=tuple(address for address in item.addresses if address.family == IPV6))
    return item
