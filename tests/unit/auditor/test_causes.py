"""One finding per cause: what a link, an address or another peer took along is told with it, and nothing else is hidden by that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest
from msgspec.structs import replace

from schemas.host_objects import (
    FdbEntry,
    LinkAddress,
    Neighbour,
    NextHop,
    PlanObject,
    Route,
    Sysctl,
    VxlanLink,
    WireguardLink,
    WireguardPeer,
)
from schemas.plan import Entry, HostPlan
from schemas.values import IPV6, Address, Endpoint, Key, Mac, Name, Prefix
from services.applier.core import Applier
from services.auditor.causes import DOWN, FALLEN
from services.auditor.compare import compare
from services.auditor.findings import LAYERS, Finding, View
from services.kernel.fake import FakeHost, FakeKernel
from services.kernel.transaction import Change, Listed
from tests.topologies import ROME_GATEWAY, keys, settled_plans, two_clusters

PLAN = settled_plans([*two_clusters(), *keys(FakeKernel().public_key())])[ROME_GATEWAY]
LINKS = [key for key in PLAN.objects() if key.startswith("link ")]
KA, KB, KX = (Key(letter * 42 + "A=") for letter in "abx")
END = Endpoint("192.0.2.9:51820")
WIDE, NARROW = Prefix("10.200.0.0/16"), Prefix("10.200.5.0/24")


MAC = Mac("02:00:00:00:00:01")


def hop(link: str, via: str = "") -> NextHop:
    return NextHop(link, Address(via) if via else None, onlink=bool(via))


def planned(items: Iterable[PlanObject]) -> HostPlan:
    return HostPlan(Name("rome"), Name("a"), {"one": {item.key: Entry(item, (f"Test/{item.layer}",)) for item in items}})


def applied(plan: HostPlan = PLAN) -> FakeHost:
    host = FakeHost()
    applier = Applier(FakeKernel(host), lambda: 0.0)
    assert applier.apply(plan, 1, 1).outcome == "applied"
    return host


def look(host: FakeHost, plan: HostPlan = PLAN, fallen: Iterable[str] = (), links: Mapping[str, bool] | None = None) -> list[Finding]:
    kernel, wanted = FakeKernel(host, looks_only=True), plan.objects()
    state = kernel.links() if links is None else links
    view = View(kernel.reference(wanted), kernel.read(wanted, LAYERS), kernel.marker(), {}, state, frozenset(fallen))
    return compare(view, plan, set(LAYERS))


def through(name: str, plan: HostPlan = PLAN) -> list[str]:
    """Keys of the routes that lead through a link."""
    return [key for key, item in plan.objects().items() if isinstance(item, Route) and name in {hop.link for hop in item.hops}]


def set_down(host: FakeHost, name: str) -> None:
    host.objects[f"link {name}"] = Listed("link", f"link {name}", "down")
    for key in through(name):
        host.objects.pop(key, None)


# Links ---------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", LINKS)
def test_a_link_that_is_gone_stands_for_what_was_on_it(key: str) -> None:
    """Addresses, peers and routes went with it: one finding, by the link's key and with the link's reasons."""
    host = applied()
    FakeKernel(host).write(Change(host.objects[key], None))  # type: ignore[arg-type]
    (finding,) = look(host)
    assert (finding.layer, finding.key, finding.found) == ("link", key, "")
    assert finding.because == PLAN.because(key)


def test_a_link_that_is_down_stands_for_its_routes_until_they_are_back() -> None:
    """One finding while it is down, still one when it is up again without them, none once they are back."""
    host, name = applied(), LINKS[0].removeprefix("link ")
    before = dict(host.objects)
    set_down(host, name)
    (finding,) = look(host)
    assert (finding.key, '"down"' in finding.found, finding.carries) == (LINKS[0], True, ("link",))
    host.objects[LINKS[0]] = before[LINKS[0]]
    (finding,) = look(host, fallen=[name])
    assert (finding.layer, finding.key, finding.found, finding.carries) == ("link", LINKS[0], FALLEN, ("route",))
    assert len(look(host)) == len(through(name)), "without having seen it fall, each route is by itself"
    host.objects = before
    assert look(host, fallen=[name]) == []


def test_a_flap_does_not_hide_what_happens_elsewhere() -> None:
    """Only what was on the link that fell is its finding; a change on it, as of an MTU, is told as that."""
    host, name = applied(), LINKS[0].removeprefix("link ")
    set_down(host, name)
    host.objects[LINKS[0]] = replace(PLAN.objects()[LINKS[0]], mtu=1300)  # type: ignore[type-var]
    other = through(LINKS[-1].removeprefix("link "))[-1]
    del host.objects[other]
    found = {finding.key: finding for finding in look(host, fallen=[name])}
    assert found.keys() == {LINKS[0], other}
    assert '"mtu":1300' in found[LINKS[0]].found


def test_a_link_of_somebody_else_stands_for_routes_of_ours() -> None:
    """Routes through a foreign link that is down are one finding by the link's name, with the routes' reasons."""
    routes = [Route(100, Prefix(f"10.{number}.0.0/16"), hops=(hop("eth9"),)) for number in (70, 71)]
    plan = planned([*routes, Route(100, Prefix("10.72.0.0/16"), "blackhole")])
    host = FakeHost(foreign={"link eth9": Listed("link", "link eth9", "foreign")})
    Applier(FakeKernel(host), lambda: 0.0).apply(plan, 1, 1)
    for route in routes:
        del host.objects[route.key]
    (finding,) = look(host, plan, links={"eth9": False})
    assert (finding.layer, finding.key, finding.wanted, finding.found) == ("link", "link eth9", "up", DOWN)
    assert (finding.unit, finding.because) == ("one", ("Test/route",))
    assert [finding.found for finding in look(host, plan, links={})] == [""]
    assert [finding.key for finding in look(host, plan, links={"eth9": True})] == [route.key for route in routes]


def test_an_ipv6_route_that_lost_one_hop_with_its_link() -> None:
    """The kernel takes a dead link's hop out of an IPv6 route: that, too, is the link's; a hop that a hand took out is not."""
    links = [VxlanLink(f"mo.{number}", number, Address("192.0.2.1"), Address(f"192.0.2.{number + 2}"), MAC, 1400) for number in (1, 2)]
    hops = tuple(replace(hop(link.name, "fe80::1"), weight=3) for link in links)
    route = Route(7001, Prefix("fd00:200::/32"), hops=hops)
    plan = planned([*links, route])
    host = applied(plan)
    host.objects[route.key] = replace(host.objects[route.key], hops=(hop("mo.1", "fe80::1"),))  # type: ignore[type-var]
    assert [finding.key for finding in look(host, plan)] == [route.key]
    host.objects["link mo.2"] = Listed("link", "link mo.2", "down")
    assert [finding.key for finding in look(host, plan)] == ["link mo.2"]
    host.objects[route.key] = replace(host.objects[route.key], hops=(hop("mo.3", "fe80::1"),))  # type: ignore[type-var]
    assert [finding.key for finding in look(host, plan)] == ["link mo.2", route.key]


def test_another_mac_stands_for_the_neighbours_that_went() -> None:
    """A link with another MAC loses its neighbours: told with it. Without that, each entry that is missing is by itself."""
    link = VxlanLink("mo.1", 1, Address("192.0.2.1"), None, MAC, 1400)
    entries = [FdbEntry("mo.1", MAC, Address("192.0.2.2")), Neighbour("mo.1", Address("10.0.0.2"), MAC)]
    plan = planned([link, *entries])
    host = applied(plan)
    for entry in entries:
        del host.objects[entry.key]
    assert {finding.key for finding in look(host, plan)} == {entry.key for entry in entries}
    host.objects[link.key] = replace(link, mac=Mac("02:00:00:00:00:77"))
    assert [(finding.key, finding.carries) for finding in look(host, plan)] == [(link.key, ("neighbour",))]


def test_an_mtu_too_small_for_ipv6_stands_for_the_ipv6_that_went() -> None:
    """Below 1280 the kernel takes IPv6 off a link; IPv4 on it is another matter."""
    link = VxlanLink("mo.1", 1, Address("192.0.2.1"), Address("192.0.2.2"), MAC, 1400)
    on_it = [LinkAddress("mo.1", Address(address), length) for address, length in (("fd00::1", 64), ("10.0.0.1", 24))]
    plan = planned([link, *on_it])
    host = applied(plan)
    host.objects[link.key] = replace(link, mtu=1200)
    del host.objects[on_it[0].key]
    (finding,) = look(host, plan)
    assert (finding.key, finding.carries) == (link.key, ("address",))
    del host.objects[on_it[1].key]
    assert {finding.key for finding in look(host, plan)} == {link.key, on_it[1].key}


def test_a_link_that_was_made_again_stands_for_its_sysctls() -> None:
    """A new link has the defaults: what was set on the old one went with it."""
    link = VxlanLink("mo.1", 1, Address("192.0.2.1"), Address("192.0.2.2"), MAC, 1400)
    sysctl = Sysctl("net/ipv4/conf/mo.1/rp_filter", "2")
    plan = planned([link, sysctl])
    host = applied(plan)
    FakeKernel(host).write(Change(link, None))
    assert [finding.key for finding in look(host, plan)] == [link.key]
    FakeKernel(host).write(Change(None, link))
    assert [finding.key for finding in look(host, plan)] == [sysctl.key]
    assert [finding.key for finding in look(host, plan, fallen=["mo.1"])] == [link.key]
    Applier(FakeKernel(host), lambda: 0.0).repair(plan, 1, 1)
    assert host.sysctls[sysctl.name] == "2"
    assert look(host, plan, fallen=["mo.1"]) == []


# Addresses -----------------------------------------------------------------------------------------------------------------------------


def test_an_address_stands_for_the_routes_that_went_with_it() -> None:
    """Those through its link or with it as source, of its family; not those of other links."""
    host = applied()
    address = next(item for item in PLAN.objects().values() if isinstance(item, LinkAddress) and item.link == "mo.worker-1")
    lost, other = through("mo.worker-1"), through("mo.worker-2")[0]
    for key in (address.key, *lost, other):
        del host.objects[key]
    found = {finding.key: finding.carries for finding in look(host)}
    assert found == {address.key: ("route",), other: ()}


def test_an_ipv6_route_that_lost_its_source_with_the_address() -> None:
    """IPv6 routes stay and forget the source: the address says so."""
    link = VxlanLink("mo.1", 1, Address("192.0.2.1"), Address("192.0.2.2"), MAC, 1400)
    address = LinkAddress("mo.1", Address("fd00::1"), 128)
    route = Route(10, Prefix("fd00:200::/32"), hops=(hop("mo.1"),), source=address.address)
    plan = planned([link, address, route])
    host = applied(plan)
    FakeKernel(host).write(Change(address, None))
    assert (route.prefix.family, host.objects[route.key].source) == (IPV6, None)  # type: ignore[union-attr]
    assert [(finding.key, finding.carries) for finding in look(host, plan)] == [(address.key, ("route",))]


# Peers ---------------------------------------------------------------------------------------------------------------------------------


def with_peers() -> tuple[HostPlan, FakeHost]:
    link = WireguardLink("mt.0", 51820, 1420)
    plan = planned([link, WireguardPeer("mt.0", KA, END, (WIDE,)), WireguardPeer("mt.0", KB, END, (NARROW,))])
    return plan, applied(plan)


def test_a_prefix_moved_from_peer_to_peer_is_one_finding() -> None:
    """It is told of the peer that lost it, with the name of the one that has it, and repaired by writing the former alone."""
    plan, host = with_peers()
    FakeKernel(host).write(Change(None, WireguardPeer("mt.0", KB, END, (NARROW, WIDE))))
    (finding,) = look(host, plan)
    assert finding.key == f"peer mt.0 {KA}"
    assert f"{WIDE} is at peer {KB} instead" in finding.found
    written: list[str] = []

    def note(change: Change) -> None:
        held = host.objects.get(change.key)
        if held != change.new:
            written.append(change.key)

    Applier(FakeKernel(host, note), lambda: 0.0).repair(plan, 1, 1)
    assert written == [f"peer mt.0 {KA}"], "the other peer holds what it is to hold by then"
    assert look(host, plan) == []


def test_a_prefix_that_a_strange_peer_took_is_the_strange_peer_s() -> None:
    """Who added a peer with somebody's prefix made one change."""
    plan, host = with_peers()
    FakeKernel(host).write(Change(None, WireguardPeer("mt.0", KX, END, (WIDE,))))
    (finding,) = look(host, plan)
    assert (finding.key, finding.wanted) == (f"peer mt.0 {KX}", "")
    assert KA in finding.found
    Applier(FakeKernel(host), lambda: 0.0).repair(plan, 1, 1)
    assert look(host, plan) == []


def test_other_changes_of_peers_are_each_by_itself() -> None:
    """A prefix that nobody lost, or a peer that changed in something else as well, is no move."""
    plan, host = with_peers()
    FakeKernel(host).write(Change(None, WireguardPeer("mt.0", KB, END, (NARROW, Prefix("10.9.0.0/16")))))
    assert [finding.key for finding in look(host, plan)] == [f"peer mt.0 {KB}"]
    FakeKernel(host).write(Change(None, WireguardPeer("mt.0", KB, END, (NARROW, WIDE), 9)))
    assert {finding.key for finding in look(host, plan)} == {f"peer mt.0 {KA}", f"peer mt.0 {KB}"}
