"""What everybody has said so far: admitted objects, plans, reports, refusals and drift, as they come in on the broker.

A value that grows: it is told each message, in order, and asked questions. It knows no broker, so that a test can tell it things.
"""

from __future__ import annotations

from collections.abc import Iterable

from schemas import codec, subjects
from schemas.allocation import Remaps
from schemas.drift import DriftEvent
from schemas.plan import PlanDiff
from schemas.status import ApplyReport, Refusal
from schemas.topology import Gateway, Node, Peering, Topology, decode_topology
from services.cli.lab.chosen import Chosen
from services.cli.lab.remapped import filled_in

LASTING = tuple(f"{stream}.>" for stream in (subjects.STATE, subjects.ALLOCATION, subjects.PLAN, subjects.STATUS))
"""Subjects whose newest message each is the state of something: worth reading at the start."""
FOLLOWED = (*LASTING, *(f"{stream}.>" for stream in (subjects.REFUSED, subjects.DRIFT)))
"""The subjects whose messages a board is told."""

HostKey = tuple[str, str]


class Board:
    """The newest word on each thing. `objects` is by ``Kind/cluster/name``; hosts are ``(cluster, host)``."""

    def __init__(self) -> None:
        self.objects: dict[str, Topology] = {}
        self.version = 0
        """Grows whenever `objects` changes."""
        self.chosen = Chosen()
        self.generations: dict[HostKey, int] = {}
        self.reports: dict[HostKey, ApplyReport] = {}
        self.refusals: list[Refusal] = []
        self.drift: list[DriftEvent] = []
        self._by_subject: dict[str, str] = {}

    def tell(self, subject: str, data: bytes) -> None:
        """Take one message in. Messages of other kinds are nothing to the board."""
        stream = subjects.parse(subject).stream
        if stream == subjects.STATE:
            self._tell_state(subject, data)
        elif stream == subjects.ALLOCATION:
            self.chosen.tell(subject, data)
        elif not data:
            return
        elif stream == subjects.PLAN:
            plan = codec.decode(data, PlanDiff)
            self.generations[plan.cluster, plan.host] = plan.generation
        elif stream == subjects.STATUS:
            report = codec.decode(data, ApplyReport)
            self.reports[report.cluster, report.host] = report
        elif stream == subjects.REFUSED:
            self.refusals.append(codec.decode(data, Refusal))
        elif stream == subjects.DRIFT:
            self.drift.append(codec.decode(data, DriftEvent))

    def _tell_state(self, subject: str, data: bytes) -> None:
        if data:
            item = decode_topology(data)
            self._by_subject[subject] = item.ref
            if self.objects.get(item.ref) != item:
                self.objects[item.ref] = item
                self.version += 1
        elif ref := self._by_subject.pop(subject, ""):
            del self.objects[ref]
            self.version += 1

    def as_seen(self) -> list[Topology]:
        """The objects, with what came from pools filled in as if their ends had given it."""
        remaps = self.chosen.remaps
        return [
            filled_in(item, remaps.get((item.cluster, item.name), Remaps()), self.objects) if isinstance(item, Peering) else item
            for item in self.objects.values()
        ]

    def missing(self, wanted: Iterable[Topology]) -> list[str]:
        """What keeps `wanted` from being in force, one line each; empty when every host holds its newest plan.

        An object is in force when it was admitted as it is; a host when the newest plan is the one that it reports as applied.
        """
        lines = [f"{item.ref} is not admitted yet" for item in wanted if self.objects.get(item.ref) != item]
        for item in self.objects.values():
            if isinstance(item, Node | Gateway):
                lines += self._missing_on(item)
        return lines

    def _missing_on(self, item: Node | Gateway) -> list[str]:
        host = (item.cluster, item.name)
        where = f"host {item.cluster}/{item.name}"
        report, generation = self.reports.get(host), self.generations.get(host)
        if generation is None:
            return [f"{where} has no plan yet"]
        if report is None:
            return [f"{where} has not reported yet"]
        if report.generation < generation:
            return [f"{where} holds generation {report.generation} of {generation}"]
        return [
            f"{where}: {unit.unit} is {unit.outcome}{f': {unit.error}' if unit.error else ''}"
            for unit in report.units
            if unit.outcome != "applied"
        ]

    def refused(self, wanted: Iterable[Topology]) -> list[str]:
        """Which of these objects were refused and are not in force, with the reasons."""
        open_refs = {item.ref for item in wanted if self.objects.get(item.ref) != item}
        return [f"{ref} was refused: {refusal.what}" for refusal in self.refusals if (ref := _ref(refusal)) in open_refs]


def _ref(refusal: Refusal) -> str:
    return f"{refusal.kind}/{refusal.cluster}/{refusal.name}"
