"""Packets in clear → alerts: which are none, when they are raised, go on and are resolved."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from schemas.drift import ClearPacket, DriftEvent
from schemas.encryption import PLAINTEXT, Point
from schemas.topology import Topology, WireguardSettings
from schemas.values import Address
from services.auditor.plaintext import GRACE_S, HOLD_S, QUIET_S, TELL_S, UNSETTLED_MAX_S, Alerts, said, watched
from services.planner.state import HostId
from tests.topologies import encrypting, pod, settled_plans

ONE = HostId("rome", "worker-1")
OUT, IN = PLAINTEXT["out", "pods"], PLAINTEXT["in", "pods"]
MINE, THEIRS, OPTED_OUT = Address("10.200.1.10"), Address("10.200.2.10"), Address("10.200.3.10")
SETTLED_S = 100.0
"""Long after the first plan."""


def packet(destination: Address = THEIRS, port: int = 53) -> ClearPacket:
    return ClearPacket("out", "pods", "udp", MINE, destination, 4000, port, 60, "eth0")


def alerts(*more: Topology, **changes: object) -> Alerts:
    """Those of a host that holds its plan since time 0, which has said what became of those before."""
    made = Alerts(*ONE)
    follow(made, 0.0, *more, **changes)
    assert [event.key for event in due(made, SETTLED_S - 1)] == ["layer plaintext"]
    return made


def follow(made: Alerts, now_s: float, *more: Topology, **changes: object) -> None:
    plan = settled_plans([*encrypting(**changes), *more])[ONE]
    made.follow(plan, watched(plan), 7, now_s)


def see(made: Alerts, now_s: float, destination: Address = THEIRS, point: Point = OUT) -> None:
    made.saw(point, packet(destination), destination, now_s)


def due(made: Alerts, now_s: float, *, settled: bool = True) -> list[DriftEvent]:
    return list(made.due(now_s, settled=settled))


def raised(made: Alerts, now_s: float = SETTLED_S) -> DriftEvent:
    see(made, now_s)
    [event] = due(made, now_s + 2 * HOLD_S)
    return event


def test_a_packet_is_an_alert_with_its_tuple() -> None:
    """Raised within a second, with the packet, the unit, and the far node among what it comes from."""
    event = raised(alerts())
    assert 2 * HOLD_S < 1
    assert (event.layer, event.key, event.state, event.count, event.generation) == (
        "plaintext",
        "out pods 10.200.1.10 10.200.2.10",
        "raised",
        1,
        7,
    )
    assert event.packet == replace(packet(), at_point=1)
    assert (event.wanted, event.found) == ("encrypted", "udp 10.200.1.10:4000 -> 10.200.2.10:53 left in clear by eth0")
    assert (event.unit, event.because) == ("mesh/rome", ("Cluster/rome/rome", "Endpoint/rome/roam", "Node/rome/worker-2"))


def test_it_goes_on_and_is_resolved_after_quiet() -> None:
    """While more come, their number is told now and then; each flow between the two counts; a while after the last it is over."""
    made = alerts()
    first = raised(made)
    for step in range(1, 9):
        made.saw(OUT, packet(port=step), THEIRS, SETTLED_S + step)
        made.counted({OUT: 10, IN: 0}, SETTLED_S + step)
        events = due(made, SETTLED_S + step + 0.01)
        assert [(event.state, event.count) for event in events] == ([("changed", 1 + step)] if step == 6 else []), step
    assert TELL_S < 6
    made.counted({OUT: 0}, SETTLED_S + 9)
    assert [event.state for event in due(made, SETTLED_S + 8 + QUIET_S - 0.1)] == ["changed"]
    [event] = due(made, SETTLED_S + 8 + QUIET_S)
    assert (event.state, event.key, event.count, event.first_seen_s) == ("resolved", first.key, 9, first.first_seen_s)
    assert event.packet is not None
    assert event.packet.at_point == 80
    assert made.open == 0


def test_it_stays_open_while_more_are_counted_than_shown() -> None:
    """Of many packets few are shown, and none of these may be of a flow that is still there."""
    made = alerts()
    raised(made)
    for step in range(1, 30):
        made.counted({OUT: 1000}, SETTLED_S + step)
        assert due(made, SETTLED_S + step) == []
    assert [event.state for event in due(made, SETTLED_S + 29 + QUIET_S)] == ["resolved"]


def test_what_is_held_back_is_pending_until_it_is_told_or_excused() -> None:
    """Whoever looks whether the kernel is at the plan does so then, and for no alert that is open."""
    made = alerts()
    assert (made.pending, made.open) == (False, 0)
    see(made, SETTLED_S)
    assert (made.pending, made.open) == (True, 0)
    due(made, SETTLED_S + 1)
    assert (made.pending, made.open) == (False, 1)
    follow(made, SETTLED_S + 2)
    made.saw(IN, replace(packet(), direction="in"), THEIRS, SETTLED_S + 2)
    assert (made.pending, made.open) == (True, 1)
    due(made, SETTLED_S + 3, settled=False)
    assert (made.pending, made.open) == (False, 1)


def test_keys_that_have_just_come_are_no_leak() -> None:
    """Two nodes learn of each other's keys at different moments; what goes in clear between them then is no alert."""
    made = alerts()
    see(made, GRACE_S - 0.1)
    assert due(made, GRACE_S + 1) == []
    assert raised(made, GRACE_S).state == "raised"


