"""What one Endpoint event costs planner and applier in computing, on 60 nodes with 1,000 pods each. No broker, no kernel.

The event gives one pod a host route. A gateway's plan has one route for each pod that its node's prefix does not cover: two sizes of plan
tell what is paid by the size of the plan from what is paid by the size of the change.

Peer: the same event with the host compiled anew. Floor: what any planner must do, building the changed part and encoding the difference.
The stages are timed one by one, with the services' own functions; the median is over whole events, timed from outside.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeVar

from benchmarks import topologies
from benchmarks.result import Figure, Result, median, result, rounded
from schemas import codec, snapshot
from schemas.plan import HostPlan, Layer, PlanDiff, PlanObject, UnitDiff, apply_diff, diff_units
from schemas.status import ApplyReport, Capabilities, UnitReport
from schemas.topology import Pod
from schemas.values import Address, Key, Name
from services.applier.core import Applier
from services.kernel.port import ALL_LAYERS, Flow
from services.kernel.transaction import Change, Marker, Observed
from services.planner.admit import admit
from services.planner.compile import Compiler, compile_host
from services.planner.core import Core, Said, Step
from services.planner.state import HostId

T = TypeVar("T")

_NODES, _EACH, _NODE_LENGTH, _TUNNELS = 60, 1000, 22, 3
_SIZES = (("compile-change", 1000, 30), ("compile-change-60k-routes", _NODES * _EACH, 5))
"""Name, how many of the 60,000 pods have a host route, how many events."""

_ANEW = 3
"""How often the host is compiled anew: seconds each."""


class Stopwatch:
    """Milliseconds of processor time by stage, one sample per event. Nothing here waits, so another process's load does not count."""

    def __init__(self) -> None:
        self.samples: dict[str, list[float]] = {}

    def time(self, stage: str, work: Callable[[], T]) -> T:
        began = time.thread_time()
        found = work()
        self.samples.setdefault(stage, []).append((time.thread_time() - began) * 1e3)
        return found

    def medians(self) -> dict[str, float]:
        return {stage: rounded(median(samples)) for stage, samples in self.samples.items()}


class SilentKernel:
    """A kernel that does what it is told in no time, so that what remains is the applier's own computing."""

    def capabilities(self) -> Capabilities:
        return Capabilities()

    def public_key(self) -> Key:
        return Key("A" * 43 + "=")

    def read(self, wanted: Mapping[str, PlanObject], layers: Collection[Layer] = ALL_LAYERS) -> Observed:
        del wanted, layers
        return {}

    def reference(self, wanted: Mapping[str, PlanObject]) -> Observed:
        return dict(wanted)

    def write(self, change: Change) -> None:
        del change

    def commit(self, batch: Sequence[Change], marker: Marker | None) -> None:
        del batch, marker

    def marker(self) -> Marker | None:
        return None

    def flows(self) -> Iterable[Flow]:
        return ()

    def drop_flows(self, flows: Iterable[Flow]) -> int:
        del flows
        return 0

    def close(self) -> None:
        pass


def run(say: Callable[[str], None]) -> list[Result]:
    found = []
    for name, roaming, events in _SIZES:
        say(f"{_NODES} nodes, {_NODES * _EACH} pods, {roaming} of them with a host route")
        found.append(_measure(name, roaming, events))
    return found


