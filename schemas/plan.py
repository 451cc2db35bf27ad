"""Plans: what one host's kernel must hold, as units of keyed objects (``schemas.host_objects``), and the differences between two plans."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping

from msgspec import Struct

from schemas import codec
from schemas.host_objects import PlanObject
from schemas.topology import DriftPolicy
from schemas.values import Name

MESH_LINK_BESIDE, TUNNEL_LINK_BESIDE = "me.1", "mt.beside"
"""The WireGuard devices that are there only while a key is changed: on the nodes of a cluster, and on the gateways of a peering."""


class Entry(Struct, frozen=True):
    """An object of a plan, and the topology objects that it comes from (``Kind/cluster/name``, sorted)."""

    object: PlanObject
    because: tuple[str, ...]

    @property
    def key(self) -> str:
        return self.object.key


Unit = Mapping[str, Entry]
"""One connected piece of a plan, by object key: applied as a whole or not at all."""


class SummedUnit(dict[str, Entry]):
    """A unit that knows the sum of its entries' digests, so that a change costs what it touches. Not to be changed once it is shared."""

    __slots__ = ("total",)

    def __init__(self, entries: Mapping[str, Entry], total: int) -> None:
        super().__init__(entries)
        self.total = total % 2**128

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> SummedUnit:
        found = {entry.key: entry for entry in entries}
        return cls(found, sum(map(codec.digest, found.values())))

    def changed(self, put: Iterable[Entry], drop: Iterable[str]) -> SummedUnit:
        """A copy without the keys of `drop` and with the entries of `put`."""
        result = SummedUnit(self, self.total)
        for key in drop:
            if (gone := result.pop(key, None)) is not None:
                result.total -= codec.digest(gone)
        for entry in put:
            if (replaced := result.get(entry.key)) is not None:
                result.total -= codec.digest(replaced)
            result[entry.key] = entry
            result.total += codec.digest(entry)
        result.total %= 2**128
        return result


class HostPlan(Struct, frozen=True):
    """All units of one host, by unit name (``peering/rome/rome-milan``), and what its auditor does about drift.

    An object may stand in several units, with equal values.
    """

    cluster: Name
    host: Name
    units: Mapping[str, Unit]
    drift: DriftPolicy = DriftPolicy()

    def objects(self) -> dict[str, PlanObject]:
        """What the kernel must hold: the union of the units."""
        return {key: entry.object for unit in self.units.values() for key, entry in unit.items()}

    def because(self, key: str) -> tuple[str, ...]:
        """The topology objects behind the object with this key, over all units."""
        found = {ref for unit in self.units.values() if key in unit for ref in unit[key].because}
        return tuple(sorted(found))

    def digests(self) -> dict[str, str]:
        return {name: digest_of(unit) for name, unit in self.units.items()}


def unit_digest(entries: Iterable[Entry]) -> str:
    """Digest of a set of entries, whatever their order: 32 hexadecimal digits, the sum of the entries' digests."""
    return f"{sum(codec.digest(entry) for entry in entries) % 2**128:032x}"


def mesh_unit(cluster: str) -> str:
    """The name of the unit that is a node's part of its cluster's mesh."""
    return f"mesh/{cluster}"


def is_beside(link: str) -> bool:
    """Whether a WireGuard device is there only while a key is changed, beside those that are always there."""
    return link in (MESH_LINK_BESIDE, TUNNEL_LINK_BESIDE)


def unit_tag(unit: str) -> str:
    """A short name of a unit for the kernel's marker: 16 hexadecimal digits, the same on every host and in every release."""
    return hashlib.blake2b(unit.encode(), digest_size=8).hexdigest()


def digest_of(unit: Unit) -> str:
    """Digest of a unit, as ``unit_digest`` of its entries; at no cost where it is known."""
    return f"{unit.total:032x}" if isinstance(unit, SummedUnit) else unit_digest(unit.values())


class UnitDiff(Struct, frozen=True, omit_defaults=True):
    """What turns the unit whose digest is `base` (empty: no such unit) into the one whose digest is `target` (empty: gone)."""

    unit: str
    base: str
    target: str
    put: tuple[Entry, ...] = ()
    drop: tuple[str, ...] = ()


class Cause(Struct, frozen=True, omit_defaults=True):
    """The topology message behind a plan: its object, its place in the stream, and when the broker stored it (Unix time)."""

    ref: str
    sequence: int
    stored_s: float


class PlanDiff(Struct, frozen=True, omit_defaults=True):
    """The step from one generation of a host's plan to the next. With `resync` the operations are not sent: take the snapshot.

    `over` is the epoch that a host may hold from another store and that this plan takes over from (``schemas.epochs``), 0 for none.
    """

    cluster: Name
    host: Name
    epoch: int
    generation: int
    units: tuple[UnitDiff, ...] = ()
    resync: bool = False
    causes: tuple[Cause, ...] = ()
    admitted_s: float = 0.0
    planned_s: float = 0.0
    drift: DriftPolicy = DriftPolicy()
    over: int = 0


class SnapshotChunk(Struct, frozen=True, omit_defaults=True):
    """A part of a whole plan: entries with the unit each belongs to."""

    entries: tuple[tuple[str, Entry], ...]


class SnapshotHead(Struct, frozen=True, omit_defaults=True):
    """What a whole plan consists of: digests by unit, and the digest of each chunk's bytes by chunk number. `over` is as in `PlanDiff`."""

    cluster: Name
    host: Name
    epoch: int
    generation: int
    units: dict[str, str]
    chunks: tuple[str, ...]
    drift: DriftPolicy = DriftPolicy()
    over: int = 0


def diff_units(old: Mapping[str, Unit], new: Mapping[str, Unit]) -> tuple[UnitDiff, ...]:
    """The exact and minimal difference, by unit name; equal plans give none."""
    found = []
    for name in sorted(old.keys() | new.keys()):
        before, after = old.get(name, {}), new.get(name, {})
        put = tuple(after[key] for key in sorted(_changed_keys(before, after)))
        drop = tuple(sorted(before.keys() - after.keys()))
        if put or drop or (name in old) != (name in new):
            base = digest_of(before) if name in old else ""
            target = digest_of(after) if name in new else ""
            found.append(UnitDiff(name, base, target, put, drop))
    return tuple(found)


def _changed_keys(before: Unit, after: Unit) -> Iterator[str]:
    # Most entries are the very same objects, and identity is the cheaper question.
    return (key for key, entry in after.items() if (held := before.get(key)) is not entry and held != entry)


def apply_diff(units: Mapping[str, Unit], diffs: Iterable[UnitDiff]) -> dict[str, Unit]:
    """Apply a difference; ValueError when a base or a target digest is not what is held."""
    result = dict(units)
    for step in diffs:
        held = digest_of(result[step.unit]) if step.unit in result else ""
        if held != step.base:
            msg = f"unit {step.unit}: the difference starts from {step.base or 'nothing'}, held is {held or 'nothing'}"
            raise ValueError(msg)
        before = result.pop(step.unit, {})
        unit = before if isinstance(before, SummedUnit) else SummedUnit.of(before.values())
        unit = unit.changed(step.put, step.drop)
        if step.target:
            if digest_of(unit) != step.target:
                msg = f"unit {step.unit}: the difference does not lead to {step.target}"
                raise ValueError(msg)
            result[step.unit] = unit
    return result
