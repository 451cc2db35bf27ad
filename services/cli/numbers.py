"""Whole numbers on a command line: what is none is refused, and never rounded to one that was not meant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from cyclopts import Parameter, Token, convert


def _whole(kind: type[int], tokens: Sequence[Token]) -> int:
    """The number as cyclopts reads it; ValueError for one with a point, of which cyclopts would take the nearest whole one."""
    for token in tokens:
        if "." in token.value:
            msg = f"{token.value!r} is no whole number"
            raise ValueError(msg)
    return int(convert(kind, tokens))


Whole = Annotated[int, Parameter(converter=_whole)]
"""The type of each option that takes a whole number, also inside a list."""
