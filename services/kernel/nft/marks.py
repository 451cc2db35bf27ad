"""The marker as comments of rules that no packet meets. Owns nothing."""

from __future__ import annotations

from collections.abc import Iterable

from services.kernel.transaction import Marker


def marker_of(comments: Iterable[str]) -> Marker | None:
    """The marker that the comments of its table's rules say; None when they say none."""
    units: dict[str, str] = {}
    head: tuple[int, int] | None = None
    for comment in comments:
        match comment.split(" "):
            case ["epoch", epoch, "generation", generation] if epoch.isdigit() and generation.isdigit():
                head = int(epoch), int(generation)
            case ["unit", tag, digest]:
                units[tag] = digest
    return Marker(*head, units) if head else None
