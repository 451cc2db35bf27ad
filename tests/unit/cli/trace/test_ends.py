"""Whom a trace asks for what: the addresses by which each step of a way knows a flow."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from schemas.commands import TraceFlow
from schemas.flow import IP, Correlation, EventType, FlowEnd, FlowEvent, PointName
from schemas.values import Address, Endpoint
from services.cli.files import load
from services.cli.trace.ends import End, Session, session
from services.cli.trace.filters import Filters
from services.planner.core import Core, settle_rollouts
from services.planner.state import HostId
from services.runtime.errors import Permanent, Transient
from tests.topologies import EXAMPLES, encrypting, keys, tell, two_clusters


def between(source: str, destination: str, *services: Address) -> Session:
    core = Core()
    tell(core, [*two_clusters(), *keys()])
    settle_rollouts(core.state, core.allocations)
    return session(core.state, core.allocations, (source, destination), None, 30, services=services)


def test_a_flow_between_clusters_is_followed_through_both_gateways() -> None:
    """By its real addresses and those by which the other cluster knows them, though both ends have the same."""
    wanted = between("rome/shop", "milan/bank")
    assert wanted.route == ("rome/worker-1", "rome/gateway", "milan/gateway", "milan/worker-1")
    (wish,) = set(wanted.hosts.values())
    assert wish.flow == ("10.200.1.10", "10.63.1.10", "10.61.1.10")
    assert {"172.18.0.10", "172.18.1.10"} <= set(wish.outer)
    assert {51840, 51841, 51842, 4789} <= set(wish.ports)
    assert wish.overlay_ports == (4789,)


def test_a_service_is_the_far_ends_address_for_who_dials_it() -> None:
    """It is asked for, and a packet to it, or from it, is of the flow."""
    wanted = between("rome/shop", "milan/bank", Address("10.96.0.1"))
    (wish,) = set(wanted.hosts.values())
    assert wish.flow == ("10.200.1.10", "10.63.1.10", "10.61.1.10", "10.96.0.1")
    assert wanted.destination.has("10.96.0.1")
    assert not wanted.source.has("10.96.0.1")


def test_an_address_is_whose_it_is() -> None:
    """A pod's, or that of a pod that nobody published on the node with the prefix, or somebody's outside."""
    assert between("10.200.1.10", "rome/worker-2").source.name in ("milan/bank", "rome/shop")
    unknown = between("10.200.2.99", "rome/shop").source
    assert (unknown.name, unknown.known.node_name.partition("/")[2]) == ("10.200.2.99", "worker-2")
    assert between("rome/shop", "192.0.2.9").route == ("rome/worker-1",)


@pytest.mark.parametrize(
    "source, destination, gateways",
    [("milan/mill", "rome/shop", ("milan/to-rome", "rome/gateway")), ("turin/bank", "milan/mint", ("turin/gateway", "milan/to-turin"))],
)
def test_of_several_peerings_the_one_that_joins_the_two_is_on_the_way(source: str, destination: str, gateways: tuple[str, str]) -> None:
    """A cluster in the middle has a gateway for each; two that none joins are told so."""
    core = Core()
    tell(core, load([EXAMPLES / "three-clusters.yaml"]))
    settle_rollouts(core.state, core.allocations)
    assert session(core.state, core.allocations, (source, destination), None, 30).route[1:3] == gateways
    with pytest.raises(Permanent, match="no peering joins rome and turin"):
        session(core.state, core.allocations, ("rome/shop", "turin/bank"), None, 30)
    del core.allocations.externals["milan", "rome-shop"]
    with pytest.raises(Transient, match="IpMapping/milan/rome-shop has no external address yet"):
        session(core.state, core.allocations, (source, destination), None, 30)


@pytest.mark.parametrize("endpoint, more", [("203.0.113.2:51871", {"203.0.113.2"}), ("gw.example.net:51871", set()), ("", set())])
def test_outer_packets_are_looked_for_where_others_find_a_node_too(endpoint: str, more: set[str]) -> None:
    """As behind a port forwarding; of a name nobody knows here what it stands for."""
    core = Core()
    items = [replace(item, endpoint=Endpoint(endpoint)) if endpoint and item.ref == "Node/rome/worker-2" else item for item in encrypting()]
    tell(core, items)
    settle_rollouts(core.state, core.allocations)
    (wish,) = set(session(core.state, core.allocations, ("rome/shop", "rome/stock"), None, 30).hosts.values())
    assert set(wish.outer) == {"172.18.0.11", "172.18.0.12", "2001:db8:18::11", "2001:db8:18::12"} | more


def outside(source: str, destination: str) -> Session:
    core = Core()
    tell(core, load([EXAMPLES / "egress.yaml"]))
    return session(core.state, core.allocations, (source, destination), None, 30)


def test_a_flow_that_a_policy_leads_out_is_followed_through_the_node_that_lets_it_out() -> None:
    """By the address as which it leaves there, in the family of the flow; from outside as well."""
    out, back = outside("rome/shop", "192.0.2.50"), outside("2001:db8:99::50", "rome/shop")
    assert out.route == ("rome/worker-1", "rome/worker-2")
    assert back.route == ("rome/worker-2", "rome/worker-1")
    assert (out.source.seen, back.destination.seen) == (("172.18.0.12",), ("2001:db8:18::12",))
    assert (out.source.shared, back.destination.shared) == (("172.18.0.12",), ("2001:db8:18::12",))
    assert (out.destination.seen, out.destination.shared, back.source.shared) == ((), (), ())
    assert {wish.flow for wish in out.hosts.values()} == {("10.200.1.10", "fd00:200:0:1::10", "172.18.0.12", "192.0.2.50")}


def test_a_policy_for_some_destinations_leads_no_other_flow_out() -> None:
    """Nor one between pods, or from a pod that it does not choose."""
    to_bank = outside("rome/stock", "198.51.100.7")
    assert (to_bank.route, to_bank.source.seen) == (("rome/worker-2", "rome/worker-3"), ("192.0.2.9",))
    assert outside("rome/stock", "192.0.2.50").route == ("rome/worker-2",)
    own = [outside("rome/stock", "192.0.2.50").source, outside("2001:db8:99::50", "rome/stock").destination]
    assert [(end.seen, end.shared) for end in own] == [(("172.18.0.12",),) * 2, (("2001:db8:18::12",),) * 2], "as its own node masquerades"
    assert outside("rome/post", "198.51.100.7").route == ("rome/worker-3",)
    assert outside("rome/shop", "rome/post").route == ("rome/worker-1", "rome/worker-3")


@pytest.mark.parametrize("missing", ["number", "slot"])
def test_what_is_not_allocated_yet_is_waited_for(missing: str) -> None:
    """Topology and allocations are read one after the other: what came or went between the two is said, with who asks again in mind."""
    core = Core()
    tell(core, load([EXAMPLES / "egress.yaml"]))
    known = core.allocations.numbers if missing == "number" else core.allocations.slots
    del known[HostId("rome", "worker-2")]
    with pytest.raises(Transient, match=f"rome/worker-2 has no {missing} yet.*again in a moment"):
        session(core.state, core.allocations, ("rome/shop", "rome/post"), None, 30)


def test_a_packet_goes_from_where_it_comes_from_to_where_it_ends() -> None:
    """What its source becomes is nobody's concern, nor which address was dialled; what either end is not, is of no flow of theirs."""
    wanted, stranger = between("rome/shop", "10.200.2.99"), "192.0.2.9"

    def ways(source: str, source_becomes: str, dialled: str, destination: str) -> tuple[str, ...]:
        ip = IP(source, dialled, "IPv4", source_becomes, destination if destination != dialled else "")
        return wanted.ways(replace(seen(0, source, dialled, "a"), ip=ip))

    assert ways("10.200.1.10", stranger, "10.200.2.99", "10.200.2.99") == ("forward",)
    assert ways("10.200.1.10", "", stranger, "10.200.2.99") == ("forward",)
    assert ways("10.200.2.99", stranger, stranger, "10.200.1.10") == ("reply",)
    assert ways(stranger, "10.200.1.10", "10.200.2.99", "10.200.2.99") == ()
    assert ways("10.200.1.10", "", "10.200.2.99", stranger) == ()


