"""Reading again: what is remembered, and what a writer who comes in between makes of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from services.kernel.netlink import Disturbed, attribute, nested
from services.kernel.nftread.dumps import Chain, Table
from services.kernel.nftread.reading import Reading
from services.kernel.transaction import ListedChain
from services.runtime.errors import Transient

T = "meshmark.x"
KEY = f"chain {T} c"


class StubDumps:
    """One table with one chain; `during` runs before each look at its rules."""

    def __init__(self) -> None:
        self.number = 1
        self.rules_of_c = [b"one!"]
        self.reads = 0
        self.is_patient = False
        self.during: Any = lambda: None

    def generation(self) -> int:
        return self.number

    @contextlib.contextmanager
    def patiently(self) -> Iterator[None]:
        self.is_patient = True
        yield
        self.is_patient = False

    def tables(self) -> list[Table]:
        return [Table(T, 0, b"")]

    def chains(self) -> dict[str, list[Chain]]:
        return {T: [Chain("c", len(self.rules_of_c), {})]}

    def sets(self, _table: str) -> list[Any]:
        return []

    def others(self) -> list[Any]:
        return []

    def rules(self, _table: str, _uses: object) -> Iterator[list[bytes]]:
        self.reads += 1
        self.during()
        place = attribute(1, f"{T}\0".encode()) + attribute(2, b"c\0")
        yield [place + attribute(3, bytes(8)) + nested(4, item) for item in self.rules_of_c]


def chain(*rules: bytes) -> ListedChain:
    return ListedChain(T, "c", tuple(nested(4, rule) for rule in rules))


@pytest.fixture
def dumps() -> StubDumps:
    return StubDumps()


@pytest.fixture
def reading(dumps: StubDumps) -> Reading:
    return Reading(dumps, remembers=True)  # type: ignore[arg-type]


def test_nothing_is_asked_for_while_nobody_writes(dumps: StubDumps, reading: Reading) -> None:
    first = reading.read({})
    assert first[KEY] == chain(b"one!")
    assert reading.read({}) == first
    assert dumps.reads == 1
    dumps.number += 1
    assert reading.read({})[KEY] is first[KEY]
    dumps.rules_of_c.append(b"two!")
    dumps.number += 1
    assert reading.read({})[KEY] == chain(b"one!", b"two!")


def test_one_that_does_not_remember_asks_each_time(dumps: StubDumps) -> None:
    reading = Reading(dumps, remembers=False)  # type: ignore[arg-type]
    assert reading.read({}) == reading.read({})
    assert dumps.reads == 2


def test_a_chain_that_is_in_memory_already_stands_for_an_equal_one(dumps: StubDumps) -> None:
    known = chain(b"one!")
    reading = Reading(dumps, remembers=True, known=lambda item: known if item == known else item)  # type: ignore[arg-type]
    assert reading.read({})[KEY] is known


@pytest.mark.parametrize("kind", ["generation", "dump"])
def test_what_was_disturbed_is_read_all_the_same_and_not_remembered(kind: str, dumps: StubDumps, reading: Reading) -> None:
    """By a writer who never pauses; once there is a pause, it is remembered again."""

    def disturb() -> None:
        dumps.number += 1
        if kind == "dump" and not dumps.is_patient:
            raise Disturbed

    dumps.during = disturb
    for _ in range(2):
        dumps.reads = 0
        assert reading.read({})[KEY] == chain(b"one!")
        assert dumps.reads == 4
    dumps.during = lambda: None
    reading.read({})
    dumps.reads = 0
    reading.read({})
    assert dumps.reads == 0


def test_a_change_while_it_is_read_is_not_taken_for_what_was_before(dumps: StubDumps, reading: Reading) -> None:
    """What came first is read again."""

    def write() -> None:
        if len(dumps.rules_of_c) == 1:
            dumps.rules_of_c.append(b"two!")
            dumps.number += 1

    dumps.during = write
    assert reading.read({})[KEY] == chain(b"one!", b"two!")
    assert dumps.reads == 2


def test_what_never_holds_still_is_transient(dumps: StubDumps, reading: Reading) -> None:
    def disturb() -> None:
        raise Disturbed

    dumps.during = disturb
    with pytest.raises(Transient):
        reading.read({})
