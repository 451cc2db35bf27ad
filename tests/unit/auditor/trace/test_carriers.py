"""Which outer packets may carry a packet, by their lengths: whole, padded, filling the MTU, and in fragments."""

from __future__ import annotations

import pytest

from schemas.flow import IP, EventType, FlowEvent
from services.auditor.trace.carriers import carrying, may_carry

IPV4, IPV6 = IP("10.0.0.1", "10.0.0.2", "IPv4"), IP("fd00::1", "fd00::2", "IPv6")
OVERHEAD = {"wireguard": 20 + 8 + 32, "overlay": 20 + 30}


def sized(length: int, ip: IP = IPV4) -> FlowEvent:
    return FlowEvent(
        time="2026-01-01T00:00:00Z", uuid="", verdict="FORWARDED", node_name="n", event_type=EventType(4), ip=ip, length=length
    )


def outer(kind: str, carried: int) -> FlowEvent:
    return sized(carried + OVERHEAD[kind])


@pytest.mark.parametrize("length,carried", [(84, 96), (96, 96), (1420, 1420), (1413, 1420), (1411, 1420 - 4)])
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
