"""What any kernel promises about many routes or rules that are written together: each for itself, in their order, and told by its key."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from schemas.host_objects import LinkAddress, NextHop, PolicyRule, Route, VxlanLink
from schemas.routes import RouteType
from schemas.values import IPV4, IPV6, Address, Family, Mac, Prefix
from services.kernel.route_messages import in_kernel_form
from services.kernel.transaction import Change
from services.runtime.errors import Conflict, MeshmarkError, Permanent, Waiting
from tests.contract.kernel.machines import Machine

pytestmark = pytest.mark.any_kernel

TABLE = 77_001
MANY = 1500


def base(machine: Machine) -> str:
    """A link with an address of each family; its name."""
    link = f"mo.{machine.tag}1"
    machine.kernel.write(Change(None, VxlanLink(link, 19, Address("127.0.0.1"), Address("127.0.0.2"), Mac("02:4d:01:00:00:09"), 1450)))
    machine.kernel.write(Change(None, LinkAddress(link, Address("10.80.0.1"), 24)))
    machine.kernel.write(Change(None, LinkAddress(link, Address("fd00:80::1"), 64)))
    return link


def routes(family: Family, hops: tuple[NextHop, ...], count: int = MANY, metric: int = 0) -> list[Route]:
    """Routes to as many addresses."""
    numbers = ((number >> 8, number & 0xFF) for number in range(count))
    texts = (f"10.9{high}.{low}.0/24" if family == IPV4 else f"fd00:9{high:x}:{low + 1:x}::/48" for high, low in numbers)
    return [Route(TABLE, Prefix(text), metric=metric, hops=hops) for text in texts]


def held(machine: Machine) -> set[object]:
    return set(machine.kernel.read({}, {"route", "rule"}).values())


def kinds(errors: Mapping[str, MeshmarkError]) -> dict[str, type[MeshmarkError]]:
    return {key: type(error) for key, error in errors.items()}


@pytest.mark.parametrize("family, via", [(IPV4, "10.80.0.2"), (IPV6, "fd00:80::2")])
def test_many_routes_come_change_and_go(machine: Machine, family: Family, via: str) -> None:
    """Added, written again, led elsewhere and removed, with none left over and none missing."""
    link = base(machine)
    first = routes(family, (NextHop(link),), metric=5)
    second = [replace(item, hops=(NextHop(link, Address(via)),)) for item in first]
    for changes in ([Change(None, item) for item in first], [Change(item, item) for item in first]):
        assert machine.kernel.write_all(changes) == {}
        assert held(machine) == set(first)
    assert machine.kernel.write_all([Change(old, new) for old, new in zip(first, second, strict=True)]) == {}
    assert held(machine) == set(second)
    assert machine.kernel.write_all([Change(item, None) for item in second[1:]]) == {}
    assert held(machine) == {second[0]}
    assert machine.kernel.write_all([Change(item, None) for item in second]) == {}
    assert held(machine) == set()


def test_routes_without_a_metric_come_and_go_together(machine: Machine) -> None:
    """Also those that lead elsewhere than is believed; those of a metric stay."""
    link = base(machine)
    plain, other = routes(IPV4, (NextHop(link),), 20), routes(IPV4, (NextHop(link),), 20, metric=9)
    types: tuple[RouteType, ...] = ("throw", "unreachable", "blackhole", "prohibit")
    ends = [
        Route(TABLE, Prefix(text), kind)
        for number, kind in enumerate(types)
        for text in (f"10.7.{number}.0/24", f"fd00:7:{number + 1}::/64")
    ]
    assert machine.kernel.write_all([Change(None, item) for item in (*plain, *other, *ends)]) == {}
    believed = [replace(item, hops=(NextHop(link, Address("10.80.0.7")),)) for item in plain]
    assert held(machine) == {in_kernel_form(item) for item in (*plain, *other, *ends)}
    assert machine.kernel.write_all([Change(item, None) for item in (*believed, *ends)]) == {}
    assert held(machine) == set(other)


def test_each_route_that_is_refused_is_told(machine: Machine) -> None:
    """A link that is missing, somebody else's route, a next hop out of reach, a contradiction; all others hold."""
    link = base(machine)
    machine.add_foreign()
    good = routes(IPV4, (NextHop(link),), 300)
    bad = {
        0: Route(TABLE, Prefix("10.1.0.0/16"), hops=(NextHop("mo.nowhere"),)),
        100: Route(254, Prefix("10.250.0.0/16"), "unreachable"),
        101: Route(TABLE, Prefix("10.2.0.0/16"), hops=(NextHop(link, Address("192.0.2.1")),)),
        200: Route(TABLE, Prefix("10.3.0.0/16"), "throw", hops=(NextHop(link),)),
        304: Route(TABLE, Prefix("10.4.0.0/16"), hops=(NextHop(link),), source=Address("192.0.2.9")),
    }
    items = list(good)
    for place, item in bad.items():
        items.insert(place, item)
    before = machine.foreign_state()
    failures = machine.kernel.write_all([Change(None, item) for item in items])
    assert kinds(failures) == dict(zip([item.key for item in bad.values()], (Waiting, Conflict, Waiting, Permanent, Waiting), strict=True))
    assert all(key in str(error) for key, error in failures.items())
    assert held(machine) == set(good)
    assert machine.foreign_state() == before


