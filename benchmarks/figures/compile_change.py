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
from schemas import codec
from schemas.commands import TraceFlow
from schemas.host_objects import Layer, PlanObject
from schemas.plan import HostPlan, PlanDiff, UnitDiff, apply_diff, diff_units
from schemas.snapshot import Chunks
from schemas.status import ApplyReport, Capabilities, UnitReport
from schemas.topology import Pod
from schemas.values import Address, Key, Name
from services.applier.core import Applier
from services.kernel.port import ALL_LAYERS, Flow, KeyRing, PeerSeen, RuleCount
from services.kernel.transaction import Change, Marker, Observed
from services.planner.admit import admit
from services.planner.compile import Compiler, compile_host
from services.planner.core import Core, Said, Step
from services.runtime.errors import MeshmarkError

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

    def keys(self) -> KeyRing:
        return KeyRing(self.public_key())

    def make_next_key(self) -> None:
        """There is one key."""

    def withdraw_next_key(self) -> None:
        """There is none."""

    def forget_withdrawn_key(self) -> None:
        """There is none."""

    def promote_key(self, key: Key) -> None:
        """There is one key."""

    def read(self, wanted: Mapping[str, PlanObject], layers: Collection[Layer] = ALL_LAYERS) -> Observed:
        del wanted, layers
        return {}

    def fingerprint(self, layer: Layer) -> bytes | None:
        del layer
        return None

    def seen(self, layer: Layer) -> bytes | None:
        del layer
        return None

    def reference(self, wanted: Mapping[str, PlanObject]) -> Observed:
        return dict(wanted)

    def write(self, change: Change) -> None:
        del change

    def commit(self, batch: Sequence[Change], marker: Marker | None) -> None:
        del batch, marker

    def trace(self, wish: TraceFlow) -> bool:
        del wish
        return True

    def forget_traced(self) -> float | None:
        return None

    def links(self) -> Mapping[str, bool]:
        return {}

    def marker(self) -> Marker | None:
        return None

    def write_all(self, changes: Sequence[Change]) -> Mapping[str, MeshmarkError]:
        del changes
        return {}

    def peers(self, link: str) -> Sequence[PeerSeen]:
        del link
        return ()

    def greet(self, link: str, keys: Collection[Key]) -> None:
        """Nobody is there."""

    def counted(self, table: str) -> Sequence[RuleCount]:
        del table
        return ()

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
    chunks = Chunks(core.published[topologies.GATEWAY])
    stages, host = Stages(core), Host(core.published[topologies.GATEWAY])
    whole = Stopwatch()
    gc.collect()
    gc.freeze()  # a planner that has run for a while has its objects in the oldest generation as well
    for number in range(1, events + 1):
        item = Pod(name=Name(f"new-{number}"), cluster=Name("rome"), node=Name("worker-0"), addresses=(Address(f"10.200.255.{number}"),))
        said = Said(("endpoint", "rome", item.name), codec.encode(item), number + 1)
        step, payload = whole.time("event", lambda said=said: _plan(core, chunks, said))  # type: ignore[misc]
        core.published[topologies.GATEWAY] = step.plan
        report = _report(step.plan)
        whole.time("report", lambda report=report: _hear_report(core, report))  # type: ignore[misc]
        stages.follow(item)
        host.follow(payload)
    anew_ms = stages.compile_anew_ms()
    gc.unfreeze()
    found = stages.watch.medians()
    return result(
        name,
        whole.samples["event"],
        "ms",
        peer=anew_ms + sum(found[stage] for stage in ("difference", "snapshot", "encode the difference")),
        floor=found["build the part"] + found["encode the difference"],
        details={
            "entries_in_plan": sum(map(len, core.published[topologies.GATEWAY].units.values())),
            "planner_ms": found,
            "compile_the_host_anew_ms": rounded(anew_ms),
            "planner_ms_when_the_report_comes": rounded(median(whole.samples["report"])),
            "applier_ms": host.watch.medians(),
        },
    )


class Stages:
    """The planner's stages one by one, with a compiler and chunks of its own, beside a core that has followed each event already."""

    def __init__(self, core: Core) -> None:
        self.watch = Stopwatch()
        self._core = core
        self._compiler = Compiler(core.state, core.allocations)
        self._compiler.refresh(list(core.state.objects.values()))
        self._plan = self._compiler.plan(topologies.GATEWAY)
        self._chunks = Chunks(self._plan)

    def follow(self, item: Pod) -> None:
        time_of, before = self.watch.time, self._plan
        time_of("admit", lambda: admit(item, self._core.state))
        time_of("rollouts", self._core.steps)
        time_of("build the part", lambda: self._compiler.refresh([item]))
        self._plan = plan = time_of("merge the parts", lambda: self._compiler.plan(topologies.GATEWAY))
        diffs = time_of("difference", lambda: diff_units(before.units, plan.units))
        time_of("snapshot", lambda: _snapshot(self._chunks, plan, diffs))
        time_of("encode the difference", lambda: _encoded(plan, diffs, 1))

    def compile_anew_ms(self) -> float:
        watch = Stopwatch()
        for _ in range(_ANEW):
            watch.time("anew", lambda: compile_host(self._core.state, self._core.allocations, topologies.GATEWAY))
        return median(watch.samples["anew"])


class Host:
    """A host that has held its plan for a while, and its applier's stages."""

    def __init__(self, plan: HostPlan) -> None:
        self.watch = Stopwatch()
        self._plan = plan
        self._applier = Applier(SilentKernel(), time.time)
        self._applier.apply(plan, 1, 1)

    def follow(self, payload: bytes) -> None:
        plan = self._plan
        diff = self.watch.time("decode", lambda: codec.decode(payload, PlanDiff))
        units = self.watch.time("apply the difference", lambda: apply_diff(plan.units, diff.units))
        self._plan = wanted = HostPlan(plan.cluster, plan.host, units)
        self.watch.time("turn, without the kernel", lambda: self._applier.apply(wanted, 1, diff.generation))


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


def _plan(core: Core, chunks: Chunks, said: Said) -> tuple[Step, bytes]:
    """All that the planner computes between an event and the message that it publishes."""
    outcome = core.hear([said])
    assert outcome.admitted, outcome.refused
    (step,) = core.steps()
    _snapshot(chunks, step.plan, step.diffs)
    return step, _encoded(step.plan, step.diffs, said.sequence)


def _snapshot(chunks: Chunks, plan: HostPlan, diffs: tuple[UnitDiff, ...]) -> None:
    """Encode what the planner writes of the snapshot."""
    for number in chunks.change(diffs):
        chunks.encoded(number)
    codec.encode(chunks.head(plan, 1, 1))


def _encoded(plan: HostPlan, diffs: tuple[UnitDiff, ...], generation: int) -> bytes:
    return codec.encode(PlanDiff(plan.cluster, plan.host, 1, generation, diffs))


FIGURE = Figure("compile-change", "computing behind one Endpoint event, planner and applier", run)
