"""Which outer packets may carry a packet, by their lengths: whole, padded, filling the MTU, and in fragments."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from schemas.flow import IP, Correlation, EventType, FlowEvent, Layer4, Tunnel
from schemas.values import Address
from services.auditor.trace.carriers import Carriers, carrying, holding, may_carry
from services.auditor.trace.groups import inner_group, is_piece, piece_group, pieces_of
from services.kernel.headers import UDP, Packet

IPV4, IPV6 = IP("10.0.0.1", "10.0.0.2", "IPv4"), IP("fd00::1", "fd00::2", "IPv6")
OVERHEAD = {"wireguard": 20 + 8 + 32, "overlay": 20 + 30}


def sized(length: int, ip: IP = IPV4) -> FlowEvent:
    return FlowEvent(
        time="2026-01-01T00:00:00Z", uuid="", verdict="FORWARDED", node_name="n", event_type=EventType(4), ip=ip, length=length
    )


def outer(kind: str, carried: int) -> FlowEvent:
    return sized(carried + OVERHEAD[kind])


@pytest.mark.parametrize("length,carried", [(84, 96), (96, 96), (81, 96), (97, 112), (1420, 1420), (1413, 1420), (1411, 1420 - 4)])
def test_wireguard_pads_but_not_beyond_its_mtu(length: int, carried: int) -> None:
    """To a multiple of 16; a device of 1420 has room for 12 bytes after the last one."""
    assert may_carry("wireguard", outer("wireguard", carried), length)


@pytest.mark.parametrize("length,carried", [(84, 80), (84, 112), (97, 96)])
def test_another_length_is_another_packet(length: int, carried: int) -> None:
    assert not may_carry("wireguard", outer("wireguard", carried), length)


def test_an_overlay_does_not_pad() -> None:
    assert may_carry("overlay", outer("overlay", 84), 84)
    assert not may_carry("overlay", outer("overlay", 96), 84)


@pytest.mark.parametrize(
    "ip,length,carried",
    [
        (IPV4, 3028, [1420, 1420, 240]),  # 1400 and 1400 of 3008 bytes, and 208 with a header, padded
        (IPV6, 3048, [1420, 1420, 320]),  # 1368 twice, padded to what the device takes, then 272 with headers
        (IPV4, 2820, [1420, 1420]),  # the last one is as large as any
    ],
)
def test_fragments_are_found_by_the_first_ones_length(ip: IP, length: int, carried: list[int]) -> None:
    """Also with another packet in between, and one after them is not theirs."""
    pieces = [outer("wireguard", size) for size in carried]
    near = [outer("wireguard", 96), pieces[0], outer("wireguard", 128), *pieces[1:], outer("wireguard", carried[-1])]
    assert list(map(id, carrying("wireguard", sized(length, ip), near))) == list(map(id, pieces))


def test_fragments_in_an_overlay_have_exactly_their_length() -> None:
    pieces = [outer("overlay", size) for size in (1364, 1364, 340)]
    assert carrying("overlay", sized(3028), pieces) == tuple(pieces)
    assert carrying("overlay", sized(3028), [*pieces[:2], outer("overlay", 348)]) == ()


def test_where_a_fragment_is_missing_nothing_is_said() -> None:
    """The others may be somebody else's. Nor is a small packet taken for the first of many."""
    assert carrying("wireguard", sized(3028), [outer("wireguard", 1420), outer("wireguard", 240)]) == ()
    assert carrying("wireguard", sized(300), [outer("wireguard", 96), outer("wireguard", 96), outer("wireguard", 96)]) == ()


def test_an_outer_packet_is_one_packets_on_each_host() -> None:
    """By its number it is found on other hosts, not on its own, and once."""
    sent, came, others = (
        replace(outer("wireguard", 96), node_name=node, uuid=node, corr=Correlation(number, "wireguard-counter", "exact"))
        for node, number in (("one", "7"), ("two", "7"), ("three", "8"))
    )
    there = Carriers("wireguard", [sent, came, others])
    assert there.same(sent) == [came]
    assert there.same(sent) == []
    assert there.same(others) == []