def test_a_route_may_rest_on_one_before_it(machine: Machine) -> None:
    """A next hop is reached by a route of the same call, be it new or led elsewhere by it."""
    link = base(machine)
    near = Route(254, Prefix("10.81.0.0/24"), hops=(NextHop(link),))
    far = Route(254, Prefix("10.82.0.0/24"), hops=(NextHop(link, Address("10.81.0.2")),))
    assert kinds(machine.kernel.write_all([Change(None, far), Change(None, near)])) == {far.key: Waiting}
    assert machine.kernel.write_all([Change(near, None), Change(None, near), Change(None, far)]) == {}
    assert held(machine) == {near, far}
    closed = Route(254, near.prefix, "unreachable")
    assert machine.kernel.write_all([Change(far, None), Change(near, closed)]) == {}
    assert machine.kernel.write_all([Change(closed, near), Change(None, far)]) == {}
    assert held(machine) == {near, far}


@pytest.mark.parametrize("family, to", [(IPV4, "10.9.{}.0/24"), (IPV6, "fd00:9:{:x}00::/40")])
def test_many_rules_come_and_go(machine: Machine, family: Family, to: str) -> None:
    """Of one priority: none is doubled, none is taken for another, and somebody else's stay."""
    machine.add_foreign()
    before = machine.foreign_state()
    broad = PolicyRule(5000, TABLE, family=family)
    narrow = [PolicyRule(5000, TABLE, to=Prefix(to.format(number)), family=family) for number in range(1, 101)]
    assert machine.kernel.write_all([Change(None, item) for item in (*narrow, broad)]) == {}
    assert machine.kernel.write_all([Change(None, item) for item in (broad, *narrow)]) == {}
    assert held(machine) == {broad, *narrow}
    assert machine.kernel.write_all([Change(item, None) for item in (broad, *narrow[::2])]) == {}
    assert held(machine) == set(narrow[1::2])
    elsewhere = [replace(item, table=TABLE + 1) for item in narrow]
    assert machine.kernel.write_all([Change(None, item) for item in elsewhere]) == {}
    assert held(machine) == set(elsewhere)
    assert machine.kernel.write_all([Change(item, None) for item in (*elsewhere, broad)]) == {}
    assert held(machine) == set()
    assert machine.foreign_state() == before


@pytest.mark.parametrize("leaves, stays", [(IPV6, IPV4), (IPV4, IPV6)])
def test_a_rule_of_one_family_is_not_taken_for_that_of_the_other(machine: Machine, leaves: Family, stays: Family) -> None:
    """They may say the very same: the one that stays is there once, and not twice, when the other has gone."""
    rules = {family: PolicyRule(5000, TABLE, 0x4D2, 0xFFF, family=family) for family in (IPV4, IPV6)}
    assert machine.kernel.write_all([Change(None, item) for item in rules.values()]) == {}
    assert machine.kernel.write_all([Change(rules[leaves], None)]) == {}
    assert held(machine) == {rules[stays]}
