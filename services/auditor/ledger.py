"""Open differences, and the events that tell their story: raised, changed, contested, resolved. Pure; time is an argument."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from schemas.drift import DriftEvent, DriftLayer, DriftState, Suspect
from schemas.values import Name
from services.auditor.findings import Finding

CONTESTED_AFTER = 3
"""Raised so often within the window, a difference is contested: somebody else keeps making it."""
WINDOW_S = 60.0
_REPAIR_FIRST_S = 1.0
_REPAIR_MAX_S = 60.0


class Open(Struct):
    """A difference that is open now."""

    finding: Finding
    first_seen_s: float
    count: int
    suspect: Suspect | None


class Ledger:
    """What is open on one host, and how often each key was raised lately."""

    def __init__(self, cluster: str, host: str) -> None:
        self._cluster, self._host = Name(cluster), Name(host)
        self._open: dict[str, Open] = {}
        self._raised: dict[str, list[float]] = {}
        self._unreadable: set[DriftLayer] = set()

    def observe(
        self, findings: Iterable[Finding], layers: Iterable[DriftLayer], now_s: float, suspects: dict[DriftLayer, Suspect], generation: int
    ) -> list[DriftEvent]:
        """The events that a complete look at `layers` gives rise to."""
        seen = {finding.key: finding for finding in findings}
        looked = set(layers)
        events: list[DriftEvent] = []
        for key, item in list(self._open.items()):
            if item.finding.layer in looked and key not in seen:
                del self._open[key]
                events.append(self._event(item, "resolved", now_s, generation))
        for key, finding in seen.items():
            known = self._open.get(key)
            if known is None:
                events.append(self._raise(finding, now_s, suspects.get(finding.layer), generation))
            elif (known.finding.wanted, known.finding.found) == (finding.wanted, finding.found):
                known.finding = finding
            else:
                known.finding, known.suspect = finding, suspects.get(finding.layer)
                known.count += 1
                events.append(self._event(known, "changed", now_s, generation))
        for layer in sorted(self._unreadable & looked):
            self._unreadable.discard(layer)
            events.append(self._layer_event(layer, "resolved", "", now_s))
        return events

    def unreadable(self, layer: DriftLayer, reason: str, now_s: float) -> list[DriftEvent]:
        """The event for a layer that cannot be read: told once, until it can be read again."""
        if layer in self._unreadable:
            return []
        self._unreadable.add(layer)
        return [self._layer_event(layer, "unknown", reason, now_s)]

    def _layer_event(self, layer: DriftLayer, state: DriftState, reason: str, now_s: float) -> DriftEvent:
        return DriftEvent(self._cluster, self._host, layer, f"layer {layer}", state, found=reason, first_seen_s=now_s, at_s=now_s)

    def repair_delay_s(self, layers: Iterable[DriftLayer], now_s: float) -> float | None:
        """How long to wait before the next repair of these layers: 0 at first, longer where it is contested, None when nothing is open.

        A difference counts for the layers that it carries, too: routes come back to a link that is up again, whoever looks after the link.
        """
        wanted = set(layers)
        counts = [len(self._recent(key, now_s)) for key, item in self._open.items() if wanted & {item.finding.layer, *item.finding.carries}]
        if not counts:
            return None
        excess = max(counts) - CONTESTED_AFTER
        return 0.0 if excess < 0 else float(min(_REPAIR_FIRST_S * 2**excess, _REPAIR_MAX_S))

    def is_open(self, layers: Iterable[DriftLayer]) -> bool:
        """Whether a difference of one of these layers is open."""
        wanted = set(layers)
        return any(item.finding.layer in wanted for item in self._open.values())

    def open_by_layer(self, layer: DriftLayer) -> int:
        return sum(item.finding.layer == layer for item in self._open.values())

    def _raise(self, finding: Finding, now_s: float, suspect: Suspect | None, generation: int) -> DriftEvent:
        times = self._recent(finding.key, now_s)
        times.append(now_s)
        self._raised[finding.key] = times
        item = self._open[finding.key] = Open(finding, now_s, len(times), suspect)
        return self._event(item, "contested" if len(times) >= CONTESTED_AFTER else "raised", now_s, generation)

    def _recent(self, key: str, now_s: float) -> list[float]:
        return [time_s for time_s in self._raised.get(key, []) if now_s - time_s <= WINDOW_S]

    def _event(self, item: Open, state: DriftState, now_s: float, generation: int) -> DriftEvent:
        finding = item.finding
        return DriftEvent(
            self._cluster,
            self._host,
            finding.layer,
            finding.key,
            state,
            finding.wanted,
            finding.found,
            finding.unit,
            finding.because,
            item.suspect,
            item.first_seen_s,
            now_s,
            item.count,
            generation,
        )
