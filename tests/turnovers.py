"""Changes of keys, without broker and services: the planner's core, and hosts that say their keys and who shakes hands with them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from typing import Generic, Protocol, TypeVar

import pytest
from msgspec.structs import replace

from schemas.host_objects import WireguardLink
from schemas.plan import HostPlan
from schemas.status import ApplyReport, Greetings
from schemas.topology import PublicKey, Topology
from schemas.values import Name
from services.applier import keys
from services.applier.core import Applier
from services.applier.greetings import greetings
from services.kernel.port import Kernel
from services.planner.core import Core, Said
from services.planner.state import HostId
from tests.meshes import InMemory, Served
from tests.topologies import said

T = TypeVar("T")


class Asked(Served, Protocol):
    """A host whose kernel and applier can be asked."""

    def ask(self, work: Callable[[Kernel, Applier], T]) -> T: ...


Host = TypeVar("Host", bound=Asked)


class Turnovers(Generic[Host]):
    """A cluster that is planned for; those hosts that are `away` neither follow nor report."""

    def __init__(self, make: Callable[[HostId], Host], now: Callable[[], float] = time.time) -> None:
        self.core = Core()
        self.hosts: dict[HostId, Host] = {}
        self.plans: dict[HostId, HostPlan] = {}
        self.away: set[HostId] = set()
        self.stages: list[str] = []
        """Every stage that a rotation was seen in, in order."""
        self._make = make
        self._now = now
        self._made: dict[HostId, tuple[HostPlan, ApplyReport]] = {}
        self._since_s: dict[HostId, float] = {}
        self._sequence = 0
        self._generation = 0

    def hear(self, items: Iterable[Topology]) -> None:
        """Hear these objects, all of which are admitted."""
        for item in items:
            self._sequence += 1
            outcome = self.core.hear([said(item, self._sequence)])
            assert not outcome.refused, outcome.refused

    def publish(self, *items: Topology) -> None:
        """Publish these objects, whatever comes of it."""
        for item in items:
            self._sequence += 1
            self.core.hear([said(item, self._sequence)])

    def remove(self, host: HostId) -> None:
        """Take a node out of the topology."""
        self.forget(self.core.state.nodes[host.cluster][host.name])

    def forget(self, item: Topology) -> None:
        """Take any object out of the topology."""
        self._sequence += 1
        self.core.hear([Said((item.kind.lower(), item.home, item.name), b"", self._sequence)])

    def say_keys(self, host: HostId) -> None:
        """A host publishes its keys."""
        ring = self.hosts[host].ask(lambda kernel, _: kernel.keys())
        self.publish(PublicKey(name=Name(host.name), cluster=Name(host.cluster), key=ring.key, next=ring.next))

    def rotate(self, host: HostId, *, abort: bool = False) -> None:
        """What ``meshmark rotate`` asks a host for."""
        self.hosts[host].ask(lambda kernel, _: keys.rotated(kernel, self.plans[host], abort=abort))
        self.tell([host])
        self.say_keys(host)

    def stage(self, host: HostId) -> str:
        found = self.core.allocations.rotations.get(host)
        return found.stage if found is not None else ""

    def plan(self) -> bool:
        """Publish what is planned now; whether that is anything new."""
        steps = self.core.steps()
        for step in steps:
            self.core.publish(step)
            self.plans[step.host] = step.plan
            if step.host not in self.hosts:
                self.hosts[step.host] = self._make(step.host)
        stages = [rotation.stage for rotation in self.core.allocations.rotations.values() if rotation.stage != "queued"]
        self.stages += [stage for stage in stages if self.stages[-1:] != [stage]]
        return bool(steps)

    def follow(self, hosts: Collection[HostId] | None = None) -> None:
        """Let these hosts, or all, make their plans, let go of keys, and report; those that are away do not."""
        going = [host for host in self.hosts if host not in self.away and (hosts is None or host in hosts)]
        for host in going:
            plan, before = self.plans[host], self._made.get(host)
            if before is not None and before[0] is plan:
                continue
            self._generation += 1
            report = self.hosts[host].apply(plan, self._generation)
            assert report.outcome == "applied", report
            if before is None or _names(before[0]) != _names(plan):
                self._since_s[host] = self._now()
            self._made[host] = plan, report
            if self.hosts[host].ask(lambda _, applier, plan=plan: applier.settle_keys(plan)):  # type: ignore[misc]
                self.say_keys(host)
        self.tell(going)

    def tell(self, hosts: Iterable[HostId]) -> None:
        """Let these hosts report what they have made and see now; those that are away do not."""
        for host in hosts:
            if host not in self.away and host in self._made:
                self._report(host)

    def round(self) -> bool:
        """All hosts follow what is planned; whether there was anything new."""
        was_new = self.plan()
        self.follow()
        return was_new

    def _report(self, host: HostId) -> None:
        plan, report = self._made[host]

        def look(kernel: Kernel, _: Applier) -> tuple[Greetings, ApplyReport]:
            seen = {link.name: kernel.peers(link.name) for link in _devices(plan)}
            found = greetings(plan.objects().values(), seen, self._now(), self._since_s[host])
            return found, replace(report, keys=kernel.keys().all, greetings=found)

        self.core.report(self.hosts[host].ask(look)[1])


def _devices(plan: HostPlan) -> list[WireguardLink]:
    return [item for item in plan.objects().values() if isinstance(item, WireguardLink)]


def _names(plan: HostPlan) -> set[str]:
    return {link.name for link in _devices(plan)}


class Clock:
    """Time that stands still until it is moved."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Greeting(Turnovers[InMemory]):
    """Hosts in memory; `shake_hands` of a subclass says who does so now."""

    def __init__(self, make: Callable[[HostId], InMemory]) -> None:
        self.clock = Clock()
        super().__init__(make, self.clock)

    def shake_hands(self) -> None:
        raise NotImplementedError

    def greet(self, here: HostId, there: HostId, link: str) -> None:
        """One end shakes hands with the other by a link, where each holds the other's key."""
        near, far = self.hosts[here].kernel, self.hosts[there].kernel
        ours, theirs = near.objects.get(f"link {link}"), far.objects.get(f"link {link}")
        if isinstance(ours, WireguardLink) and isinstance(theirs, WireguardLink):
            sends, takes = f"peer {link} {theirs.public_key}", f"peer {link} {ours.public_key}"
            if sends in near.objects and takes in far.objects:
                near.handshakes_s[sends] = self.clock()

    def step(self) -> bool:
        """One round: what is planned is made, then hands are shaken, then all report."""
        was_new = self.plan()
        self.follow()
        self.shake_hands()
        self.follow(())
        self.tell(self.hosts)
        return was_new

    def settle(self, rounds: int = 60) -> None:
        """Until nothing is planned any more, whatever is reported."""
        quiet = 0
        for _ in range(rounds):
            quiet = 0 if self.step() else quiet + 1
            if quiet == 3:
                return
        pytest.fail("it does not end")
