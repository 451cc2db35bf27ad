"""Messages of a datagram, told apart many at a time: the same ones as one after the other."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.kernel.netlink import HEADER, _runs, message, messages

KINDS = st.sampled_from((24, 24, 24, 3, 2))
FLAGS = st.sampled_from((2, 2, 2, 18))
BODIES = st.sampled_from((b"", b"abcd", b"efgh", b"abcde", b"\0" * 24)) | st.binary(max_size=9)
TRAINS = st.lists(st.tuples(KINDS, BODIES, FLAGS, st.integers(1, 4)), max_size=8)


@given(TRAINS, st.binary(max_size=HEADER.size - 1))
def test_runs_are_the_messages(items: list[tuple[int, bytes, int, int]], rest: bytes) -> None:
    """With what is alike in a row or not, bodies that end off a word, and something behind that is no message."""
    data = b""
    for kind, body, flags, count in items:
        one = message(kind, body, flags, 7)
        data += (one + bytes(-len(one) % 4)) * count
    data += rest
    found = [(run.kind, run.flags, data[at + HEADER.size : at + run.length]) for run in _runs(data) for at in run.places]
    assert found == [(kind, flags, body) for kind, flags, _, body in messages(data)]


def test_a_body_that_looks_like_headers_is_no_message() -> None:
    """Also where each message of a row has the same bytes in it."""
    inner = message(24, b"x" * 8, 2, 7)
    data = message(24, inner + inner, 2, 7) * 3
    assert [list(run.places) for run in _runs(data)] == [[0, len(data) // 3, 2 * len(data) // 3]]


def test_what_only_begins_like_a_message_is_none() -> None:
    """The first bytes of one more, behind messages that differ."""
    one, other = message(24, b"abcd", 2, 7), message(25, b"abcd", 2, 7)
    assert [list(run.places) for run in _runs(one + other + other[:12])] == [[0], [len(one)]]
