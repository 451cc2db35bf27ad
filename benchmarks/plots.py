"""The page of plots: kept runs as one SVG for each kind of figure, and the part of docs/benchmarks.md that shows them.

What of a run is in which plot is said here and nowhere else; a figure that no plot names is in the tables only.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.chart import Bar, Row, chart
from benchmarks.report import Document
from benchmarks.result import Result

_OURS, _FLOOR, _PEER, _GOAL = "#2b6cb0", "#9aa5b1", "#dd8452", "#c00"
_LEGEND = (("meshmark", _OURS), ("floor", _FLOOR), ("peer", _PEER), ("goal", _GOAL))
_BEGIN, _END = "<!-- plots: written by `./run bench --plots` -->", "<!-- end of the plots -->"


class Plot(NamedTuple):
    """A file's name, a title, and how the names of its figures begin. All its figures have one unit."""

    name: str
    title: str
    figures: tuple[str, ...]


PLOTS = (
    Plot("events", "From an event to the kernel, ms", ("event-to-kernel", "compile-change")),
    Plot("micro", "Pure computing, ms", ("micro-",)),
    Plot("nft-writing", "nftables written, ms", ("nft-table-", "nft-hash-element-", "nft-interval-element-", "nft-rule-", "nft-chain-")),
    Plot("nft-reading", "nftables read and compared, ms", ("nft-idle-", "nft-full-", "nft-anew-", "nft-one-rule-")),
    Plot("routes", "Routes added, compared, looked at again, ms", ("routes-",)),
    Plot("peers", "1,000 WireGuard peers, ms", ("peers-",)),
    Plot("packets", "What a packet pays, ns", ("packet-cost-", "encryption-audit-", "trace-cost-")),
    Plot("throughput", "A MiB by TCP, ms", ("throughput-",)),
    Plot("trace", "Packets of a traced flow not seen at every point, %", ("trace-missed-",)),
    Plot("times", "Starting, noticing, changing over, s", ("startup-", "lab-start", "tunnel-loss", "encryption-leak-", "key-rotation")),
    Plot("memory", "Resident memory, MiB", ("memory-",)),
)


def plots(results: Sequence[Result]) -> dict[str, str]:
    """SVG by file name, of those plots for which there are figures."""
    found = {}
    for plot in PLOTS:
        chosen = [item for item in results if item.name.startswith(plot.figures) and item.median > 0]
        chosen = [item for item in chosen if item.unit == chosen[0].unit]
        if chosen:
            found[f"{plot.name}.svg"] = chart(plot.title, [_row(item) for item in chosen], _LEGEND)
    return found


def _row(item: Result) -> Row:
    bars = [Bar(item.median, f"{item.median:g}", _OURS)]
    for value, ratio, color in ((item.floor, item.ratio_floor, _FLOOR), (item.peer, item.ratio_peer, _PEER)):
        if value:
            bars.append(Bar(value, f"{value:g}   (ours {ratio:.3g}x)", color))
    return Row(item.name, tuple(bars), item.goal)


def merged(documents: Sequence[Document]) -> list[Result]:
    """All figures; of one that was measured several times, the last."""
    found: dict[str, Result] = {}
    for document in documents:
        found.update((item.name, item) for item in document.results)
    return list(found.values())


def page(text: str, folder: str, documents: Sequence[Document]) -> str:
    """The page's text with its part about plots written anew; `folder` is where they are, as seen from the page."""
    before, begin, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        msg = f"the page has no {_BEGIN!r} and {_END!r}"
        raise ValueError(msg)
    files = plots(merged(documents))
    shown = [f"![{plot.title}]({folder}/{plot.name}.svg)\n" for plot in PLOTS if f"{plot.name}.svg" in files]
    runs = [
        f"{document.started}, commit {document.machine.commit}, load {document.machine.load:g} to {document.machine.load_after:g}"
        for document in documents
    ]
    said = f"Bars are of logarithmic length. Measured {'; '.join(runs)}.\n"
    return "\n".join([before + begin, "", said, *shown, end + after])


def write(documents: Sequence[Document], docs: Path) -> list[Path]:
    """Write the plots below a folder of documents, and the page that shows them; the files written."""
    folder = docs / "plots"
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.svg"):
        old.unlink()
    found = []
    for name, text in plots(merged(documents)).items():
        file = folder / name
        file.write_text(text, encoding="utf-8")
        found.append(file)
    file = docs / "benchmarks.md"
    file.write_text(page(file.read_text(encoding="utf-8"), folder.name, documents), encoding="utf-8")
    return [*found, file]
