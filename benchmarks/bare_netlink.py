"""The kernel's own time, as floors: messages that were made beforehand, sent and received without being looked at.

All of it in the calling thread's network namespace.
"""

from __future__ import annotations

import resource
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from services.kernel.namespace import enter_new_network
from services.kernel.netlink import ACK, DUMP, HEADER, REQUEST, message
from services.runtime.errors import Permanent

T = TypeVar("T")

_SNDBUFFORCE, _RCVBUFFORCE = 32, 33
_BUFFER_BYTES = 64 << 20
_RECEIVE_BYTES = 1 << 20
_ERROR, _DONE = 2, 3


class BareNetlink:
    """A socket with room for everything at once."""

    def __init__(self, protocol: int) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol)
        self._socket.bind((0, 0))
        for option in (_SNDBUFFORCE, _RCVBUFFORCE):
            self._socket.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)

    def send(self, train: bytes) -> None:
        """Send messages of which the last is acknowledged, and wait for that. Permanent when any was refused."""
        self._socket.send(train)
        answer = self._socket.recv(_RECEIVE_BYTES)
        if HEADER.unpack_from(answer)[1] != _ERROR or answer[HEADER.size : HEADER.size + 4] != bytes(4):
            msg = "the kernel refused a message that was made beforehand"
            raise Permanent(msg)

    def dump(self, kind: int, body: bytes) -> int:
        """Receive a dump whole; how many bytes it had."""
        self._socket.send(message(kind, body, REQUEST | DUMP, 1))
        size = 0
        while True:
            data = self._socket.recv(_RECEIVE_BYTES)
            size += len(data)
            if _has_ended(data):
                return size

    def close(self) -> None:
        self._socket.close()


def train(kind: int, bodies: Sequence[bytes], flags: int) -> bytes:
    """Messages of one kind in one piece; the last asks for an acknowledgement."""
    parts = [message(kind, body, REQUEST | flags, number) for number, body in enumerate(bodies[:-1], 1)]
    return b"".join([*parts, message(kind, bodies[-1], REQUEST | ACK | flags, len(bodies))])


def spent_ms(work: Callable[[], object]) -> float:
    """Milliseconds of processor time that this thread and the programs that it ran took, the kernel's share included.

    Netlink does its work within the system calls, so nothing is missing; and what else runs on the machine is not counted.
    """
    before = time.thread_time(), resource.getrusage(resource.RUSAGE_CHILDREN)
    work()
    after = time.thread_time(), resource.getrusage(resource.RUSAGE_CHILDREN)
    children_s = after[1].ru_utime + after[1].ru_stime - before[1].ru_utime - before[1].ru_stime
    return (after[0] - before[0] + children_s) * 1e3


def in_new_network(work: Callable[[], T]) -> T:
    """The result of `work` in a thread with a network namespace of its own, which dies with it."""

    def inside() -> T:
        enter_new_network()
        return work()

    with ThreadPoolExecutor(1, thread_name_prefix="bench-network") as thread:
        return thread.submit(inside).result()


def _has_ended(data: bytes) -> bool:
    """Whether the last message of a datagram is the dump's end. It has 20 bytes; what looks like it in other places is not at the end."""
    length, kind, *_ = HEADER.unpack_from(data, len(data) - 20) if len(data) >= 20 else (0, 0)
    return (length, kind) == (20, _DONE)
