"""Plan against kernel, object by object. Pure.

What is compared is the kernel's own normal form on both sides: how it lists what it holds, and how it would list the plan. One cause gives
one finding: a table that is gone stands for all that was in it. While a unit is on its way to another digest, its objects are no drift.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet

from msgspec import Struct

from schemas import codec
from schemas.drift import DriftLayer
from schemas.host_objects import NftTable, PlanObject
from schemas.plan import HostPlan, unit_tag
from services.kernel.transaction import Held, ListedChain, Marker, Observed, same

MARKER_KEY = "marker"
LAYERS: tuple[DriftLayer, ...] = ("nft", "rule", "route")


class View(Struct, frozen=True):
    """What is known of the kernel: how it would list the plan, how it lists what it holds, and which plan its marker names.

    `reported` is the digest of each unit that the applier last said that it holds; it counts where there is no marker.
    """

    reference: Observed
    observed: Observed
    marker: Marker | None
    reported: Mapping[str, str]


class Finding(Struct, frozen=True):
    """One difference. `wanted` and `found` are in the kernel's form, as text; empty for what is not there."""

    layer: DriftLayer
    key: str
    wanted: str
    found: str
    unit: str
    because: tuple[str, ...]


def compare(kernel: View, plan: HostPlan, layers: AbstractSet[DriftLayer]) -> list[Finding]:
    """Findings in the order of their keys. The view holds the objects of `layers` only."""
    reference, observed = kernel.reference, kernel.observed
    settled = _settled(plan, kernel)
    wanted = {key: unit for unit in sorted(plan.units) for key in plan.units[unit] if key in reference}
    gone = {item.name for key, item in reference.items() if isinstance(item, NftTable) and key not in observed}
    found = list(_missing_marker(kernel, settled, layers))
    for key, unit in wanted.items():
        item = reference[key]
        if same(item, observed.get(key)) or unit not in settled or (_table(item) in gone and not isinstance(item, NftTable)):
            continue
        found.append(Finding(_layer(item), key, *_differing(item, observed.get(key)), unit, plan.because(key)))
    if settled == plan.units.keys() and not _holds_others(plan, kernel.marker):
        found.extend(
            Finding(_layer(item), key, "", show(item), _owner(item, wanted, reference), ())
            for key, item in observed.items()
            if key not in wanted and not _inside_foreign(item, observed, wanted)
        )
    return sorted(found, key=lambda finding: finding.key)


def _differing(wanted: Held, found: Held | None) -> tuple[str, str]:
    """Both sides as text; of two chains that differ in their rules, only those rules."""
    if isinstance(wanted, ListedChain) and isinstance(found, ListedChain) and sorted(wanted.rules) != sorted(found.rules):
        missing, added = Counter(wanted.rules) - Counter(found.rules), Counter(found.rules) - Counter(wanted.rules)
        return "\n".join(missing.elements()), "\n".join(added.elements())
    return show(wanted), show(found)


def show(item: Held | None) -> str:
    """An object as one line of JSON."""
    return codec.encode(item).decode() if item is not None else ""


def _settled(plan: HostPlan, kernel: View) -> AbstractSet[str]:
    """Units whose plan the kernel says it holds; without a marker, those that the applier reported as held."""
    held = kernel.reported if kernel.marker is None else {name: kernel.marker.units.get(unit_tag(name), "") for name in plan.units}
    return {name for name, digest in plan.digests().items() if held.get(name) == digest}


def _holds_others(plan: HostPlan, marker: Marker | None) -> bool:
    """Whether the kernel says that it holds units that are not planned: they are on their way in, or out."""
    return marker is not None and not marker.units.keys() <= {unit_tag(name) for name in plan.units}


def _missing_marker(kernel: View, settled: AbstractSet[str], layers: AbstractSet[DriftLayer]) -> Iterator[Finding]:
    if kernel.marker is None and settled and "nft" in layers:
        yield Finding("nft", MARKER_KEY, "the marker table", "", "", ())


def _inside_foreign(item: Held, observed: Observed, wanted: Mapping[str, str]) -> bool:
    """True for what lies in a table that is itself not wanted: the table stands for it."""
    table = _table(item)
    return table is not None and not isinstance(item, NftTable) and f"table {table}" in observed and f"table {table}" not in wanted


def _owner(item: Held, wanted: Mapping[str, str], reference: Observed) -> str:
    """The unit whose table an addition was made to."""
    table = _table(item)
    return next((unit for key, unit in wanted.items() if table is not None and _table(reference[key]) == table), "")


def _table(item: Held | PlanObject) -> str | None:
    return getattr(item, "table", None) if item.layer == "nft" else None


def _layer(item: Held) -> DriftLayer:
    return next(layer for layer in LAYERS if layer == item.layer)
