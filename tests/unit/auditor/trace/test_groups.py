"""What holds events of one packet together: the same on all hosts, another one for every other packet that can be told apart."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from schemas.values import Address
from services.auditor.trace.groups import inner_group, is_piece, outer_group, piece_group, pieces_of
from services.kernel.headers import ICMP, TCP, UDP, Packet, WireguardHeader

HERE, THERE = Address("10.0.0.1"), Address("10.0.0.2")
HERE_6, THERE_6 = Address("fd00::1"), Address("fd00::2")
DATAGRAM = Packet(HERE, THERE, UDP, 60, 7, source_port=4000, destination_port=53)
SEGMENT = replace(DATAGRAM, protocol=TCP, transport=bytes(range(20)))
ECHO = Packet(HERE, THERE, ICMP, 84, 7, kind=8, code=0, echo_id=3, echo_sequence=1)
DATAGRAM_6, ECHO_6 = (replace(each, source=HERE_6, destination=THERE_6, ident=0) for each in (DATAGRAM, ECHO))


@pytest.mark.parametrize("item", [DATAGRAM, SEGMENT, ECHO, DATAGRAM_6, ECHO_6])
def test_a_packet_is_the_same_one_wherever_its_addresses_are_translated(item: Packet) -> None:
    translated = replace(item, source=item.destination, destination=item.source)
    assert inner_group(translated) == inner_group(item)


@pytest.mark.parametrize(
    "one, other",
    [
        (DATAGRAM, replace(DATAGRAM, ident=8)),
        (DATAGRAM, replace(DATAGRAM, length=61)),
        (DATAGRAM, replace(DATAGRAM, source_port=4001)),
        (DATAGRAM, replace(DATAGRAM, destination_port=54)),
        (DATAGRAM, replace(DATAGRAM, protocol=TCP, transport=bytes(20))),
        (SEGMENT, replace(SEGMENT, transport=bytes(20))),
        *((SEGMENT, replace(SEGMENT, transport=bytes((*range(at), 255, *range(at + 1, 20))))) for at in (4, 7, 8, 11, 12)),
        (ECHO, replace(ECHO, echo_sequence=2)),
        (ECHO, replace(ECHO, echo_id=4)),
        (ECHO, replace(ECHO, kind=0)),
        (ECHO_6, replace(ECHO_6, echo_sequence=2)),
        (DATAGRAM_6, replace(DATAGRAM_6, length=61)),
    ],
)
def test_what_differs_in_its_headers_is_another_packet(one: Packet, other: Packet) -> None:
    """TCP's sequence numbers and the length of its header are among them."""
    assert inner_group(one).group != inner_group(other).group


def test_checksums_and_windows_are_not_among_them() -> None:
    """They are written anew where something is translated; nor is what of IPv6 has no meaning."""
    assert inner_group(replace(SEGMENT, transport=SEGMENT.transport[:14] + bytes(6))) == inner_group(SEGMENT)
    assert inner_group(replace(DATAGRAM, transport=b"payload")) == inner_group(DATAGRAM)
    assert inner_group(replace(DATAGRAM_6, ident=9)) == inner_group(DATAGRAM_6)


@pytest.mark.parametrize(
    "item, confidence",
    [
        (DATAGRAM, "high"),
        (replace(DATAGRAM, ident=0), "inferred"),  # as of one that may not be fragmented
        (DATAGRAM_6, "inferred"),
        (ECHO, "high"),
        (replace(ECHO, ident=0), "high"),
        (ECHO_6, "high"),
    ],
)
def test_without_a_number_of_its_own_a_packet_is_inferred(item: Packet, confidence: str) -> None:
    found = inner_group(item)
    assert (found.method, found.confidence) == ("headers", confidence)


def test_wireguards_packets_are_named_by_receiver_and_counter() -> None:
    """The same bytes on both hosts, and in a session no two alike; handshakes have no counter."""
    data = WireguardHeader("data", 0x1234, 7)
    others = [replace(data, counter=8), replace(data, counter=0), replace(data, index=0x1235), WireguardHeader("initiation", 0x1234)]
    assert len({outer_group(each).group for each in (data, *others)}) == 5
    assert (outer_group(data).method, outer_group(data).confidence) == ("wireguard-counter", "exact")


def test_fragments_of_a_packet_have_its_number() -> None:
    """By which the whole one is found, where it has one itself; with IPv6 only they have."""
    first, last = (replace(DATAGRAM, length=length, fragment=True, source_port=port) for length, port in ((1400, 4000), (700, 0)))
    assert piece_group(first) == piece_group(last)
    assert piece_group(first).confidence == "high"
    assert piece_group(first).group != piece_group(replace(first, ident=8)).group
    assert pieces_of(inner_group(DATAGRAM)) == piece_group(first).group
    assert (is_piece(piece_group(first)), is_piece(inner_group(DATAGRAM))) == (True, False)
    assert pieces_of(inner_group(DATAGRAM_6)) is None
    assert pieces_of(inner_group(replace(DATAGRAM, ident=0))) is None
    assert piece_group(replace(first, ident=0)).confidence == "inferred"
