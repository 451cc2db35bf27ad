"""What is counted of a node's encryption, and at which points: the vocabulary that plans, kernels and status share.

Packets are counted by rules of the plan. A rule says in its comment what it counts (``Point.comment``), and whoever reads a kernel finds
the counts by that (``point_of``); a comment has no names in it that people give. `PLAINTEXT` are the points where nothing is to be counted.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

PointName = Literal["to-network", "from-network", "to-crypto", "from-crypto", "to-overlay", "from-overlay"]
PointState = Literal["encrypted", "inner", "plaintext"]
Traffic = Literal["all", "pods", "overlay", "nodes"]
Direction = Literal["out", "in"]

_WORD = "count"
_PREFIX = "meshmark"


class Point(NamedTuple):
    """Where packets are counted.

    On the uplink, WireGuard's own packets (`encrypted`) and those that should have been encrypted (`plaintext`), by whose they are; at the
    device and the overlay's link, what goes in or comes out (`inner`).
    """

    name: PointName
    state: PointState
    traffic: Traffic = "all"

    @property
    def direction(self) -> Direction:
        return "out" if self.name.startswith("to-") else "in"

    def comment(self, says: str) -> str:
        """The comment of the rule that counts here; `says` is for people."""
        return f"{_WORD} {self.name} {self.state} {self.traffic}: {says}"


POINTS: tuple[Point, ...] = (
    Point("to-crypto", "inner"),
    Point("to-network", "encrypted"),
    Point("from-network", "encrypted"),
    Point("from-crypto", "inner"),
    Point("to-overlay", "inner"),
    Point("from-overlay", "inner"),
    Point("to-network", "plaintext", "pods"),
    Point("to-network", "plaintext", "overlay"),
    Point("to-network", "plaintext", "nodes"),
    Point("from-network", "plaintext", "pods"),
    Point("from-network", "plaintext", "overlay"),
    Point("from-network", "plaintext", "nodes"),
)
PLAINTEXT: dict[tuple[Direction, Traffic], Point] = {
    (point.direction, point.traffic): point for point in POINTS if point.state == "plaintext"
}
_BY_BEGIN = {point.comment("").rstrip(": "): point for point in POINTS}


def point_of(comment: str) -> Point | None:
    """What a rule with this comment counts; None for one that counts nothing of encryption."""
    return _BY_BEGIN.get(comment.partition(":")[0])


def said(comment: str) -> str:
    """What a rule's comment says to people."""
    return comment.partition(": ")[2] if point_of(comment) else comment


def log_prefix(direction: Direction, traffic: Traffic) -> str:
    """What a packet in clear is shown with, so that it says by which rule."""
    return f"{_PREFIX} {direction} {traffic}"


def logged(prefix: str) -> Point | None:
    """The point at which a packet with this prefix was seen; None for what others log."""
    return next((point for key, point in PLAINTEXT.items() if log_prefix(*key) == prefix), None)