def _measure(name: str, roaming: int, events: int) -> Result:
    objects = topologies.mesh(_NODES, _TUNNELS, node_length=_NODE_LENGTH)
    objects += topologies.pods(_NODES, _EACH, node_length=_NODE_LENGTH, roaming=roaming)
    core = topologies.planner(objects, _TUNNELS)
    _publish_all(core)
    compiler = Compiler(core.state, core.allocations)
    compiler.refresh(list(core.state.objects.values()))
    applier = Applier(SilentKernel(), time.time)
    applier.apply(core.published[topologies.GATEWAY], 1, 1)
    gc.collect()
    gc.freeze()  # a planner that has run for a while has its objects in the oldest generation as well
    whole, planning, applying = Stopwatch(), Stopwatch(), Stopwatch()
    for number in range(events):
        item = Pod(
            name=Name(f"new-{number}"), cluster=Name("rome"), node=Name("worker-0"), addresses=(Address(f"10.200.255.{number + 1}"),)
        )
        before = core.published[topologies.GATEWAY]
        said = Said(("endpoint", "rome", item.name), codec.encode(item), number + 2)
        step, diff = whole.time("event", lambda said=said: _plan(core, said))  # type: ignore[misc]
        core.published[topologies.GATEWAY] = step.plan
        report = _report(step.plan)
        whole.time("report", lambda report=report: _hear_report(core, report))  # type: ignore[misc]
        _time_planning(planning, core, compiler, item, before)
        _time_applying(applying, applier, before, codec.encode(diff))
    for _ in range(_ANEW):
        planning.time("compile the host anew", lambda: compile_host(core.state, core.allocations, topologies.GATEWAY))
    gc.unfreeze()
    entries = sum(len(unit) for unit in core.published[topologies.GATEWAY].units.values())
    stages = planning.medians()
    return result(
        name,
        whole.samples["event"],
        "ms",
        peer=median(planning.samples["compile the host anew"])
        + sum(stages[stage] for stage in ("difference", "snapshot", "encode the difference")),
        floor=stages["build the part"] + stages["encode the difference"],
        details={
            "entries_in_plan": entries,
            "planner_ms": stages,
            "planner_ms_when_the_report_comes": rounded(median(whole.samples["report"])),
            "applier_ms": applying.medians(),
        },
    )


def _publish_all(core: Core) -> None:
    """As if every plan had been published, applied and reported."""
    for step in core.steps():
        core.published[step.host] = step.plan
    for plan in core.published.values():
        _hear_report(core, _report(plan))


def _hear_report(core: Core, report: ApplyReport) -> None:
    """What the planner does when a host reports that it holds its plan: nothing is left to do, and it finds out."""
    core.report(report)
    core.steps()


def _report(plan: HostPlan) -> ApplyReport:
    units = tuple(UnitReport(name, digest, digest, "applied") for name, digest in plan.digests().items())
    return ApplyReport(plan.cluster, plan.host, 1, 1, units)


def _plan(core: Core, said: Said) -> tuple[Step, PlanDiff]:
    """All that the planner computes between an event and the message that it publishes."""
    outcome = core.hear([said])
    assert outcome.admitted, outcome.refused
    (step,) = core.steps()
    snapshot.split(step.plan, 1, said.sequence)
    diff = _difference(step.host, step.diffs, said.sequence)
    codec.encode(diff)
    return step, diff


def _difference(host: HostId, diffs: tuple[UnitDiff, ...], generation: int) -> PlanDiff:
    return PlanDiff(Name(host.cluster), Name(host.name), 1, generation, diffs)


def _time_planning(watch: Stopwatch, core: Core, compiler: Compiler, item: Pod, before: HostPlan) -> None:
    host = topologies.GATEWAY
    watch.time("admit", lambda: admit(item, core.state))
    watch.time("build the part", lambda: compiler.refresh([item]))
    plan = watch.time("merge the parts", lambda: compiler.plan(host))
    diffs = watch.time("difference", lambda: diff_units(before.units, plan.units))
    watch.time("one digest of the plan", plan.digests)
    watch.time("rollouts", core.steps)
    watch.time("snapshot", lambda: snapshot.split(plan, 1, 1))
    watch.time("encode the difference", lambda: codec.encode(_difference(host, diffs, 1)))


def _time_applying(watch: Stopwatch, applier: Applier, before: HostPlan, payload: bytes) -> None:
    diff = watch.time("decode", lambda: codec.decode(payload, PlanDiff))
    units = watch.time("apply the difference", lambda: apply_diff(before.units, diff.units))
    plan = HostPlan(before.cluster, before.host, units)
    watch.time("turn, without the kernel", lambda: applier.apply(plan, 1, diff.generation))


FIGURE = Figure("compile-change", "computing behind one Endpoint event, planner and applier", run)
