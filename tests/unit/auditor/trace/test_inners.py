"""Packets that were shown, joined to what was told of them: in order, bounded, and never by guessing."""

from __future__ import annotations

import struct

import pytest

from schemas.host_objects import TRACE_PREFIX, TRACE_TABLE
from services.auditor.trace.inners import Inners
from services.kernel.nflog import Shown
from services.kernel.nftrace import TraceEvent, TraceKind, TraceVerdict

UDP_HEAD = struct.pack(">HHHH", 5000, 6081, 0, 0)
NOW_S = 1000.0


def network(ident: int = 1, options: bytes = b"") -> bytes:
    """An IPv4 header."""
    addresses = bytes((172, 18, 0, 11)), bytes((172, 18, 0, 12))
    return struct.pack(">BBHHHBBH4s4s", 0x45 + len(options) // 4, 0, 100, ident, 0, 64, 17, 0, *addresses) + options


IPV6_NETWORK = b"\x60\0\0\0\0\x50\x11\x40" + bytes(32)


def told(
    data: bytes,
    header_bytes: int = 20,
    chain: str = "arriving",
    verdict: TraceVerdict = "accept",
    *,
    kind: TraceKind = "rule",
    table: str = TRACE_TABLE,
) -> TraceEvent:
    """What is told of a packet: 40 bytes from the network header on, and 20 behind it."""
    return TraceEvent(7, 1, table, chain, kind, verdict, network=data[:40], transport=data[header_bytes : header_bytes + 20])


def shown(data: bytes, *, leaves: bool = False, lost: int = 0, prefix: str = TRACE_PREFIX) -> Shown:
    return Shown(prefix, data, 0 if leaves else 2, 2 if leaves else 0, lost=lost)


def packet(last: bytes, ident: int = 1) -> bytes:
    """One that differs from others in what is told of it by its number, and behind that by its last bytes."""
    return network(ident) + UDP_HEAD + bytes(60) + last


@pytest.mark.parametrize(
    "data,header_bytes",
    [
        (packet(b"x"), 20),
        (network(options=bytes(8)) + UDP_HEAD + bytes(60), 28),
        (IPV6_NETWORK + UDP_HEAD + bytes(60), 40),
        (network() + UDP_HEAD + struct.pack(">BBHI", 2, 0, 0x6558, 77 << 8) + bytes(60), 20),
        (network() + UDP_HEAD[:6], 20),
    ],
    ids=["ipv4", "ipv4 options", "ipv6", "geneve options", "short"],
)
def test_a_packet_is_found_by_its_first_bytes(data: bytes, header_bytes: int) -> None:
    """Its network header as long as it is, and twenty bytes behind that; once."""
    inners = Inners()
    assert inners.show([shown(data)], NOW_S) == 0
    assert inners.of(told(data, header_bytes)) == data
    assert inners.of(told(data, header_bytes)) == b""


def test_packets_are_found_in_any_order_and_those_that_look_alike_in_theirs() -> None:
    """As two of one flow, whose outer headers are the same but for a number that IPv6 has not."""
    inners, many = Inners(), [packet(b"a"), packet(b"b"), packet(b"c", ident=2), packet(b"d")]
    inners.show(map(shown, many), NOW_S)
    assert [inners.of(told(many[place]))[-1:] for place in (2, 0, 0, 0, 0)] == [b"c", b"a", b"b", b"d", b""]


def test_a_packet_that_arrives_and_one_that_leaves_are_two() -> None:
    """On a host that hands packets on, both may look alike."""
    inners = Inners()
    inners.show([shown(packet(b"in")), shown(packet(b"out"), leaves=True)], NOW_S)
    assert inners.of(told(packet(b""), chain="leaving")).endswith(b"out")
    assert inners.of(told(packet(b""))).endswith(b"in")


@pytest.mark.parametrize(
    "event",
    [told(packet(b""), verdict="continue"), told(packet(b""), kind="policy"), told(packet(b""), table="somebodys"), told(b"")],
)
def test_what_was_not_shown_takes_no_packet(event: TraceEvent) -> None:
    """A rule that shows nothing goes on with its chain; a table of somebody else's is nobody's."""
    inners = Inners()
    inners.show([shown(packet(b"x")), shown(b"")], NOW_S)
    assert inners.of(event) == b""
    assert inners.of(told(packet(b""))) != b""


def test_what_others_show_is_nobodys() -> None:
    """Their rules may name our group."""
    inners = Inners()
    inners.show([shown(packet(b"x"), prefix="somebody's")], NOW_S)
    assert inners.of(told(packet(b""))) == b""


def test_after_a_loss_no_packet_is_joined_for_a_while() -> None:
    """The next one that looks alike is another packet; how many were lost is said."""
    inners = Inners()
    inners.show([shown(packet(b"before"))], NOW_S)
    assert inners.show([shown(packet(b"after"), lost=3), shown(packet(b"later"))], NOW_S) == 3
    assert inners.of(told(packet(b""))) == b""
    inners.show([shown(packet(b"soon"))], NOW_S + 0.5)
    assert inners.of(told(packet(b""))) == b""
    inners.show([shown(packet(b"sure"))], NOW_S + 2)
    assert inners.of(told(packet(b""))).endswith(b"sure")
    inners.lose(NOW_S + 2)
    assert inners.of(told(packet(b""))) == b""


def test_what_is_never_told_of_does_not_pile_up() -> None:
    """By number, the oldest go, and with them what looks like them; by age, too."""
    inners, many = Inners(), [packet(b"x", ident=number) for number in range(4100)]
    inners.show(map(shown, many), NOW_S)
    assert [bool(inners.of(told(many[place]))) for place in (0, 3, 4, 4099)] == [False, False, True, True]
    inners.show([], NOW_S + 10)
    assert inners.of(told(many[100])) == b""
