"""One look at the kernel. Blocking; runs in the kernel's thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from msgspec import Struct
from msgspec.structs import replace

from schemas.drift import DriftLayer
from schemas.host_objects import PlanObject, WireguardPeer
from services.auditor.findings import View
from services.kernel.port import Kernel
from services.kernel.transaction import Held
from services.runtime.errors import MeshmarkError


class Look(Struct, frozen=True):
    """What was seen of some layers, and why others could not be read."""

    view: View
    layers: tuple[DriftLayer, ...]
    unreadable: Mapping[DriftLayer, str]


def look(
    kernel: Kernel, objects: Mapping[str, PlanObject], layers: Sequence[DriftLayer], fallen: AbstractSet[str], *, with_links: bool
) -> Look:
    """Read `layers`, each for itself where they cannot be read together. Raises MeshmarkError when the marker cannot be read.

    `objects` are all that is wanted; `with_links` asks for the state of every link of the host as well.
    """
    marker = kernel.marker()
    wanted = {key: _without_name(item) for key, item in objects.items() if item.layer in layers}
    unreadable: dict[DriftLayer, str] = {}
    try:
        reference, observed = kernel.reference(wanted), kernel.read(wanted, layers)
    except MeshmarkError:
        reference, observed, unreadable = _by_layer(kernel, wanted, layers)
    try:
        links = kernel.links() if with_links else None
    except MeshmarkError:  # then those that say so are the layers with links in them, and no cause is looked for among links
        links = None
    view = View(reference, observed, marker, {}, links, fallen)
    return Look(view, tuple(layer for layer in layers if layer not in unreadable), unreadable)


def _by_layer(
    kernel: Kernel, wanted: Mapping[str, PlanObject], layers: Sequence[DriftLayer]
) -> tuple[dict[str, Held], dict[str, Held], dict[DriftLayer, str]]:
    reference: dict[str, Held] = {}
    observed: dict[str, Held] = {}
    unreadable: dict[DriftLayer, str] = {}
    for layer in layers:
        part = {key: item for key, item in wanted.items() if item.layer == layer}
        try:
            expected, found = kernel.reference(part), kernel.read(part, (layer,))
        except MeshmarkError as error:
            unreadable[layer] = str(error)
        else:
            reference.update(expected)
            observed.update(found)
    return reference, observed, unreadable


def _without_name(item: PlanObject) -> PlanObject:
    """A peer whose endpoint is a name without it: where that is, the applier has looked up, and may have found anew by now."""
    return replace(item, endpoint=None) if isinstance(item, WireguardPeer) and item.endpoint and item.endpoint.name else item
