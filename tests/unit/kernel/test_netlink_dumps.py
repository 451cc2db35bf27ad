"""Dumps that a writer disturbed: asked for again, and no answer where no pass was undisturbed. The kernel's part is played by a socket."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Iterator
from threading import Thread

import pytest

from services.kernel.netlink import HEADER, NETLINK_ROUTE, Disturbed, NetlinkError, NetlinkSocket, message

KIND, ITEM, DONE = 26, 24, 3
MULTI, DISTURBED = 0x2, 0x12
TRIES = 8
STALE, FRESH = [b"old1", b"old2"], [b"new1", b"new2", b"new3"]
WAYS: dict[str, Callable[[NetlinkSocket], object]] = {
    "dump": lambda asked: asked.dump(KIND, b""),
    "dump_digested": lambda asked: asked.dump_digested(KIND, b"")[0],
    "digest": lambda asked: asked.digest(KIND, b""),
}


class Player:
    """Answers each request with the next pass: bodies, and at which message, the end being the last, it is said to be disturbed."""

    def __init__(self, *passes: tuple[list[bytes], int | None]) -> None:
        self.asked = 0
        near, self._far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.asking = NetlinkSocket(NETLINK_ROUTE)
        self.asking.close()
        self.asking._socket = near
        self._thread = Thread(target=self._play, args=(passes,))
        self._thread.start()

    def _play(self, passes: tuple[tuple[list[bytes], int | None], ...]) -> None:
        for bodies, disturbed in passes:
            request = self._far.recv(1 << 16)
            if not request:
                return
            self.asked += 1
            sequence = HEADER.unpack_from(request)[3]
            told = [*((ITEM, body) for body in bodies), (DONE, bytes(4))]
            for place, (kind, body) in enumerate(told):
                self._far.send(message(kind, body, DISTURBED if place == disturbed else MULTI, sequence))

    def close(self) -> None:
        self.asking.close()
        self._thread.join(5)
        self._far.close()


@pytest.fixture
def played() -> Iterator[Callable[..., Player]]:
    made: list[Player] = []

    def play(*passes: tuple[list[bytes], int | None]) -> Player:
        made.append(Player(*passes))
        return made[-1]

    yield play
    for player in made:
        player.close()


@pytest.mark.parametrize("at", [0, 1, 2], ids=["the first message", "the last object", "the end"])
@pytest.mark.parametrize("way", WAYS)
def test_a_disturbed_dump_is_asked_for_again(way: str, at: int, played: Callable[..., Player]) -> None:
    """Wherever the kernel says so, also with the end alone; nothing of the disturbed passes is in the answer."""
    player = played((STALE, at), (STALE, at), (FRESH, None))
    found = WAYS[way](player.asking)
    assert player.asked == 3
    assert found == WAYS[way](played((FRESH, None)).asking)


def test_an_undisturbed_dump_is_what_was_told(played: Callable[..., Player]) -> None:
    """In one pass."""
    player = played((FRESH, None))
    assert player.asking.dump(KIND, b"") == FRESH
    assert player.asked == 1


def test_a_stream_says_at_its_end_that_it_was_disturbed(played: Callable[..., Player]) -> None:
    """What was taken by then is of no one moment."""
    told = played((STALE, 1)).asking.stream(KIND, b"")
    assert [next(told), next(told)] == STALE
    with pytest.raises(Disturbed):
        next(told)


@pytest.mark.parametrize("way", WAYS)
def test_a_dump_that_is_disturbed_each_time_is_no_answer(way: str, played: Callable[..., Player]) -> None:
    """The error says how often it was tried; it is one that passes."""
    player = played(*[(STALE, 0)] * (TRIES + 1))
    with pytest.raises(NetlinkError, match=f"{TRIES} dumps in a row were disturbed") as caught:
        WAYS[way](player.asking)
    assert (caught.value.errno, player.asked) == (errno.EINTR, TRIES)
