"""What is inside overlay packets, in clear or on their way into encryption: as the auditor tells it, and packet by packet."""

from __future__ import annotations

import pytest

from schemas.flow import EventType, FlowEvent
from schemas.host_objects import TRACE_GROUP
from schemas.values import Family
from services.auditor.trace import watch
from services.auditor.trace.verdicts import courses
from services.cli.lab import namespaces
from services.cli.lab.layout import host_namespace
from services.kernel.nflog import group_socket
from tests.hosts import NO_GENEVE, has_geneve
from tests.integration.mesh.audited import Auditor
from tests.trace.flows import ALL, seen, traced
from tests.trace.site import Rome
from tests.trace.test_points import points
from tests.tracing import ONE, PODS, TWO, Case, drawn, echo, recording

pytestmark = pytest.mark.privileged

IN_CLEAR = {"routing": "overlay", "encryption": "none", "strict": "off"}
CASES = {
    "vxlan": Case(IN_CLEAR),
    "vxlan-ipv6": Case(IN_CLEAR, family=6),
    "vxlan-over-ipv6": Case(IN_CLEAR, outer=6),
    "vxlan-encrypted": ALL["overlay"],
    "vxlan-encrypted-over-ipv6": ALL["overlay-over-ipv6"],
    "geneve": Case({**IN_CLEAR, "overlay": "geneve"}),
    "geneve-ipv6": Case({**IN_CLEAR, "overlay": "geneve"}, family=6),
    "geneve-over-ipv6": Case({**IN_CLEAR, "overlay": "geneve"}, outer=6),
}
MANY = 40
"""Echo requests, and as many answers: so many that none is left out by a limit."""


@pytest.mark.parametrize("name", CASES)
def test_each_of_many_packets_that_look_alike_from_outside_is_found_by_what_is_inside(rome: Rome, name: str) -> None:
    """Of one flow and one length, on both nodes, both ways: no two are mistaken for each other."""
    if name.startswith("geneve") and not has_geneve("mm.underlay"):
        pytest.skip(NO_GENEVE)
    wanted, found = traced(rome, CASES[name], MANY)
    trails = seen(rome, wanted, found)
    assert len(trails) == 2 * MANY
    for trail in trails:
        inside = [link for link in trail.outer if link.event.tunnel]
        assert [(link.corr.method, link.corr.confidence) for link in inside] == [("headers", "high")] * 2
        assert {link.event.node_name for link in inside} == {"rome/worker-1", "rome/worker-2"}
        assert {link.event.corr and link.event.corr.group for link in inside} == {trail.corr.group}


@pytest.mark.parametrize("outer", [4, 6])
def test_a_dropped_overlay_packet_is_the_one_that_was_inside(rome: Rome, outer: Family) -> None:
    """On a node that drops what would leave in clear: by which rule, and of which packet."""
    case = Case({"routing": "overlay", "strict": "enforce"}, broken=(ONE, (1000,)), outer=outer, answered=False)
    wanted, found = traced(rome, case)
    (trail,) = seen(rome, wanted, found)
    assert points(trail) == (("FROM_ENDPOINT", "TO_OVERLAY"),)
    (drop,) = (link.event for link in trail.outer)
    assert drop.nft is not None
    assert (drop.nft.family, drop.nft.table, drop.nft.chain) == ("inet", "meshmark.mesh.rome", "clear_out_overlay")
    assert (drop.drop_reason_desc, drop.event_type) == ("UNENCRYPTED_TRAFFIC", EventType(1, 195))
    assert (drop.ip and drop.ip.destination, drop.outer and drop.outer.ip_version) == (PODS["stock"][0], f"IPv{outer}")
    assert [(course.verdict, course.packets, course.dropped) for course in courses([trail])] == [("unknown", 1, 1)]
    assert "DROPPED (ICMPv4 EchoRequest) in VXLAN 77 " in drawn([trail], wanted)


def told(auditor: Auditor) -> list[FlowEvent]:
    """Overlay packets that it has told of."""
    return [message.flow for message in list(auditor.flows) if message.flow is not None and message.flow.tunnel is not None]


@pytest.mark.parametrize("family", [4, 6])
def test_an_auditor_tells_what_is_inside_as_soon_as_it_is_the_one_to_hear_it(
    rome: Rome, family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While somebody else listens to the group, it tells of outer packets alone."""
    monkeypatch.setattr(watch, "_LISTEN_AGAIN_S", 0.1)
    rome.turn(**IN_CLEAR)
    rome.forget_traces()
    wanted, to = rome.session("shop", "stock"), PODS["stock"][0 if family == 4 else 1]
    somebody = namespaces.inside(host_namespace(*ONE), lambda: group_socket(TRACE_GROUP))
    auditor = Auditor(rome.mesh, ONE)
    try:
        with somebody, recording({TWO: rome.hosts[TWO]}) as recorder:
            rome.hosts[ONE].trace(wanted.hosts[ONE])
            assert echo("rome.pod.shop", to, recorder) == 1
            auditor.until(lambda: len(told(auditor)) == 2)
        assert [(event.ip, event.summary) for event in told(auditor)] == [(None, "VXLAN 77")] * 2
        with recording({TWO: rome.hosts[TWO]}) as recorder:

            def tells_more() -> bool:
                assert echo("rome.pod.shop", to, recorder) == 1
                return any(event.ip is not None for event in told(auditor))

            auditor.until(tells_more)
    finally:
        auditor.close()
    shown = next(event for event in told(auditor) if event.ip is not None)
    assert shown.ip is not None
    assert shown.tunnel is not None
    assert {shown.ip.source, shown.ip.destination} == {PODS["shop"][0 if family == 4 else 1], to}
    assert {shown.tunnel.ip.source, shown.tunnel.ip.destination} == {"172.18.0.11", "172.18.0.12"}
    assert shown.outer_length == shown.length + 50
