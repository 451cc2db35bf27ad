"""What real kernels (6.18, with wireguard-go) told of an echo request and its answer, as points, outer packets and verdicts.

``recorded`` has their messages, host by host, without those that say nothing new; ``golden`` what a reviewer has read. The same flows are
traced live in ``tests/trace/test_points.py``, with the same transcripts.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from schemas.encryption import PLAINTEXT
from schemas.flow import EventType, FlowEvent
from services.auditor.trace.verdicts import packet_verdict
from services.cli.trace.ends import Session, session
from services.cli.trace.forms import compact
from services.planner.compile import compile_host
from services.planner.core import Core, settle_rollouts
from tests.topologies import encrypting, settled_plans, tell
from tests.tracing import CASES, ONE, Recorded, drawn, flows

HERE = Path(__file__).parent


def told(name: str, *, shown: bool = True) -> tuple[Session, list[FlowEvent]]:
    """The traced flow of a case, and all events of its hosts; without `shown` as if the kernels had shown no packets."""
    core = Core()
    tell(core, encrypting(**CASES[name].cluster))
    settle_rollouts(core.state, core.allocations)
    wanted = session(core.state, core.allocations, ("rome/shop", f"rome/{CASES[name].to}"), None, 60)
    found: list[FlowEvent] = []
    for host in wanted.hosts:
        recorded = Recorded.read(HERE / "recorded" / f"{name}.{host.name}.trace")
        recorded = recorded if shown else replace(recorded, shown=[])
        found += flows(compile_host(core.state, core.allocations, host), recorded)
    return wanted, found


@pytest.mark.parametrize("name", CASES)
def test_the_transcript_is_what_was_read(name: str) -> None:
    """Points in order, translations, marks, the outer packets and how they were found, and each direction's verdict."""
    wanted, found = told(name)
    text = drawn(wanted.trails(found), wanted)
    assert text == (HERE / "golden" / f"{name}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "name,node,points",
    [
        ("native", "rome/worker-1", ["FROM_ENDPOINT", "TO_STACK", "TO_CRYPTO", "TO_NETWORK"]),
        ("native", "rome/worker-2", ["FROM_NETWORK", "FROM_CRYPTO", "TO_ENDPOINT"]),
        ("overlay", "rome/worker-1", ["FROM_ENDPOINT", "TO_OVERLAY", "TO_CRYPTO", "TO_NETWORK"]),
        ("overlay", "rome/worker-2", ["FROM_NETWORK", "FROM_CRYPTO", "FROM_OVERLAY", "TO_ENDPOINT"]),
        ("overlay-in-clear", "rome/worker-1", ["FROM_ENDPOINT", "TO_OVERLAY", "TO_NETWORK"]),
        ("opted-out", "rome/worker-1", ["FROM_ENDPOINT", "TO_STACK", "TO_NETWORK"]),
    ],
)
def test_points_come_in_ciliums_order(name: str, node: str, points: list[str]) -> None:
    """Of the request, on the host that sends it and on the one that gets it."""
    wanted, found = told(name)
    request = wanted.trails(found)[0]
    assert [event.trace_observation_point for event in request.at(node)] == points


def test_a_connection_is_told_with_each_packet_of_it() -> None:
    """One on each host, whose answers are replies; WireGuard's own packets are of none that the flow has."""
    _, found = told("native")
    for node in ("rome/worker-1", "rome/worker-2"):
        here = [event for event in found if event.node_name == node]
        assert all((event.ct is None) == bool(event.wg and event.wg.msg_type) for event in here)
        known = [(event.ct, event.trace_reason) for event in here if event.ct]
        assert len({connection.id for connection, _ in known}) == 1
        assert {(connection.state, connection.direction, reason) for connection, reason in known} == {
            ("new", "original", "NEW"),
            ("established", "reply", "REPLY"),
        }


def test_the_strict_flag_is_on_outer_packets_alone() -> None:
    """As in Cilium: at the uplink, both ways, on both hosts."""
    _, found = told("native")
    flagged = {(event.node_name, event.trace_observation_point) for event in found if event.ip and event.ip.encrypted}
    assert flagged == {(f"rome/worker-{number}", point) for number in (1, 2) for point in ("TO_NETWORK", "FROM_NETWORK")}
    assert all(event.wg and event.wg.peer for event in found if event.ip and event.ip.encrypted)


def test_what_is_inside_an_overlay_packet_is_told_as_hubble_does() -> None:
    """The inner packet's addresses, protocol and length are the flow's, the outer packet's those of the tunnel."""
    _, found = told("overlay")
    wrapped = [event for event in found if event.tunnel]
    assert len(wrapped) == 4
    for event in wrapped:
        assert event.ip is not None
        assert event.l4 is not None
        assert event.tunnel is not None
        assert {event.ip.source, event.ip.destination} == {"10.200.1.10", "10.200.2.10"}
        assert (event.l4.icmp4 is not None, event.length, event.summary.startswith("ICMPv4 Echo")) == (True, 84, True)
        assert {event.tunnel.ip.source, event.tunnel.ip.destination} == {"172.18.0.11", "172.18.0.12"}
        assert (event.tunnel.vni, event.tunnel.length, event.outer_length) == (77, 84 + 50, 84 + 50)


@pytest.mark.parametrize("name,verdict", [("overlay", "encrypted"), ("overlay-in-clear", "plaintext")])
def test_what_was_not_shown_is_not_made_up(name: str, verdict: str) -> None:
    """It has the outer headers and no addresses of its own; which packet it was is inferred, and the verdict is the same."""
    wanted, found = told(name, shown=False)
    wrapped = [event for event in found if event.tunnel]
    assert wrapped
    assert all(event.ip is None and event.l4 is None and event.tunnel and event.tunnel.vni == 77 for event in wrapped)
    seen = wanted.trails(found)
    assert [packet_verdict(trail) for trail in seen] == [verdict, verdict]
    joined = {link.corr.method for trail in seen for link in trail.outer if link.event.tunnel}
    assert joined == {"order and length"}


@pytest.mark.parametrize(
    "comment, said",
    [
        ("", ""),
        ("block guests", ": block guests"),
        (PLAINTEXT["out", "pods"].comment("left in clear, strict enforce"), ": left in clear, strict enforce"),
    ],
)
def test_a_drop_names_its_rule(comment: str, said: str) -> None:
    """By where it is, what its comment says to people, Cilium's reason, and the topology objects behind it."""
    plan = settled_plans(encrypting(**CASES["dropped"].cluster))[ONE]
    recorded = Recorded.read(HERE / "recorded" / "dropped.worker-1.trace")
    (drop,) = (event for event in flows(plan, recorded, comment) if event.verdict == "DROPPED")
    assert drop.nft is not None
    wanted, where = told("dropped")[0], "dropped by inet meshmark.mesh.rome clear_out_pods"
    assert f"{where} handle {drop.nft.handle}{said} because" in compact(drop, None, wanted)
    assert f"{where} policy{said} because" in compact(replace(drop, nft=replace(drop.nft, handle=0)), None, wanted)
    assert (drop.drop_reason_desc, drop.event_type) == ("UNENCRYPTED_TRAFFIC", EventType(1, 195))
    assert (drop.nft.comment, drop.because) == (comment, ("Cluster/rome/rome", "Node/rome/worker-1"))
