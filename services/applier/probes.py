"""Probes through tunnels: ICMP echo requests from one end's address to the other's, which the far kernel answers by itself.

One ping socket (SOCK_DGRAM, IPPROTO_ICMP) for each family serves all tunnels: each packet says from which address and through which
link it goes. The kernel gives such a socket its own answers only, and takes one where net/ipv4/ping_group_range has the process's group,
for both families; plans of gateways see to that. An answer counts when it brings back what was sent lately.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
from collections.abc import Iterable, Iterator

from services.applier.health import Tunnel

_ROUNDS_KEPT = 6
"""An answer that comes later than this many rounds after its request is none."""
_TOKEN_BYTES = 8
_HEADER = struct.Struct("!BBHHH")
_ROUND = struct.Struct("!Q")
_ANSWER_BYTES = _HEADER.size + _TOKEN_BYTES + _ROUND.size
# linux/in.h and linux/in6.h: protocol, level, message that names address and link, echo request, echo reply.
_FAMILIES = {
    4: (socket.AF_INET, socket.IPPROTO_ICMP, socket.IPPROTO_IP, 8, 8, 0),
    6: (socket.AF_INET6, socket.IPPROTO_ICMPV6, socket.IPPROTO_IPV6, socket.IPV6_PKTINFO, 128, 129),
}


class Prober:
    """Sends one echo request per tunnel and round, and says whose answers came. Never blocks."""

    def __init__(self) -> None:
        self._sockets: dict[int, socket.socket] = {}
        self._token = os.urandom(_TOKEN_BYTES)
        self._round = 0

    def send(self, tunnels: Iterable[Tunnel]) -> bool:
        """Begin a round; False when this process may not send probes. What cannot be sent stays without an answer."""
        self._round += 1
        allowed = True
        for tunnel in tunnels:
            own = ipaddress.ip_address(tunnel.own)
            try:
                opened = self._socket(own.version)
            except PermissionError:
                allowed = False
                continue
            with contextlib.suppress(OSError):
                self._send(opened, tunnel, own)
        return allowed

    def answered(self, tunnels: Iterable[Tunnel]) -> set[str]:
        """Links of these tunnels through which an answer has come since the last call."""
        links = {str(tunnel.far): tunnel.link for tunnel in tunnels}
        return {links[source] for source in self._sources() if source in links}

    def close(self) -> None:
        for opened in self._sockets.values():
            opened.close()

    def _send(self, opened: socket.socket, tunnel: Tunnel, own: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
        _, _, level, named, request, _ = _FAMILIES[own.version]
        index = struct.pack("=i", socket.if_nametoindex(tunnel.link))
        place = index + own.packed + bytes(4) if own.version == 4 else own.packed + index  # noqa: PLR2004 - the family
        packet = _HEADER.pack(request, 0, 0, 0, self._round & 0xFFFF) + self._token + _ROUND.pack(self._round)
        opened.sendmsg([packet], [(level, named, place)], 0, (str(tunnel.far), 0))

    def _sources(self) -> Iterator[str]:
        for version, opened in self._sockets.items():
            reply = _FAMILIES[version][-1]
            with contextlib.suppress(BlockingIOError):
                while True:
                    try:
                        packet, source = opened.recvfrom(_ANSWER_BYTES + 1)
                    except BlockingIOError:
                        raise
                    except OSError:  # an ICMP error that came back for one of the requests
                        continue
                    if len(packet) == _ANSWER_BYTES and packet[0] == reply and self._is_recent(packet[_HEADER.size :]):
                        yield source[0]

    def _is_recent(self, data: bytes) -> bool:
        (sent_in,) = _ROUND.unpack_from(data, _TOKEN_BYTES)
        return data.startswith(self._token) and self._round - _ROUNDS_KEPT <= sent_in <= self._round

    def _socket(self, version: int) -> socket.socket:
        if version not in self._sockets:
            family, protocol, *_ = _FAMILIES[version]
            opened = socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, protocol)
            opened.setblocking(False)  # noqa: FBT003 - positional in the standard library
            self._sockets[version] = opened
        return self._sockets[version]