HERE, THERE = Address("10.0.0.1"), Address("10.0.0.2")
HERE_6, THERE_6 = Address("fd00::1"), Address("fd00::2")


def datagram(length: int, ident: int = 7, *, ipv6: bool = False, fragment: bool = False) -> Packet:
    """One of a flow whose packets differ in nothing else; with IPv6 only fragments have a number."""
    ends = (HERE_6, THERE_6) if ipv6 else (HERE, THERE)
    return Packet(*ends, UDP, length, ident if fragment or not ipv6 else 0, fragment, 7000, 7000)


def seen(item: Packet) -> FlowEvent:
    """The packet as itself."""
    return replace(sized(item.length, IP(item.source, item.destination, f"IPv{item.family}")), corr=inner_group(item))  # type: ignore[arg-type]


def opened(item: Packet) -> FlowEvent:
    """The packet in an overlay's, as far as the kernel showed it."""
    corr = piece_group(item) if item.fragment else inner_group(item)
    return replace(seen(item), corr=corr, tunnel=Tunnel("VXLAN", IPV4, Layer4(), 77, item.length + OVERHEAD["overlay"]))


@pytest.mark.parametrize("ipv6", [False, True])
def test_a_packet_that_is_seen_inside_is_found_by_that(ipv6: bool) -> None:
    """Not the neighbour of the same length; with IPv6 the first of those that are alike."""
    wanted, others = datagram(84, ipv6=ipv6), [replace(datagram(84, 6, ipv6=ipv6), source_port=1), datagram(96, ipv6=ipv6)]
    turned = replace(wanted, source=wanted.destination, destination=wanted.source)
    near = list(map(opened, [*others, turned, wanted, wanted]))
    found = holding(seen(wanted), near)
    assert found is not None
    assert (found.events[0] is near[3], len(found.events), found.by_headers, found.is_named) == (True, 1, True, True)
    assert holding(seen(wanted), near[:3]) is None
    assert holding(seen(wanted), []) is None


@pytest.mark.parametrize("ipv6,sizes", [(False, (1364, 1364, 340)), (True, (1360, 1360, 412))])
def test_fragments_that_are_seen_inside_are_found_by_their_number(ipv6: bool, sizes: tuple[int, ...]) -> None:
    """Those of another packet are between them. With IPv6 the number holds them together, and their lengths say whose they are."""
    whole = datagram(3028, ipv6=ipv6)
    mine, others = ([datagram(size, ident, ipv6=ipv6, fragment=True) for size in sizes] for ident in (7, 8))
    mixed = [item for pair in zip(others, mine, strict=True) for item in pair]
    near = [replace(opened(item), uuid=str(place)) for place, item in enumerate(mixed)]
    found = holding(seen(whole), near[1:])
    assert found is not None
    assert [event.uuid for event in found.events] == ["1", "3", "5"]
    assert (found.by_headers, found.is_named, found.in_pieces) == (True, not ipv6, True)
    assert holding(seen(whole), near[1:5]) is None


def test_fragments_of_another_packet_are_not_taken() -> None:
    """Of the same lengths, and alone."""
    others = [opened(datagram(size, 8, fragment=True)) for size in (1364, 1364, 340)]
    assert holding(seen(datagram(3028)), others) is None


def test_what_fragments_have_alike_follows_from_the_packet_with_ipv4() -> None:
    """A group of somebody else's making says nothing."""
    whole, part = inner_group(datagram(3028)), piece_group(datagram(1364, fragment=True))
    assert pieces_of(whole) == part.group
    assert (is_piece(whole), is_piece(part)) == (False, True)
    assert pieces_of(inner_group(datagram(3028, ipv6=True))) is None
    assert pieces_of(replace(whole, group="a")) is None
