"""The planner's core and the applier's core of every host it plans for, in this process: over any kernels, without broker and services."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

import pytest

from schemas.plan import HostPlan
from schemas.status import ApplyReport
from services.applier.core import Applier
from services.kernel.fake import FakeHost, FakeKernel
from services.kernel.port import Kernel
from services.planner.core import Core, Said
from services.planner.state import HostId

ROUNDS_MAX = 40

T = TypeVar("T")


class Served(Protocol):
    """A host with its kernel and applier."""

    def apply(self, plan: HostPlan, generation: int = 1) -> ApplyReport:
        """Make a turn."""
        ...


Host = TypeVar("Host", bound=Served)


class InMemory:
    """A host whose kernel is a fake."""

    def __init__(self, private_key: bytes) -> None:
        self.kernel = FakeHost(private_key=private_key)
        self._start()

    def apply(self, plan: HostPlan, generation: int = 1) -> ApplyReport:
        return self._applier.apply(plan, 1, generation)

    def ask(self, work: Callable[[Kernel, Applier], T]) -> T:
        """What some work with the kernel and the applier comes to."""
        return work(self._kernel, self._applier)

    def restart(self) -> None:
        """End the applier and start another one."""
        self._start()

    def _start(self) -> None:
        self._kernel = FakeKernel(self.kernel)
        self._applier = Applier(self._kernel, lambda: 0.0)


class Mesh(Generic[Host]):
    """A planner, and the hosts that it plans for; each is made when its first plan is there."""

    def __init__(self, make: Callable[[HostId], Host]) -> None:
        self.core = Core()
        self.hosts: dict[HostId, Host] = {}
        self._make = make
        self.turns = 0
        """How many plans were applied until now: the generation of the last one."""

    def hear(self, events: Iterable[Said]) -> None:
        """Hear messages one by one, and apply what follows from all of them, to the end of every rollout."""
        self.hear_resting((event, False) for event in events)

    def hear_resting(self, order: Iterable[tuple[Said, bool]]) -> None:
        """The same; after messages that say so, hosts apply what is planned by then."""
        for event, rests in order:
            self.core.hear([event])
            if rests:
                self.round()
        self.settle()

    def round(self) -> bool:
        """What is planned now is applied, by one host after the other, and reported; False when there was nothing."""
        steps = self.core.steps()
        for step in steps:
            if step.host not in self.hosts:
                self.hosts[step.host] = self._make(step.host)
            self.turns += 1
            self.core.publish(step)
            report = self.hosts[step.host].apply(step.plan, self.turns)
            assert report.outcome == "applied", report
            self.core.report(report)
        return bool(steps)

    def settle(self) -> None:
        for _ in range(ROUNDS_MAX):
            if not self.round():
                return
        pytest.fail("the rollout does not end")
