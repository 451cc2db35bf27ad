"""What is to be published next for a host, and what it would take away."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from msgspec import Struct

from schemas.plan import HostPlan, UnitDiff, digest_of, unit_tag
from schemas.status import ApplyReport
from services.planner.state import HostId


class HeldUnit(NamedTuple):
    """A unit in a kernel: its digest, and how many objects it has, 0 when nobody knows."""

    digest: str
    objects: int


class Claim(Struct, frozen=True):
    """What a host holds that the plans published here do not account for: its store was lost, and perhaps topology with it.

    `epoch` is the epoch that it holds it under, 0 when the host holds a plan of this store all right and only the topology behind it is in
    doubt. Units are by name, or by ``unit_tag`` where the host has only the kernel's marker to go by.
    """

    epoch: int
    units: Mapping[str, HeldUnit]

    @classmethod
    def of_report(cls, report: ApplyReport) -> Claim:
        return cls(report.epoch, {unit.unit: HeldUnit(unit.held, unit.objects) for unit in report.units if unit.held})

    @classmethod
    def of_plan(cls, plan: HostPlan) -> Claim:
        return cls(0, {name: HeldUnit(digest_of(unit), len(unit)) for name, unit in plan.units.items()})

    def unit(self, name: str) -> HeldUnit | None:
        return self.units.get(name) or self.units.get(unit_tag(name))


class Loss(NamedTuple):
    """A unit that a host would lose, or most of it: how many objects it has, 0 for unknown, and how many are left of them."""

    host: HostId
    unit: str
    objects: int
    kept: int


class Step(NamedTuple):
    """A host's plan goes from `before`, the published one, to `plan` by `diffs`; or from what the host claims to hold."""

    host: HostId
    plan: HostPlan
    diffs: tuple[UnitDiff, ...]
    before: HostPlan | None = None
    claim: Claim | None = None

    @property
    def takes_away(self) -> bool:
        """Whether anything that the host has would go. Of what it claims to hold only sizes are known."""
        if self.claim is not None:
            return bool(self.losses())
        return any(diff.drop or not diff.target for diff in self.diffs)

    def losses(self) -> list[Loss]:
        """The units that would go. One that keeps four fifths of its objects stays; of one that is claimed, nothing may be missing."""
        if self.claim is not None:
            return self._claimed_losses(self.claim)
        found = []
        for diff in self.diffs:
            objects = len(self.before.units.get(diff.unit, ())) if self.before else 0
            gone = len(diff.drop)
            if diff.base and (not diff.target or 5 * gone > objects):
                found.append(Loss(self.host, diff.unit, objects, objects - gone))
        return found

    def _claimed_losses(self, claim: Claim) -> list[Loss]:
        digests = self.plan.digests()
        names = {unit_tag(name): name for name in digests}
        found = []
        for called, held in sorted(claim.units.items()):
            name = called if called in digests else names.get(called, called)
            planned = len(self.plan.units.get(name, ()))
            # Equal digests are equal units; else only a unit of known size can be seen not to shrink.
            if digests.get(name) != held.digest and (not planned or not held.objects or planned < held.objects):
                found.append(Loss(self.host, name, held.objects, planned))
        return found


__all__ = ["Claim", "HeldUnit", "Loss", "Step"]
