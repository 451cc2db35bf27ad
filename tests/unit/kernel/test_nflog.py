"""What NFLOG tells, decoded: messages, packets, and what an overlay's packets carry. Cut off anywhere, nothing is guessed."""

from __future__ import annotations

import struct

import pytest

from services.kernel.headers import OverlayProtocol
from services.kernel.netlink import attribute, message
from services.kernel.nflog import Shown, inner_of, packet_of, shown

_PACKET = 4 << 8
_INNER = struct.pack(">BBHHHBBH4s4s", 0x45, 0, 48, 7, 0, 64, 17, 0, bytes((10, 200, 1, 10)), bytes((10, 200, 2, 10))) + struct.pack(
    ">HHHH", 4000, 53, 28, 0
)
_FRAME = bytes(12) + b"\x08\x00" + _INNER
_VXLAN = struct.pack(">B3xI", 8, 77 << 8)
_GENEVE = struct.pack(">BBHI", 2, 0, 0x6558, 77 << 8) + bytes(8)  # with 8 bytes of options


def outer(overlay: bytes, port: int, options: bytes = b"") -> bytes:
    """An IPv4 packet to an overlay's port."""
    carried = struct.pack(">HHHH", 5000, port, 8 + len(overlay), 0) + overlay
    head = struct.pack(
        ">BBHHHBBH4s4s",
        0x45 + len(options) // 4,
        0,
        20 + len(options) + len(carried),
        1,
        0,
        64,
        17,
        0,
        bytes((172, 18, 0, 11)),
        bytes((172, 18, 0, 12)),
    )
    return head + options + carried


def test_a_message_is_a_packet_with_what_its_rule_says() -> None:
    """Prefix, links, mark, the payload and the number in the group; what is not there is 0."""
    told = attribute(10, b"meshmark in pods\0") + attribute(9, b"data") + attribute(4, (3).to_bytes(4, "big"))
    told += attribute(2, (0x4D2).to_bytes(4, "big")) + attribute(12, (9).to_bytes(4, "big"))
    data = message(_PACKET, bytes(4) + told, 0) + message(_PACKET, bytes(4) + attribute(9, b"x"), 0) + message(3, bytes(4), 0)
    assert list(shown(data)) == [(Shown("meshmark in pods", b"data", 3, 0, 0x4D2), 9), (Shown("", b"x"), None)]


@pytest.mark.parametrize("protocol,overlay,port", [("VXLAN", _VXLAN, 4789), ("GENEVE", _GENEVE, 6081)])
def test_what_an_overlays_packet_carries(protocol: OverlayProtocol, overlay: bytes, port: int) -> None:
    """The network's number and the inner packet, also behind options of either header."""
    for options in (b"", bytes(8)):
        packet = packet_of(outer(overlay + _FRAME, port, options))
        assert packet is not None
        assert (packet.source, packet.destination_port) == ("172.18.0.11", port)
        carried = inner_of(packet, protocol)
        assert carried is not None
        header, inner = carried
        assert (header.vni, inner.source, inner.destination, inner.destination_port) == (77, "10.200.1.10", "10.200.2.10", 53)


def test_what_is_cut_off_or_something_else_is_not_guessed() -> None:
    """No packet at all, no transport, an overlay that carries ARP."""
    whole = outer(_VXLAN + _FRAME, 4789)
    for length in range(len(whole)):
        packet = packet_of(whole[:length])
        assert (packet is None) == (length < 20)
        inner = inner_of(packet, "VXLAN") if packet is not None else None
        assert (inner is None) == (length < 20 + 8 + 8 + 14 + 20)
    assert packet_of(b"\x00" * 40) is None
    packet = packet_of(outer(_VXLAN + bytes(12) + b"\x08\x06" + bytes(28), 4789))
    assert packet is not None
    assert inner_of(packet, "VXLAN") is None
    packet = packet_of(outer(_GENEVE.replace(b"\x65\x58", b"\x08\x00") + _FRAME, 6081))  # an IPv4 packet follows, and no frame
    assert packet is not None
    assert inner_of(packet, "GENEVE") is None


@pytest.mark.parametrize("offset,ports", [(0, (4000, 53)), (170, (0, 0))])
def test_an_ipv6_fragment_says_what_it_is_of(offset: int, ports: tuple[int, int]) -> None:
    """Its protocol and number, and of the first one the ports; cut off before that, nothing."""
    data = b"\x60\0\0\0\0\x10\x2c\x40" + bytes(32) + struct.pack(">BBHI", 17, 0, offset << 3 | 1, 99) + struct.pack(">HHHH", 4000, 53, 8, 0)
    found, less = packet_of(data), packet_of(data[:47])
    assert found is not None
    assert (found.fragment, found.protocol, found.ident) == (True, 17, 99)
    assert (found.source_port, found.destination_port) == ports
    assert less is not None
    assert (less.fragment, less.protocol, less.ident) == (True, None, 0)


def test_an_overlay_carries_either_family() -> None:
    """As the frame says."""
    six = b"\x60\0\0\0\0\x08\x11\x40" + bytes(15) + b"\x01" + bytes(15) + b"\x02" + struct.pack(">HHHH", 4000, 53, 8, 0)
    packet = packet_of(outer(_VXLAN + bytes(12) + b"\x86\xdd" + six, 4789))
    assert packet is not None
    carried = inner_of(packet, "VXLAN")
    assert carried is not None
    assert (carried[1].source, carried[1].destination, carried[1].length, carried[1].destination_port) == ("::1", "::2", 48, 53)
