"""Plans: the difference of two plans leads from one to the other, and from nothing else."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas import codec
from schemas.host_objects import (
    GUARD_METRIC,
    MAIN_TABLE,
    LinkAddress,
    NextHop,
    NftChain,
    NftElement,
    NftSet,
    NftTable,
    PlanObject,
    PolicyRule,
    Route,
    Sysctl,
    VxlanLink,
    WireguardLink,
    WireguardPeer,
)
from schemas.nft import ClampMss, Counter, Match, Nat, Notrack, SetMark, Verdict, VerdictMap
from schemas.plan import Entry, HostPlan, PlanDiff, SnapshotChunk, SnapshotHead, Unit, UnitDiff, apply_diff, diff_units, unit_digest
from schemas.values import Address, Endpoint, Key, Mac, Name, Prefix

KEY = Key("A" * 43 + "=")
OBJECTS: tuple[PlanObject, ...] = (
    Sysctl("net/ipv4/ip_forward", "1"),
    VxlanLink("vx1", 7, Address("192.0.2.1"), Address("192.0.2.2"), Mac("02:00:00:00:00:01"), 1450),
    WireguardLink("wg1", 51840, 1420, KEY),
    WireguardPeer("wg1", KEY, Endpoint("192.0.2.7:51840"), (Prefix("10.61.0.0/16"),), 25),
    LinkAddress("wg1", Address("10.80.0.1"), 32),
    Route(254, Prefix("10.81.0.0/16"), "unreachable", GUARD_METRIC),
    Route(10, Prefix("0.0.0.0/0"), hops=(NextHop("wg1", weight=3), NextHop("wg2", Address("10.0.0.1"), onlink=True))),
    PolicyRule(1000, 10, 0x1000, 0x3000),
    PolicyRule(1001, 10, iif="lo", to=Prefix("10.61.0.0/16")),
    NftTable("meshmark.gateway"),
    NftSet("meshmark.gateway", "pods", "ipv4_addr", "ipv4_addr", interval=True, value_interval=True),
    NftElement("meshmark.gateway", "pods", "10.81.0.0/16", "10.61.0.0/16"),
    NftChain(
        "meshmark.gateway",
        "pre",
        (
            (Match("iifname", ("wg*",)), Match("meta mark", ("0x1000",), mask=0x3000), Counter(), SetMark(0x1000, 0x3000)),
            (Match("ip daddr", ("@pods",), op="!="), Nat("dnat", "pods"), ClampMss(), Notrack()),
            (VerdictMap("iifname", "classes"), Verdict("jump", "other")),
        ),
        "filter",
        "prerouting",
        -150,
    ),
)


def entries(*values: tuple[str, str]) -> Unit:
    made = (Entry(Sysctl(name, value), ("Cluster/rome/rome",)) for name, value in values)
    return {entry.key: entry for entry in made}


UNITS = st.dictionaries(
    st.sampled_from(["peering/rome/a", "peering/rome/b", "encryption/rome"]),
    st.dictionaries(st.sampled_from("abcde"), st.sampled_from("01"), max_size=5).map(lambda found: entries(*found.items())),
)


@given(UNITS, UNITS)
def test_a_difference_leads_from_the_old_plan_to_the_new(old: dict[str, Unit], new: dict[str, Unit]):
    steps = diff_units(old, new)
    assert apply_diff(old, steps) == new
    wire = codec.decode(codec.encode(PlanDiff(Name("rome"), Name("n1"), 1, 2, steps)), PlanDiff)
    assert apply_diff(old, wire.units) == new


@given(UNITS, UNITS)
def test_a_difference_is_minimal(old: dict[str, Unit], new: dict[str, Unit]):
    for step in diff_units(old, new):
        before, after = old.get(step.unit, {}), new.get(step.unit, {})
        assert all(before.get(entry.key) != entry for entry in step.put)
        assert all(key in before and key not in after for key in step.drop)


@given(UNITS)
def test_equal_plans_differ_in_nothing(units: dict[str, Unit]):
    assert diff_units(units, dict(reversed(units.items()))) == ()


@given(UNITS, UNITS, UNITS)
def test_a_difference_is_refused_by_a_plan_that_it_does_not_start_from(old: dict[str, Unit], new: dict[str, Unit], held: dict[str, Unit]):
    steps = diff_units(old, new)
    if all(old.get(step.unit) == held.get(step.unit) for step in steps):
        apply_diff(held, steps)
    else:
        with pytest.raises(ValueError, match="the difference starts from"):
            apply_diff(held, steps)


def test_a_difference_that_does_not_lead_where_it_says_is_refused():
    unit = entries(("a", "1"))
    with pytest.raises(ValueError, match="unit u: the difference does not lead to"):
        apply_diff({}, (UnitDiff("u", "", "0" * 32, tuple(unit.values())),))


def test_a_refused_difference_changes_nothing():
    held = {"u": entries(("a", "1"))}
    before = {name: dict(unit) for name, unit in held.items()}
    with pytest.raises(ValueError, match="starts from nothing, held is"):
        apply_diff(held, (UnitDiff("u", "", "", (), ("sysctl a",)),))
    assert held == before


def test_an_empty_unit_is_not_a_unit_that_is_gone():
    (made,) = diff_units({}, {"u": {}})
    assert made.target == unit_digest(()) != ""
    assert apply_diff({}, (made,)) == {"u": {}}
    (gone,) = diff_units({"u": {}}, {})
    assert apply_diff({"u": {}}, (gone,)) == {}


@given(st.randoms(use_true_random=False))
def test_a_digest_does_not_depend_on_order(order: random.Random):
    unit = [Entry(item, ("Cluster/rome/rome",)) for item in OBJECTS]
    shuffled = order.sample(unit, len(unit))
    assert unit_digest(unit) == unit_digest(shuffled)


def test_a_digest_tells_every_object_and_every_reason_apart():
    found = {unit_digest([Entry(item, (because,))]) for item in OBJECTS for because in ("Node/rome/a", "Node/rome/b")}
    assert len(found) == 2 * len(OBJECTS)
    assert all(len(digest) == 32 for digest in found)


def copied(value: object) -> object:
    """An equal value that shares no text, number or tuple with the first, so far as Python allows."""
    if isinstance(value, msgspec.Struct):
        return type(value)(**{name: copied(getattr(value, name)) for name in value.__struct_fields__})
    if isinstance(value, tuple):
        return tuple(copied(item) for item in value)
    if isinstance(value, str):
        return type(value)("".join([*value, ""]))
    if isinstance(value, int) and not isinstance(value, bool):
        return int(str(value))
    return value


@pytest.mark.parametrize("item", OBJECTS, ids=lambda item: item.key)
def test_equal_objects_have_equal_digests_wherever_they_come_from(item: PlanObject):
    """msgspec omits defaults by identity, which tells equal objects apart: plan objects omit none."""
    entry = Entry(item, ("Cluster/rome/rome",))
    for other in (copied(entry), codec.decode(codec.encode(entry), Entry)):
        assert other == entry
        assert codec.digest(other) == codec.digest(entry)


@pytest.mark.parametrize("item", OBJECTS, ids=lambda item: item.key)
def test_every_object_survives_the_wire(item: PlanObject):
    entry = Entry(item, ("Cluster/rome/rome",))
    back = codec.decode(codec.encode(entry), Entry)
    assert back == entry
    assert type(back.object) is type(item)
    assert (back.key, back.object.layer) == (item.key, item.layer)


def test_a_route_written_before_a_field_existed_can_be_read():
    short = b'{"kind":"route","table":10,"prefix":"10.61.0.0/16","hops":[{"link":"wg1"}]}'
    assert codec.decode(short, Route) == Route(10, Prefix("10.61.0.0/16"), hops=(NextHop("wg1"),))


def test_keys_are_what_the_kernel_keys_by():
    keys = [item.key for item in OBJECTS]
    assert len(set(keys)) == len(keys)
    assert Route(10, Prefix("10.0.0.0/8")).key == Route(10, Prefix("10.0.0.0/8"), "throw").key
    assert Route(10, Prefix("10.0.0.0/8")).key != Route(10, Prefix("10.0.0.0/8"), metric=1).key
    assert PolicyRule(1000, 10, 1, 1).key == PolicyRule(1000, 11, 1, 1).key


def test_a_guard_is_a_route_that_fails_closed():
    assert Route(MAIN_TABLE, Prefix("10.0.0.0/8"), "unreachable", GUARD_METRIC).is_guard
    assert not Route(MAIN_TABLE, Prefix("10.0.0.0/8"), "unreachable").is_guard


def test_a_host_plan_is_the_union_of_its_units():
    shared = Sysctl("net/ipv4/ip_forward", "1")
    plan = HostPlan(
        Name("rome"),
        Name("n1"),
        {
            "a": {shared.key: Entry(shared, ("Peering/rome/b", "Node/rome/n1"))},
            "b": {shared.key: Entry(shared, ("Peering/rome/a",)), **entries(("x", "1"))},
        },
    )
    assert plan.objects() == {shared.key: shared, "sysctl x": Sysctl("x", "1")}
    assert plan.because(shared.key) == ("Node/rome/n1", "Peering/rome/a", "Peering/rome/b")
    assert plan.because("sysctl unknown") == ()
    assert plan.digests() == {name: unit_digest(unit.values()) for name, unit in plan.units.items()}


def test_snapshots_survive_the_wire():
    chunk = SnapshotChunk(tuple(("u", Entry(item, ())) for item in OBJECTS))
    assert codec.decode(codec.encode(chunk), SnapshotChunk) == chunk
    head = SnapshotHead(Name("rome"), Name("n1"), 1, 2, {"u": unit_digest(())}, ("0" * 32,))
    assert codec.decode(codec.encode(head), SnapshotHead) == head
