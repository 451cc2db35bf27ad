"""Many messages made at once are the very bytes of each made alone, in pieces that fit."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.kernel.netlink import HEADER, message
from services.kernel.rows import Alike, Mixed, Row, bodies, pieces

_MIXED = st.lists(st.binary(max_size=24), max_size=6).map(Mixed)
_ALIKE = st.builds(
    lambda model, at, values: Alike(model, at, 3, b"".join(values)),
    st.binary(min_size=8, max_size=24),
    st.integers(0, 5),
    st.lists(st.binary(min_size=3, max_size=3), min_size=1, max_size=9),
)
ROWS = st.lists(st.one_of(_MIXED, _ALIKE), max_size=6)


@given(row=st.one_of(_MIXED, _ALIKE), first=st.integers(0, 0xFFFFFF00))
def test_a_train_is_its_messages(row: Row, first: int) -> None:
    """With their numbers in a row."""
    expected = b"".join(message(24, body, 5, number) for number, body in enumerate(bodies([row]), first))
    assert row.train(24, 5, first) == expected


@given(rows=ROWS, count=st.integers(1, 12), size=st.integers(1, 200))
def test_pieces_hold_all_and_no_more_than_fits(rows: list[Row], count: int, size: int) -> None:
    """In their order; what is larger than fits goes alone."""
    found = list(pieces(rows, count, size))
    assert [body for piece in found for body in bodies(piece)] == bodies(rows)
    for piece in found:
        each = bodies(piece)
        assert 0 < len(each) <= count
        assert len(each) == 1 or sum(HEADER.size + len(body) for body in each) <= size
