"""Open differences, and the events that tell their story: raised, changed, contested, resolved. Pure; time is an argument."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from msgspec import Struct

from schemas.drift import DriftEvent, DriftLayer, DriftState, Suspect
from schemas.values import Name
from services.auditor.findings import Finding

CONTESTED_AFTER = 3
"""Made so often within the window, a difference is contested: somebody else keeps making it."""
WINDOW_S = 60.0
_REPAIR_FIRST_S = 1.0
_REPAIR_MAX_S = 60.0


class Open(Struct):
    """A difference that is open now. `is_repaired`: by the applier's word, so that it was made anew if it is there at the next look."""

    finding: Finding
    first_seen_s: float
    count: int
    suspect: Suspect | None
    is_repaired: bool = False


class Ledger:
    """What is open on one host, and how often each key was made lately, since `began_s`, as its events say it."""

    def __init__(self, cluster: str, host: str, began_s: float) -> None:
        self._cluster, self._host, self._began_s = Name(cluster), Name(host), began_s
        self._open: dict[str, Open] = {}
        self._made: dict[str, list[float]] = {}
        self._unreadable: set[DriftLayer] = set()
        self._inherited: set[DriftLayer] | None = None

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
            elif known.is_repaired:
                events.extend(self._raise_again(known, finding, now_s, generation))
            elif (known.finding.wanted, known.finding.found) == (finding.wanted, finding.found):
                known.finding = finding
            else:
                known.finding, known.suspect = finding, suspects.get(finding.layer)
                known.count += 1
                is_contested = len(self._recent(key, now_s)) >= CONTESTED_AFTER
                events.append(self._event(known, "contested" if is_contested else "changed", now_s, generation))
        self._made = {key: recent for key in self._made if (recent := self._recent(key, now_s))}
        told = (self._unreadable | (self._inherited or set())) & looked
        self._unreadable -= told
        if self._inherited is not None:
            self._inherited -= told
        return events + [self._layer_event(layer, "resolved", "", now_s) for layer in sorted(told)]

    def inherit(self, layers: Iterable[DriftLayer]) -> None:
        """Of these layers, and of no others, an auditor before this one may have had something open when it ended.

        What of that is there still, a complete look raises anew; that all else is over, nobody but this one can say.
        """
        self._inherited = set(layers)

    def repaired(self, layers: Iterable[DriftLayer], units: Collection[str]) -> None:
        """The applier says that it has brought these layers back, as far as they are of these units, or of none."""
        wanted = set(layers)
        for item in self._open.values():
            if item.finding.layer in wanted and (item.finding.unit in units or not item.finding.unit):
                item.is_repaired = True

    def unreadable(self, layer: DriftLayer, reason: str, now_s: float) -> list[DriftEvent]:
        """The event for a layer that cannot be read: told once, until it can be read again."""
        if layer in self._unreadable:
            return []
        self._unreadable.add(layer)
        return [self._layer_event(layer, "unknown", reason, now_s)]

    def _layer_event(self, layer: DriftLayer, state: DriftState, reason: str, now_s: float) -> DriftEvent:
        # Resolved is also what was open before its first_seen_s: it is said after a complete look, and what was told since is known.
        since_s = self._began_s if state == "resolved" else now_s
        return DriftEvent(
            self._cluster,
            self._host,
            layer,
            f"layer {layer}",
            state,
            "",
            reason,
            first_seen_s=since_s,
            at_s=now_s,
            leaves_open=self._leaves_open(layer),
        )

    def _leaves_open(self, layer: DriftLayer) -> bool:
        """Whether something of a layer is told and not over, as far as is known of the auditor before this one."""
        is_inherited = self._inherited is None or layer in self._inherited
        return is_inherited or layer in self._unreadable or self.is_open((layer,))

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
        count = self._note_made(finding.key, now_s)
        item = self._open[finding.key] = Open(finding, now_s, count, suspect)
        return self._event(item, "contested" if count >= CONTESTED_AFTER else "raised", now_s, generation)

    def _raise_again(self, item: Open, finding: Finding, now_s: float, generation: int) -> list[DriftEvent]:
        """What was repaired, and undone before anybody saw it whole: told once it is contested. Its suspect stays.

        The first to touch the layer since was the applier.
        """
        differs = (item.finding.wanted, item.finding.found) != (finding.wanted, finding.found)
        item.finding, item.is_repaired = finding, False
        item.count = self._note_made(finding.key, now_s)
        if item.count >= CONTESTED_AFTER:
            return [self._event(item, "contested", now_s, generation)]
        return [self._event(item, "changed", now_s, generation)] if differs else []

    def _note_made(self, key: str, now_s: float) -> int:
        """How often the difference was made within the window, now included."""
        self._made[key] = [*self._recent(key, now_s), now_s]
        return len(self._made[key])

    def _recent(self, key: str, now_s: float) -> list[float]:
        return [time_s for time_s in self._made.get(key, []) if now_s - time_s <= WINDOW_S]

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
            leaves_open=self._leaves_open(finding.layer),
        )
