"""One turn: bring the kernel from what it holds to what is wanted, unit by unit all or nothing.

The steps of all units are made together (one nft batch). When a change fails, the units that it belongs to are undone, in the order that
leaks nothing, and stay at their old version; the others go on. Guards of a unit that is wanted are never undone: while a unit cannot be
applied, its traffic meets `unreachable` instead of the uplink (docs/decisions/0003).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType

import structlog
from msgspec import Struct

from schemas.host_objects import PlanObject
from schemas.plan import Unit, digest_of, unit_tag
from services.applier.flows import stale_flows, touches_nat
from services.applier.lookups import Addresses, as_known
from services.applier.steps import Steps, is_guard, order
from services.kernel.port import Kernel
from services.kernel.transaction import Change, Marker
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


class Scope(Struct, frozen=True):
    """What a turn is about: units before and after, epoch and generation, and units that are given up beforehand.

    `from_kernel` says that the changes come from reading the kernel and not from memory. With `final`, a batch that does not fit or whose
    answer is lost is a failure, and no reason to read the kernel and try again. `damaged` units were found in the kernel in part: there is
    no old version to go back to, so they are brought as far as they can be, and what is missing of them stays drift. `withdrawn` are the
    links whose hops the held routes lack, `addresses` those that names stand for in what is held.
    """

    held: Mapping[str, Unit]
    target: Mapping[str, Unit]
    epoch: int
    generation: int
    from_kernel: bool
    final: bool
    damaged: frozenset[str]
    failures: Mapping[str, Failure]
    withdrawn: frozenset[str] = frozenset()
    addresses: Addresses = MappingProxyType({})


class Turn:
    """Carries one turn out; made for one use."""

    def __init__(self, kernel: Kernel, scope: Scope, now: Callable[[], float]) -> None:
        self._kernel = kernel
        self._scope = scope
        self._now = now
        self._made: list[Change] = []
        self._failures: dict[str, Failure] = dict(scope.failures)
        self._leftovers: dict[str, PlanObject] = {}
        self._marked: Marker | None = None
        self._trusted = True

    def run(self, steps: Steps) -> Result:
        """Make all steps.

        Raises Conflict when the kernel does not hold what the changes start from, OutcomeUnknown when an answer was lost (then nothing is
        undone): read the kernel and make a new turn. In a final turn both are failures of units.
        """
        self._write(steps.leave)
        self._write(steps.stage)
        staged_s = self._now()
        self._commit(steps.commit)
        committed_s = self._now()
        self._drop_stale_flows(steps.commit)
        self._write(steps.connect)
        connected_s = self._now()
        self._write(steps.remove)
        if self._marked != self._marker():
            # A unit that failed after the commit and holds no nftables objects of its own changed the marker's truth.
            self._attempt(lambda: self._kernel.commit([], self._marker()))
        return Result(self._failures, self._leftovers, staged_s, committed_s, connected_s, len(self._made), self._trusted)

    # Steps -----------------------------------------------------------------------------------------------------------------------

    def _write(self, changes: Sequence[Change]) -> None:
        for _, group in groupby(changes, key=_together):
            run = [change for change in group if not self._is_off(change)]
            errors = self._kernel.write_all(run)
            for change in run:
                error = errors.get(change.key)
                # With an unknown outcome it may be there, and half of a replacement may have been made, as a port that was left before the
                # new one was refused: undone as if it were made, and the kernel is read before the next turn.
                unclear = isinstance(error, OutcomeUnknown) or (change.old is not None and change.new is not None)
                if error is None or unclear:
                    self._made.append(change)
                if error is not None and unclear:
                    self._trusted = False
            for key, error in errors.items():
                if not self._is_off_key(key):  # one failure stands for its unit
                    self._fail(key, error)

    def _commit(self, changes: Sequence[Change]) -> None:
        """Commit the batch; when it fails, unit by unit, so that only the faulty ones stay behind."""
        batch = [change for change in changes if not self._is_off(change)]
        try:
            self._commit_batch(batch)
        except (Conflict, OutcomeUnknown) as error:
            if not self._scope.final:
                if isinstance(error, Conflict):
                    self._undo(list(self._made))
                raise
            self._trusted = False
            self._commit_by_unit(batch, error)
        except MeshmarkError as error:
            self._commit_by_unit(batch, error)

    def _commit_by_unit(self, batch: list[Change], error: MeshmarkError) -> None:
        units = sorted({unit for change in batch for unit in self._units_of(change.key)})
        if len(units) <= 1:
            self._fail_commit(batch, set(units) or {STRAY}, error)
            return
        done: set[int] = set()
        for unit in units:
            mine = [change for change in batch if unit in self._units_of(change.key) and not self._is_off(change)]
            part = [change for change in mine if id(change) not in done]
            try:
                self._commit_batch(part)
            except MeshmarkError as own_error:
                self._fail_commit(part, {unit}, own_error)
            else:
                done.update(map(id, part))

    def _fail_commit(self, batch: Sequence[Change], units: set[str], error: MeshmarkError) -> None:
        """What the kernel refused fails each unit that holds it; where it is not known, those whose batch it was fail."""
        if any(change.key == error.key for change in batch):
            self._fail(error.key, error)
        else:
            self._fail("nft", error, units)

    def _commit_batch(self, batch: list[Change]) -> None:
        marker = self._marker()
        if batch or self._kernel.marker() != marker:
            self._kernel.commit(batch, marker)
        self._marked = marker
        self._made.extend(batch)

    def _drop_stale_flows(self, changes: Sequence[Change]) -> None:
        objects = {key: entry.object for unit in self._scope.target.values() for key, entry in unit.items()}
        if not self._scope.from_kernel and not touches_nat(changes, {**objects, **self._held_objects()}):
            return
        try:
            dropped = self._kernel.drop_flows(stale_flows(changes, objects, self._kernel.flows()))
        except MeshmarkError as error:
            # The next turn starts from the kernel and judges all flows again.
            self._trusted = False
            _log.warning("stale_flows_kept", error=str(error))
        else:
            _log.debug("flows_dropped", count=dropped)

    # Failures ----------------------------------------------------------------------------------------------------------------------

    def _fail(self, key: str, error: MeshmarkError, units: set[str] | None = None) -> None:
        """Fail these units, or all that hold the object, and undo what was made of them."""
        units = units or self._units_of(key)
        _log.warning("change_failed", key=key, units=sorted(units), error=str(error))
        for unit in units:
            self._failures.setdefault(unit, Failure(key, error))
        if units & self._scope.damaged:
            self._trusted = False
        self._undo([change for change in self._made if self._is_off(change)])

    def _undo(self, concerned: list[Change]) -> None:
        """Undo these changes, in the order of steps of the way back. Guards of wanted units stay."""
        undone = {id(change) for change in concerned}
        self._made = [change for change in self._made if id(change) not in undone]
        inverses = []
        for change in concerned:
            if is_guard(change.new) and change.old is None and change.new is not None:
                self._leftovers[change.key] = change.new
                continue
            try:
                inverses.append(change.inverse())
            except ValueError as error:
                # What was known by its listing only has no inverse; the next turn starts from what the kernel then holds.
                self._trusted = False
                _log.warning("undo_incomplete", error=str(error))
        back = order(inverses, self._leftovers, self._held_objects(), {change.key for change in inverses})
        self._write_back((*back.leave, *back.stage))
        if back.commit:
            self._attempt(lambda: self._kernel.commit(back.commit, self._marker()))
            self._marked = self._marker()
        self._write_back((*back.connect, *back.remove))

    def _write_back(self, changes: Sequence[Change]) -> None:
        for _, run in groupby(changes, key=_together):
            for error in self._kernel.write_all(list(run)).values():
                self._not_undone(error)

    def _attempt(self, undo: Callable[[], None]) -> None:
        try:
            undo()
        except MeshmarkError as error:
            self._not_undone(error)

    def _not_undone(self, error: MeshmarkError) -> None:
        self._trusted = False
        _log.warning("undo_failed", error=str(error))

    def _held_objects(self) -> Mapping[str, PlanObject]:
        held = {key: entry.object for unit in self._scope.held.values() for key, entry in unit.items()}
        return as_known(held, self._scope.withdrawn, self._scope.addresses)

    def _is_off(self, change: Change) -> bool:
        return self._is_off_key(change.key)

    def _is_off_key(self, key: str) -> bool:
        """Whether the object is to be what it was: all its units have failed, or one that has it still, and no other unit wants it."""
        failed = self._failures.keys() - self._scope.damaged
        if not failed:
            return False
        if self._units_of(key) <= failed:
            return True
        stays = any(key in self._scope.held.get(name, ()) for name in failed)
        return stays and not any(key in unit for name, unit in self._scope.target.items() if name not in failed)

    def _units_of(self, key: str) -> set[str]:
        """The units, old or new, that hold the object."""
        units = (self._scope.held, self._scope.target)
        return {name for group in units for name, unit in group.items() if key in unit} or {STRAY}

    def _marker(self) -> Marker | None:
        """What the kernel holds once the failed units are back; None when that is nothing at all."""
        scope = self._scope
        held = {name: unit for name, unit in scope.target.items() if name not in self._failures or name in scope.damaged}
        held.update({name: scope.held[name] for name in self._failures if name in scope.held})
        if not held:
            return None
        return Marker(scope.epoch, scope.generation, {unit_tag(name): digest_of(unit) for name, unit in held.items()})


def _together(change: Change) -> str:
    """What changes of one kind that may be given to the kernel at once have in common: routes, rules, or peers of one link.

    Everything else goes by itself: it rests on what came before.
    """
    layer = change.subject.layer
    return layer if layer in ("rule", "route") else f"peers {change.key.split(' ')[1]}" if layer == "wireguard" else change.key