@pytest.mark.parametrize("name", ["rome/worker-1", "10.200.1.1"])
def test_no_policy_leads_out_what_a_node_says_itself(name: str) -> None:
    """Though the address by which it speaks to pods is among those that the policy chooses."""
    wanted = outside(name, "192.0.2.50")
    assert (wanted.route, wanted.source.seen) == (("rome/worker-1",), ())


@pytest.mark.parametrize("to", ["10.80.0.77", "169.254.0.9", "10.200.9.9", "fe80::9"])
def test_no_policy_leads_out_what_is_never_outside(to: str) -> None:
    """An address of the cluster that nobody has, and what is not routed, are not looked for on another node."""
    wanted = outside("rome/shop", to)
    assert (wanted.route, wanted.source.seen) == (("rome/worker-1",), ())


EXIT, POD, OUTSIDE = Address("192.0.2.1"), Address("10.0.0.1"), Address("198.51.100.9")
LET_OUT = Session(
    End("rome/shop", FlowEnd(), HostId("rome", "one"), (POD,), (EXIT,), (EXIT,)),
    End("198.51.100.9", FlowEnd(), None, (OUTSIDE,)),
    dict.fromkeys((HostId("rome", "one"), HostId("rome", "two")), TraceFlow(())),
)
"""A pod's flow to somebody outside, by a node that gives it its own address."""


