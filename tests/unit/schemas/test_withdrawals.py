"""Routes without dead hops: flows of living hops stay, the others are shared out, and nothing is left without a hop."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.host_objects import NextHop, Route
from schemas.values import Address, Prefix
from schemas.withdrawals import living_hops, without

HASHES = 1 << 31
SAMPLES = range(HASHES // 2001, HASHES, HASHES // 1000)
ROUTE = Route(7001, Prefix("10.61.0.0/16"), hops=tuple(NextHop(f"mt.{number}") for number in range(3)))


def bounds(hops: tuple[NextHop, ...]) -> list[int]:
    """Up to which hash each hop is taken: fib_rebalance() of net/ipv4/fib_semantics.c, and the like for IPv6."""
    total = sum(hop.weight for hop in hops)
    return [round(part * HASHES / total) - 1 for part in accumulate(hop.weight for hop in hops)]


def taken(hops: tuple[NextHop, ...], value: int) -> str:
    """The link by which the kernel sends a flow with this hash."""
    return next(hop.link for hop, bound in zip(hops, bounds(hops), strict=True) if value <= bound)


@st.composite
def routes(draw: st.DrawFn, weight_max: int, hops_max: int) -> tuple[tuple[NextHop, ...], set[str]]:
    """Hops, and links of them that are dead: at least one, and not all."""
    weights = draw(st.lists(st.integers(1, weight_max), min_size=2, max_size=hops_max))
    hops = tuple(NextHop(f"mt.{number}", Address(f"10.0.0.{number}"), weight=weight) for number, weight in enumerate(weights))
    dead = draw(st.sets(st.sampled_from([hop.link for hop in hops]), min_size=1, max_size=len(hops) - 1))
    return hops, dead


@given(routes(weight_max=256, hops_max=16), st.booleans())
def test_no_dead_hop_is_left_and_the_kernel_can_hold_it(case: tuple[tuple[NextHop, ...], set[str]], repeated: bool) -> None:
    """Whatever the weights: every living link is there, no dead one, weights fit a byte, and IPv6 sees no link twice."""
    hops, dead = case
    found = living_hops(hops, dead, repeated=repeated)
    assert {hop.link for hop in found} == {hop.link for hop in hops} - dead
    assert all(1 <= hop.weight <= 256 for hop in found)
    assert len(found) <= 256
    if not repeated:
        assert len(found) == len({hop.link for hop in found})


@given(routes(weight_max=4, hops_max=8), st.booleans())
def test_flows_of_living_hops_stay(case: tuple[tuple[NextHop, ...], set[str]], repeated: bool) -> None:
    """A flow whose tunnel lives keeps it when others die, and so when they come back."""
    hops, dead = case
    found = living_hops(hops, dead, repeated=repeated)
    edges = [*bounds(hops), *bounds(found)]
    for value in SAMPLES:
        before = taken(hops, value)
        if before not in dead and min(abs(value - edge) for edge in edges) > 4:
            assert taken(found, value) == before


@given(routes(weight_max=4, hops_max=8))
def test_the_dead_hops_flows_are_shared_by_weight(case: tuple[tuple[NextHop, ...], set[str]]) -> None:
    """Where a hop may be named twice, each living link has of all flows what its weight among the living ones says."""
    hops, dead = case
    found = living_hops(hops, dead, repeated=True)
    living = [hop for hop in hops if hop.link not in dead]
    for hop in living:
        share = sum(part.weight for part in found if part.link == hop.link) / sum(part.weight for part in found)
        assert share == pytest.approx(hop.weight / sum(part.weight for part in living))


def test_one_of_three() -> None:
    """What the example's gateways hold when their second tunnel, or their first, is dead."""
    assert living_hops(ROUTE.hops, {"mt.1"}, repeated=True) == (NextHop("mt.0"), NextHop("mt.2"))
    assert living_hops(ROUTE.hops, {"mt.0"}, repeated=True) == (
        NextHop("mt.2", weight=1),
        NextHop("mt.1", weight=3),
        NextHop("mt.2", weight=2),
    )
    assert living_hops(ROUTE.hops, {"mt.0", "mt.2"}, repeated=True) == (NextHop("mt.1"),)


def test_what_would_lose_all_its_hops_keeps_them() -> None:
    """A tunnel's own route, and every route when all tunnels are dead, stay; other objects do too, and nothing is copied."""
    own = Route(7001, Prefix("169.254.18.4/30"), hops=(NextHop("mt.1"),))
    objects = {item.key: item for item in (ROUTE, own)}
    found = without(objects, {"mt.1"})
    assert found[own.key] is own
    assert found[ROUTE.key] != ROUTE
    assert without(objects, {"mt.0", "mt.1", "mt.2"}) == objects
    assert without(objects, ()) is objects
    assert without(objects, {"mt.9"})[ROUTE.key] is ROUTE
