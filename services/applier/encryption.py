"""What a host's kernel says of its part in its cluster's encryption, now: peers, and packets by point."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from schemas.commands import EncryptionNow, PeerNow, PointNow
from schemas.encryption import Point, point_of
from schemas.host_objects import NftChain, WireguardLink, WireguardPeer
from schemas.nft import Comment
from schemas.plan import Entry, HostPlan, Unit
from services.kernel.port import Kernel, PeerSeen

PEERS_MAX = 3000
"""An answer has to fit into a message of 1 MiB."""
_KEY = "PublicKey"


def encryption_now(kernel: Kernel, plan: HostPlan, at_s: float) -> EncryptionNow:
    """Read it from the kernel. Raises MeshmarkError when that cannot be read."""
    nothing = EncryptionNow(plan.cluster, plan.host, at_s)
    for unit in plan.units.values():
        table = _table(unit)
        links = sorted((item for entry in unit.values() if isinstance(item := entry.object, WireguardLink)), key=lambda item: item.name)
        if table is not None and links:
            found = (peer for link in links for peer in _peers(unit, link.name, kernel.peers(link.name)))
            peers, link = sorted(found, key=lambda peer: (peer.node, peer.link)), links[0]
            points = tuple(_points(kernel, table))
            return EncryptionNow(plan.cluster, plan.host, at_s, link.name, link.listen_port, len(peers), tuple(peers[:PEERS_MAX]), points)
    return nothing


def _table(unit: Unit) -> str | None:
    """The table in which a unit counts packets by point; None where it does not."""
    for entry in unit.values():
        if isinstance(entry.object, NftChain):
            for rule in entry.object.rules:
                if any(isinstance(item, Comment) and point_of(item.text) for item in rule):
                    return entry.object.table
    return None


def _peers(unit: Unit, link: str, held: Iterable[PeerSeen]) -> Iterator[PeerNow]:
    seen = {peer.public_key: peer for peer in held}
    planned = {item.public_key: entry for entry in unit.values() if isinstance(item := entry.object, WireguardPeer) and item.link == link}
    for key, entry in planned.items():
        peer = seen.get(key)
        yield _peer(_node(entry), link, peer) if peer is not None else PeerNow(_node(entry), link, key, is_there=False)
    yield from (_peer("", link, peer) for key, peer in seen.items() if key not in planned)


def _peer(node: str, link: str, seen: PeerSeen) -> PeerNow:
    return PeerNow(node, link, seen.public_key, True, seen.endpoint, seen.handshake_s, seen.received_bytes, seen.sent_bytes)  # noqa: FBT003


def _node(entry: Entry) -> str:
    """The name of a peer's node: whose key it is."""
    return next((ref.split("/", 2)[2] for ref in entry.because if ref.startswith(f"{_KEY}/")), "")


def _points(kernel: Kernel, table: str) -> Iterator[PointNow]:
    found: dict[Point, tuple[int, int]] = {}
    for item in kernel.counted(table):
        point = point_of(item.comment)
        if point is not None:
            packets, size = found.get(point, (0, 0))
            found[point] = packets + item.packets, size + item.bytes
    for point, (packets, size) in sorted(found.items()):
        yield PointNow(point.name, point.state, point.direction, point.traffic, packets, size)
