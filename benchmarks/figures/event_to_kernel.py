"""From publishing an Endpoint to its host route in the gateway's kernel: 200 events, one after the other, in the lab.

The addresses lie in the cluster's pod prefix but in no node's, so that each event is one route in the gateway's table of incoming
packets. The end is the kernel's own word (a netlink listener in the gateway's namespace), not the applier's. The stages come from what
the services say in plans and reports; all clocks are this machine's.

Floor, one sample after each event: one JetStream publish → fetch round trip, and one route added by one netlink message.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from benchmarks import lab
from benchmarks.result import Figure, Result, median, quantile, result, rounded
from benchmarks.roundtrip import RoundTrip
from benchmarks.routes import BareRoutes, RouteWatch
from schemas import codec, subjects
from schemas.plan import PlanDiff
from schemas.status import ApplyReport
from schemas.topology import Pod
from schemas.values import Address, Name
from services.cli.lab.layout import host_namespace
from services.planner.layout import INCOMING_TABLE
from services.runtime.broker import Broker, Message
from services.runtime.settings import BrokerSettings

_CLUSTER, _GATEWAY, _NODE = "rome", "gateway", "worker-1"
_EVENTS, _WARM_UP = 200, 10
_PAUSE_S = 0.15
"""Between events, so that each finds the services idle: the auditor looks at the kernel after each of them."""
_PATIENCE_S = 15.0


class Event(Struct, frozen=True):
    """One event's times, Unix time in seconds."""

    published_s: float
    acknowledged_s: float
    route_s: float
    diff: PlanDiff
    report: ApplyReport

    @property
    def total_ms(self) -> float:
        return (self.route_s - self.published_s) * 1e3

    def stages_ms(self) -> dict[str, float]:
        """Milliseconds of each stage, in order; all but the last add up to the total."""
        timings = self.report.timings
        marks = {
            "published": self.published_s,
            "stored": self.diff.causes[0].stored_s,
            "admitted": self.diff.admitted_s,
            "planned": self.diff.planned_s,
            "received": timings.received_s,
            "staged": timings.staged_s,
            "committed": timings.committed_s,
            "route in the kernel": self.route_s,
            "reported": timings.reported_s,
        }
        names = list(marks)
        return {f"{before} → {after}": (marks[after] - marks[before]) * 1e3 for before, after in itertools.pairwise(names)}


class Ears:
    """What the planner and the applier say about one host, matched to the events behind it."""

    def __init__(self) -> None:
        self._diffs: dict[str, PlanDiff] = {}
        self._reports: dict[int, ApplyReport] = {}
        self._told = asyncio.Event()

    async def hear(self, messages: AsyncIterator[Message]) -> None:
        async for message in messages:
            if message.subject.startswith(f"{subjects.PLAN}."):
                diff = codec.decode(message.data, PlanDiff)
                self._diffs.update({cause.ref: diff for cause in diff.causes})
            else:
                report = codec.decode(message.data, ApplyReport)
                self._reports.setdefault(report.generation, report)
            self._told.set()

    async def about(self, ref: str) -> tuple[PlanDiff, ApplyReport]:
        """The plan that an object led to, and the report on it. To be bounded by the caller's timeout."""
        while ref not in self._diffs or self._diffs[ref].generation not in self._reports:
            self._told.clear()
            await self._told.wait()
        diff = self._diffs[ref]
        return diff, self._reports[diff.generation]


def run(say: Callable[[str], None]) -> list[Result]:
    return asyncio.run(_run(say))


async def _run(say: Callable[[str], None]) -> list[Result]:
    async with lab.standing(say) as standing:
        before = _cpu_ms(standing.pids)
        events, round_trips_ms, routes_ms = await standing.in_underlay(lambda: _measure(standing, say))
        spent = {name: (after - before[name]) / (_EVENTS + _WARM_UP) for name, after in _cpu_ms(standing.pids).items() if name in before}
    return [_sum_up(events, round_trips_ms, routes_ms, spent)]


