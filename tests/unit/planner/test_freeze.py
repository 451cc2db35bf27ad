"""When plans are held back: much at once, and a store that was lost; never what only adds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.host_objects import Sysctl
from schemas.plan import Entry, HostPlan, diff_units, unit_tag
from schemas.status import Freeze
from schemas.values import Name
from services.planner.freeze import FLOOR, WINDOW_S, Freezer
from services.planner.state import HostId
from services.planner.step import Claim, HeldUnit, Step

Units = Mapping[str, int]
"""How many objects each unit has."""


def plan(host: HostId, units: Units) -> HostPlan:
    entries = {name: [Entry(Sysctl(f"net.{name}.{number}", "1"), ("x",)) for number in range(count)] for name, count in units.items()}
    return HostPlan(Name(host.cluster), Name(host.name), {name: {entry.key: entry for entry in group} for name, group in entries.items()})


def step(host: HostId, before: Units, after: Units, claim: Claim | None = None) -> Step:
    old, new = plan(host, before), plan(host, after)
    return Step(host, new, diff_units(old.units, new.units), old, claim)


def mesh(hosts: int, units: Units, cluster: str = "rome") -> dict[HostId, HostPlan]:
    return {host: plan(host, units) for host in (HostId(cluster, f"node-{number}") for number in range(hosts))}


def cut(hosts: Iterable[HostId], before: Units, after: Units) -> list[Step]:
    return [step(host, before, after) for host in hosts]


WHOLE = {"a": 10}


def test_the_only_peering_of_a_small_mesh_may_go() -> None:
    """Fewer units than the floor go without a question, also when they are all there are."""
    published = mesh(FLOOR - 1, WHOLE)
    verdict = Freezer().judge(cut(published, WHOLE, {}), published, 0.0)
    assert len(verdict.go) == FLOOR - 1
    assert not verdict.freeze.is_on


def test_a_fifth_may_go_and_more_may_not() -> None:
    """Of a hundred units, twenty go; the twenty-first freezes."""
    published = mesh(100, WHOLE)
    assert not Freezer().judge(cut(list(published)[:20], WHOLE, {}), published, 0.0).freeze.is_on
    verdict = Freezer().judge(cut(list(published)[:21], WHOLE, {}), published, 0.0)
    assert (verdict.freeze.count, verdict.freeze.planned, verdict.freeze.hosts) == (21, 100, 21)
    assert (len(verdict.go), len(verdict.held)) == (0, 21)
    assert verdict.freeze.token


def test_most_of_one_cluster_is_much_however_large_the_mesh_is() -> None:
    """A cluster that is wiped out is a small part of a mesh of many."""
    published = {**mesh(1000, WHOLE, "milan"), **mesh(30, WHOLE, "rome")}
    assert Freezer().judge(cut(mesh(30, WHOLE, "rome"), WHOLE, {}), published, 0.0).freeze.is_on


def test_what_goes_bit_by_bit_counts_together_for_a_minute() -> None:
    """Ten units a second are as much as all at once; ten a minute are not."""
    published = mesh(100, WHOLE)
    hosts = list(published)
    for pause_s, expected in ((1.0, True), (WINDOW_S + 1.0, False)):
        freezer, left = Freezer(), dict(published)
        frozen = False
        for number in range(5):
            steps = cut(hosts[10 * number : 10 * number + 10], WHOLE, {})
            verdict = freezer.judge(steps, left, number * pause_s)
            frozen = frozen or verdict.freeze.is_on
            left.update({one.host: one.plan for one in verdict.go})
        assert frozen is expected


def test_what_comes_back_did_not_go() -> None:
    """A peering that is deleted and made again and again is no loss that adds up."""
    published = mesh(40, WHOLE)
    freezer, hosts = Freezer(), list(mesh(15, WHOLE))
    for second in range(5):
        assert not freezer.judge(cut(hosts, WHOLE, {}), published, float(second)).freeze.is_on
        assert not freezer.judge(cut(hosts, {}, WHOLE), published, second + 0.5).freeze.is_on


def test_a_unit_that_keeps_four_fifths_stays() -> None:
    """Churn inside units is no loss; most of a unit gone is."""
    published = mesh(50, {"a": 10})
    assert not Freezer().judge(cut(published, {"a": 10}, {"a": 8}), published, 0.0).freeze.is_on
    verdict = Freezer().judge(cut(published, {"a": 10}, {"a": 7}), published, 0.0)
    assert [(loss.objects, loss.kept) for loss in verdict.freeze.losses[:1]] == [(10, 7)]


def frozen() -> tuple[Freezer, dict[HostId, HostPlan], list[Step]]:
    published = mesh(50, WHOLE)
    steps = cut(list(published)[:30], WHOLE, {})
    freezer = Freezer()
    assert freezer.judge(steps, published, 0.0).freeze.is_on
    return freezer, published, steps


def test_while_frozen_what_adds_goes_and_what_takes_away_waits() -> None:
    """Also a removal of one object, which alone would be nothing."""
    freezer, published, steps = frozen()
    adds, drops = step(HostId("rome", "node-40"), WHOLE, {"a": 10, "b": 1}), step(HostId("rome", "node-41"), WHOLE, {"a": 9})
    verdict = freezer.judge([*steps, adds, drops], published, 1.0)
    assert verdict.go == [adds]
    assert verdict.held == [*steps, drops]


def test_a_freeze_ends_when_nothing_would_go() -> None:
    """Half of what was deleted said again is not enough, however little is left; all of it is."""
    freezer, published, steps = frozen()
    assert freezer.judge(steps[:1], published, 100.0).freeze.is_on
    assert freezer.freeze.since_s == 0.0
    drops = step(HostId("rome", "node-41"), WHOLE, {"a": 9})
    verdict = freezer.judge([drops], published, 101.0)
    assert (verdict.freeze.state, verdict.go) == ("lifted", [drops])


def test_only_the_token_that_was_shown_is_accepted() -> None:
    """What would go besides since then is not accepted along with it; a planner that starts anew knows the token."""
    freezer, published, steps = frozen()
    token = freezer.freeze.token
    more = [*steps, *cut([HostId("rome", "node-45")], WHOLE, {})]
    assert not freezer.judge(more, published, 1.0, {token}).accepted
    assert not freezer.judge(steps, published, 1.0, {"other"}).accepted
    successor = Freezer(freezer.freeze)
    verdict = successor.judge(steps, published, 2.0, {token})
    assert (verdict.accepted, verdict.go, verdict.freeze.reason) == (True, steps, "accepted")
    assert not successor.judge(cut([HostId("rome", "node-45")], WHOLE, {}), published, 3.0).freeze.is_on


def test_a_planner_that_starts_anew_stays_frozen() -> None:
    """What would go may be little by then: what went before the freeze is known no more."""
    freezer = Freezer(Freeze("frozen", "much", 30, 50, 30, (), 5.0, "t"))
    verdict = freezer.judge(cut([HostId("rome", "node-1")], WHOLE, {}), mesh(50, WHOLE), 10.0)
    assert (verdict.freeze.is_on, verdict.freeze.reason, verdict.freeze.since_s) == (True, "much", 5.0)


HOST = HostId("rome", "gateway")


def claim(units: Units, *, known: bool = True, tagged: bool = False) -> Claim:
    """What a host holds, by name or by the marker's tags, of known size or not."""
    digests = plan(HOST, units).digests()
    return Claim(7, {unit_tag(name) if tagged else name: HeldUnit(digests[name], count if known else 0) for name, count in units.items()})


