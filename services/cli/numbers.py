"""Whole numbers on a command line: what is none is refused, and never rounded to one that was not meant."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated

from cyclopts import Parameter, Token, convert

_WHOLE = re.compile(r"[+-]?([0-9]+|0x[0-9a-f]+|0o[0-7]+|0b[01]+)", re.ASCII | re.IGNORECASE)


def _whole(kind: type[int], tokens: Sequence[Token]) -> int:
    """The number as cyclopts reads it; ValueError for any other, as 4.5 and 4e-1, of which cyclopts would take the nearest whole one."""
    for token in tokens:
        if not _WHOLE.fullmatch(token.value):
            msg = f"{token.value!r} is no whole number"
            raise ValueError(msg)
    return int(convert(kind, tokens))


Whole = Annotated[int, Parameter(converter=_whole)]
"""The type of each option that takes a whole number, also inside a list."""
