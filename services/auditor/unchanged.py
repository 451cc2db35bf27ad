"""What need not be looked at again: layers that the kernel holds exactly as they were when nothing was found in them.

A look compares what the kernel shows of a layer with a plan, without withdrawn hops, in the light of the marker. With all four the same it
would come to the same. A layer in which something was found is looked at each time, and so is every one while there is no marker, since
then what the applier says it holds counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from schemas.drift import DriftLayer
from schemas.plan import HostPlan
from services.kernel.port import Kernel
from services.kernel.transaction import Marker


class State(NamedTuple):
    """All that a look at a layer depends on. The plan is that very object."""

    plan: HostPlan
    withdrawn: tuple[str, ...]
    marker: Marker | None
    fingerprint: bytes | None

    def is_known(self, other: State | None) -> bool:
        """Whether `other` is the same state."""
        return (
            other is not None
            and self.marker is not None
            and self.fingerprint is not None
            and self.plan is other.plan
            and self[1:] == other[1:]
        )


States = Mapping[DriftLayer, State]


class Unchanged:
    """The states of one host's layers in which nothing was found. Blocking, one call at a time."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._clean: dict[DriftLayer, State] = {}

    def left(self, layers: Iterable[DriftLayer], plan: HostPlan, withdrawn: tuple[str, ...]) -> tuple[DriftLayer, ...]:
        """Those of `layers` that have to be looked at. Raises MeshmarkError when the kernel does not answer."""
        known = [layer for layer in layers if layer in self._clean]
        marker = self._kernel.marker() if known else None
        same = {
            layer for layer in known if State(plan, withdrawn, marker, self._kernel.fingerprint(layer)).is_known(self._clean.get(layer))
        }
        return tuple(layer for layer in layers if layer not in same)

    def states(self, layers: Iterable[DriftLayer], plan: HostPlan, withdrawn: tuple[str, ...], marker: Marker | None) -> States:
        """What a look depends on that has just read these layers."""
        return {layer: State(plan, withdrawn, marker, self._kernel.seen(layer)) for layer in layers}

    def note(self, states: States, differing: Iterable[DriftLayer]) -> None:
        """Keep what a look came to. `differing` are the layers in which something was found."""
        found = set(differing)
        for layer, state in states.items():
            if layer in found or not state.is_known(state):
                self._clean.pop(layer, None)
            else:
                self._clean[layer] = state