def test_a_host_that_holds_more_than_it_is_given_freezes() -> None:
    """However small the mesh is: a unit that is not planned, or a smaller one, or one whose size nobody knows."""
    unknown = claim({"a": 3}, known=False)
    for held, after in ((claim({"a": 3}), {}), (claim({"a": 3}), {"a": 2}), (unknown, {"a": 4}), (claim({"a": 3, "b": 1}), {"a": 3})):
        one = step(HOST, {}, after, held)
        verdict = Freezer().judge([one], {}, 0.0)
        assert (verdict.freeze.is_on, verdict.held) == (True, [one])
        assert "store was lost" in verdict.freeze.reason


def test_a_host_that_gets_what_it_holds_does_not() -> None:
    """The same again, by name or by the kernel's marker, or more than before."""
    for held, after in (
        (claim({"a": 3}), {"a": 3}),
        (claim({"a": 3}, known=False, tagged=True), {"a": 3}),
        (claim({"a": 3}), {"a": 5, "b": 1}),
        (claim({}), {}),
    ):
        one = step(HOST, {}, after, held)
        assert Freezer().judge([one], {}, 0.0).go == [one]


BEFORE = st.dictionaries(st.sampled_from("abc"), st.integers(1, 6))
MORE = st.dictionaries(st.sampled_from("abcd"), st.integers(0, 6))


@settings(max_examples=200)
@given(st.lists(st.tuples(BEFORE, MORE)))
def test_additions_never_freeze(hosts: list[tuple[dict[str, int], dict[str, int]]]) -> None:
    """Whatever is added to whatever, at once: everything goes out."""
    steps = []
    for number, (before, more) in enumerate(hosts):
        after = {name: before.get(name, 0) + more.get(name, 0) for name in before.keys() | more.keys()}
        steps.append(step(HostId("rome", f"node-{number}"), before, {name: count for name, count in after.items() if count}))
    published = {one.host: one.before for one in steps if one.before is not None}
    verdict = Freezer().judge(steps, published, 0.0)
    assert verdict.go == steps
    assert not verdict.freeze.is_on


@settings(max_examples=200)
@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.integers(1, 10)), max_size=60), st.data())
def test_nothing_is_lost_between_go_and_held(hosts: list[dict[str, int]], data: st.DataObject) -> None:
    """Every step goes or is held; what is held takes something away, and while frozen nothing that goes does."""
    steps = []
    for number, before in enumerate(hosts):
        after = {name: data.draw(st.integers(0, count)) for name, count in before.items()}
        steps.append(step(HostId("rome", f"node-{number}"), before, {name: count for name, count in after.items() if count}))
    verdict = Freezer().judge(steps, {one.host: one.before for one in steps if one.before is not None}, 0.0)
    assert sorted([*verdict.go, *verdict.held], key=lambda one: one.host) == sorted(steps, key=lambda one: one.host)
    if verdict.freeze.is_on:
        assert all(one.takes_away for one in verdict.held)
        assert not any(one.takes_away for one in verdict.go)
    else:
        assert not verdict.held
