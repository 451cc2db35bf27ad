"""What the auditor sees and what it says of it, as values: a view of the kernel, and findings."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from msgspec import Struct
from msgspec.structs import replace

from schemas import codec
from schemas.drift import DriftLayer
from services.kernel.nftread.words import rule_text
from services.kernel.transaction import Held, ListedChain, Marker, Observed

LAYERS: tuple[DriftLayer, ...] = ("nft", "rule", "route", "link", "address", "neighbour", "wireguard", "sysctl")
LINKED: frozenset[DriftLayer] = frozenset(("route", "link", "address", "neighbour", "wireguard", "sysctl"))
"""Layers of which one cause may have several: what is on a link goes with it."""


class View(Struct, frozen=True):
    """What is known of the kernel: how it would list the plan, how it lists what it holds, and which plan its marker names.

    `reported` is the digest of each unit that the applier last said that it holds; it counts where there is no marker. `links` are all
    links of the host, ours and others', and whether each is up; None where nobody asked. `fallen` are links that were seen going down or
    away lately, whatever they are now.
    """

    reference: Observed
    observed: Observed
    marker: Marker | None
    reported: Mapping[str, str]
    links: Mapping[str, bool] | None = None
    fallen: AbstractSet[str] = frozenset()


class Finding(Struct, frozen=True):
    """One difference. `wanted` and `found` are in the kernel's form, as text; empty for what is not there.

    `carries` are layers besides its own in which a repair can make good what it stands for.
    """

    layer: DriftLayer
    key: str
    wanted: str
    found: str
    unit: str
    because: tuple[str, ...]
    carries: tuple[DriftLayer, ...] = ()


def show(item: Held | None) -> str:
    """An object as one line of JSON, rules in words."""
    if isinstance(item, ListedChain):
        item = replace(item, rules=tuple(map(rule_text, item.rules)))
    return codec.encode(item).decode() if item is not None else ""