def test_a_new_node_excuses_nobody_else() -> None:
    """With pods that come and go all the time, those that are there are watched all the same."""
    made = alerts()
    follow(made, SETTLED_S, pod("new", "worker-2", "10.200.1.99"))
    see(made, SETTLED_S + 1, Address("10.200.1.99"))
    see(made, SETTLED_S + 1)
    assert [event.key for event in due(made, SETTLED_S + 2)] == ["out pods 10.200.1.10 10.200.2.10"]


def test_what_stops_to_encrypt_in_the_same_moment_is_no_leak() -> None:
    """A far end sends in clear a moment before this host hears of it."""
    made = alerts()
    see(made, SETTLED_S)
    items = [replace(item, opt_out=True) if item.ref == "Node/rome/worker-2" else item for item in encrypting()]
    plan = settled_plans(items)[ONE]
    made.follow(plan, watched(plan), 8, SETTLED_S + 0.1)
    assert due(made, SETTLED_S + 2 * HOLD_S) == []
    see(made, SETTLED_S + 1)
    assert due(made, SETTLED_S + 2) == []


def test_a_kernel_on_its_way_is_excused_for_a_while() -> None:
    """Until it holds what is planned, and no longer than half a minute."""
    made = alerts()
    follow(made, SETTLED_S)
    see(made, SETTLED_S + 1)
    assert due(made, SETTLED_S + 2, settled=False) == []
    assert due(made, SETTLED_S + 3) == [], "what went before is excused for good"
    see(made, SETTLED_S + UNSETTLED_MAX_S)
    assert [event.state for event in due(made, SETTLED_S + UNSETTLED_MAX_S + 1, settled=False)] == ["raised"]


def test_another_form_of_the_plan_is_a_new_beginning() -> None:
    """As from native routing to the overlay, which hosts come to one after the other."""
    made = alerts()
    follow(made, SETTLED_S, routing="overlay")
    see(made, SETTLED_S + 1)
    assert due(made, SETTLED_S + 2) == []


def test_nodes_and_pods_that_do_not_encrypt_are_no_concern() -> None:
    """Who opted out, whoever it was before; the outside; and all of it where there is no encryption."""
    made = alerts()
    for destination in (OPTED_OUT, Address("192.0.2.1"), Address("172.18.0.12")):
        see(made, SETTLED_S, destination)
    assert due(made, SETTLED_S + 1) == []
    assert watched(settled_plans(encrypting(encryption="none", strict="off"))[ONE]) is None


@pytest.mark.parametrize("traffic", ["overlay", "nodes"])
def test_packets_of_nodes_are_known_by_the_nodes_address(traffic: str) -> None:
    """Also those of an overlay, which say of the inner packet whose they are."""
    made = alerts(routing="overlay", wireguard=WireguardSettings(nodes=True))
    point = PLAINTEXT["out", traffic]  # type: ignore[index]
    made.saw(point, packet(), Address("172.18.0.12"), SETTLED_S)
    made.saw(point, packet(OPTED_OUT), Address("172.18.0.13"), SETTLED_S)
    assert [event.key for event in due(made, SETTLED_S + 1)] == [f"out {traffic} 10.200.1.10 10.200.2.10"]


