"""A stable choice among names that come and go: one that is added or removed changes only the choices that fall on itself."""

from __future__ import annotations

import bisect
import functools
import hashlib
from collections.abc import Iterator

_CIRCLE = 2**64


class Ring:
    """Names on a circle, each at the hash of itself. Holds the same for the same names, in whatever order they came."""

    def __init__(self) -> None:
        self._places: list[tuple[int, str]] = []

    def add(self, name: str) -> None:
        """Put in a name that is not there."""
        bisect.insort(self._places, (_hash(name), name))

    def discard(self, name: str) -> None:
        index = bisect.bisect_left(self._places, (_hash(name), name))
        if self._places[index : index + 1] == [(_hash(name), name)]:
            del self._places[index]

    def after(self, word: str) -> Iterator[str]:
        """All names, in the order in which they come after the hash of `word`: the first that suits is the choice."""
        start = bisect.bisect_left(self._places, (_hash(word), ""))
        for index in (*range(start, len(self._places)), *range(start)):
            yield self._places[index][1]

    @staticmethod
    def distance(word: str, name: str) -> int:
        """How far after `word` a name comes, whether it is there or not."""
        return (_hash(name) - _hash(word)) % _CIRCLE


@functools.lru_cache(maxsize=65536)
def _hash(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "big")