async def _measure(standing: lab.Lab, say: Callable[[str], None]) -> tuple[list[Event], list[float], list[float]]:
    events, round_trips_ms, routes_ms = [], [], []
    bare = BareRoutes()
    async with (
        Broker.connect(BrokerSettings(url=standing.url), "bench") as broker,
        RoundTrip.open(standing.url, standing.folder.credentials("planner")) as floor,
        _listening(broker) as ears,
    ):
        watch = RouteWatch(host_namespace(_CLUSTER, _GATEWAY), INCOMING_TABLE)
        for number in range(_WARM_UP + _EVENTS):
            item = _pod(number)
            event = await _event(broker, ears, watch, item)
            await asyncio.sleep(_PAUSE_S)
            if number >= _WARM_UP:
                events.append(event)
                round_trips_ms.append(await floor.take_ms(codec.encode(item)))
                routes_ms.append(bare.add_ms(item.addresses[0]))
            if (number + 1) % 50 == 0:
                say(f"{number + 1} events")
        watch.close()
        bare.close()
    return events, round_trips_ms, routes_ms


@contextlib.asynccontextmanager
async def _listening(broker: Broker) -> AsyncIterator[Ears]:
    ears = Ears()
    async with (
        broker.listen(subjects.plan(_CLUSTER, _GATEWAY)) as plans,
        broker.listen(subjects.status(_CLUSTER, _GATEWAY)) as reports,
        asyncio.TaskGroup() as tasks,
    ):
        hearing = [tasks.create_task(ears.hear(messages), name="hear") for messages in (plans, reports)]
        try:
            yield ears
        finally:
            for task in hearing:
                task.cancel()


async def _event(broker: Broker, ears: Ears, watch: RouteWatch, item: Pod) -> Event:
    async with asyncio.timeout(_PATIENCE_S):
        published_s = time.time()
        await broker.publish(subjects.topology(item.kind, item.cluster, item.name), codec.encode(item))
        acknowledged_s = time.time()
        route_s = await watch.seen_s(item.addresses[0])
        return Event(published_s, acknowledged_s, route_s, *await ears.about(item.ref))


def _pod(number: int) -> Pod:
    """The warm-up's pods come first, at addresses of their own."""
    address = f"10.200.101.{number + 1}" if number < _WARM_UP else f"10.200.100.{number - _WARM_UP + 1}"
    return Pod(name=Name(f"bench-{number}"), cluster=Name(_CLUSTER), node=Name(_NODE), addresses=(Address(address),))


def _sum_up(events: Sequence[Event], round_trips_ms: Sequence[float], routes_ms: Sequence[float], cpu_ms: Mapping[str, float]) -> Result:
    totals = [event.total_ms for event in events]
    stages = [event.stages_ms() for event in events]
    quarter = len(events) // 4
    auditors = [spent for name, spent in cpu_ms.items() if name.startswith("auditor.") and name != f"auditor.{_CLUSTER}.{_GATEWAY}"]
    shown = ("planner", f"applier.{_CLUSTER}.{_GATEWAY}", f"auditor.{_CLUSTER}.{_GATEWAY}", "nats-server")
    return result(
        "event-to-kernel",
        totals,
        "ms",
        floor=median([trip + route for trip, route in zip(round_trips_ms, routes_ms, strict=True)]),
        details={
            "p50_ms": rounded(median(totals)),
            "p99_ms": rounded(quantile(totals, 0.99)),
            "stages_ms_p50": {name: rounded(median([stage[name] for stage in stages])) for name in stages[0]},
            "stages_ms_p99": {name: rounded(quantile([stage[name] for stage in stages], 0.99)) for name in stages[0]},
            "publish_acknowledged_ms": rounded(median([(event.acknowledged_s - event.published_s) * 1e3 for event in events])),
            "floor_ms": {"round trip": rounded(median(round_trips_ms)), "route": rounded(median(routes_ms))},
            "first_and_last_quarter_p50_ms": [rounded(median(totals[:quarter])), rounded(median(totals[-quarter:]))],
            "cpu_ms_per_event": {name: rounded(cpu_ms[name], 3) for name in shown}
            | ({"another host's auditor": rounded(median(auditors), 3)} if auditors else {}),
        },
    )


def _cpu_ms(pids: Mapping[str, int]) -> dict[str, float]:
    """Milliseconds of processor time that each service has used, to a clock tick."""
    tick_ms = 1e3 / os.sysconf("SC_CLK_TCK")
    found = {}
    for name, pid in pids.items():
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        found[name] = (int(fields[11]) + int(fields[12])) * tick_ms
    return found


FIGURE = Figure("event-to-kernel", f"{_EVENTS} Endpoint events, from publishing to the route in the gateway's kernel", run, needs_root=True)
