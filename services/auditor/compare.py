"""Plan against kernel, object by object. Pure.

What is compared is the kernel's own normal form on both sides: how it lists what it holds, and how it would list the plan. One cause gives
one finding: a table that is gone stands for all that was in it, and ``causes`` does the like for links, addresses and peers. While a unit
is on its way to another digest, its objects are no drift.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet

from msgspec.structs import replace

from schemas.drift import DriftLayer
from schemas.host_objects import NftTable, PlanObject, WireguardLink
from schemas.plan import HostPlan, unit_tag
from services.auditor.causes import by_cause
from services.auditor.findings import LAYERS, Finding, View, show
from services.kernel.nftread.words import rule_text
from services.kernel.transaction import Held, ListedChain, Marker, Observed, same

MARKER_KEY = "marker"


def compare(kernel: View, plan: HostPlan, layers: AbstractSet[DriftLayer]) -> list[Finding]:
    """Findings in the order of their keys. The view holds the objects of `layers` only."""
    reference, observed = kernel.reference, kernel.observed
    settled = _settled(plan, kernel)
    if len(reference) == len(observed) and all(observed.get(key) is item for key, item in reference.items()):
        # Mostly the kernel's objects are the plan's very own.
        return by_cause(list(_missing_marker(kernel, settled, layers)), kernel, plan)
    wanted = {key: unit for unit in sorted(plan.units) for key in plan.units[unit] if key in reference}
    others = [(key, reference[key], observed.get(key)) for key in wanted if observed.get(key) is not reference[key]]
    gone = {item.name for _, item, held in others if isinstance(item, NftTable) and held is None}
    found = list(_missing_marker(kernel, settled, layers))
    for key, item, held in others:
        unit = wanted[key]
        if _holds(item, held) or unit not in settled or (_table(item) in gone and not isinstance(item, NftTable)):
            continue
        found.append(Finding(_layer(item), key, *_differing(item, held), unit, plan.because(key)))
    if settled == plan.units.keys() and not _holds_others(plan, kernel.marker):
        found.extend(
            Finding(_layer(item), key, "", show(item), _owner(item, wanted, reference), ())
            for key, item in observed.items()
            if key not in wanted and not _inside_foreign(item, observed, wanted)
        )
    return sorted(by_cause(found, kernel, plan), key=lambda finding: finding.key)


def _holds(wanted: Held, found: Held | None) -> bool:
    """Whether the kernel holds what is wanted; any WireGuard key will do while the planner does not know the host's."""
    if isinstance(wanted, WireguardLink) and wanted.public_key is None and isinstance(found, WireguardLink):
        found = replace(found, public_key=None)
    return same(wanted, found)


def _differing(wanted: Held, found: Held | None) -> tuple[str, str]:
    """Both sides as text; of two chains that differ in their rules, only those rules."""
    if isinstance(wanted, ListedChain) and isinstance(found, ListedChain):
        missing, added = Counter(wanted.rules) - Counter(found.rules), Counter(found.rules) - Counter(wanted.rules)
        if missing or added:
            words = _rules(missing), _rules(added)
            return words if words[0] != words[1] else (_exactly(missing), _exactly(added))
    return show(wanted), show(found)


def _rules(rules: Counter[str | bytes]) -> str:
    return "\n".join(map(rule_text, rules.elements()))


def _exactly(rules: Counter[str | bytes]) -> str:
    """With the kernel's own bytes, where words cannot tell the difference."""
    return "\n".join(f"{rule_text(rule)} [{rule.hex() if isinstance(rule, bytes) else rule}]" for rule in rules.elements())


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
    """True for what lies in a table or on a link that is itself not wanted, which stands for it."""
    table, link = _table(item), f"link {getattr(item, 'link', '')}"
    if link in observed and link not in wanted:
        return True
    return table is not None and not isinstance(item, NftTable) and f"table {table}" in observed and f"table {table}" not in wanted


def _owner(item: Held, wanted: Mapping[str, str], reference: Observed) -> str:
    """The unit whose table or link an addition was made to."""
    table, link = _table(item), getattr(item, "link", None)
    if link is not None:
        return wanted.get(f"link {link}", "")
    return next((unit for key, unit in wanted.items() if table is not None and _table(reference[key]) == table), "")


def _table(item: Held | PlanObject) -> str | None:
    return getattr(item, "table", None) if item.layer == "nft" else None


def _layer(item: Held) -> DriftLayer:
    return next(layer for layer in LAYERS if layer == item.layer)
