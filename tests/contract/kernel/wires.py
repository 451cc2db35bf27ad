"""Links of a namespace with somebody at their far ends, who sends packets in and sees where they leave."""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from typing import NamedTuple

import pytest

from tests.contract.kernel.firewall_host import Host


class Seen(NamedTuple):
    """A UDP packet as it left: by which link, from and to which address and port."""

    link: str
    source: tuple[str, int]
    destination: tuple[str, int]


class Wires:
    """A veth pair for each of these links, whose far end is here. The host forwards, and takes packets from anywhere."""

    def __init__(self, host: Host, links: Sequence[str]) -> None:
        self._links = links
        host.run("sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.default.disable_ipv6=1", "net.ipv4.conf.all.rp_filter=0")
        host.run("sysctl", "-qw", "net.ipv4.conf.default.rp_filter=0")
        for number, link in enumerate(links):
            host.run("ip", *f"link add {link} address 02:00:00:00:01:0{number} type veth peer name far{number}".split())
            host.run("ip", "link", "set", link, "up")
            host.run("ip", "link", "set", f"far{number}", "up")
        self._far = {link: host.call(self._opened, f"far{number}") for number, link in enumerate(links)}

    @staticmethod
    def _opened(name: str) -> socket.socket:
        opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)  # with a protocol it would hear all links until it is bound to one
        opened.bind((name, 0x0800))
        opened.settimeout(2)
        return opened

    def passes(self, link: str, source: tuple[str, int], destination: tuple[str, int]) -> Seen:
        """A packet that comes in by a link, as it leaves."""
        number = self._links.index(link)
        ethernet = bytes.fromhex(f"02000000010{number}02000000020{number}0800")
        self._far[link].send(ethernet + _packet(source, destination))
        for _ in range(200):
            for way, far in self._far.items():
                far.settimeout(0.01)
                try:
                    raw, (_, _, direction, *_) = far.recvfrom(2048)
                except TimeoutError:
                    continue
                if direction != socket.PACKET_OUTGOING:
                    return _seen(way, raw[14:])
        pytest.fail(f"nothing left for {destination}")

    def close(self) -> None:
        for far in self._far.values():
            far.close()


def _packet(source: tuple[str, int], destination: tuple[str, int]) -> bytes:
    udp = struct.pack("!HHHH", source[1], destination[1], 8, 0)
    addresses = socket.inet_aton(source[0]) + socket.inet_aton(destination[0])
    head = struct.pack("!BBHHHBBH", 0x45, 0, 28, 0, 0, 64, socket.IPPROTO_UDP, 0) + addresses
    total = sum(struct.unpack("!10H", head))
    total = (total & 0xFFFF) + (total >> 16)
    checksum = ~((total & 0xFFFF) + (total >> 16)) & 0xFFFF
    return head[:10] + struct.pack("!H", checksum) + head[12:] + udp


def _seen(link: str, raw: bytes) -> Seen:
    ports = struct.unpack("!HH", raw[20:24])
    return Seen(link, (socket.inet_ntoa(raw[12:16]), ports[0]), (socket.inet_ntoa(raw[16:20]), ports[1]))
