"""The applier without its loop: what is wanted, what is held, and the turns between them. Blocking; runs in the kernel's thread.

What is held is believed only after a turn that ended well. Before the first turn, and after anything unclear, the kernel is read and the
plan applied as a difference against it: unchanged objects, counters, tracked flows and learned endpoints survive a restart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec import Struct

from schemas.plan import HostPlan, PlanObject, Unit, digest_of
from schemas.status import ApplyReport, Outcome, Timings, UnitReport
from services.applier.steps import order
from services.applier.turn import STRAY, Failure, Result, Turn
from services.kernel.port import Kernel
from services.kernel.transaction import Change, changes, repairs
from services.runtime.errors import Conflict, Waiting


class Difference(Struct, frozen=True):
    """One object in which the kernel differs from the wanted plan. `wanted` and `found` are for people; empty: not there."""

    key: str
    unit: str
    wanted: str
    found: str


class Applier:
    """Brings one host's kernel to its plan."""

    def __init__(self, kernel: Kernel, now: Callable[[], float]) -> None:
        self._kernel = kernel
        self._now = now
        self._held: dict[str, Unit] = {}
        self._leftovers: dict[str, PlanObject] = {}
        self._trusted = False
        self.failures: Mapping[str, Failure] = {}

    def apply(self, plan: HostPlan, epoch: int, generation: int, received_s: float = 0.0) -> ApplyReport:
        """Make one turn towards `plan` and report what came of it. Raises only what makes the kernel unreadable as a whole."""
        if not self._trusted:
            result = self._turn(plan, epoch, generation, *self._from_kernel(plan))
        else:
            try:
                result = self._turn(plan, epoch, generation, *self._from_memory(plan))
            except Conflict:
                result = self._turn(plan, epoch, generation, *self._from_kernel(plan))
        self._take_over(plan, result)
        timings = Timings(received_s, result.staged_s, result.committed_s, result.connected_s, self._now())
        return self._report(plan, epoch, generation, timings, result.operations)

    def forget(self) -> None:
        """Believe nothing about the kernel any more: the next turn reads it."""
        self._trusted = False

    def differences(self, plan: HostPlan) -> list[Difference]:
        """Where the kernel differs from `plan`, read now."""
        units = {key: name for name, unit in plan.units.items() for key in unit}
        found, _ = self._from_kernel(plan)
        return [Difference(change.key, units.get(change.key, STRAY), _show(change.new), _show(change.old)) for change in found]

    def _from_memory(self, plan: HostPlan) -> tuple[list[Change], dict[str, Unit]]:
        held = {**HostPlan(plan.cluster, plan.host, self._held).objects(), **self._leftovers}
        return changes(held, plan.objects()), self._held

    def _from_kernel(self, plan: HostPlan) -> tuple[list[Change], dict[str, Unit]]:
        objects = plan.objects()
        return repairs(objects, self._kernel.reference(objects), self._kernel.read(objects)), {}

    def _turn(self, plan: HostPlan, epoch: int, generation: int, found: list[Change], held: dict[str, Unit]) -> Result:
        leaving = {key for name, unit in held.items() if name not in plan.units for key in unit}
        if not held and not plan.units:
            leaving = {change.key for change in found}
        turn = Turn(self._kernel, held, plan.units, (epoch, generation), self._now)
        return turn.run(order(found, plan.objects(), leaving))

    def _take_over(self, plan: HostPlan, result: Result) -> None:
        self.failures = result.failures
        self._held = {
            name: self._held[name] if name in result.failures else unit
            for name, unit in plan.units.items()
            if name not in result.failures or name in self._held
        }
        self._leftovers = dict(result.leftovers)
        self._trusted = result.trusted and STRAY not in result.failures

    def _report(self, plan: HostPlan, epoch: int, generation: int, timings: Timings, operations: int) -> ApplyReport:
        reports = []
        for name, unit in sorted(plan.units.items()):
            wanted = digest_of(unit)
            failure = self.failures.get(name)
            held = digest_of(self._held[name]) if name in self._held else ""
            reports.append(UnitReport(name, held, wanted, _outcome(failure), _explain(failure)))
        if STRAY in self.failures:
            reports.append(UnitReport(STRAY, "", "", "degraded", _explain(self.failures[STRAY])))
        return ApplyReport(plan.cluster, plan.host, epoch, generation, tuple(reports), operations, timings, self._kernel.capabilities())


def _outcome(failure: Failure | None) -> Outcome:
    if failure is None:
        return "applied"
    return "waiting" if isinstance(failure.error, Waiting) else "degraded"


def _explain(failure: Failure | None) -> str:
    return f"{failure.key}: {failure.error}" if failure else ""


def _show(item: object) -> str:
    return str(item) if item is not None else ""


__all__ = ["Applier", "Difference"]
