"""Events out of bytes that a newer kernel may send: what is not known is left alone, and nothing of it is an error."""

from __future__ import annotations

import os

from hypothesis import given
from hypothesis import strategies as st

from services.kernel.events import EventSource, KernelEvent, route_events
from services.kernel.netlink import BE32, HEADER, attribute, text_attribute

NFT = 10 << 8
PORT = 1 << 31 | 7


def message(kind: int, body: bytes, port: int = PORT) -> bytes:
    padded = body + bytes(-len(body) % 4)
    return HEADER.pack(HEADER.size + len(body), kind, 0, 0, port) + padded


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """A fixed part and attributes, of any kind and length, and perhaps cut off."""
    fixed = draw(st.binary(min_size=0, max_size=16))
    parts = draw(st.lists(st.tuples(st.integers(0, 0xFFFF), st.binary(max_size=12)), max_size=4))
    whole = fixed + b"".join(attribute(kind, value) for kind, value in parts)
    return whole[: draw(st.integers(0, len(whole)))]


KNOWN = (16, 17, 20, 21, 24, 25, 28, 29, 32, 33, NFT, NFT | 6, NFT | 12, NFT | 15)


@given(st.lists(st.tuples(st.sampled_from(KNOWN) | st.integers(0, 0xFFFF), bodies()), max_size=6), st.binary(max_size=20))
def test_no_bytes_are_an_error(items: list[tuple[int, bytes]], rest: bytes) -> None:
    """Of any message, known or not, whole or cut off."""
    data = b"".join(message(kind, body) for kind, body in items) + rest
    list(route_events(data))
    list(EventSource()._nft_events(data))


def test_a_transaction_is_told_with_what_a_newer_kernel_adds() -> None:
    """Messages and attributes that nobody here knows do not hide who committed what."""
    own = message(NFT | 99, b"\0\0\0\0" + text_attribute(1, "meshmark.x") + attribute(77, b"\1" * 9))
    end = message(
        NFT | 15, b"\0\0\0\0" + attribute(1, BE32.pack(7)) + attribute(55, b"?") + attribute(2, BE32.pack(42)) + text_attribute(3, "nft")
    )
    assert list(EventSource()._nft_events(message(77 << 8, b"other") + own + end)) == [KernelEvent("nft", 42, "nft", kind="transaction")]


def test_a_process_number_of_another_width_is_nobody_s() -> None:
    """It is not taken for somebody else's."""
    own = message(NFT, b"\0\0\0\0" + text_attribute(1, "meshmark.x"))
    end = message(NFT | 15, b"\0\0\0\0" + attribute(2, b"\1\2"))
    assert list(EventSource()._nft_events(own + end)) == [KernelEvent("nft", 0, None, kind="transaction")]


def test_who_changed_a_route_is_named() -> None:
    """By the sender's port, where that is a process's number."""
    (event,) = route_events(message(24, bytes(12), os.getpid()))
    assert (event.layer, event.kind, event.pid) == ("route", "new", os.getpid())
    assert event.process_name
