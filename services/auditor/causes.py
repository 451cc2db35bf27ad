"""One finding per cause: what went with a link, with an address, or to another peer, is not told again by itself. Pure.

- A link that is gone or down stands for what was on it or led through it; so does one that was, as long as that is not back, and one of
  somebody else's that routes of ours need. An MTU too small for IPv6 stands for the IPv6 that the kernel took off the link, another MAC
  for its neighbours.
- An address that is gone stands for the routes that the kernel dropped with it.
- A prefix that a strange peer took is the strange peer's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from schemas.drift import DriftLayer
from schemas.host_objects import FdbEntry, GeneveLink, Link, LinkAddress, Neighbour, OnLink, Route, Sysctl, VxlanLink, WireguardPeer
from schemas.plan import HostPlan
from schemas.values import IPV6, Family
from services.auditor.findings import Finding, View, show
from services.kernel.transaction import Held, Listed

IPV6_MTU_MIN = 1280
"""Below this the kernel takes IPv6 off a link (IPV6_MIN_MTU)."""
UP = "up"
DOWN = "down"
FALLEN = "up again, without what went when it was down or away"


def by_cause(found: Sequence[Finding], view: View, plan: HostPlan) -> list[Finding]:
    """The findings without those that another one explains; a link that nobody found different may become one."""
    found = _without_robbed(found, view)
    found = _by_link(found, view, plan) if view.links is not None else found
    return _by_address(found, view)


# Links ---------------------------------------------------------------------------------------------------------------------------------


def _by_link(found: Sequence[Finding], view: View, plan: HostPlan) -> list[Finding]:
    left: list[Finding] = []
    carried: dict[str, list[Finding]] = {}
    for finding in found:
        broken = sorted(name for name in _links_behind(finding, view) if _is_broken(name, finding, view))
        if broken:
            carried.setdefault(f"link {broken[0]}", []).append(finding)
        else:
            left.append(finding)
    by_key = {finding.key: finding for finding in left}
    for key, items in carried.items():
        by_key[key] = _bearing(by_key.get(key) or _of_link(key, items, view, plan), items, view)
    return sorted(by_key.values(), key=lambda finding: finding.key)


def _links_behind(finding: Finding, view: View) -> set[str]:
    """The links of which one may be why the kernel lost the wanted object, or a part of it."""
    wanted, held = view.reference.get(finding.key), view.observed.get(finding.key)
    match wanted:
        case Route():
            return _lost_hops(wanted, held)
        case Sysctl():
            return {wanted.link} - {""}
        case _:
            return {wanted.link} if held is None and isinstance(wanted, OnLink) else set()


def _lost_hops(wanted: Route, held: Held | None) -> set[str]:
    """The links of hops that a route lacks; all of them when there is no route. A hop that is left alone has lost its weight."""
    hops = {(hop.link, hop.via): hop.link for hop in wanted.hops}
    if held is None:
        return set(hops.values())
    if not isinstance(held, Route) or replace(held, hops=wanted.hops) != wanted:
        return set()
    left = {(hop.link, hop.via) for hop in held.hops}
    return {link for hop, link in hops.items() if hop not in left} if left < hops.keys() else set()


def _is_broken(name: str, finding: Finding, view: View) -> bool:
    links = view.links or {}
    if not links.get(name) or name in view.fallen:
        return True
    lost = view.reference[finding.key]
    wanted, held = view.reference.get(f"link {name}"), view.observed.get(f"link {name}")
    if isinstance(lost, Neighbour | FdbEntry):
        return isinstance(wanted, VxlanLink | GeneveLink) and isinstance(held, VxlanLink | GeneveLink) and held.mac != wanted.mac
    return isinstance(held, Link) and held.mtu < IPV6_MTU_MIN and _family(lost) == IPV6


def _family(item: Held) -> Family | None:
    match item:
        case Route():
            return item.prefix.family
        case LinkAddress():
            return item.address.family
    return None


def _of_link(key: str, items: Sequence[Finding], view: View, plan: HostPlan) -> Finding:
    """The finding of a link that is down or gone and not ours, or that is up again."""
    name, wanted = key.removeprefix("link "), view.reference.get(key)
    links = view.links or {}
    state = "" if name not in links else FALLEN if links[name] else DOWN
    because = plan.because(key) or tuple(sorted({ref for item in items for ref in item.because}))
    unit = next((unit for unit in sorted(plan.units) if key in plan.units[unit]), items[0].unit)
    return Finding("link", key, show(wanted) or UP, state, unit, because)


def _bearing(finding: Finding, items: Iterable[Finding], view: View) -> Finding:
    """A repair of other layers helps only where the link is there to carry them."""
    is_up = bool((view.links or {}).get(finding.key.removeprefix("link ")))
    return replace(finding, carries=_layers(items) if is_up else ("link",))


def _layers(items: Iterable[Finding]) -> tuple[DriftLayer, ...]:
    return tuple(sorted({item.layer for item in items}))


# Addresses -----------------------------------------------------------------------------------------------------------------------------


def _by_address(found: Sequence[Finding], view: View) -> list[Finding]:
    gone = {
        finding.key: item
        for finding in found
        if isinstance(item := view.reference.get(finding.key), LinkAddress) and finding.key not in view.observed
    }
    if not gone:
        return list(found)
    left: list[Finding] = []
    carried: dict[str, list[Finding]] = {}
    for finding in found:
        key = next((key for key, item in gone.items() if _went_with(finding.key, item, view)), None)
        if key is None:
            left.append(finding)
        else:
            carried.setdefault(key, []).append(finding)
    return [replace(finding, carries=_layers(carried[finding.key])) if finding.key in carried else finding for finding in left]


def _went_with(key: str, address: LinkAddress, view: View) -> bool:
    """Whether a route is not there, or lacks its source, and the address may be why."""
    wanted, held = view.reference.get(key), view.observed.get(key)
    if not isinstance(wanted, Route) or wanted.prefix.family != address.address.family:
        return False
    if held is None:
        return wanted.source == address.address or any(hop.link == address.link for hop in wanted.hops)
    return wanted.source == address.address and isinstance(held, Route) and replace(held, source=wanted.source) == wanted


# Peers ---------------------------------------------------------------------------------------------------------------------------------


def _without_robbed(found: Sequence[Finding], view: View) -> list[Finding]:
    """Without planned peers that a strange one took prefixes from. Of planned ones the kernel's adapter tells the one that lost, alone."""
    strangers = [
        (finding.key, item)
        for finding in found
        if finding.key not in view.reference and isinstance(item := view.observed.get(finding.key), WireguardPeer)
    ]
    by_key = {finding.key: finding for finding in found}
    for key, stranger in strangers:
        for other, finding in list(by_key.items()):
            wanted = view.reference.get(other)
            if isinstance(wanted, WireguardPeer) and _is_robbed(wanted, view.observed.get(other), stranger):
                by_key[key] = replace(by_key[key], found=f"{by_key[key].found}\n{finding.found}")
                del by_key[other]
    return list(by_key.values())


def _is_robbed(wanted: WireguardPeer, held: Held | None, stranger: WireguardPeer) -> bool:
    return isinstance(held, Listed) and wanted.link == stranger.link and not set(wanted.allowed_ips).isdisjoint(stranger.allowed_ips)
