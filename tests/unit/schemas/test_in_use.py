"""Numbers that others use, and when one of ours meets one of them."""

from __future__ import annotations

import pytest

from schemas import codec
from schemas.in_use import InUse, Kind, Number, Use

SEEN = InUse(
    marks=(Use(0x4000, "kube-proxy"), Use(0xFF0000, "tailscale")),
    tables=(Use(52, "IPv4 routes", 4),),
    priorities=(Use(5210, "IPv4 rule 5210", 4), Use(5210, "IPv6 rule 5210", 6)),
    ports=(Use(41641, "a UDP socket"),),
)


@pytest.mark.parametrize(
    "kind, number, family, by",
    [
        ("mark", 0xFF00, 0, "kube-proxy"),
        ("mark", 0x10000, 0, "tailscale"),
        ("mark", 0x1, 0, None),
        ("table", 52, 4, "IPv4 routes"),
        ("table", 52, 0, "IPv4 routes"),
        ("table", 52, 6, None),
        ("table", 5210, 4, None),
        ("priority", 5210, 6, "IPv6 rule 5210"),
        ("port", 41641, 4, "a UDP socket"),
        ("port", 41642, 0, None),
    ],
)
def test_a_number_of_ours_meets_an_equal_one_of_its_family_and_marks_by_any_bit(kind: Kind, number: int, family: int, by: str | None):
    """0 stands for both families, on either side."""
    found = SEEN.met(Number(kind, number, family))
    assert (found.by if found else None) == by


def test_nothing_in_use_is_false_and_takes_two_bytes():
    """A report of a host with nobody else on it costs nothing."""
    assert not InUse()
    assert SEEN
    assert codec.encode(InUse()) == b"{}"
    assert codec.decode(codec.encode(SEEN), InUse) == SEEN
