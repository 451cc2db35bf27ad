"""Packet headers as far as a trace shows them."""

from __future__ import annotations

import pytest

from services.kernel import headers

_NETWORK = bytes.fromhex("45000021ff71400040113d587f0000017f000001")
_TRANSPORT = bytes.fromhex("e5581e61000dfe2068656c6c6f")


def test_the_packet_behind_a_trace() -> None:
    """Addresses, ports, length and identification of an IPv4 datagram."""
    item = headers.packet(_NETWORK, _TRANSPORT)
    assert item is not None
    assert (item.source, item.destination, item.protocol, item.length, item.ident) == ("127.0.0.1", "127.0.0.1", headers.UDP, 33, 0xFF71)
    assert (item.source_port, item.destination_port, item.fragment) == (58712, 7777, False)


def test_icmp_echo_in_both_families() -> None:
    """Type, code, identifier and sequence number."""
    six = bytes.fromhex("6000000000083a40fd000061000000000000000000000005fd000062000000000000000000000007")
    four = bytes.fromhex("4500001c000100003f01000001020304050607 08".replace(" ", ""))
    for network, kind in ((six, 128), (four, 8)):
        item = headers.packet(network, bytes((kind, 0, 0, 0, 0, 7, 0, 9)))
        assert item is not None
        assert (item.kind, item.code, item.echo_id, item.echo_sequence) == (kind, 0, 7, 9)
    unreachable = headers.packet(four, bytes((3, 4, 0, 0, 0, 7, 5, 120)))
    assert unreachable is not None
    assert (unreachable.kind, unreachable.code, unreachable.echo_id) == (3, 4, None)


@pytest.mark.parametrize("offset, ports", [("2000", (58712, 7777)), ("2001", (0, 0)), ("0010", (0, 0)), ("4000", (58712, 7777))])
def test_only_the_first_fragment_has_ports(offset: str, ports: tuple[int, int]) -> None:
    """The bytes after a later fragment's network header are no transport header."""
    network = _NETWORK[:6] + bytes.fromhex(offset) + _NETWORK[8:]
    item = headers.packet(network, _TRANSPORT)
    assert item is not None
    assert (item.source_port, item.destination_port) == ports
    assert item.fragment == (offset != "4000")


def test_ipv6_behind_an_extension_header_has_no_protocol() -> None:
    """Forty bytes do not reach the transport's number: unknown, not the extension's."""
    network = bytes.fromhex("6000000000102c40fd000061000000000000000000000005fd000062000000000000000000000007")
    item = headers.packet(network, _TRANSPORT)
    assert item is not None
    assert (item.protocol, item.fragment, item.source_port) == (None, True, 0)


@pytest.mark.parametrize("network", [b"", b"\x45", _NETWORK[:19], b"\x60" + bytes(38), b"\x00" * 40])
def test_what_is_no_packet(network: bytes) -> None:
    """Too short, or of no known version."""
    assert headers.packet(network, _TRANSPORT) is None


def test_wireguard_messages_are_told_by_type_index_and_counter() -> None:
    """The 20 transport bytes of a data packet hold receiver and counter, both little-endian; they are the same on both hosts."""
    udp = bytes.fromhex("ca9fca9f0080 0000".replace(" ", ""))
    data = _outer(udp + bytes.fromhex("0400000078563412 2a000000".replace(" ", "")))
    initiation = _outer(udp + bytes.fromhex("0100000078563412"))
    assert headers.wireguard(data) == headers.WireguardHeader("data", 0x12345678, 0x2A)
    assert headers.wireguard(initiation) == headers.WireguardHeader("initiation", 0x12345678)
    assert headers.wireguard(_outer(udp + b"\x04\x00\x00\x01" + bytes(8))) is None
    assert headers.wireguard(_outer(udp + b"\x05\x00\x00\x00" + bytes(8))) is None
    assert headers.wireguard(_outer(udp)) is None


def test_overlay_headers_give_the_network() -> None:
    """VXLAN and Geneve hold the VNI at the same place."""
    udp = bytes.fromhex("c00012b500800000")
    assert headers.tunnel(_outer(udp + bytes.fromhex("0800000000002a00")), "VXLAN") == headers.TunnelHeader("VXLAN", 42)
    assert headers.tunnel(_outer(udp + bytes.fromhex("0000655800002a00")), "GENEVE") == headers.TunnelHeader("GENEVE", 42)
    assert headers.tunnel(_outer(udp + bytes.fromhex("0000000000002a00")), "VXLAN") is None
    assert headers.tunnel(_outer(udp + b"\x08"), "VXLAN") is None


def _outer(transport: bytes) -> headers.Packet:
    item = headers.packet(_NETWORK, transport)
    assert item is not None
    return item


def test_what_is_cut_off_is_not_there() -> None:
    """Anywhere in the transport's header and behind it: no field is made of less than its bytes, and nothing goes wrong."""
    udp = bytes.fromhex("ca9fca9f00800000")
    data, vxlan = udp + bytes.fromhex("04000000785634122a000000"), udp + bytes.fromhex("0800000000002a00")
    for length in range(len(data) + 1):
        item = _outer(data[:length])
        assert (item.source_port, item.destination_port) == ((0xCA9F, 0xCA9F) if length >= 4 else (0, 0))
        found, counter = headers.wireguard(item), 0x2A if length == 20 else None
        assert found == (headers.WireguardHeader("data", 0x12345678, counter) if length >= 16 else None)
        assert headers.tunnel(_outer(vxlan[:length]), "VXLAN") == (headers.TunnelHeader("VXLAN", 42) if length >= 16 else None)


def test_tcp_has_flags_and_no_other_protocol() -> None:
    """They are behind the ports and both numbers."""
    transport = bytes.fromhex("04d20050000000010000000250120000")
    found = {number: headers.packet(_NETWORK[:9] + bytes((number,)) + _NETWORK[10:], transport) for number in (6, 17, 132, 47)}
    assert {number: item.flags for number, item in found.items() if item} == {6: 0x12, 17: 0, 132: 0, 47: 0}
    assert {number: item.source_port for number, item in found.items() if item} == {6: 1234, 17: 1234, 132: 1234, 47: 0}
    short = headers.packet(_NETWORK[:9] + b"\x06" + _NETWORK[10:], transport[:13])
    assert short is not None
    assert (short.destination_port, short.flags) == (80, 0)
