"""One turn: bring the kernel from what it holds to what is wanted, unit by unit all or nothing.

The steps of all units are made together (one nft batch). When a change fails, the units that it belongs to are undone from the journal
and stay at their old version; the others go on. Guards of a unit that is wanted are never undone: while a unit cannot be applied, its
traffic meets `unreachable` instead of the uplink (docs/decisions/0003).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import structlog
from msgspec import Struct

from schemas.plan import PlanObject, Unit, digest_of
from services.applier.flows import stale_flows, touches_nat
from services.applier.steps import Steps, is_guard
from services.kernel.port import Kernel
from services.kernel.transaction import Change, Marker, unit_tag
from services.runtime.errors import Conflict, MeshmarkError, OutcomeUnknown

_log = structlog.get_logger()

STRAY = "-"
"""Stands for the unit of an object that no unit holds: something of ours that is left over in the kernel."""


class Failure(Struct, frozen=True):
    """Why a unit was not applied, and which object it was."""

    key: str
    error: MeshmarkError


class Result(Struct, frozen=True):
    """What a turn came to: failures by unit, guards left standing, when steps ended (Unix time), how many changes were made.

    `trusted` is False when the kernel may hold something else than the result says: read it before the next turn.
    """

    failures: Mapping[str, Failure]
    leftovers: Mapping[str, PlanObject]
    staged_s: float
    committed_s: float
    connected_s: float
    operations: int
    trusted: bool


class Turn:
    """Carries one turn out. `held` and `target` are the units before and after, `stamp` is epoch and generation; made for one use."""

    def __init__(
        self, kernel: Kernel, held: Mapping[str, Unit], target: Mapping[str, Unit], stamp: tuple[int, int], now: Callable[[], float]
    ) -> None:
        self._kernel = kernel
        self._held = held
        self._target = target
        self._stamp = stamp
        self._now = now
        self._journal: list[Change] = []
        self._committed: list[Change] = []
        self._failures: dict[str, Failure] = {}
        self._leftovers: dict[str, PlanObject] = {}
        self._trusted = True

    def run(self, steps: Steps) -> Result:
        """Make all steps. Raises Conflict only when nothing was committed because the kernel holds something else than `held`."""
        self._write(steps.leave)
        self._write(steps.stage)
        staged_s = self._now()
        try:
            self._commit(steps.commit)
        except Conflict:
            self._undo_where(lambda _: True)
            raise
        committed_s = self._now()
        self._drop_stale_flows(steps.commit)
        self._write(steps.connect)
        connected_s = self._now()
        self._write(steps.remove)
        operations = len(self._journal) + len(self._committed)
        return Result(self._failures, self._leftovers, staged_s, committed_s, connected_s, operations, self._trusted)

    # Steps -----------------------------------------------------------------------------------------------------------------------

    def _write(self, changes: Sequence[Change]) -> None:
        for change in changes:
            if self._is_off(change):
                continue
            try:
                self._kernel.write(change)
            except MeshmarkError as error:
                self._fail(change.key, error)
            else:
                self._journal.append(change)

    def _commit(self, changes: Sequence[Change]) -> None:
        """Commit the batch; when it fails, unit by unit, so that only the faulty ones stay behind."""
        batch = [change for change in changes if not self._is_off(change)]
        try:
            self._commit_batch(batch)
        except Conflict:
            raise
        except MeshmarkError as error:
            units = sorted({unit for change in batch for unit in self._units_of(change.key)})
            if len(units) <= 1:
                self._fail(batch[0].key if batch else "marker", error)
                return
            for unit in units:
                part = [change for change in batch if unit in self._units_of(change.key)]
                try:
                    self._commit_batch(part)
                except MeshmarkError as own_error:
                    self._fail(part[0].key, own_error)

    def _commit_batch(self, batch: list[Change]) -> None:
        marker = self._marker()
        if not batch and not self._held and self._kernel.marker() == marker:
            return  # a restart with nothing new leaves the kernel, and who listens to it, alone
        try:
            self._kernel.commit(batch, marker)
        except OutcomeUnknown:
            if self._kernel.marker() != marker:
                raise
        self._committed.extend(batch)

    def _drop_stale_flows(self, changes: Sequence[Change]) -> None:
        if not changes:
            return
        objects = {key: entry.object for unit in self._target.values() for key, entry in unit.items()}
        if touches_nat(changes, objects):
            dropped = self._kernel.drop_flows(stale_flows(changes, objects, self._kernel.flows()))
            _log.info("flows_dropped", count=dropped)

    # Failures ----------------------------------------------------------------------------------------------------------------------

    def _fail(self, key: str, error: MeshmarkError) -> None:
        units = self._units_of(key)
        _log.warning("change_failed", key=key, units=sorted(units), error=str(error))
        for unit in units:
            self._failures.setdefault(unit, Failure(key, error))
        self._undo_where(self._is_off)

    def _undo_where(self, concerned: Callable[[Change], bool]) -> None:
        """Undo what was done and is concerned, latest first. Guards of wanted units stay."""
        for change in [change for change in reversed(self._journal) if concerned(change)]:
            self._journal.remove(change)
            if is_guard(change.new) and change.old is None and change.new is not None:
                self._leftovers[change.key] = change.new
                continue
            self._attempt(lambda change=change: self._kernel.write(change.inverse()))  # type: ignore[misc]
        nft = [change for change in self._committed if concerned(change)]
        if nft:
            self._committed = [change for change in self._committed if change not in nft]
            self._attempt(lambda: self._kernel.commit([change.inverse() for change in reversed(nft)], self._marker()))

    def _attempt(self, undo: Callable[[], None]) -> None:
        try:
            undo()
        except (MeshmarkError, ValueError) as error:
            # A chain that was known by its listing only has no inverse; the next turn starts from what the kernel then holds.
            self._trusted = False
            _log.warning("undo_failed", error=str(error))

    def _is_off(self, change: Change) -> bool:
        """True when every unit of the change has failed."""
        return self._units_of(change.key) <= self._failures.keys()

    def _units_of(self, key: str) -> set[str]:
        """The units, old or new, that hold the object."""
        return {name for units in (self._held, self._target) for name, unit in units.items() if key in unit} or {STRAY}

    def _marker(self) -> Marker | None:
        """What the kernel is to say that it holds; None, which leaves no trace, for a plan without units."""
        if not self._target:
            return None
        held = {name: unit for name, unit in self._target.items() if name not in self._failures}
        held.update({name: self._held[name] for name in self._failures if name in self._held})
        epoch, generation = self._stamp
        return Marker(epoch, generation, {unit_tag(name): digest_of(unit) for name, unit in held.items()})
