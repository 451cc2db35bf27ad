"""Many messages of one kind as one piece of bytes. Pure.

Where messages differ in a few bytes alone, as routes by one next hop do in their prefixes, all of them are made at once: the first one as
often as there are messages, then each of those bytes, and of the sequence numbers, in all messages together.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate

HEADER = struct.Struct("=IHHII")
"""Of a netlink message: length, kind, flags, sequence number, the sender's port."""
FLAGS_AT = 6
_SEQUENCE_AT, _SEQUENCE_BYTES = 8, 4


class Mixed:
    """Bodies of any kind."""

    __slots__ = ("bodies",)

    def __init__(self, bodies: list[bytes]) -> None:
        self.bodies = bodies

    def __len__(self) -> int:
        return len(self.bodies)

    def body(self, place: int) -> bytes:
        return self.bodies[place]

    def fitting(self, count: int, size: int) -> int:
        """How many of the first `count` messages have no more than `size` bytes together."""
        return bisect_right(list(accumulate([HEADER.size + len(body) for body in self.bodies[:count]])), size)

    def cut(self, start: int, stop: int) -> Mixed:
        return Mixed(self.bodies[start:stop])

    def train(self, kind: int, flags: int, first: int) -> bytes:
        """The messages, numbered from `first` on."""
        pack, size = HEADER.pack, HEADER.size
        parts = [b""] * (2 * len(self.bodies))
        parts[::2] = [pack(size + len(body), kind, flags, number, 0) for number, body in enumerate(self.bodies, first)]
        parts[1::2] = self.bodies
        return b"".join(parts)


class Alike:
    """Bodies that are `model` but for `size` bytes from `at` on, which are told by `values`, one after the other."""

    __slots__ = ("_at", "_model", "_size", "_values")

    def __init__(self, model: bytes, at: int, size: int, values: bytes) -> None:
        self._model = model
        self._at = at
        self._size = size
        self._values = values

    def __len__(self) -> int:
        return len(self._values) // self._size

    def body(self, place: int) -> bytes:
        value = self._values[place * self._size : (place + 1) * self._size]
        return self._model[: self._at] + value + self._model[self._at + self._size :]

    def fitting(self, count: int, size: int) -> int:
        return min(count, len(self), size // (HEADER.size + len(self._model)))

    def cut(self, start: int, stop: int) -> Alike:
        return Alike(self._model, self._at, self._size, self._values[start * self._size : stop * self._size])

    def train(self, kind: int, flags: int, first: int) -> bytes:
        count, length = len(self), HEADER.size + len(self._model)
        data = bytearray((HEADER.pack(length, kind, flags, 0, 0) + self._model) * count)
        numbers = struct.pack(f"={count}I", *range(first, first + count))
        for place in range(_SEQUENCE_BYTES):
            data[_SEQUENCE_AT + place :: length] = numbers[place::_SEQUENCE_BYTES]
        for place in range(self._size):
            data[HEADER.size + self._at + place :: length] = self._values[place :: self._size]
        return bytes(data)


Row = Mixed | Alike


def pieces(rows: Iterable[Row], count: int, size: int) -> Iterator[list[Row]]:
    """Rows in pieces of at most so many messages and bytes; one message that is larger is a piece of its own."""
    piece: list[Row] = []
    held, length = 0, 0
    for row in rows:
        start = 0
        while start < len(row):
            rest = row.cut(start, len(row)) if start else row
            fits = rest.fitting(count - held, size - length)
            if fits <= 0 and piece:
                yield piece
                piece, held, length = [], 0, 0
                continue
            taken = rest.cut(0, max(1, fits)) if fits < len(rest) else rest
            piece.append(taken)
            held, length, start = held + len(taken), length + _size(taken), start + len(taken)
    if piece:
        yield piece


def bodies(rows: Iterable[Row]) -> list[bytes]:
    """All bodies, one by one."""
    return [row.body(place) for row in rows for place in range(len(row))]


def _size(row: Row) -> int:
    if isinstance(row, Alike):
        return len(row) * (HEADER.size + len(row.body(0)))
    return sum(HEADER.size + len(body) for body in row.bodies)
