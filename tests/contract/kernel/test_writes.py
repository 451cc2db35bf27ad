"""What any kernel promises about one change outside nftables: what it waits for, what it will not touch, what changes in place."""

from __future__ import annotations

import msgspec
import pytest

from schemas.host_objects import (
    LinkAddress,
    NextHop,
    NftTable,
    PlanObject,
    PolicyRule,
    Route,
    Sysctl,
    VxlanLink,
    WireguardLink,
    WireguardPeer,
)
from schemas.values import IPV6, Address, Endpoint, Mac, Prefix
from schemas.withdrawals import without
from services.kernel.port import Kernel
from services.kernel.transaction import Change
from services.runtime.errors import Conflict, Permanent, Waiting
from tests.contract.kernel.gateway_plan import PEERS, tunnel
from tests.contract.kernel.machines import Machine, converge, differences

pytestmark = pytest.mark.any_kernel

PREFIX = Prefix("10.200.0.0/16")
ENDPOINT = Endpoint("127.0.0.9:51840")


def _write(kernel: Kernel, item: PlanObject) -> None:
    kernel.write(Change(None, item))


@pytest.mark.parametrize(
    "item",
    [
        Route(7001, PREFIX, hops=(NextHop("mo.gone"),)),
        Route(7001, PREFIX, hops=(NextHop("lo"), NextHop("mo.gone"))),
        LinkAddress("mo.gone", Address("10.1.1.1"), 32),
        WireguardPeer("mt.gone", PEERS[0], ENDPOINT, (PREFIX,)),
        Sysctl("net/ipv4/conf/mo.gone/rp_filter", "0"),
    ],
    ids=lambda item: item.layer,
)
def test_what_needs_a_missing_link_waits_for_it_by_name(machine: Machine, item: PlanObject) -> None:
    """The error says which link, so that its arrival can wake the next try; nothing is written."""
    with pytest.raises(Waiting) as caught:
        _write(machine.kernel, item)
    assert caught.value.waiting_for in ("link mo.gone", "link mt.gone")
    assert dict(machine.kernel.read({})) == {}


def test_a_next_hop_out_of_reach_waits(machine: Machine, plan: dict[str, PlanObject]) -> None:
    """A gateway that no address of the link covers is not there yet; with onlink it need not be."""
    converge(machine.kernel, plan)
    hop = NextHop(f"mo.{machine.tag}1", Address("10.66.0.1"))
    with pytest.raises(Waiting):
        _write(machine.kernel, Route(7003, PREFIX, hops=(hop,)))
    _write(machine.kernel, Route(7003, PREFIX, hops=(msgspec.structs.replace(hop, onlink=True),)))


@pytest.mark.parametrize(
    "item",
    [
        Route(254, Prefix("10.250.0.0/16"), "unreachable"),
        VxlanLink("foreign0", 9, Address("127.0.0.1"), Address("127.0.0.8"), Mac("02:00:00:00:00:09"), 1400),
        WireguardLink("foreign0", 51840, 1400),
        LinkAddress("foreign0", Address("10.1.1.1"), 32),
    ],
    ids=lambda item: f"{item.layer}-{type(item).__name__}",
)
def test_what_belongs_to_others_is_a_conflict_and_stays(machine: Machine, item: PlanObject) -> None:
    """An object in the way is never replaced, and never removed either, even when asked to."""
    machine.add_foreign()
    before = machine.foreign_state()
    with pytest.raises(Conflict):
        _write(machine.kernel, item)
    machine.kernel.write(Change(item, None))
    assert machine.foreign_state() == before
    assert dict(machine.kernel.read({})) == {}


def test_an_equal_policy_rule_of_another_owner_stays_beside_ours(machine: Machine) -> None:
    """The kernel holds both, and the removal of ours takes ours."""
    machine.add_foreign()
    before = machine.foreign_state()
    item = PolicyRule(500, 99)
    _write(machine.kernel, item)
    assert dict(machine.kernel.read({})) == {item.key: item}
    machine.kernel.write(Change(item, None))
    assert dict(machine.kernel.read({})) == {}
    assert machine.foreign_state() == before


@pytest.mark.parametrize(
    "item",
    [
        Route(7001, PREFIX),
        Route(7001, PREFIX, "throw", hops=(NextHop("lo"),)),
        Route(7001, Prefix("fd00::/8"), hops=(NextHop("lo"), NextHop("lo"))),
        NftTable("meshmark.x"),
    ],
    ids=["unicast without hop", "throw with hop", "IPv6 hops by device only", "nft"],
)
def test_what_cannot_be_right_is_permanent(machine: Machine, item: PlanObject) -> None:
    """A contradiction in the object itself is told at once, and not tried again."""
    with pytest.raises(Permanent):
        _write(machine.kernel, item)


def test_a_host_is_not_its_own_peer(machine: Machine, plan: dict[str, PlanObject]) -> None:
    """WireGuard drops the own key silently; here it is an error."""
    converge(machine.kernel, plan)
    with pytest.raises(Permanent):
        _write(machine.kernel, WireguardPeer(tunnel(machine.tag), machine.kernel.public_key(), ENDPOINT, (PREFIX,)))


