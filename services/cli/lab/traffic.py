"""Steady traffic between two pods, to see what a change does to flows that are running."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

from schemas.values import SOCKET_FAMILY, Address
from services.cli.lab import namespaces

_FLOWS = 8
_INTERVAL_S = 0.01
"""Between two rounds of one datagram per flow."""
_LAST_S = 1.5
_SEQUENCE_BYTES = 8


class Traffic:
    """The count of some UDP flows. Each datagram has a number of its own, and the server sends it back."""

    def __init__(self) -> None:
        self.sent = 0
        self._open: set[int] = set()
        self._answered = asyncio.Event()

    @property
    def lost(self) -> int:
        """Datagrams without an answer: on the way while traffic runs, lost when it has ended."""
        return len(self._open)

    def next(self) -> bytes:
        """A datagram to send."""
        self.sent += 1
        self._open.add(self.sent)
        return self.sent.to_bytes(_SEQUENCE_BYTES, "big")

    def answered(self, datagram: bytes) -> None:
        self._open.discard(int.from_bytes(datagram, "big"))
        self._answered.set()

    async def settle(self) -> None:
        """Wait until everything is answered, or no answer has come for a while."""
        with contextlib.suppress(TimeoutError):
            while self._open:
                self._answered.clear()
                async with asyncio.timeout(_LAST_S):
                    await self._answered.wait()


@contextlib.asynccontextmanager
async def running(client: str, server: str, address: str, flows: int = _FLOWS) -> AsyncIterator[Traffic]:
    """Traffic of some UDP flows from the namespace `client` to `server`, dialled as `address`, while the body runs.

    Counted to the end when it is left.
    """
    loop = asyncio.get_running_loop()
    traffic = Traffic()
    with contextlib.ExitStack() as stack:
        family = SOCKET_FAMILY[Address(address).family]

        def opened(namespace: str) -> socket.socket:
            return stack.enter_context(namespaces.bound_socket(namespace, family, socket.SOCK_DGRAM, ("", 0)))

        echo = opened(server)
        port = echo.getsockname()[1]
        loop.add_reader(echo, _echo, echo)
        stack.callback(loop.remove_reader, echo)
        clients = [opened(client) for _ in range(flows)]
        for each in clients:
            loop.add_reader(each, _take, each, traffic)
            stack.callback(loop.remove_reader, each)
        sending = asyncio.ensure_future(_send(clients, (address, port), traffic))
        try:
            yield traffic
        finally:
            sending.cancel()
            await traffic.settle()


async def _send(clients: list[socket.socket], to: tuple[str, int], traffic: Traffic) -> None:
    while True:
        for client in clients:
            # What cannot even be sent stays without an answer, and so counts as lost.
            with contextlib.suppress(OSError):
                client.sendto(traffic.next(), to)
        await asyncio.sleep(_INTERVAL_S)


def _echo(opened: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            datagram, source = opened.recvfrom(64)
            opened.sendto(datagram, source)


def _take(opened: socket.socket, traffic: Traffic) -> None:
    with contextlib.suppress(OSError):
        while True:
            traffic.answered(opened.recv(64))
