"""A whole plan as a head and chunks: small enough to send, and one changed object changes one chunk.

Entries are dealt to chunks by a hash of unit and key. The head holds each chunk's digest, so that a reader that meets a writer at work
notices and reads again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from schemas import codec
from schemas.plan import Entry, HostPlan, SnapshotChunk, SnapshotHead, SummedUnit

_ENTRIES_PER_CHUNK = 256


def split(plan: HostPlan, epoch: int, generation: int) -> tuple[SnapshotHead, tuple[bytes, ...]]:
    """The head and the encoded chunks of a plan. Equal plans of one generation give equal bytes."""
    total = sum(len(unit) for unit in plan.units.values())
    count = 1
    while count * _ENTRIES_PER_CHUNK < total:
        count *= 2
    dealt: list[list[tuple[str, Entry]]] = [[] for _ in range(count)]
    for name, unit in sorted(plan.units.items()):
        for key, entry in sorted(unit.items()):
            dealt[_place(name, key, count)].append((name, entry))
    chunks = tuple(codec.encode(SnapshotChunk(tuple(part))) for part in dealt)
    head = SnapshotHead(plan.cluster, plan.host, epoch, generation, plan.digests(), tuple(_digest(chunk) for chunk in chunks), plan.drift)
    return head, chunks


def join(head: SnapshotHead, chunks: Sequence[bytes]) -> HostPlan:
    """The plan again; ValueError when the chunks are not those of the head."""
    if tuple(_digest(chunk) for chunk in chunks) != head.chunks:
        msg = f"the chunks do not belong to generation {head.generation}"
        raise ValueError(msg)
    units: dict[str, dict[str, Entry]] = {name: {} for name in head.units}
    for chunk in chunks:
        for name, entry in codec.decode(chunk, SnapshotChunk).entries:
            units[name][entry.key] = entry
    return HostPlan(head.cluster, head.host, {name: SummedUnit.of(unit.values()) for name, unit in units.items()}, head.drift)


def _place(unit: str, key: str, count: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{unit}\n{key}".encode(), digest_size=4).digest(), "big") % count


def _digest(chunk: bytes) -> str:
    return hashlib.blake2b(chunk, digest_size=16).hexdigest()