def seen(at_ms: int, source: str, destination: str, group: str, point: PointName = "FROM_NETWORK", *, node: str = "one") -> FlowEvent:
    """A packet at a point."""
    return FlowEvent(
        time=f"2026-01-01T00:00:00.{at_ms:03}000Z",
        uuid=f"{at_ms} {group}",
        verdict="FORWARDED",
        ip=IP(source, destination, "IPv4"),
        node_name=f"rome/{node}",
        event_type=EventType(4),
        trace_observation_point=point,
        corr=Correlation(group, "headers", "high"),
    )


def test_a_sessions_packets_are_those_between_its_ends() -> None:
    """In the order of time, whatever that of events is, each with its way and the hosts on it; what others say is none of them."""
    request = [seen(1, POD, OUTSIDE, "a", "FROM_ENDPOINT"), seen(2, POD, OUTSIDE, "a", "FROM_OVERLAY", node="two")]
    leaving = seen(3, EXIT, OUTSIDE, "a", "TO_NETWORK", node="two")
    answer = seen(5, OUTSIDE, POD, "b", "TO_ENDPOINT")
    stranger = "10.0.0.7"
    pairs = [(stranger, OUTSIDE), (POD, stranger), (stranger, POD), (OUTSIDE, stranger), (POD, POD)]
    others = [seen(4, *pair, f"of {pair}") for pair in pairs] + [replace(seen(4, POD, OUTSIDE, "e"), ip=None)]
    found = LET_OUT.trails([answer, *others, leaving, *reversed(request)])
    assert [(trail.way, trail.seen) for trail in found] == [("forward", [*request, leaving]), ("reply", [answer])]
    assert {trail.route for trail in found} == {("rome/one", "rome/two")}
    assert LET_OUT.trails([]) == LET_OUT.trails(others) == []


def test_what_a_node_says_itself_is_not_of_a_pod_that_it_lets_out() -> None:
    """Though it has the addresses that the pod's packets have outside: it is seen by none that is the pod's alone."""
    own = [seen(1, EXIT, OUTSIDE, "a", "FROM_HOST", node="two"), seen(2, EXIT, OUTSIDE, "a", "TO_NETWORK", node="two")]
    back = seen(3, OUTSIDE, EXIT, "b", "FROM_NETWORK", node="two")
    assert LET_OUT.trails([*own, back]) == []
    assert back.ip is not None
    turned = replace(back, ip=replace(back.ip, destination_xlated=POD))
    assert [(trail.way, trail.seen) for trail in LET_OUT.trails([*own, turned])] == [("reply", [turned])]


def test_hosts_are_asked_for_nothing_that_is_not_shown() -> None:
    """By protocols and ports of the filters; a port of a protocol that has none is said to be so."""
    core = Core()
    tell(core, [*two_clusters(), *keys()])
    settle_rollouts(core.state, core.allocations)
    only = Filters(port=[443, 443, 80], protocol=["tcp", "icmp"]).only(16)
    wanted = session(core.state, core.allocations, ("rome/shop", "milan/bank"), None, 30, only=only)
    assert {(wish.protocols, wish.flow_ports, wish.sample) for wish in wanted.hosts.values()} == {(("tcp", "icmp"), (443, 80), 16)}
    with pytest.raises(Permanent, match="have none"):
        Filters(port=[443], protocol=["icmp"]).check()
