"""A bar chart as SVG, for what differs by orders of magnitude: lengths are logarithms. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

_LABEL, _BARS, _AFTER = 190, 420, 150
_BAR, _GAP, _TOP, _BOTTOM = 9, 8, 34, 22
_TEXT = 11


class Bar(NamedTuple):
    """One length; `text` stands behind it."""

    value: float
    text: str
    color: str


class Row(NamedTuple):
    """Bars below each other beside one label. `mark` is a value at which a line is drawn through them."""

    label: str
    bars: tuple[Bar, ...]
    mark: float | None = None


def chart(title: str, rows: Sequence[Row], legend: Sequence[tuple[str, str]]) -> str:
    """The chart. `legend` is names with colours. ValueError without a value above zero."""
    values = [value for row in rows for value in (*(bar.value for bar in row.bars), row.mark or 0) if value > 0]
    low = math.floor(math.log10(min(values)) - 0.01)
    high = max(math.ceil(math.log10(max(values))), low + 1)
    heights = [len(row.bars) * _BAR + _GAP for row in rows]
    width, height = _LABEL + _BARS + _AFTER, _TOP + sum(heights) + _BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="{_TEXT}">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="8" y="16" font-weight="bold">{escape(title)}</text>',
        *_legend(legend),
        *_axis(low, high, height),
    ]
    top = _TOP
    for row, size in zip(rows, heights, strict=True):
        parts += _row(row, top, lambda value: _LABEL + _place(value, low, high))
        top += size
    return "\n".join((*parts, "</svg>")) + "\n"


def _place(value: float, low: int, high: int) -> float:
    """How far from the left a value is; what is nothing is at the left."""
    return round(_BARS * (math.log10(value) - low) / (high - low), 1) if value > 0 else 0


def _legend(legend: Sequence[tuple[str, str]]) -> list[str]:
    found, left = [], _LABEL + _BARS + _AFTER
    for name, color in reversed(legend):
        left -= 8 * len(name) + 22
        found += [f'<rect x="{left}" y="8" width="9" height="9" fill="{color}"/>', f'<text x="{left + 13}" y="16">{escape(name)}</text>']
    return found


def _axis(low: int, high: int, height: int) -> list[str]:
    found = []
    for power in range(low, high + 1):
        x = _LABEL + _place(10.0**power, low, high)
        found.append(f'<line x1="{x}" y1="{_TOP - 6}" x2="{x}" y2="{height - _BOTTOM}" stroke="#ddd"/>')
        found.append(f'<text x="{x}" y="{height - 7}" text-anchor="middle" fill="#666">{10.0**power:g}</text>')
    return found


def _row(row: Row, top: int, place: Callable[[float], float]) -> list[str]:
    bottom = top + len(row.bars) * _BAR
    found = [f'<text x="{_LABEL - 6}" y="{(top + bottom) / 2 + 4}" text-anchor="end">{escape(row.label)}</text>']
    for number, bar in enumerate(row.bars):
        y, end = top + number * _BAR, place(bar.value)
        found.append(f'<rect x="{_LABEL}" y="{y}" width="{max(1, round(end - _LABEL, 1))}" height="{_BAR - 1}" fill="{bar.color}"/>')
        found.append(f'<text x="{end + 4}" y="{y + _BAR - 1}" font-size="9" fill="#333">{escape(bar.text)}</text>')
    if row.mark is not None:
        x = place(row.mark)
        found.append(f'<line x1="{x}" y1="{top - 2}" x2="{x}" y2="{bottom + 1}" stroke="#c00" stroke-width="1.5"/>')
    return found
