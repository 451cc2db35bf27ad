"""What the auditor is to look at next: by events of the kernel, and by rounds for what the kernel says nothing about. No I/O.

Nobody tells when a WireGuard peer, port or key, or a sysctl changes, and of neighbours the kernel tells whatever it learns: these are
looked at every few seconds, which takes one read of each.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Mapping

from schemas.drift import DriftLayer, Suspect
from schemas.host_objects import Link, Route, Sysctl
from schemas.plan import HostPlan
from services.auditor.findings import LAYERS, LINKED
from services.kernel.events import KernelEvent

QUIET: tuple[DriftLayer, ...] = ("link", "neighbour", "wireguard", "sysctl")
"""What may change without an event: of links, the port and the key of a WireGuard device. Of neighbours there are too many events."""
_JITTER = 0.1


class Attention:
    """Layers to look at, who was first seen changing each, and links that fell."""

    def __init__(self) -> None:
        self._layers: set[DriftLayer] = set(LAYERS)
        self._suspects: dict[DriftLayer, Suspect] = {}
        self._links: frozenset[str] = frozenset()
        self._fallen: dict[str, int] = {}
        self._count = 0

    def follow(self, plan: HostPlan) -> None:
        """Heed the links that the plan speaks of, ours and others': on a host with pods, links come and go all the time."""
        self._links = frozenset(_links_of(plan))
        self.want(*LAYERS)

    def want(self, *layers: DriftLayer) -> None:
        self._layers.update(layers)

    def note(self, event: KernelEvent) -> bool:
        """Take in an event; whether there is something to look at."""
        layers = self._layers_of(event)
        if event.layer == "link" and layers and event.kind != "new":
            self._count += 1
            self._fallen[event.link] = self._count
        # Whose address it was must be known: others' come and go with others' links.
        if event.pid and event.layer in layers and (event.link or event.layer != "address"):
            self._suspects.setdefault(event.layer, Suspect(event.pid, event.process_name or ""))
        self.want(*layers)
        return bool(layers)

    def _layers_of(self, event: KernelEvent) -> tuple[DriftLayer, ...]:
        """What may have changed with it."""
        match event.layer:
            case "all":
                return LAYERS
            case "link":
                return tuple(LINKED) if event.link in self._links else ()
            case "address" if event.link and event.link not in self._links:
                return ("route",)  # of ours, by their source or next hop
            case "address":
                return ("route", "address")
            case _:
                return (event.layer,)

    def take(self) -> tuple[tuple[DriftLayer, ...], dict[DriftLayer, Suspect]]:
        """What to look at now, and the first to touch each layer since the last time: who repairs comes after who broke."""
        layers, suspects = tuple(layer for layer in LAYERS if layer in self._layers), self._suspects
        self._layers, self._suspects = set(), {}
        return layers, suspects

    def suspects(self) -> Mapping[DriftLayer, Suspect]:
        """Who was seen since: a look may come upon a change before the word of it is heard."""
        return dict(self._suspects)

    def fallen(self) -> Mapping[str, int]:
        """Links that went down or away and may lack what was on them, each with the number of its last fall."""
        return dict(self._fallen)

    def forget(self, seen: Mapping[str, int], lacking: Collection[str]) -> None:
        """After a look with `seen` as fallen: links are whole again whose key is not among `lacking`, unless they fell again meanwhile."""
        self._fallen = {name: fall for name, fall in self._fallen.items() if seen.get(name) != fall or f"link {name}" in lacking}


class Rounds:
    """When which layers are to be looked at without an event: each group once in its period, give or take a tenth."""

    def __init__(self, periods_s: Mapping[tuple[DriftLayer, ...], float], now_s: float) -> None:
        self._periods_s = periods_s
        self._due_s = {layers: now_s + _jittered(period_s) for layers, period_s in periods_s.items()}

    def next_s(self) -> float:
        """When the next look is due."""
        return min(self._due_s.values())

    def due(self, now_s: float) -> set[DriftLayer]:
        """The layers that are due now; their next round is set."""
        groups = [layers for layers, due_s in self._due_s.items() if due_s <= now_s]
        self._due_s.update({layers: now_s + _jittered(self._periods_s[layers]) for layers in groups})
        return {layer for layers in groups for layer in layers}


def _jittered(period_s: float) -> float:
    return period_s * random.uniform(1 - _JITTER, 1 + _JITTER)  # noqa: S311 - jitter, not a secret


def _links_of(plan: HostPlan) -> Iterable[str]:
    for item in plan.objects().values():
        match item:
            case Route():
                yield from (hop.link for hop in item.hops)
            case Sysctl():
                yield item.link
            case _:
                yield from (item.name,) if isinstance(item, Link) else ()
