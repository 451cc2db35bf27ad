"""Passages as flow events: the packet in Hubble's words, the connection as the kernel tells of it, and what dropped it."""

from __future__ import annotations

import itertools

import pytest
from msgspec.structs import replace

from schemas.flow import Connection, EventType, FlowEvent, Icmp, Layer4, NftPlace, Ports
from schemas.values import Address
from services.auditor.trace.flows import Flows
from services.auditor.trace.passages import Passage, Sighting
from services.auditor.trace.view import view_of
from services.kernel.headers import ICMP, ICMPV6, SCTP, TCP, UDP, Packet
from services.kernel.nftrace import CtState, TraceEvent, Tracked
from tests.topologies import encrypting, settled_plans
from tests.tracing import ONE

NEAR, FAR = Address("10.200.1.10"), Address("10.200.2.10")
DATAGRAM = Packet(NEAR, FAR, UDP, 60, 7, source_port=4000, destination_port=53)
LINKS = {1: "eth0", 2: "me.0", 3: "veth7"}


def sighting(item: Packet, chain: str = "arriving") -> Sighting:
    return Sighting(chain, 1.0, item, 3, 0, 0)


def events(passage: Passage, comment: str = "never") -> list[FlowEvent]:
    plan, numbers = settled_plans(encrypting())[ONE], itertools.count(1)
    made = Flows(view_of(plan), plan.because, lambda index: LINKS.get(index, ""), lambda: f"{next(numbers)}", lambda _: comment)
    return list(made.of(passage))


def event(item: Packet, tracked: Tracked | None = None) -> FlowEvent:
    (found,) = events(Passage(7, 1.0, [sighting(item)], tracked))
    return found


@pytest.mark.parametrize(
    "item, l4, summary",
    [
        (DATAGRAM, Layer4(udp=Ports(4000, 53)), "UDP"),
        (replace(DATAGRAM, protocol=SCTP), Layer4(sctp=Ports(4000, 53)), "SCTP"),
        (
            replace(DATAGRAM, protocol=TCP, flags=0b0001_0010),
            Layer4(tcp=Ports(4000, 53, {"SYN": True, "ACK": True})),
            "TCP Flags: SYN, ACK",
        ),
        (
            replace(DATAGRAM, protocol=TCP, flags=0b1110_1101),
            Layer4(tcp=Ports(4000, 53, dict.fromkeys(("FIN", "RST", "PSH", "URG", "ECE", "CWR"), True))),
            "TCP Flags: FIN, RST, PSH, URG, ECE, CWR",
        ),
        (replace(DATAGRAM, protocol=ICMP, kind=8, code=0), Layer4(icmp4=Icmp(8, 0)), "ICMPv4 EchoRequest"),
        (replace(DATAGRAM, protocol=ICMP, kind=3, code=4), Layer4(icmp4=Icmp(3, 4)), "ICMPv4 type 3"),
        (replace(DATAGRAM, protocol=ICMPV6, kind=129, code=0), Layer4(icmp6=Icmp(129, 0)), "ICMPv6 EchoReply"),
        (replace(DATAGRAM, protocol=ICMP), Layer4(icmp4=Icmp(None, None)), "ICMPv4"),
        (replace(DATAGRAM, protocol=47), Layer4(), "protocol 47"),
        (replace(DATAGRAM, protocol=None), Layer4(), "unknown protocol"),
    ],
)
def test_a_packet_is_told_in_hubbles_words(item: Packet, l4: Layer4, summary: str) -> None:
    """Ports, flags that are set, ICMP's type and code; of what is not known nothing is made up."""
    found = event(item)
    assert (found.l4, found.summary) == (l4, summary)


@pytest.mark.parametrize(
    "state, is_reply, reason",
    [
        ("new", False, "NEW"),
        ("established", False, "ESTABLISHED"),
        ("established", True, "REPLY"),
        ("related", False, "RELATED"),
        ("related", True, "RELATED"),
        ("invalid", False, "TRACE_REASON_UNKNOWN"),
        (None, False, "TRACE_REASON_UNKNOWN"),
    ],
)
def test_the_connection_is_the_kernels(state: CtState | None, is_reply: bool, reason: str) -> None:
    """Its number, state, status and direction, and Hubble's reason by these."""
    found = event(DATAGRAM, Tracked(99, state, is_reply, 8))
    assert (found.trace_reason, found.is_reply) == (reason, is_reply)
    assert found.ct == Connection(99, state or "", "reply" if is_reply else "original", 8)


def test_a_packet_without_a_connection_has_none() -> None:
    found = event(DATAGRAM)
    assert (found.ct, found.is_reply, found.trace_reason) == (None, None, "TRACE_REASON_UNKNOWN")


@pytest.mark.parametrize("handle, comment", [(9, "no guests"), (0, "")])
def test_a_drop_is_a_rules_or_a_policys(handle: int, comment: str) -> None:
    """A policy has no comment that could be asked for."""
    drop = TraceEvent(7, 2, "filter", "forward", "rule" if handle else "policy", "drop", handle)
    first = sighting(DATAGRAM)
    point, dropped = events(Passage(7, 1.0, [first], None, drop, first), "no guests")
    assert (point.verdict, point.trace_observation_point) == ("FORWARDED", "FROM_ENDPOINT")
    assert (dropped.verdict, dropped.drop_reason_desc, dropped.event_type) == ("DROPPED", "POLICY_DENIED", EventType(1, 133))
    assert dropped.nft == NftPlace(7, "ip", "filter", "forward", handle, comment, "drop")
