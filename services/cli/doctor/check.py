"""What a check says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

Verdict = Literal["ok", "warning", "problem", "unknown"]
Role = Literal["gateway", "node"]

_SHOWN = 4


class Check(Struct, frozen=True):
    """One check: what was looked at, what came of it, what was seen, and what to do about it (empty: nothing)."""

    name: str
    verdict: Verdict
    detail: str
    advice: str = ""


def listed(parts: Sequence[str]) -> str:
    """Some of the parts, and how many more there are."""
    more = len(parts) - _SHOWN
    return "; ".join(parts[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")
