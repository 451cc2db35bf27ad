"""A chain is brought from any rules to any others by what comes and goes, and what stays keeps its handle."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.kernel.nfnetlink.edits import Edit, edit, handles_of

RULES = st.text("abcd", max_size=12)


def carried_out(held: str, found: Edit, wanted: str) -> list[tuple[str, int]]:
    """Rules with their handles, as the kernel has them after the edit; 0 for new ones."""
    chain = [(rule, 10 + place) for place, rule in enumerate(held) if 10 + place not in found.gone]
    for place, before in found.coming:
        at = next(number for number, (_, handle) in enumerate(chain) if handle == before) if before else len(chain)
        chain.insert(at, (wanted[place], 0))
    return chain


@given(held=RULES, wanted=RULES)
def test_any_rules_become_any_others(held: str, wanted: str) -> None:
    """With doubles, in any order."""
    found = edit(held, handles_of(range(10, 10 + len(held))), wanted)
    chain = carried_out(held, found, wanted)
    assert "".join(rule for rule, _ in chain) == wanted
    assert [handle for _, handle in chain] == list(found.handles)


CASES = {
    "nothing": ("abc", "abc", 0),
    "one replaced": ("abc", "axc", 2),
    "one added at the end": ("abc", "abcx", 1),
    "one added at the begin": ("abc", "xabc", 1),
    "one gone": ("abc", "ac", 1),
    "one moved to the end": ("abcde", "bcdea", 2),
    "one moved to the begin": ("abcde", "eabcd", 2),
    "one of two doubles gone": ("aba", "ab", 1),
    "two exchanged": ("abcde", "adcbe", 4),
    "all new": ("abc", "xyz", 6),
    "emptied": ("abc", "", 3),
}


@pytest.mark.parametrize("name", CASES)
def test_no_more_comes_and_goes_than_must(name: str) -> None:
    """Counted in rules."""
    held, wanted, most = CASES[name]
    found = edit(held, handles_of(range(10, 10 + len(held))), wanted)
    assert len(found.gone) + len(found.coming) == most
