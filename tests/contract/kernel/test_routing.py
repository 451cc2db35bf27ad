"""What any kernel promises about routes and policy rules with all that a person may say of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
from msgspec.structs import replace

from schemas.host_objects import LinkAddress, NextHop, PlanObject, PolicyRule, Route, VxlanLink
from schemas.routes import Scope
from schemas.values import IPV4, Address, Family, Mac, Prefix
from services.kernel.fake import FakeHost
from services.kernel.transaction import Change, Listed
from services.runtime.errors import Permanent, Waiting
from tests.contract.kernel.machines import Machine, converge, differences, make

pytestmark = pytest.mark.any_kernel

PLACES = (
    (Address("10.80.0.1"), Address("10.80.0.9"), Prefix("10.97.0.0/16")),
    (Address("fd00::1"), Address("fd00::9"), Prefix("fd00:97::/32")),
)
TABLE = 7003


def routing_plan(tag: str) -> dict[str, PlanObject]:
    """Two links with an address of each family, and what goes by them, by key."""
    links = [f"mo.{tag}{number}" for number in (1, 2)]
    objects: list[PlanObject] = []
    for number, link in enumerate(links, 1):
        ends = Address("127.0.0.1"), Address(f"127.0.0.{number + 1}")
        objects.append(VxlanLink(link, 0x20000 + number, *ends, Mac(f"02:4d:01:00:00:0{number}"), 1450))
    for source, via, prefix in PLACES:
        objects.append(LinkAddress(links[0], source, source.host_prefix.length))
        objects += _chosen(links, source, via, prefix)
    return {item.key: item for item in objects}


def _chosen(links: list[str], source: Address, via: Address, prefix: Prefix) -> list[PlanObject]:
    family, one = prefix.family, (NextHop(links[0]),)
    hops = tuple(NextHop(link, via, onlink=True, weight=weight) for link, weight in zip(links, (1, 256), strict=True))
    scopes: tuple[Scope, ...] = ("global", "site", "link", "host") if family == IPV4 else ()
    return [
        Route(TABLE, prefix, metric=2, hops=(NextHop(links[0], weight=9),), source=source),
        Route(TABLE, prefix, metric=3, hops=hops, source=source),
        *(Route(TABLE, prefix, metric=metric, hops=one, scope=scope) for metric, scope in enumerate(scopes, 4)),
        PolicyRule(5000, TABLE, to=prefix, source=source.host_prefix, family=family),
        PolicyRule(5000, TABLE, to=prefix, source=source.host_prefix, iif=links[1], oif=links[0], family=family),
        PolicyRule(5001, TABLE, 0, 0xFF, family=family),
        PolicyRule(5001, 77_123_456, 0, 0xFFFFFFFF, oif="no-such-link", family=family),
    ]


@pytest.fixture
def plan(machine: Machine) -> dict[str, PlanObject]:
    return routing_plan(machine.tag)


def test_all_that_can_be_said_is_held_and_no_difference(machine: Machine, plan: dict[str, PlanObject]) -> None:
    """After a restart too; written again it stays as it is, and removed it leaves nothing."""
    converge(machine.kernel, plan)
    assert differences(machine.kernel, plan) == []
    make(machine.kernel, [Change(item, item) for item in plan.values() if isinstance(item, Route | PolicyRule)])
    assert differences(machine.restart(), plan) == []
    make(machine.kernel, [Change(item, None) for item in plan.values()])
    assert dict(machine.kernel.read({})) == {}


class Tampering(NamedTuple):
    """A change by hand ({o}: the links' names without their number), its like on the fake, and the key that then differs."""

    commands: str
    fake: Callable[[FakeHost, str], None]
    key: str


def _edit(key: str, **fields: object) -> Callable[[FakeHost, str], None]:
    def change(host: FakeHost, tag: str) -> None:
        named = key.format(o=f"mo.{tag}")
        host.objects[named] = replace(host.objects[named], **fields)  # type: ignore[type-var]

    return change


def _put(item: object) -> Callable[[FakeHost, str], None]:
    return lambda host, _tag: host.objects.update({item.key: item})  # type: ignore[attr-defined]


RULE = "rule 5000 fwmark 0x0/0x0 iif - to 10.97.0.0/16 from 10.80.0.1/32"
RULE6 = "rule inet6 5001 fwmark 0x0/0xff iif - to -"
TAMPERINGS = {
    "source removed": Tampering(
        "ip route replace 10.97.0.0/16 dev {o}1 table 7003 metric 2 proto 77",
        _edit("route 7003 10.97.0.0/16 2", source=None),
        "route 7003 10.97.0.0/16 2",
    ),
    "IPv6 source removed": Tampering(
        "ip -6 route replace fd00:97::/32 dev {o}1 table 7003 metric 2 proto 77",
        _edit("route 7003 fd00:97::/32 2", source=None),
        "route 7003 fd00:97::/32 2",
    ),
    "other weight": Tampering(
        "ip route replace 10.97.0.0/16 table 7003 metric 3 src 10.80.0.1 proto 77"
        " nexthop via 10.80.0.9 dev {o}1 onlink weight 2 nexthop via 10.80.0.9 dev {o}2 onlink weight 256",
        _edit("route 7003 10.97.0.0/16 3", hops=()),
        "route 7003 10.97.0.0/16 3",
    ),
    "hop not on-link": Tampering(
        "ip -6 route replace fd00:97::/32 table 7003 metric 2 proto 77 src fd00::1 dev {o}2",
        _edit("route 7003 fd00:97::/32 2", hops=()),
        "route 7003 fd00:97::/32 2",
    ),
    "other scope": Tampering(
        "ip route replace 10.97.0.0/16 dev {o}1 table 7003 metric 5 scope global proto 77",
        _edit("route 7003 10.97.0.0/16 5", scope="global"),
        "route 7003 10.97.0.0/16 5",
    ),
    "scope of nowhere": Tampering(
        "ip route replace 10.97.0.0/16 dev {o}1 table 7003 metric 6 scope host proto 77",
        _edit("route 7003 10.97.0.0/16 6", scope="host"),
        "route 7003 10.97.0.0/16 6",
    ),
    "rule removed": Tampering(
        "ip rule del pref 5000 from 10.80.0.1 to 10.97.0.0/16 iif {o}2 oif {o}1",
        lambda host, tag: host.objects.__delitem__(_iif_rule(tag)),
        "rule 5000 fwmark 0x0/0x0 iif {o}2 to 10.97.0.0/16 from 10.80.0.1/32 oif {o}1",
    ),
    "rule of another table": Tampering(
        "ip rule del pref 5000 from 10.80.0.1 to 10.97.0.0/16 lookup 7003;"
        "ip rule add pref 5000 from 10.80.0.1 to 10.97.0.0/16 lookup 7004 proto 77",
        _edit(RULE, table=7004),
        RULE,
    ),
    "rule for another source": Tampering(
        "ip -6 rule add pref 5003 from fd00:5::/32 lookup 7003 proto 77",
        _put(PolicyRule(5003, 7003, source=Prefix("fd00:5::/32"), family=6)),
        "rule inet6 5003 fwmark 0x0/0x0 iif - to - from fd00:5::/32",
    ),
    "rule doubled": Tampering("ip -6 rule add pref 5001 fwmark 0/0xff lookup 7005 proto 77", _put(Listed("rule", RULE6, "twice")), RULE6),
    "rule by port": Tampering(
        "ip rule add pref 5002 ipproto tcp dport 80 lookup 7003 proto 77",
        _put(Listed("rule", "rule 5002 fwmark 0x0/0x0 iif - to - with [22, 24, 29] tos 0 action 1", "by port")),
        "rule 5002 fwmark 0x0/0x0 iif - to - with [22, 24",  # kernels differ in what they tell besides
    ),
}


def _iif_rule(tag: str) -> str:
    return TAMPERINGS["rule removed"].key.format(o=f"mo.{tag}")


@pytest.mark.parametrize("name", TAMPERINGS)
def test_a_change_by_hand_is_exactly_one_difference_and_is_repaired(machine: Machine, plan: dict[str, PlanObject], name: str) -> None:
    """Nothing else is blamed, and the repair brings the plan back."""
    tampering = TAMPERINGS[name]
    converge(machine.kernel, plan)
    machine.tamper(tampering.commands, tampering.fake)
    found = differences(machine.kernel, plan)
    key = tampering.key.format(o=f"mo.{machine.tag}")
    assert [change.key[: len(key)] for change in found] == [key]
    make(machine.kernel, found)
    assert differences(machine.kernel, plan) == []


@pytest.mark.parametrize("source, via, prefix", PLACES, ids=["IPv4", "IPv6"])
def test_a_source_that_is_no_address_of_the_host_waits_for_it(
    machine: Machine, plan: dict[str, PlanObject], source: Address, via: Address, prefix: Prefix
) -> None:
    """The error says which address; nothing is written until it is there."""
    converge(machine.kernel, {key: item for key, item in plan.items() if isinstance(item, VxlanLink)})
    route = Route(TABLE, prefix, hops=(NextHop(f"mo.{machine.tag}1", via, onlink=True),), source=source)
    with pytest.raises(Waiting) as caught:
        machine.kernel.write(Change(None, route))
    assert caught.value.waiting_for == f"address {source}"
    machine.kernel.write(Change(None, LinkAddress(f"mo.{machine.tag}2", source, source.host_prefix.length)))
    machine.kernel.write(Change(None, route))


@pytest.mark.parametrize("source, via, prefix", PLACES, ids=["IPv4", "IPv6"])
def test_an_address_that_goes_is_missed_by_routes_that_name_it(
    machine: Machine, plan: dict[str, PlanObject], source: Address, via: Address, prefix: Prefix
) -> None:
    """IPv4 routes of main go with it and IPv6 ones lose it, which differs from the plan; IPv4 routes of other tables stay as they are."""
    links = [f"mo.{machine.tag}{number}" for number in (1, 2)]
    address = LinkAddress(links[0], source, source.host_prefix.length)
    # A link whose last IPv4 address goes loses all its IPv4 routes: these are by the other link.
    # Linux 6.1 looks at IPv6 routes by the address's own link only.
    wanted: list[PlanObject] = [item for item in plan.values() if isinstance(item, VxlanLink)]
    hops = (NextHop(links[1] if prefix.family == IPV4 else links[0]),)
    wanted += [address, LinkAddress(links[0], via, source.host_prefix.length)]
    wanted += [Route(table, prefix, metric=9, hops=hops, source=source) for table in (254, TABLE)]
    objects = {item.key: item for item in wanted}
    converge(machine.kernel, objects)
    machine.kernel.write(Change(address, None))
    tables = (254,) if prefix.family == IPV4 else (254, TABLE)
    assert {change.key for change in differences(machine.kernel, objects)} == {
        address.key,
        *(f"route {table} {prefix} 9" for table in tables),
    }
    converge(machine.kernel, objects)
    assert differences(machine.kernel, objects) == []


@pytest.mark.parametrize(
    "item",
    [
        Route(TABLE, Prefix("10.97.0.0/16"), hops=(NextHop("lo", Address("10.80.0.9"), onlink=True),), scope="link"),
        Route(TABLE, Prefix("10.97.0.0/16"), hops=(NextHop("lo"), NextHop("lo")), scope="host"),
    ],
    ids=["neighbour in link scope", "several hops in host scope"],
)
def test_what_contradicts_itself_is_permanent(machine: Machine, item: Route) -> None:
    """Scopes that no next hop of the route can have are told at once, and not tried again."""
    with pytest.raises(Permanent):
        machine.kernel.write(Change(None, item))


def _rules(family: Family) -> list[PolicyRule]:
    """Rules of one priority and table: each has something more than the one before."""
    source, to = (Prefix("10.1.0.0/16"), Prefix("10.2.0.0/16")) if family == IPV4 else (Prefix("fd00:1::/32"), Prefix("fd00:2::/32"))
    found = [PolicyRule(5000, TABLE, family=family)]
    for more in ({"to": to}, {"source": source}, {"iif": "eth7"}, {"oif": "eth8"}, {"fwmark": 1, "mask": 3}):
        found.append(replace(found[-1], **more))
    return found


@pytest.mark.parametrize("family", [4, 6])
def test_a_rule_is_not_taken_for_one_that_says_more(machine: Machine, family: Family) -> None:
    """Neither when it comes after it, nor when it goes before it: exactly that one comes and goes."""
    rules = _rules(family)
    for item in reversed(rules):
        machine.kernel.write(Change(None, item))
    left = {item.key: item for item in rules}
    assert dict(machine.kernel.read({})) == left
    for item in rules:
        machine.kernel.write(Change(item, None))
        del left[item.key]
        assert dict(machine.kernel.read({})) == left


def test_a_rule_that_is_there_twice_is_left_once(machine: Machine) -> None:
    """As by an end in the midst of a removal; neither is taken for the wanted one while both are there."""
    item = PolicyRule(5000, TABLE, to=Prefix("10.1.0.0/16"))
    machine.kernel.write(Change(None, item))
    machine.tamper("ip rule save | ip rule restore", _put(Listed("rule", item.key, "twice")))
    (found,) = differences(machine.kernel, {item.key: item})
    assert isinstance(found.old, Listed)
    machine.kernel.write(found)
    assert dict(machine.kernel.read({})) == {item.key: item}


@pytest.mark.parametrize("prefix", [prefix for _, _, prefix in PLACES], ids=["IPv4", "IPv6"])
def test_a_route_is_not_taken_for_one_of_another_metric(machine: Machine, plan: dict[str, PlanObject], prefix: Prefix) -> None:
    """One without a metric goes whatever it leads to, and removed when it is not there, it does not take another along."""
    converge(machine.kernel, {key: item for key, item in plan.items() if isinstance(item, VxlanLink)})
    plain, other = (Route(7004, prefix, metric=metric, hops=(NextHop(f"mo.{machine.tag}{metric + 1}"),)) for metric in (0, 1))
    machine.kernel.write(Change(None, other))
    for held in (plain, replace(plain, hops=other.hops), None):
        if held is not None:
            machine.kernel.write(Change(None, held))
        machine.kernel.write(Change(plain, None))
        assert machine.kernel.read({}, {"route"}).keys() == {other.key}
