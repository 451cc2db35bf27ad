"""Streams of numbered datagrams between places of a mesh: what of them came, while something else happens.

wireguard-go and these tests are processes: on a busy machine they may not be given a processor for a while, until the kernel drops what no
longer fits into their sockets. The kernel counts that, per namespace, and it is told apart from what is lost because of what hosts hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from schemas.values import Address
from services.cli.lab import namespaces
from tests.speakers import opened

PORT = 7100
EVERY_S = 0.01
PATIENCE_S = 120.0


class Talk:
    """Datagrams that somebody sends to somebody else, numbered; which of them came."""

    def __init__(self, here: str, there: str, to: Address, port: int) -> None:
        self.name = f"{here} → {there} {to} port {port}"
        self.sent = 0
        self.came: set[int] = set()
        self._to = to

    def send(self, at: socket.socket, port: int) -> None:
        at.sendto(self.sent.to_bytes(8, "big"), (self._to, port))
        self.sent += 1

    @property
    def lost(self) -> list[int]:
        return sorted(set(range(self.sent)) - self.came)


class Talks(list[Talk]):
    """All streams of a while, and how many datagrams in all namespaces found no room in a socket meanwhile; that is known at the end."""

    overrun = 0

    @property
    def lost(self) -> dict[str, list[int]]:
        """What did not come, by stream."""
        return {talk.name: talk.lost for talk in self if talk.lost}


def overrun(namespace: str) -> int:
    """Datagrams that found no room in a socket of a namespace until now, of both families."""
    return namespaces.inside(namespace, _refused)


def _refused() -> int:
    folder = Path("/proc/thread-self/net")
    names, counts = (line.split() for line in (folder / "snmp").read_text(encoding="ascii").splitlines() if line.startswith("Udp:"))
    of_ipv6 = dict(line.split() for line in (folder / "snmp6").read_text(encoding="ascii").splitlines())
    return int(counts[names.index("RcvbufErrors")]) + int(of_ipv6["Udp6RcvbufErrors"])


@contextlib.asynccontextmanager
async def talking(pairs: Sequence[tuple[str, str, Address]], *, answered: bool = False) -> AsyncIterator[Talks]:
    """Each of these, who speaks, who hears and what is dialled, is a stream of its own for the time of the body.

    Where they are `answered`, each datagram is sent back, from what was dialled, and has come when it is back.

    They have done so before, and at the end all that they said had time to come.
    """
    talks, loop = Talks(Talk(*pair, PORT + index) for index, pair in enumerate(pairs)), asyncio.get_running_loop()
    with contextlib.ExitStack() as stack:
        ends = []
        for index, (talk, (here, there, to)) in enumerate(zip(talks, pairs, strict=True)):
            family = to.family
            sender, receiver = (
                stack.enter_context(opened(here, family)),
                stack.enter_context(opened(there, family, port=PORT + index, address=to if answered else "")),
            )
            last = sender if answered else receiver
            loop.add_reader(last, lambda talk=talk, last=last: talk.came.add(int.from_bytes(last.recv(64), "big")))
            stack.callback(loop.remove_reader, last)
            if answered:
                loop.add_reader(receiver, lambda receiver=receiver: receiver.sendto(*receiver.recvfrom(64)))
                stack.callback(loop.remove_reader, receiver)
            ends.append((talk, sender, PORT + index))
        await until(lambda: all(talk.came for talk in talks), lambda: [talk.send(sender, port) for talk, sender, port in ends])
        for talk in talks:
            talk.sent = 0
            talk.came.clear()
        before = sum(map(overrun, namespaces.existing()))

        async def send() -> None:
            while True:
                for talk, sender, port in ends:
                    talk.send(sender, port)
                await asyncio.sleep(EVERY_S)

        task = asyncio.create_task(send())
        try:
            yield talks
        finally:
            task.cancel()
        with contextlib.suppress(TimeoutError):
            await until(lambda: not any(talk.lost for talk in talks), lambda: None, 3.0)
        talks.overrun = sum(map(overrun, namespaces.existing())) - before


async def until(condition: Callable[[], bool], work: Callable[[], object], patience_s: float = PATIENCE_S) -> None:
    """Do some work again and again until a condition holds; TimeoutError when it does not in time."""
    async with asyncio.timeout(patience_s):
        while True:
            if condition():
                return
            work()
            await asyncio.sleep(0.1)


def assert_none_lost(talks: Talks) -> None:
    """Nothing that was sent is missing, but for what found no room in a socket; says how much that was."""
    lost = sum(map(len, talks.lost.values()))
    assert lost <= talks.overrun, f"lost, and {talks.overrun} for want of a processor: {talks.lost}"
    more = f" (and {lost} for want of a processor)" if lost else ""
    print(f"rotation: sent={sum(talk.sent for talk in talks)} lost=0{more}")  # noqa: T201 - a figure of the suite


def blocking(ports: str) -> str:
    """A table of somebody else that lets nothing to or from these UDP ports through."""
    chain = "type filter hook {} priority 0; udp dport {} drop"
    return f"table inet blocked {{ chain in {{ {chain.format('input', ports)}; }}; chain out {{ {chain.format('output', ports)}; }}; }}"
