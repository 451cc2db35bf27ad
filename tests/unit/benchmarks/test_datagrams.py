"""Datagrams that a benchmark sends are ones that a host would take."""

from __future__ import annotations

import struct

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.datagrams import datagram, ends_of, in_vxlan, internet_checksum

_ADDRESSES = st.ip_addresses(v=4).map(str)
_PORTS = st.tuples(st.integers(0, 65535), st.integers(0, 65535))


def test_a_known_header_has_its_known_checksum():
    """The example of many textbooks: 4500 0073 0000 4000 4011 .... c0a8 0001 c0a8 00c7."""
    assert internet_checksum(bytes.fromhex("450000730000400040110000c0a80001c0a800c7")) == 0xB861


@given(_ADDRESSES, _ADDRESSES, _PORTS, st.binary(max_size=64))
def test_both_checksums_are_right_and_lengths_are_what_follows(source, destination, ports, payload):
    packet = datagram(source, destination, ports, payload)
    assert ends_of(packet) == (source, destination)
    assert struct.unpack("!H", packet[2:4]) == (len(packet),)
    assert internet_checksum(packet[:20]) == 0
    udp = packet[20:]
    assert struct.unpack("!HHH", udp[:6]) == (*ports, len(udp))
    assert internet_checksum(packet[12:20] + struct.pack("!BBH", 0, 17, len(udp)) + udp) == 0


def test_a_checksum_that_comes_to_zero_is_written_as_ones():
    """Zero would say that there is none (RFC 768)."""
    bare = datagram("10.0.0.1", "10.0.0.2", (1, 2), b"\0\0")
    (checksum,) = struct.unpack("!H", bare[26:28])
    packet = datagram("10.0.0.1", "10.0.0.2", (1, 2), struct.pack("!H", checksum))
    assert packet[26:28] == b"\xff\xff"


def test_vxlan_is_a_valid_vni_and_a_frame():
    """RFC 7348: flag I, 24 bits of VNI, and an Ethernet frame whose destination comes first."""
    packet = datagram("10.0.0.1", "10.0.0.2", (1, 2), b"")
    found = in_vxlan(packet, 0xABCDEF, ("02:00:00:00:00:01", "02:00:00:00:00:02"))
    assert found == bytes.fromhex("08000000abcdef000200000000020200000000010800") + packet