@pytest.mark.parametrize("field", [{"mtu": 1300}, {"mac": Mac("02:00:00:00:00:77")}, {"remote": Address("127.0.0.7")}])
def test_a_vxlan_link_changes_in_place(machine: Machine, plan: dict[str, PlanObject], field: dict[str, object]) -> None:
    """MTU, MAC and far end change without loss of the link's addresses and routes."""
    converge(machine.kernel, plan)
    key = f"link mo.{machine.tag}1"
    changed = {**plan, key: msgspec.structs.replace(plan[key], **field)}  # type: ignore[type-var]
    machine.kernel.write(Change(plan[key], changed[key]))
    assert differences(machine.kernel, changed) == []


@pytest.mark.parametrize("field", [{"vni": 77}, {"port": 4790}, {"local": Address("fd00:18::1"), "remote": Address("fd00:18::7")}])
def test_a_vxlan_link_that_is_made_again_loses_what_is_on_it(
    machine: Machine, plan: dict[str, PlanObject], field: dict[str, object]
) -> None:
    """Number, port and family need a new device: the caller writes addresses and routes again, and nothing else."""
    converge(machine.kernel, plan)
    key = f"link mo.{machine.tag}1"
    changed = {**plan, key: msgspec.structs.replace(plan[key], **field)}  # type: ignore[type-var]
    machine.kernel.write(Change(plan[key], changed[key]))
    assert {item.subject.layer for item in differences(machine.kernel, changed)} == {"address", "route"}
    converge(machine.kernel, changed)
    assert differences(machine.kernel, changed) == []


@pytest.mark.parametrize("field", [{"mtu": 1300}, {"listen_port": 51999}, {"fwmark": 0xE00}])
def test_a_wireguard_link_changes_in_place(machine: Machine, plan: dict[str, PlanObject], field: dict[str, object]) -> None:
    """Port, mark and MTU change without loss of peers, addresses and routes."""
    converge(machine.kernel, plan)
    key = f"link {tunnel(machine.tag)}"
    changed = {**plan, key: msgspec.structs.replace(plan[key], **field)}  # type: ignore[type-var]
    machine.kernel.write(Change(plan[key], changed[key]))
    assert differences(machine.kernel, changed) == []


def test_a_neighbouring_address_outlives_the_first(machine: Machine, plan: dict[str, PlanObject]) -> None:
    """A link changes from one address of a subnet to another: the new one stays when the old one goes, and so do the link's routes."""
    converge(machine.kernel, plan)
    old = next(item for item in plan.values() if isinstance(item, LinkAddress) and item.length == 30)
    new = msgspec.structs.replace(old, address=Address("169.254.18.2"))
    changed = {**{key: item for key, item in plan.items() if key != old.key}, new.key: new}
    machine.kernel.write(Change(None, new))
    machine.kernel.write(Change(old, None))
    assert differences(machine.kernel, changed) == []


@pytest.mark.parametrize(
    "field",
    [
        {"endpoint": Endpoint("127.0.0.8:1234")},
        {"allowed_ips": (Prefix("10.5.0.0/16"),)},
        {"allowed_ips": ()},
        {"keepalive_seconds": 7},
        {"keepalive_seconds": 0},
    ],
)
def test_a_peer_changes_to_exactly_what_is_wanted(machine: Machine, plan: dict[str, PlanObject], field: dict[str, object]) -> None:
    """Stale AllowedIPs go, a planned endpoint is written, a keepalive is switched off; other peers stay."""
    converge(machine.kernel, plan)
    key = f"peer {tunnel(machine.tag)} {PEERS[2]}"
    changed = {**plan, key: msgspec.structs.replace(plan[key], **field)}  # type: ignore[type-var]
    machine.kernel.write(Change(plan[key], changed[key]))
    assert differences(machine.kernel, changed) == []


def test_allowed_ips_move_from_peer_to_peer(machine: Machine, plan: dict[str, PlanObject]) -> None:
    """A prefix given to one peer leaves the other, and that shows."""
    converge(machine.kernel, plan)
    link = tunnel(machine.tag)
    key = f"peer {link} {PEERS[2]}"
    thief = WireguardPeer(link, PEERS[1], ENDPOINT, (Prefix("10.9.0.0/16"),))
    _write(machine.kernel, thief)
    assert {item.key for item in differences(machine.kernel, {**plan, thief.key: thief})} == {key}


def test_a_route_is_replaced_in_place(machine: Machine, plan: dict[str, PlanObject]) -> None:
    """Another type, another weight, another hop: one message, same key."""
    converge(machine.kernel, plan)
    old = plan["route 7001 10.200.0.0/16 0"]
    first, second = tunnel(machine.tag, 0), tunnel(machine.tag, 1)
    for hops in ((NextHop(first),), (NextHop(second), NextHop(first)), (NextHop(first), NextHop(second, weight=2))):
        new = Route(7001, PREFIX, hops=hops)
        machine.kernel.write(Change(old, new))
        assert differences(machine.kernel, {**plan, new.key: new}) == []
        old = new
    dead = Route(7001, PREFIX, "unreachable")
    machine.kernel.write(Change(old, dead))
    assert differences(machine.kernel, {**plan, dead.key: dead}) == []
    machine.kernel.write(Change(dead, None))
    assert dead.key not in machine.kernel.read(plan)


