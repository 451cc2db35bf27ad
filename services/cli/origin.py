"""Where an object of a plan comes from, and what a topology object leads to. Pure: plans, reports and drift in, answers out."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from typing import Literal

from msgspec import Struct

from schemas import encryption
from schemas.drift import PLAINTEXT, DriftEvent
from schemas.host_objects import NftObject, OnLink, PlanObject, Route, Sysctl
from schemas.plan import HostPlan, digest_of
from schemas.status import ApplyReport
from schemas.topology import KINDS, Topology
from schemas.values import wire_name
from services.planner.state import HostId
from services.runtime.errors import Permanent

_NEAR = 3
_WIRE = {"frozen": True, "rename": wire_name}

Held = Literal["yes", "no", "unknown"]


class Origin(Struct, **_WIRE):
    """A topology object behind others: its admitted value, and the message that said so. None: not kept, or not known offline.

    `sequence` is the message's place in TOPOLOGY. Times are Unix time, in seconds.
    """

    ref: str
    value: Topology | None = None
    sequence: int | None = None
    published_s: float | None = None
    admitted_s: float | None = None


class Standing(Struct, **_WIRE):
    """Whether a host reports that it holds an object, and why it is not known or not so."""

    held: Held
    detail: str = ""
    reported_s: float | None = None


class Place(Struct, **_WIRE):
    """An object in a unit of a host's plan. `generation` is the plan's; it, `standing` and `drift` are None offline."""

    cluster: str
    host: str
    unit: str
    value: PlanObject
    because: tuple[str, ...]
    generation: int | None = None
    standing: Standing | None = None
    drift: DriftEvent | None = None


def is_reference(text: str) -> bool:
    """True for a topology object's reference; every key of a plan's object has a space in it."""
    return " " not in text and text.count("/") == 2 and text.partition("/")[0].lower().removesuffix("s") in map(str.lower, KINDS)  # noqa: PLR2004


def places(plans: Mapping[HostId, HostPlan], key: str) -> list[Place]:
    """Every unit of every plan that holds the object, by host and unit. Permanent, with keys that are like it, when none does."""
    found = [
        Place(*host, name, entry.object, entry.because)
        for host, plan in sorted(plans.items())
        for name, unit in sorted(plan.units.items())
        if (entry := unit.get(key)) is not None
    ]
    if not found:
        known = {one for plan in plans.values() for unit in plan.units.values() for one in unit}
        where = f"the plan of {next(iter(plans))}" if len(plans) == 1 else "any plan"
        msg = f"no object {key!r} in {where}; {near(key, known)}"
        raise Permanent(msg)
    return found


def descendants(plans: Mapping[HostId, HostPlan], ref: str) -> dict[HostId, dict[str, list[str]]]:
    """Keys of the objects that come from a topology object, by host and layer; hosts without any are left out."""
    found: dict[HostId, dict[str, list[str]]] = {}
    for host, plan in sorted(plans.items()):
        entries = {key: entry for unit in plan.units.values() for key, entry in unit.items() if ref in entry.because}
        for key, entry in sorted(entries.items()):
            found.setdefault(host, {}).setdefault(entry.object.layer, []).append(key)
    return found


def standing(plan: HostPlan, unit: str, report: ApplyReport | None) -> Standing:
    """What the host's last report says about a unit of this plan. A unit is held as a whole or not."""
    if report is None:
        return Standing("unknown", "the host has never reported")
    at_s = report.timings.reported_s or None
    told = next((one for one in report.units if one.unit == unit), None)
    if told is None:
        return Standing("no", "the host has not reported on this unit", at_s)
    if told.held == digest_of(plan.units[unit]):
        return Standing("yes", "", at_s)
    if told.outcome != "applied":
        return Standing("no" if not told.held else "unknown", f"{told.outcome}: {told.error}", at_s)
    return Standing("unknown", f"the host reported on an older version of the unit, generation {report.generation}", at_s)


def drift_of(host: HostId, key: str, item: PlanObject, events: Iterable[DriftEvent]) -> DriftEvent | None:
    """The open difference that concerns the object: its own, its layer's, or that of what stands for it: its table, a link it needs."""
    keys = {key, f"layer {item.layer}"}
    match item:
        case Route():
            keys |= {f"link {hop.link}" for hop in item.hops}
        case Sysctl():
            keys |= {f"link {item.link}"}
        case _ if isinstance(item, OnLink):
            keys.add(f"link {item.link}")
        case _ if isinstance(item, NftObject):
            keys.add(f"table {item.table}")
    return next((event for event in events if (event.cluster, event.host) == host and event.key in keys), None)


def refuse_alert(text: str, events: Iterable[DriftEvent]) -> None:
    """Permanent for the key of an alert about packets, as ``out pods 10.200.1.10 10.200.2.10``: no plan has an object of that.

    It says which topology objects are behind the alert, if it is open.
    """
    key = text.removeprefix(f"{PLAINTEXT} ")
    direction, _, rest = key.partition(" ")
    traffic, _, ends = rest.partition(" ")
    if not ends or (direction, traffic) not in encryption.PLAINTEXT:
        return
    behind = [f"{event.cluster}/{event.host}: {', '.join(event.because) or 'nothing'}" for event in events if event.key == key]
    said = f"on {'; on '.join(behind)}" if behind else "meshmark drift says it while the alert is open, and none such is now"
    msg = f"{key!r} is an alert about packets in clear, and no plan has an object for it; what is behind it (its `because`): {said}"
    raise Permanent(msg)


def near(text: str, known: Collection[str]) -> str:
    """What is known and like `text`, in words: what begins so, else what differs in little."""
    begin = sorted(one for one in known if one.startswith(text))[:_NEAR]
    close = begin or difflib.get_close_matches(text, known, n=_NEAR)
    if close:
        return f"did you mean {' or '.join(repr(one) for one in close)}?"
    return "meshmark plan --output json lists all keys, meshmark get all topology objects"