def test_where_nobody_shows_packets_their_number_is_an_alert() -> None:
    """Said as unknown, with the reason, once; what is counted meanwhile is raised without a packet, and resolved."""
    made = alerts()
    [event] = made.unheard("somebody else listens", SETTLED_S)
    assert (event.key, event.state, event.found) == ("layer plaintext", "unknown", "somebody else listens")
    assert list(made.unheard("somebody else listens still", SETTLED_S + 1)) == []
    made.counted({OUT: 3, IN: 0}, SETTLED_S + 1)
    [event] = due(made, SETTLED_S + 2)
    assert (event.key, event.state, event.count, event.packet, event.found) == ("out pods", "raised", 3, None, "3 packets left in clear")
    assert [event.state for event in due(made, SETTLED_S + 1 + QUIET_S)] == ["resolved"]
    assert [event.state for event in made.unheard("", SETTLED_S + 20)] == ["resolved"]


def test_a_cluster_whose_kernels_show_nothing_is_counted() -> None:
    """It is said to be so by the cluster, so that nobody is told; what is counted is raised all the same."""
    made = alerts(wireguard=WireguardSettings(audit_group=None))
    made.counted({OUT: 2}, SETTLED_S)
    assert [(event.key, event.state) for event in due(made, SETTLED_S + 1)] == [("out pods", "raised")]


def test_many_flows_are_a_bounded_number_of_alerts() -> None:
    """Those beyond the bound are one together."""
    made = alerts()
    for number in range(2000):
        destination = Address(f"10.200.2.{number % 256}")
        made.saw(OUT, replace(packet(destination), source=Address(f"10.200.1.{number // 8}")), destination, SETTLED_S)
    keys = [event.key for event in due(made, SETTLED_S + 1)]
    assert len(keys) == 201
    assert keys[-1] == "out pods others"


def test_a_packet_in_one_line() -> None:
    """Ports where there are any, IPv6 addresses in brackets then, and whether it was dropped."""
    six = replace(packet(Address("fd00::1")), direction="in", dropped=True)
    assert said(six) == "udp 10.200.1.10:4000 -> [fd00::1]:53 arrived in clear by eth0, dropped"
    assert said(replace(six, protocol="icmpv6", source_port=0, destination_port=0, link="", dropped=False)) == (
        "icmpv6 10.200.1.10 -> fd00::1 arrived in clear"
    )


def test_the_longest_prefix_is_the_far_end() -> None:
    """In both families; a pod that roams is one of its own."""
    found = watched(settled_plans(encrypting())[ONE])
    assert found is not None
    assert found.end("pods", THEIRS) == "10.200.2.0/24"
    assert found.end("pods", Address("fd00:200:0:2::10")) == "fd00:200:0:2::/64"
    assert found.end("pods", OPTED_OUT) is None
    assert found.end("pods", Address("10.200.1.77")) == "10.200.1.77/32"


def test_what_the_one_before_had_open_is_over_unless_it_is_raised_anew() -> None:
    """Said once, when as long a time has passed as resolves an alert, and not while nobody shows packets."""
    made = Alerts(*ONE)
    assert due(made, 1.0) == []
    follow(made, 2.0)
    see(made, 2.0 + GRACE_S)
    assert [event.state for event in due(made, 2.0 + GRACE_S + 2 * HOLD_S)] == ["raised"]
    list(made.unheard("somebody else listens", 9.0))
    assert [event.key for event in due(made, 2.0 + GRACE_S + QUIET_S)] == ["out pods 10.200.1.10 10.200.2.10"]
    [heard] = made.unheard("", 20.0)
    assert (heard.state, heard.first_seen_s) == ("resolved", 0.0), "not yet"
    assert due(made, 20.0 + GRACE_S + QUIET_S - 0.1) == []
    [over] = due(made, 20.0 + GRACE_S + QUIET_S)
    assert (over.key, over.state, over.first_seen_s, over.at_s) == ("layer plaintext", "resolved", 2.0, 35.0)
    assert due(made, 100.0) == []
