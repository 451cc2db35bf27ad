"""UDP flows between two pods of a lab, each known by its client's port: what of each came back, and which of a gateway's links it takes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping

from services.cli.lab import namespaces
from services.cli.lab.captures import packet_socket

FLOWS = 60
INTERVAL_S = 0.1
"""Between two datagrams of a flow."""
_NUMBER_BYTES = 4
_PACKET_OUTGOING = 4
LAST_S = 2.0
"""What has not come back after this is lost."""
_FIRST_PORT = 40000


class Flows:
    """What was sent (its time on the monotonic clock, by number) and which numbers came back, by port."""

    def __init__(self, ports: Collection[int]) -> None:
        self.sent_s: Mapping[int, list[float]] = {port: [] for port in ports}
        self.back: Mapping[int, set[int]] = {port: set() for port in ports}

    def lost(self, port: int, since_s: float, until_s: float) -> int:
        """How many datagrams that were sent within these times did not come back."""
        back = self.back[port]
        return sum(since_s <= at_s < until_s and number not in back for number, at_s in enumerate(self.sent_s[port]))

    def away_s(self, port: int, since_s: float) -> tuple[float, float] | None:
        """When the first datagram since then was sent that did not come back, and the first one after it that did; None for no such two."""
        back, first_s = self.back[port], 0.0
        for number, at_s in enumerate(self.sent_s[port]):
            if at_s < since_s or (not first_s and number in back):
                continue
            if not first_s:
                first_s = at_s
            elif number in back:
                return first_s, at_s
        return None


@contextlib.asynccontextmanager
async def running(client: str, server: str, address: str) -> AsyncIterator[Flows]:
    """Flows from the namespace `client` to `server`, dialled as `address`, while the body runs."""
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as stack:

        def opened(namespace: str, port: int) -> socket.socket:
            return stack.enter_context(namespaces.bound_socket(namespace, socket.AF_INET, socket.SOCK_DGRAM, ("", port)))

        echo = opened(server, 0)
        _read(loop, stack, echo, echo.sendto)
        clients = {port: opened(client, port) for port in range(_FIRST_PORT, _FIRST_PORT + FLOWS)}
        flows = Flows(clients)
        for port, near in clients.items():
            _read(loop, stack, near, lambda data, _, port=port: flows.back[port].add(int.from_bytes(data, "big")))  # type: ignore[misc]
        sending = asyncio.create_task(_send(clients, (address, echo.getsockname()[1]), flows), name="flows")
        try:
            yield flows
        finally:
            sending.cancel()


async def _send(clients: Mapping[int, socket.socket], to: tuple[str, int], flows: Flows) -> None:
    while True:
        for port, opened in clients.items():
            times = flows.sent_s[port]
            # What cannot even be sent does not come back.
            with contextlib.suppress(OSError):
                opened.sendto(len(times).to_bytes(_NUMBER_BYTES, "big"), to)
            times.append(time.monotonic())
        await asyncio.sleep(INTERVAL_S)


def _read(
    loop: asyncio.AbstractEventLoop, stack: contextlib.ExitStack, opened: socket.socket, take: Callable[[bytes, tuple[str, int]], object]
) -> None:
    def drain() -> None:
        with contextlib.suppress(OSError):
            while True:
                take(*opened.recvfrom(64))

    loop.add_reader(opened, drain)
    stack.callback(loop.remove_reader, opened)


class Places:
    """Looks which link of a gateway each flow takes, out and back."""

    def __init__(self, gateway: str, links: Collection[str]) -> None:
        self._sockets = {link: packet_socket(gateway, link) for link in links}

    async def look(self, flows: Flows, duration_s: float = 0.5) -> dict[tuple[int, bool], str]:
        """The link by (port, outgoing) where it was the only one; a flow without an entry was not seen, or on several links."""
        for _ in self._drain():
            pass
        await asyncio.sleep(duration_s)
        seen: dict[tuple[int, bool], set[str]] = {}
        for link, outgoing, packet in self._drain():
            port = int.from_bytes(packet[20:22] if outgoing else packet[22:24], "big")
            if port in flows.sent_s:
                seen.setdefault((port, outgoing), set()).add(link)
        return {key: next(iter(links)) for key, links in seen.items() if len(links) == 1}

    def close(self) -> None:
        for opened in self._sockets.values():
            opened.close()

    def _drain(self) -> Iterator[tuple[str, bool, bytes]]:
        for link, opened in self._sockets.items():
            with contextlib.suppress(BlockingIOError):
                while True:
                    packet, (_, _, kind, *_) = opened.recvfrom(64)
                    yield link, kind == _PACKET_OUTGOING, packet
