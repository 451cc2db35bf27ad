"""Batches of several units that the kernel refuses: who fails for it, and what becomes of what units share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from schemas.host_objects import HOST_TABLE, NftSet, NftTable, PlanObject, Sysctl, WireguardLink
from schemas.plan import Entry, HostPlan
from schemas.status import ApplyReport
from services.applier.core import Applier
from services.applier.turn import STRAY
from services.kernel.fake import FakeHost, FakeKernel
from services.kernel.transaction import Change, Marker
from services.runtime.errors import MeshmarkError, Permanent
from tests.unit.applier.test_turns import FIRST, applier

SHARED, ONE, TWO, THREE = (NftTable(name) for name in (HOST_TABLE, "meshmark.one", "meshmark.two", "meshmark.three"))
OF_ONE = NftSet(ONE.name, "s", "ipv4_addr")
TOGETHER: dict[str, tuple[PlanObject, ...]] = {"one": (SHARED, ONE, OF_ONE), "two": (SHARED, TWO)}


def plan(**units: Sequence[PlanObject]) -> HostPlan:
    return HostPlan(FIRST.cluster, FIRST.host, {name: {item.key: Entry(item, ()) for item in items} for name, items in units.items()})


def refusing(item: PlanObject, times: int = 1000) -> Callable[[Change], Exception | None]:
    """Refuses to make an object, so many times."""
    left = iter(range(times))
    return lambda change: Permanent("no") if change.new == item and next(left, None) is not None else None


def failed(report: ApplyReport) -> dict[str, str]:
    return {unit.unit: unit.error for unit in report.units if unit.outcome == "degraded"}


class Unnamed(FakeKernel):
    """Does not say which object it refused, as libnftables."""

    def commit(self, batch: Sequence[Change], marker: Marker | None) -> None:
        try:
            super().commit(batch, marker)
        except MeshmarkError as error:
            error.key = ""
            raise


class NoMarkers(FakeKernel):
    """Refuses, when told so, a batch of nothing but its marker."""

    refusal: Permanent | None = None

    def commit(self, batch: Sequence[Change], marker: Marker | None) -> None:
        if self.refusal and not batch:
            raise self.refusal
        super().commit(batch, marker)


def test_one_units_own_object_stops_no_other_unit() -> None:
    host = FakeHost()
    assert failed(applier(host, refusing(OF_ONE)).apply(plan(**TOGETHER), 1, 1)) == {"one": f"{OF_ONE.key}: no"}
    assert set(host.objects) == {SHARED.key, TWO.key}


def test_a_shared_object_stops_all_that_hold_it() -> None:
    """And no unit is made after it has failed, though the kernel would take it by now."""
    for times in (1000, 2):
        host = FakeHost()
        report = applier(host, refusing(SHARED, times)).apply(plan(**TOGETHER, three=(THREE,)), 1, 1)
        assert failed(report) == dict.fromkeys(("one", "two"), f"{SHARED.key}: no")
        assert set(host.objects) == {THREE.key}


def test_where_nobody_knows_the_object_the_unit_whose_batch_it_was_fails() -> None:
    """All of it by itself, and no other."""
    host = FakeHost()
    report = Applier(Unnamed(host, refusing(OF_ONE)), lambda: 0.0).apply(plan(**TOGETHER), 1, 1)
    assert failed(report) == {"one": "nft: no"}
    assert set(host.objects) == {SHARED.key, TWO.key}


@pytest.mark.parametrize("kernel", [FakeKernel, Unnamed])
def test_the_only_unit_fails_whether_the_object_is_known_or_not(kernel: type[FakeKernel]) -> None:
    host = FakeHost()
    report = Applier(kernel(host, refusing(OF_ONE)), lambda: 0.0).apply(plan(one=TOGETHER["one"]), 1, 1)
    assert failed(report) == {"one": f"{OF_ONE.key if kernel is FakeKernel else 'nft'}: no"}
    assert host.objects == {}


def test_a_marker_that_is_refused_alone_is_no_units_failure_but_is_told() -> None:
    """Nothing else has changed than the generation: all units are held, and the next turn says whose they are."""
    host = FakeHost()
    kernel = NoMarkers(host)
    one = Applier(kernel, lambda: 0.0)
    wanted = plan(**TOGETHER)
    one.apply(wanted, 1, 1)
    kernel.refusal = Permanent("no marker")
    assert failed(one.apply(wanted, 1, 2)) == {STRAY: "nft: no marker"}
    assert one.held() == wanted.digests()
    kernel.refusal = None
    assert failed(one.apply(wanted, 1, 2)) == {}
    assert host.marker is not None
    assert host.marker.generation == 2


def test_what_two_units_share_is_taken_away_once() -> None:
    """They go, while a third one that comes is refused: the second does not stumble over what went with the first."""
    host = FakeHost()
    one = applier(host, refusing(THREE))
    one.apply(plan(**TOGETHER), 1, 1)
    assert failed(one.apply(plan(three=(THREE,)), 1, 2)) == {"three": f"{THREE.key}: no"}
    assert host.objects == {}


LINK = WireguardLink("mt.0", 51840, 1420)


@pytest.mark.parametrize("staying", [TWO, LINK], ids=["in the same batch", "in a later step"])
def test_what_a_unit_shares_stays_with_it_when_it_cannot_go(staying: PlanObject) -> None:
    """Two units go, and one cannot: it is held as it was, with the table that the other one had as well; the next turn takes it away."""
    host, busy = FakeHost(), {staying.key}
    kernel = FakeKernel(host, lambda change: Permanent("busy") if change.new is None and change.key in busy else None)
    one = Applier(kernel, lambda: 0.0)
    wanted = plan(one=(SHARED, ONE, OF_ONE), two=(SHARED, TWO, LINK))
    one.apply(wanted, 1, 1)
    assert failed(one.apply(plan(), 1, 2)) == {"two": f"{staying.key}: busy"}
    assert set(host.objects) == {SHARED.key, TWO.key, LINK.key}
    assert one.held() == {"two": wanted.digests()["two"]}
    busy.clear()
    assert failed(one.apply(plan(), 1, 3)) == {}
    assert host.objects == {}


def test_what_a_unit_shares_is_changed_for_who_wants_it_though_another_one_cannot_go() -> None:
    """A sysctl is one for all: the unit that is wanted has it as it wants it."""
    host, busy = FakeHost(), {TWO.key}
    kernel = FakeKernel(host, lambda change: Permanent("busy") if change.new is None and change.key in busy else None)
    one = Applier(kernel, lambda: 0.0)
    before, after = (Sysctl("net/ipv4/ip_forward", value) for value in ("1", "2"))
    one.apply(plan(one=(before, ONE), two=(before, TWO)), 1, 1)
    assert failed(one.apply(plan(one=(after, ONE)), 1, 2)) == {"two": f"{TWO.key}: busy"}
    assert host.sysctl("net/ipv4/ip_forward") == "2"


def test_what_a_unit_shares_stays_as_it_was_when_its_change_is_refused_and_the_other_one_goes() -> None:
    """Nobody is left who wants it otherwise."""
    host, refused = FakeHost(), {OF_ONE.key}
    kernel = FakeKernel(host, lambda change: Permanent("no") if change.key in refused else None)
    one = Applier(kernel, lambda: 0.0)
    before, after = (Sysctl("net/ipv4/ip_forward", value) for value in ("1", "2"))
    first = plan(one=(before, ONE), two=(before, TWO))
    one.apply(first, 1, 1)
    assert failed(one.apply(plan(one=(after, ONE, OF_ONE)), 1, 2)) == {"one": f"{OF_ONE.key}: no"}
    assert host.sysctl("net/ipv4/ip_forward") == "1"
    assert one.held() == {"one": first.digests()["one"]}
    assert set(host.objects) == {ONE.key}
