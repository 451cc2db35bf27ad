"""Remembering what own tables listed: what is asked again when, and what never is believed."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from schemas.host_objects import NftElement, NftSet, NftTable, PlanObject
from services.kernel.netlink import Disturbed, attribute
from services.kernel.nft.raw import REST, PartKey, Parts, without_counted
from services.kernel.nft.reading import Reading
from services.kernel.transaction import Held, Listed, ListedChain

TABLE = "meshmark.x"
SET: PartKey = ("set", "s")
CHAIN: PartKey = ("chain", "c")


class StubKernel:
    """Lists and digests one table; `during` runs before each look at its parts."""

    def __init__(self) -> None:
        self.number = 1
        self.elements = ["10.0.0.1"]
        self.rules = ["accept"]
        self.is_plain = True
        self.listed: list[object] = []
        self.during = lambda: None

    def generation(self) -> int:
        return self.number

    def parts(self) -> dict[str, Parts]:
        self.during()
        return {TABLE: Parts({REST: b"", SET: repr(self.elements).encode(), CHAIN: repr(self.rules).encode()}, self.is_plain)}

    def tables(self) -> list[str]:
        return [TABLE]

    def read(self, table: str, wanted: Mapping[str, PlanObject]) -> dict[str, Held]:
        self.listed.append(table)
        items: list[Held] = [NftTable(table), *self._set(wanted), ListedChain(table, "c", tuple(self.rules))]
        if not self.is_plain:
            items.append(Listed("nft", f"counter {table} n", "a counter"))
        return {item.key: item for item in items}

    def read_part(self, table: str, part: PartKey, wanted: Mapping[str, PlanObject]) -> dict[str, Held]:
        self.listed.append(part)
        items: list[Held] = list(self._set(wanted)) if part == SET else [ListedChain(table, "c", tuple(self.rules))]
        return {item.key: item for item in items}

    def _set(self, wanted: Mapping[str, PlanObject]) -> list[PlanObject]:
        planned = wanted.get(f"set {TABLE} s")
        ranged = isinstance(planned, NftSet) and planned.value_interval
        return [NftSet(TABLE, "s", "ipv4_addr", value_interval=ranged), *(NftElement(TABLE, "s", text) for text in self.elements)]


def test_what_differs_is_listed_and_the_rest_remembered() -> None:
    """At first all, then nothing, then the part that has changed, and only when the generation has."""
    kernel = StubKernel()
    reading = Reading(kernel, kernel)
    first = reading.read({})
    assert reading.read({}) == first
    assert kernel.listed == [TABLE]
    kernel.elements.append("10.0.0.2")
    kernel.number += 1
    assert reading.read({}).keys() - first.keys() == {NftElement(TABLE, "s", "10.0.0.2").key}
    assert kernel.listed == [TABLE, SET]


def test_another_plan_for_an_empty_map_is_no_difference_of_yesterday_s() -> None:
    """What a listing cannot say is taken from the plan of now."""
    kernel = StubKernel()
    reading = Reading(kernel, kernel)
    reading.read({})
    planned = NftSet(TABLE, "s", "ipv4_addr", value_interval=True)
    assert reading.read({planned.key: planned})[planned.key] is planned


@pytest.mark.parametrize("kind", ["generation", "dump"])
def test_what_was_disturbed_is_listed_whole_and_not_remembered(kind: str) -> None:
    """By a writer who never pauses; once there is a pause, it is remembered again."""
    kernel = StubKernel()
    reading = Reading(kernel, kernel)
    reading.read({})

    def disturb() -> None:
        if kind == "dump":
            raise Disturbed
        kernel.number += 1

    kernel.during = disturb
    kernel.number += 1
    kernel.rules.append("drop")
    for _ in range(2):
        kernel.listed.clear()
        assert reading.read({})[f"chain {TABLE} c"] == ListedChain(TABLE, "c", ("accept", "drop"))
        assert kernel.listed == [TABLE]
    kernel.during = lambda: None
    reading.read({})
    kernel.listed.clear()
    reading.read({})
    assert kernel.listed == []


def test_a_change_between_digest_and_listing_is_not_taken_for_the_digest_s() -> None:
    """The listing is newer than the digest: both are taken again."""
    kernel = StubKernel()
    reading = Reading(kernel, kernel)
    listing = kernel.read

    def read(table: str, wanted: Mapping[str, PlanObject]) -> dict[str, Held]:
        found = listing(table, wanted)
        if len(kernel.rules) == 1:
            kernel.rules.append("drop")
            kernel.number += 1
        return found

    kernel.read = read  # type: ignore[method-assign]
    assert reading.read({})[f"chain {TABLE} c"] == ListedChain(TABLE, "c", ("accept", "drop"))


def test_a_table_with_what_has_no_digest_is_listed_whenever_somebody_wrote() -> None:
    """A counter by name may have changed without a trace."""
    kernel = StubKernel()
    kernel.is_plain = False
    reading = Reading(kernel, kernel)
    for _ in range(2):
        kernel.listed.clear()
        kernel.number += 1
        assert f"counter {TABLE} n" in reading.read({})
        assert kernel.listed == [TABLE]


COUNTED = attribute(1, b"counter\0") + attribute(2 | 0x8000, attribute(1, b"\0" * 7 + b"\5") + attribute(2, b"\0" * 7 + b"\2"))
NOTHING = attribute(1, b"counter\0") + attribute(2 | 0x8000, bytes(24))


def rule(expressions: bytes, comment: bytes = b"") -> bytes:
    return attribute(1, b"t\0") + attribute(2, b"c\0") + attribute(4 | 0x8000, attribute(1 | 0x8000, expressions)) + attribute(7, comment)


def test_only_what_counters_counted_is_left_out() -> None:
    """The same bytes in a comment stay, as does every other byte; what ends early is no error."""
    assert without_counted(rule(COUNTED)) == without_counted(rule(COUNTED.replace(b"\5", b"\6"))) == rule(NOTHING)
    assert without_counted(rule(attribute(1, b"meta\0"), COUNTED)) == rule(attribute(1, b"meta\0"), COUNTED)
    whole = rule(COUNTED, COUNTED)
    for end in range(len(whole)):
        assert len(without_counted(whole[:end])) == end
