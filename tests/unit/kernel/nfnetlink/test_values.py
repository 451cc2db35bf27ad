"""Values as the kernel compares them, and what has no form."""

from __future__ import annotations

import sys

import pytest

from services.kernel.nfnetlink import values
from services.kernel.nfnetlink.values import IPV4_ADDRESS, IPV6_ADDRESS, MARK, NAME, PORT, Inexpressible, Kind


@pytest.mark.parametrize(
    "kind, text, found",
    [
        (IPV4_ADDRESS, "10.0.0.1", bytes((10, 0, 0, 1))),
        (IPV6_ADDRESS, "fd00::1", bytes.fromhex("fd" + "0" * 29 + "1")),
        (PORT, "80", b"\0\x50"),
        (MARK, "0xff00", 0xFF00.to_bytes(4, sys.byteorder)),
        (MARK, "7", (7).to_bytes(4, sys.byteorder)),
        (NAME, "eth0", b"eth0".ljust(16, b"\0")),
        (NAME, "wg\\*", b"wg*".ljust(16, b"\0")),
    ],
)
def test_a_value_has_its_bytes(kind: Kind, text: str, found: bytes) -> None:
    assert kind.read(text) == found


@pytest.mark.parametrize(
    "kind, text, low, high",
    [
        (IPV4_ADDRESS, "10.0.0.0/8", 0x0A000000, 0x0AFFFFFF),
        (IPV4_ADDRESS, "0.0.0.0/0", 0, 0xFFFFFFFF),
        (IPV4_ADDRESS, "10.0.0.1", 0x0A000001, 0x0A000001),
        (IPV4_ADDRESS, "10.0.0.1-10.0.0.9", 0x0A000001, 0x0A000009),
        (IPV6_ADDRESS, "fd00::/16", 0xFD << 120, (0xFD01 << 112) - 1),
        (PORT, "80-90", 80, 90),
        (MARK, "0x100-0x105", 0x100, 0x105),
        (NAME, "e*", 0x65 << 120, (0x66 << 120) - 1),
        (NAME, "e", 0x65 << 120, 0x65 << 120),
    ],
)
def test_a_span_compares_from_the_left(kind: Kind, text: str, low: int, high: int) -> None:
    assert kind.span(text) == (low, high)


@pytest.mark.parametrize(
    "kind, text",
    [
        (IPV4_ADDRESS, "10.0.0.256"),
        (IPV4_ADDRESS, "1"),
        (IPV4_ADDRESS, "fd00::1"),
        (IPV4_ADDRESS, "10.0.0.0/33"),
        (IPV4_ADDRESS, "10.0.0.0/08"),
        (IPV6_ADDRESS, "fe80::1%eth0"),
        (PORT, "65536"),
        (PORT, "http"),
        (PORT, "010"),
        (MARK, "0x100000000"),
        (MARK, "-1"),
        (NAME, "x" * 16),
        (NAME, "a*b"),
        (NAME, "*"),
        (NAME, ""),
        (Kind("words", 0, 1, values.words({"a": 1}, 1), shape="word"), "b"),
    ],
)
def test_what_is_no_value_has_no_form(kind: Kind, text: str) -> None:
    with pytest.raises(Inexpressible):
        kind.span(text)


def test_an_interval_is_more_than_one_value() -> None:
    """Also where it is written as one, a prefix of full length is none, and neither is a star that means itself."""
    assert [text for text in ("10.0.0.0/8", "10.0.0.1/32", "10.0.0.1", "10.0.0.1-10.0.0.2") if IPV4_ADDRESS.is_interval(text)] == [
        "10.0.0.0/8",
        "10.0.0.1-10.0.0.2",
    ]
    assert [text for text in ("eth0", "wg*", "wg\\*", "a-b") if NAME.is_interval(text)] == ["wg*"]
