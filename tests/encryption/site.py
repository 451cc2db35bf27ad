"""One cluster whose nodes encrypt, in network namespaces: examples/encryption.yaml, over an underlay of one family, in each mode, live.

Its pods have addresses of both families, or of those that are asked for.

Of an underlay of both families the nodes take IPv4, and leave room for IPv6; with one family, a device's MTU is exact, and so is its test.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from msgspec.structs import replace

from schemas.topology import Cluster, Node, Pod, Topology, WireguardSettings
from schemas.values import FAMILIES, IPV4, IPV6, Address, Family, Prefix
from services.cli.files import load
from services.planner import mesh as planned
from tests import sites
from tests.topologies import EXAMPLES

Of = TypeVar("Of", Address, Prefix)

ROME = "Cluster/rome/rome"
DEVICE, UPLINK, PORT = "me.0", "eth0", 51871
MTU = 1500
WIREGUARD_OVERHEAD = {IPV4: 60, IPV6: 80}
OVERLAY_OVERHEAD = {IPV4: 50, IPV6: 70}
OVERLAY_PORTS = {"vxlan": 4789, "geneve": 6081}
OUTSIDE = {IPV4: Address("192.0.2.50"), IPV6: Address("2001:db8:99::50")}
_ROAMS_BY_IPV6 = Address("fd00:200:0:1::77")


class Mode(NamedTuple):
    """How packets get to other nodes, and whether what nodes say is encrypted as well. `way` is native, vxlan or geneve."""

    way: str
    nodes: bool = False

    def __str__(self) -> str:
        return f"{self.way}{'+nodes' if self.nodes else ''}"

    @property
    def is_native(self) -> bool:
        return self.way == "native"

    def mtu(self, underlay: Family) -> int:
        """The largest packet that pods of two nodes can send each other."""
        return MTU - WIREGUARD_OVERHEAD[underlay] - (0 if self.is_native else OVERLAY_OVERHEAD[underlay])

    def fields(self) -> dict[str, Any]:
        """Of the cluster."""
        way = {"routing": "native"} if self.is_native else {"routing": "overlay", "overlay": self.way}
        return {"encryption": "wireguard", "wireguard": WireguardSettings(nodes=self.nodes), **way}


MODES = [Mode(way, nodes) for nodes in (False, True) for way in ("native", "vxlan", "geneve")]


class Site(sites.Site):
    """The cluster rome as it is now, over an underlay of this family, with pods of these."""

    def __init__(self, folder: Path, underlay: Family, pods: Collection[Family] = FAMILIES) -> None:
        self.underlay: Family = underlay
        super().__init__(folder, [_of_pods(item, pods) for item in _placed(underlay)], Node, [OUTSIDE[underlay]])

    def node(self, name: str) -> Node:
        found = self.object(f"Node/rome/{name}")
        assert isinstance(found, Node)
        return found

    def cluster(self) -> Cluster:
        found = self.object(ROME)
        assert isinstance(found, Cluster)
        return found

    def address(self, name: str) -> Address:
        """A node's underlay address."""
        return self.node(name).addresses[0]

    def pod(self, name: str, family: Family) -> Address:
        found = self.object(f"Endpoint/rome/{name}")
        assert isinstance(found, Pod)
        return next(address for address in found.addresses if address.family == family)

    def change(self, ref: str = ROME, **fields: object) -> None:
        """Let an object have these fields, live."""
        self.say([replace(self.object(ref), **fields)])

    def turn_to(self, mode: Mode, **fields: object) -> None:
        wanted = replace(self.cluster(), **(mode.fields() | fields))
        if wanted != self.cluster():
            self.say([wanted])

    def sender(self, name: str, family: Family) -> Address:
        """The address by which a node itself sends to pods of others."""
        number = self.chosen.numbers["rome", name]
        source = planned.overlay_source if self.cluster().routing == "overlay" else None
        found = source(self.cluster(), number, family) if source else planned.source(self.cluster(), self.node(name), number, family)
        assert found is not None
        return found

    def wg(self, name: str, what: str) -> list[list[str]]:
        """What `wg show` says of a node's device: lines of words (``endpoints``, ``latest-handshakes``, ``allowed-ips``, ``transfer``)."""
        return [line.split() for line in self.host("rome", name).run("wg", "show", DEVICE, what).splitlines()]

    def hand(self, name: str, *argv: str) -> str:
        """What somebody types on a node, with its devices' sockets; what it prints."""
        return self.host("rome", name).run(*argv)

    def expose(self, name: str) -> None:
        """Somebody takes the rules away that lead a node's packets into its device: they leave in clear."""
        rules = "for f in 4 6; do for p in 1000 1001; do while ip -$f rule delete priority $p; do :; done; done; done 2>&-"
        self.hand(name, "sh", "-c", f"{rules}; true")


def _placed(underlay: Family) -> Sequence[Topology]:
    return [_with_one(item, underlay) for item in load([EXAMPLES / "encryption.yaml"])]


def _with_one(item: Topology, underlay: Family) -> Topology:
    """The object; a node with an underlay address of this family alone, a pod that roams with addresses of both."""
    if isinstance(item, Node):
        found = [address for address in item.addresses if address.family == underlay]
        return replace(item, opt_out=False, addresses=tuple(found) or (_third(underlay),))
    if isinstance(item, Pod) and item.name == "roam":
        return replace(item, addresses=(*item.addresses, _ROAMS_BY_IPV6))
    return item


def _of_pods(item: Topology, families: Collection[Family]) -> Topology:
    """The object, without pods' addresses of other families."""

    def kept(found: Iterable[Of]) -> tuple[Of, ...]:
        return tuple(each for each in found if each.family in families)

    match item:
        case Cluster():
            return replace(item, pod_prefixes=kept(item.pod_prefixes), internal_prefixes=kept(item.internal_prefixes))
        case Node():
            return replace(item, pod_prefixes=kept(item.pod_prefixes), source_addresses=kept(item.source_addresses))
        case Pod():
            return replace(item, addresses=kept(item.addresses))
    return item


def _third(underlay: Family) -> Address:
    return Address("172.18.0.13" if underlay == IPV4 else "2001:db8:18::13")
