"""The planner and a mesh of appliers over kernels in memory: whatever the order of events, every kernel ends with the same."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from schemas.topology import PublicKey, Topology
from schemas.values import Address, Name
from services.applier.core import Applier
from services.kernel.curve25519 import public_key
from services.kernel.fake import FakeHost, FakeKernel
from services.planner.core import Core, Said
from services.planner.state import HostId
from tests.topologies import MILAN_GATEWAY, ROME_GATEWAY, gateway, node, peering, pod, said, two_clusters

PRIVATE_KEYS = {ROME_GATEWAY: bytes([1] * 32), MILAN_GATEWAY: bytes([2] * 32)}
ROUNDS_MAX = 40


class Mesh:
    """A planner, and for each host that it plans for a kernel and its applier."""

    def __init__(self) -> None:
        self.core = Core()
        self.kernels: dict[HostId, FakeHost] = {}
        self._appliers: dict[HostId, Applier] = {}
        self._generation = 0

    def hear(self, event: Said) -> None:
        self.core.hear([event])

    def round(self) -> bool:
        """What is planned now is applied and reported; False when there was nothing."""
        steps = self.core.steps()
        for step in steps:
            if step.host not in self.kernels:
                self.kernels[step.host] = FakeHost(private_key=PRIVATE_KEYS.get(step.host, bytes([3] * 32)))
                self._appliers[step.host] = Applier(FakeKernel(self.kernels[step.host]), lambda: 0.0)
            self._generation += 1
            self.core.published[step.host] = step.plan
            report = self._appliers[step.host].apply(step.plan, 1, self._generation)
            assert report.outcome == "applied", report
            self.core.report(report)
        return bool(steps)

    def settle(self) -> None:
        for _ in range(ROUNDS_MAX):
            if not self.round():
                return
        pytest.fail("the rollout does not end")

    def held(self) -> dict[HostId, tuple[dict[str, object], dict[str, str]]]:
        """What each kernel holds, and which plan its marker names."""
        return {
            host: (dict(kernel.objects), dict(kernel.marker.units) if kernel.marker else {})
            for host, kernel in self.kernels.items()
            if kernel.objects
        }


def keys() -> list[Topology]:
    return [PublicKey(name=Name(host.name), cluster=Name(host.cluster), key=public_key(private)) for host, private in PRIVATE_KEYS.items()]


def history() -> list[Said]:
    """Two clusters as they came to be: hosts that moved, tunnels that were added, a pod that roamed, and things that are gone again."""
    final = [*two_clusters(), *keys()]
    earlier: list[Topology] = [
        replace(gateway("rome"), addresses=(Address("172.18.0.99"),)),
        node("worker-2", 17),
        peering(1),
        pod("shop", "worker-2", "10.200.9.9"),
    ]
    gone: list[Topology] = [node("worker-7", 7), pod("guest", "worker-1", "10.200.1.77")]
    events = [said(item, number) for number, item in enumerate([*earlier, *gone], 1)]
    events += [Said((item.kind.lower(), item.home, item.name), b"", number) for number, item in enumerate(gone, 50)]
    return events + [said(item, number) for number, item in enumerate(final, 100)]


def told(events: Iterable[Said]) -> Mesh:
    mesh = Mesh()
    for event in events:
        mesh.hear(event)
    mesh.settle()
    return mesh


EVENTS = history()
EXPECTED = told(event for event in EVENTS if event.sequence >= 100).held()


def test_what_is_expected_is_a_whole_mesh() -> None:
    """The comparison is not one of nothing: six hosts, with tunnels that carry traffic at both gateways."""
    assert len(EXPECTED) == 6
    assert all(any(key.startswith("link mt.2") for key in EXPECTED[host][0]) for host in PRIVATE_KEYS)


@settings(max_examples=60)
@given(data=st.data())
def test_any_order_leads_to_the_same_kernels(data: st.DataObject) -> None:
    """Messages in any order, some of them twice and old ones late, with hosts that apply what is planned in between."""
    order = data.draw(st.permutations(EVENTS))
    again = data.draw(st.lists(st.sampled_from(EVENTS), max_size=8))
    busy = data.draw(st.lists(st.booleans(), min_size=len(order) + len(again), max_size=len(order) + len(again)))
    mesh = Mesh()
    for event, is_busy in zip([*order, *again], busy, strict=True):
        mesh.hear(event)
        if is_busy:
            mesh.round()
    mesh.settle()
    assert mesh.held() == EXPECTED
    for event in EVENTS:
        mesh.hear(event)
    assert not mesh.round(), "all of it once more changes nothing"
