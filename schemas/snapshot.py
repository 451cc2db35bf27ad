"""A whole plan as a head and chunks: small enough to send, and a change rewrites only the chunks that it touches.

Entries are dealt to chunks by a hash of unit and key. The head holds each chunk's digest, so that a reader that meets a writer at work
notices and reads again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from schemas import codec
from schemas.plan import Entry, HostPlan, SnapshotChunk, SnapshotHead, SummedUnit, UnitDiff, digest_of

_ENTRIES_PER_CHUNK = 256
_Place = tuple[str, str]


class TornError(ValueError):
    """The chunks are not those of the head: a writer is at work, or one died at it."""


class Chunks:
    """A plan's entries by chunk, kept up by differences. `digests` are of the encoded chunks."""

    def __init__(self, plan: HostPlan) -> None:
        total = sum(len(unit) for unit in plan.units.values())
        count = 1
        while count * _ENTRIES_PER_CHUNK < total:
            count *= 2
        self._dealt: list[dict[_Place, Entry]] = [{} for _ in range(count)]
        for name, unit in plan.units.items():
            for key, entry in unit.items():
                self._chunk(name, key)[name, key] = entry
        self._size = total
        self.digests = tuple(_digest(self.encoded(number)) for number in range(count))

    def __len__(self) -> int:
        return len(self._dealt)

    @property
    def is_crowded(self) -> bool:
        """True when the plan has outgrown its number of chunks: deal anew."""
        return self._size > 2 * len(self._dealt) * _ENTRIES_PER_CHUNK

    def change(self, diffs: Iterable[UnitDiff]) -> list[int]:
        """Follow a difference; returns the numbers of the chunks that changed."""
        touched: set[int] = set()
        for diff in diffs:
            for key in diff.drop:
                self._chunk(diff.unit, key).pop((diff.unit, key), None)
                touched.add(self._number(diff.unit, key))
            for entry in diff.put:
                self._chunk(diff.unit, entry.key)[diff.unit, entry.key] = entry
                touched.add(self._number(diff.unit, entry.key))
        self._size = sum(map(len, self._dealt))
        self.digests = tuple(_digest(self.encoded(number)) if number in touched else digest for number, digest in enumerate(self.digests))
        return sorted(touched)

    def encoded(self, number: int) -> bytes:
        """One chunk as it is written: equal entries give equal bytes."""
        return codec.encode(
            SnapshotChunk(tuple((place[0], entry) for place, entry in sorted(self._dealt[number].items(), key=lambda it: it[0])))
        )

    def head(self, plan: HostPlan, epoch: int, generation: int, over: int = 0) -> SnapshotHead:
        return SnapshotHead(plan.cluster, plan.host, epoch, generation, plan.digests(), self.digests, plan.drift, over)

    def _chunk(self, unit: str, key: str) -> dict[_Place, Entry]:
        return self._dealt[self._number(unit, key)]

    def _number(self, unit: str, key: str) -> int:
        raw = hashlib.blake2b(f"{unit}\n{key}".encode(), digest_size=4).digest()
        return int.from_bytes(raw, "big") % len(self._dealt)


def join(head: SnapshotHead, chunks: Sequence[bytes]) -> HostPlan:
    """The plan again. TornError when the chunks are not those of the head, DecodeError when they are no chunks."""
    if tuple(map(_digest, chunks)) != head.chunks:
        msg = f"the chunks do not belong to generation {head.generation}"
        raise TornError(msg)
    found: dict[str, list[Entry]] = {name: [] for name in head.units}
    for chunk in chunks:
        for name, entry in codec.decode(chunk, SnapshotChunk).entries:
            found.setdefault(name, []).append(entry)
    units = {name: SummedUnit.of(entries) for name, entries in found.items()}
    if {name: digest_of(unit) for name, unit in units.items()} != head.units:
        msg = f"the entries do not have the digests of generation {head.generation}"
        raise TornError(msg)
    return HostPlan(head.cluster, head.host, units, head.drift)


def _digest(chunk: bytes) -> str:
    return hashlib.blake2b(chunk, digest_size=16).hexdigest()