def test_a_link_may_be_several_hops_of_a_route(machine: Machine, plan: dict[str, PlanObject]) -> None:
    """Each keeps its place and its weight, as a route needs it that has lost a hop in its middle; IPv6 has each link once."""
    converge(machine.kernel, plan)
    four, six = plan["route 7001 10.200.0.0/16 0"], plan["route 7001 fd00:200::/32 1024"]
    assert isinstance(four, Route)
    assert isinstance(six, Route)
    first, second = (NextHop(tunnel(machine.tag, number)) for number in (0, 1))
    weighted = tuple(msgspec.structs.replace(hop, weight=weight) for hop, weight in ((second, 1), (first, 3), (second, 2)))
    new = msgspec.structs.replace(four, hops=weighted)
    machine.kernel.write(Change(four, new))
    assert machine.kernel.read(plan)[new.key] == new
    assert machine.kernel.reference({new.key: new}) == {new.key: new}
    reduced = without({six.key: six}, {six.hops[0].link})[six.key]
    machine.kernel.write(Change(six, reduced))
    assert differences(machine.kernel, {**plan, new.key: new, six.key: reduced}) == []
    machine.kernel.write(Change(reduced, six))
    machine.kernel.write(Change(new, four))
    assert differences(machine.kernel, plan) == []


def test_an_ipv6_route_is_replaced_in_place(machine: Machine, plan: dict[str, PlanObject]) -> None:
    """Hops to other hops, more, fewer, to none, and back: one key, whatever its metric is said to be."""
    converge(machine.kernel, plan)
    prefix = Prefix("fd00:200::/32")
    old = plan["route 7001 fd00:200::/32 1024"]
    first, second = (NextHop(tunnel(machine.tag, number), Address(f"fd00:169::{4 * number + 2:x}"), onlink=True) for number in (0, 1))
    device = NextHop(tunnel(machine.tag, 1))
    weighted = (first, msgspec.structs.replace(second, weight=2))
    for new in (
        Route(7001, prefix, hops=(first,)),
        Route(7001, prefix, hops=(second, first)),
        Route(7001, prefix, metric=1024, hops=weighted),
        Route(7001, prefix, "unreachable"),
        Route(7001, prefix, hops=weighted),
        Route(7001, prefix, hops=(device,)),
        Route(7001, prefix, hops=(first, second)),
    ):
        machine.kernel.write(Change(old, new))
        assert differences(machine.kernel, {**plan, new.key: new}) == []
        assert new.key == old.key
        old = new
    machine.kernel.write(Change(old, None))
    assert old.key not in machine.kernel.read(plan)


def test_a_link_that_goes_takes_an_ipv6_route_or_its_own_hop_of_it(machine: Machine, plan: dict[str, PlanObject]) -> None:
    """What is left of a route over two tunnels goes by the other; writing the route again completes it."""
    converge(machine.kernel, plan)
    link = plan[f"link {tunnel(machine.tag, 1)}"]
    machine.kernel.write(Change(link, None))
    route = plan["route 7001 fd00:200::/32 1024"]
    held = machine.kernel.read(plan)[route.key]
    assert isinstance(held, Route)
    assert [hop.link for hop in held.hops] == [tunnel(machine.tag, 0)]
    converge(machine.kernel, plan)
    assert differences(machine.kernel, plan) == []


def test_a_rule_is_of_one_family(machine: Machine) -> None:
    """Equal rules of the two families are two objects; removing one leaves the other."""
    four, six = PolicyRule(700, 99, 1, 1), PolicyRule(700, 99, 1, 1, family=IPV6)
    _write(machine.kernel, four)
    _write(machine.kernel, six)
    assert dict(machine.kernel.read({})) == {four.key: four, six.key: six}
    machine.kernel.write(Change(four, None))
    assert dict(machine.kernel.read({})) == {six.key: six}


def test_a_sysctl_that_is_right_already_is_not_owned(machine: Machine) -> None:
    """Only what was changed is given back: removal of the other leaves a later foreign value alone."""
    item = Sysctl("net/ipv4/ip_forward", "0")
    _write(machine.kernel, item)
    assert dict(machine.kernel.read({})) == {}


def test_a_sysctl_keeps_its_first_value_over_changes(machine: Machine) -> None:
    """Two changes in a row, one removal: the value of the very beginning is back."""
    name = "net/ipv4/fib_multipath_hash_policy"
    first, second = Sysctl(name, "1"), Sysctl(name, "2")
    _write(machine.kernel, first)
    machine.kernel.write(Change(first, second))
    assert machine.sysctl(name) == "2"
    machine.kernel.write(Change(second, None))
    assert machine.sysctl(name) == "0"
    assert dict(machine.kernel.read({})) == {}
