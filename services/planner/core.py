"""The planner without its loop: events in, decisions out. No clock, no broker; everything durable is returned to be written.

A refused object is kept as pending and tried again whenever the admitted topology changes, so that what publishers said last is what holds
once nothing stands in its way, in whatever order it was said. Objects that are valid only together (a cluster with one more prefix, and the
peering that remaps it) are admitted together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from schemas.in_use import InUse
from schemas.plan import HostPlan, diff_units
from schemas.status import ApplyReport, Refusal
from schemas.topology import EgressPolicy, Gateway, Node, Peering, Topology
from schemas.values import Prefix
from services.planner.admit import Problem, admit, admit_removal, admit_together, overtaken
from services.planner.allocate import NOTHING, Allocations
from services.planner.compile import Compiler, gateway
from services.planner.compile.parts import unit_name
from services.planner.remaps import Exhausted
from services.planner.rollouts import Rollouts, settle_rollouts
from services.planner.rotations import Rotations
from services.planner.said import Said, decoded, named, read
from services.planner.state import Attachment, HostId, State
from services.planner.step import Claim, Step

_REASON_CHARACTERS = 1000


class Admitted(NamedTuple):
    """An object that joined the state, or (`item` None) left it."""

    ref: str
    item: Topology | None
    said: Said


class Pending(NamedTuple):
    """An object (None: its removal) that was refused and may be admitted later; `waits_for` is the object that was in the way last."""

    item: Topology | None
    said: Said
    waits_for: str = ""


class _Moment(NamedTuple):
    """Which words of objects that wait for each other were tried together, what was in their way, and which word of that."""

    waiting: Mapping[str, int]
    blocker: str
    blocked_by: int


class Outcome:
    """What came of some events: objects to write to STATE, refusals to tell, hosts whose plan may have changed."""

    def __init__(self) -> None:
        self.admitted: list[Admitted] = []
        self.refused: list[Refusal] = []
        self.unreadable: list[tuple[Said, str]] = []

    def __bool__(self) -> bool:
        return bool(self.admitted or self.refused or self.unreadable)


class Core:
    """The planner's state: admitted topology, allocations, compiled plans, what is published, what hosts reported."""

    def __init__(self) -> None:
        self.allocations = Allocations()
        self.state = State(remaps=self.allocations.remaps, rotations=self.allocations.rotations)
        self.sequences: dict[str, int] = {}
        self.published: dict[HostId, HostPlan] = {}
        self.reports: dict[HostId, ApplyReport] = {}
        self._compiler = Compiler(self.state, self.allocations)
        self._claims: dict[HostId, Claim] = {}
        self._rollouts = Rollouts(
            self.state, self.allocations, self._compiler, published=self.published, reports=self.reports, claims=self._claims
        )
        self._rotations = Rotations(self.state, self.allocations, self.reports, self._rollouts.holds)
        self._pending: dict[str, Pending] = {}
        self._blocked: dict[frozenset[str], _Moment] = {}
        self._dirty: set[HostId] = set()
        self._reporting: set[HostId] = set()
        """Hosts on which others use something else than when topology was heard last."""

    def restore(
        self, objects: Iterable[tuple[Topology, int]], published: Mapping[HostId, HostPlan], reports: Mapping[HostId, ApplyReport]
    ) -> None:
        """Take over what an earlier planner admitted (with source sequences) and published; allocations are put in before."""
        for item, sequence in objects:
            self.state.put(item)
            self.sequences[item.ref] = sequence
        for joined in self.state.peerings.values():
            self.allocations.recover(self.state, joined, [_translations(Attachment(joined, place), published) for place in (0, 1)])
        self._rotations.recover(published)
        for cluster in self.state.clusters:
            self.allocations.settle_ways(self.state, cluster)
        self.allocations.allocate(self.state, list(self.state.objects.values()))
        self.published.update(published)
        for report in reports.values():
            self.note_in_use(report)
            self.report(report)
        self._compiler.refresh(list(self.state.objects.values()))
        self._dirty = {*self.state.hosts(), *self.published}

    def hear(self, events: Iterable[Said], *, quiet: bool = False) -> Outcome:
        """Decide on topology messages, in stream order. With `quiet`, what is refused again is not told again."""
        outcome = Outcome()
        for said in events:
            self._hear_one(said, outcome)
        self._retry_reported(outcome)
        in_force = {entry.said.sequence for entry in outcome.admitted}
        outcome.refused = [refusal for refusal in outcome.refused if refusal.sequence not in in_force]
        if quiet:
            outcome.refused.clear()
            outcome.unreadable.clear()
        return outcome

    def is_overtaken(self, said: Said, earlier: Said | None) -> bool:
        """Whether a message is an old copy by its revision: than what is admitted, or than an `earlier` message about the same object."""
        if not said.has_revision:
            return False
        item, before = decoded(said), decoded(earlier) if earlier is not None else None
        return self._overtaken(item, before) is not None

    def note_in_use(self, report: ApplyReport) -> None:
        """Note what others use on a host: what was refused because of that is tried again when topology is heard next, be it none."""
        host = HostId(report.cluster, report.host)
        if report.in_use is None or report.in_use == self.state.in_use.get(host, InUse()):
            return
        self.state.in_use.pop(host, None)
        if report.in_use:
            self.state.in_use[host] = report.in_use
        self._reporting.add(host)

    def report(self, report: ApplyReport) -> None:
        """Note what a host says that it holds."""
        self.reports[HostId(report.cluster, report.host)] = report

    def claim(self, host: HostId, claim: Claim) -> None:
        """Note that a host holds what is none of the plans published here, or is to be planned as if it did."""
        self._claims[host] = claim

    def publish(self, step: Step) -> None:
        """Note that a step is published."""
        self.published[step.host] = step.plan
        self._claims.pop(step.host, None)

    def keep(self, step: Step) -> None:
        """Note that a step was held back: it is one of the next steps again, as it is then."""
        self._dirty.add(step.host)

    def steps(self) -> list[Step]:
        """The plans that differ from what is published, after rollouts have moved as far as the reports allow.

        A host's first plan is one, even when there is nothing for it to hold: it answers for that, and is known not to be silent.
        """
        self._advance()
        found = []
        for host in sorted(self._dirty | self._claims.keys()):
            plan = self._compiler.plan(host)
            before, claim = self.published.get(host), self._claims.get(host)
            diffs = diff_units(before.units if before else {}, plan.units)
            fresh = before is None and self.state.host(host) is not None
            if diffs or fresh or claim is not None or (before is not None and before.drift != plan.drift):
                found.append(Step(host, plan, diffs, before, claim))
        self._dirty.clear()
        return found

    def _advance(self) -> None:
        """Move rollouts and rotations on. Where one ends without another plan no report follows, and others may have waited for it."""
        is_turned = True
        while is_turned:
            self._dirty |= self._rollouts.advance()
            turned = self._rotations.advance()
            for host in turned:
                self._dirty |= self._compiler.turn(host)
            is_turned = bool(turned)

    def _hear_one(self, said: Said, outcome: Outcome) -> None:
        about = named(said)
        if isinstance(about, str):
            outcome.unreadable.append((said, about))
            return
        ref = about.ref
        waiting = self._pending[ref].said.sequence if ref in self._pending else 0
        if said.sequence <= self.sequences.get(ref, 0) or said.sequence < waiting:
            return
        item, problem = read(ref, said)
        old = self._overtaken(item, self._pending[ref].item if ref in self._pending else None)
        if old is None:
            self._pending.pop(ref, None)
        wish, problem = Pending(item, said), problem or old
        if problem is None:
            problem = self._try(ref, wish, outcome)
        if problem is None:
            self._retry_pending(outcome)
            return
        if problem.retry:
            self._pending[ref] = wish._replace(waits_for=problem.other)
            if self._try_together(ref, outcome):
                self._retry_pending(outcome)
                return
        reason = problem.reason if len(problem.reason) <= _REASON_CHARACTERS else f"{problem.reason[:_REASON_CHARACTERS]}…"
        outcome.refused.append(Refusal(*about, reason, problem.field, problem.other, said.sequence))

    def _overtaken(self, item: Topology | None, waiting: Topology | None) -> Problem | None:
        if item is None:
            return None
        admitted = self.state.objects.get(item.ref)
        return overtaken(item, admitted, "is admitted") or overtaken(item, waiting, "waits to be admitted")

    def _try(self, ref: str, wish: Pending, outcome: Outcome) -> Problem | None:
        problem = admit(wish.item, self.state) if wish.item is not None else admit_removal(ref, self.state)
        return problem or self._take({ref: wish}, outcome)

    def _take(self, wishes: Mapping[str, Pending], outcome: Outcome) -> Problem | None:
        """Put these objects into the state, or take them out, and plan anew what they touch: all of them, or none."""
        before = {ref: self.state.objects.get(ref) for ref in wishes}
        forms = [(before[ref], wish.item) for ref, wish in wishes.items() if wish.item != before[ref]]
        changed = [item for pair in forms for item in pair if item is not None]
        try:
            for ref, wish in wishes.items():
                self._set(ref, wish.item)
            self.allocations.allocate(self.state, changed)
            self._dirty |= self._compiler.refresh(changed)
        except Exhausted as error:
            self._put_back(before, changed)
            return Problem(str(error), error.field, error.other)
        except (ValueError, KeyError) as error:
            # Admission should have known. One object that no plan can be made of must not stop all others.
            self._put_back(before, changed)
            return Problem(f"no plan can be made of it: {error}", retry=False)
        for ref, wish in wishes.items():
            self._note(ref, before[ref], wish, outcome)
        return None

    def _set(self, ref: str, item: Topology | None) -> None:
        if item is None:
            self.state.remove(ref)
        else:
            self.state.put(item)

    def _put_back(self, before: Mapping[str, Topology | None], changed: Iterable[Topology]) -> None:
        for ref, item in before.items():
            self.state.remove(ref)
            if item is not None:
                self.state.put(item)
        for item in changed:
            if isinstance(item, EgressPolicy) and before[item.ref] is None:
                self.allocations.set_way((item.cluster, item.name), None)
        self._compiler.refresh(changed)

    def _note(self, ref: str, before: Topology | None, wish: Pending, outcome: Outcome) -> None:
        self.sequences[ref] = wish.said.sequence
        outcome.admitted.append(Admitted(ref, wish.item, wish.said))
        if wish.item is None and isinstance(before, Peering):
            self.allocations.set_rollout((before.cluster, before.name), NOTHING)
        if wish.item is None and isinstance(before, EgressPolicy):
            self.allocations.set_way((before.cluster, before.name), None)
        if wish.item is None and isinstance(before, Node):
            self.allocations.settle_ways(self.state, before.cluster)
        if wish.item is None and isinstance(before, Node | Gateway):
            self._drop_key(HostId(before.cluster, before.name), wish.said, outcome)

    def _drop_key(self, host: HostId, said: Said, outcome: Outcome) -> None:
        """A host's public key goes with the host: nobody else may delete it, and it would hold the cluster for ever."""
        key = self.state.keys.get(host)
        if key is not None:
            self.state.remove(key.ref)
            self.sequences[key.ref] = max(said.sequence, self.sequences.get(key.ref, 0))
            self._dirty |= self._compiler.refresh([key])
            if self._rotations.forget(host):
                self._dirty |= self._compiler.turn(host)
            outcome.admitted.append(Admitted(key.ref, None, said))

    def _retry_reported(self, outcome: Outcome) -> None:
        """Try what was refused again if a host was in its way that reports something else now."""
        if not self._reporting:
            return
        refs = {f"{kind}/{cluster}/{name}" for cluster, name in self._reporting for kind in ("Node", "Gateway")}
        self._reporting.clear()
        circles = [circle for circle, moment in self._blocked.items() if moment.blocker in refs]
        for circle in circles:
            del self._blocked[circle]
        if circles or any(wish.waits_for in refs for wish in self._pending.values()):
            self._retry_pending(outcome)

    def _retry_pending(self, outcome: Outcome) -> None:
        """Try what was refused again, until nothing more is admitted."""
        progress = True
        while progress:
            progress = False
            for ref, wish in sorted(self._pending.items(), key=lambda entry: entry[1].said.sequence):
                if ref not in self._pending:
                    continue
                problem = self._try(ref, wish, outcome)
                if problem is None:
                    del self._pending[ref]
                else:
                    self._pending[ref] = wish._replace(waits_for=problem.other)
                if problem is None or self._try_together(ref, outcome):
                    progress = True

    def _try_together(self, first: str, outcome: Outcome) -> bool:
        """Admit objects that wait for each other, with all others that these wait for, if together they contradict nothing."""
        together = self._circle(first)
        circle = frozenset(together)
        if not together or self._stands_still(circle):
            return False
        while True:
            wishes = {ref: self._pending[ref] for ref in together}
            problem = admit_together({ref: wish.item for ref, wish in wishes.items()}, self.state)
            if problem is None:
                problem = self._take(wishes, outcome)
            if problem is None:
                break
            if problem.other not in self._pending or problem.other in together:
                self._blocked[circle] = self._moment(together, problem.other)
                return False
            together.append(problem.other)
        for ref in together:
            del self._pending[ref]
        return True

    def _circle(self, first: str) -> list[str]:
        """`first` and what it waits for, if that goes round among objects that wait; empty when it ends at one that does not."""
        found = [first]
        while (following := self._pending[found[-1]].waits_for) not in found:
            if following not in self._pending:
                return []
            found.append(following)
        return found if len(found) > 1 else []

    def _stands_still(self, circle: frozenset[str]) -> bool:
        """Whether nothing has changed since these were tried together: a trial costs a copy of the state."""
        moment = self._blocked.get(circle)
        return moment is not None and bool(moment.blocker) and moment == self._moment(moment.waiting, moment.blocker)

    def _moment(self, waiting: Iterable[str], blocker: str) -> _Moment:
        said = {ref: self._pending[ref].said.sequence for ref in waiting if ref in self._pending}
        return _Moment(said, blocker, self.sequences.get(blocker, 0))


def _translations(attachment: Attachment, published: Mapping[HostId, HostPlan]) -> dict[Prefix, Prefix]:
    """How an end sees real prefixes by its gateway's published plan."""
    plan = published.get(attachment.host)
    unit = plan.units.get(unit_name(attachment), {}) if plan else {}
    return gateway.translations(entry.object for entry in unit.values())


__all__ = ["Admitted", "Claim", "Core", "Outcome", "Said", "Step", "settle_rollouts"]
