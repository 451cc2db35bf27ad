"""What the uplinks of nodes that encrypt show while packets go: between pods of two such nodes nothing in clear, but WireGuard's packets.

As ``expected``, the lab's own reading of the contract: who encrypts is in the topology, and what passes a cable is looked at from outside.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct

from schemas.topology import Cluster, Node, Pod, Topology
from schemas.values import Address
from services.cli.lab.captures import Packet, capture
from services.cli.lab.layout import host_namespace
from services.cli.lab.probe import Check

_OVERLAY_PORTS = (4789, 6081)


class Encrypting(Struct, frozen=True):
    """The nodes of one cluster that encrypt, and its pods."""

    cluster: Cluster
    nodes: tuple[Node, ...]
    pods: tuple[Pod, ...]

    def is_in_clear(self, packet: Packet) -> bool:
        """Whether a packet on an uplink should have been inside WireGuard."""
        ends = Address(packet.source), Address(packet.destination)
        whose = [self._runs(end) for end in ends]
        if all(whose) and whose[0] != whose[1]:
            return True
        is_outer = packet.protocol == socket.IPPROTO_UDP and packet.destination_port in _OVERLAY_PORTS
        return is_outer and all(any(end in node.addresses for node in self.nodes) for end in ends)

    def is_encrypted(self, packet: Packet) -> bool:
        port = self.cluster.wireguard.port  # the next one is the second device's, while a key changes
        used = {packet.source_port, packet.destination_port}
        return packet.protocol == socket.IPPROTO_UDP and not used.isdisjoint((port, port + 1))

    def _runs(self, address: Address) -> str:
        """The node that an address of pods is on, if that encrypts: the pod's own, else the one whose prefix it is in."""
        names = {node.name for node in self.nodes}
        owner = next((pod.node for pod in self.pods if address in pod.addresses), None)
        if owner is not None:
            return owner if owner in names else ""
        return next((node.name for node in self.nodes if any(prefix.covers(address) for prefix in node.pod_prefixes)), "")


class Watch:
    """What was seen on the uplinks. Its `checks` are to be asked for when the watching has ended."""

    def __init__(self) -> None:
        self._seen: list[tuple[str, Encrypting, list[Packet]]] = []

    def add(self, name: str, home: Encrypting, packets: list[Packet]) -> None:
        self._seen.append((name, home, packets))

    def checks(self) -> list[Check]:
        """One for each node that encrypts."""
        return [_check(name, home, packets) for name, home, packets in self._seen]


def encrypting(topology: Iterable[Topology]) -> list[Encrypting]:
    """The clusters whose nodes encrypt, with at least two nodes that do."""
    items = sorted(topology, key=lambda item: item.ref)
    found = []
    for cluster in (item for item in items if isinstance(item, Cluster) and item.encryption == "wireguard"):
        home = [item for item in items if item.home == cluster.name]
        nodes = tuple(item for item in home if isinstance(item, Node) and not item.opt_out)
        if len(nodes) > 1:
            found.append(Encrypting(cluster, nodes, tuple(item for item in home if isinstance(item, Pod))))
    return found


@contextlib.contextmanager
def watching(topology: Iterable[Topology]) -> Iterator[Watch]:
    """Look at the uplinks of all nodes that encrypt while the body runs."""
    watch = Watch()
    with contextlib.ExitStack() as stack:
        for home in encrypting(topology):
            for node in home.nodes:
                packets = stack.enter_context(capture(host_namespace(node.cluster, node.name), node.uplink))
                watch.add(f"{node.cluster}/{node.name}", home, packets)
        yield watch


def _check(name: str, home: Encrypting, packets: Sequence[Packet]) -> Check:
    inside, clear = sum(map(home.is_encrypted, packets)), list(filter(home.is_in_clear, packets))
    first = f", first {clear[0].source} → {clear[0].destination}" if clear else ""
    detail = f"{inside} packets of WireGuard's, {len(clear)} in clear that should not be{first}"
    return Check(f"uplink of {name}: encrypted, and nothing in clear", ok=inside > 0 and not clear, detail=detail)
