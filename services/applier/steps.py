"""The order of steps: make before break, with one nft batch as the only switch. Pure.

1. leave    of units that go as a whole: links, then class routes. Their traffic meets `unreachable` from here on.
2. stage    guards and terminal routes, sysctls, policy rules. None of it moves a packet of the new plan until nft marks it.
3. commit   all of nftables, with the marker.
4. connect  links, addresses, WireGuard peers, then class routes; until then, traffic meets `unreachable`.
5. remove   what is left over: class routes, peers, addresses, links, rules, sysctls and at last guards.

A link that has to be made again takes its addresses, peers and routes with it: they are connected again after it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from schemas.plan import Link, LinkAddress, PlanObject, PolicyRule, Route, Sysctl, WireguardLink, WireguardPeer
from services.kernel.transaction import Change, Held, with_dependents


class Steps(NamedTuple):
    """Changes by step, each in the order in which they are to be made."""

    leave: tuple[Change, ...]
    stage: tuple[Change, ...]
    commit: tuple[Change, ...]
    connect: tuple[Change, ...]
    remove: tuple[Change, ...]


def order(changes: Sequence[Change], held: Mapping[str, Held], target: Mapping[str, PlanObject], leaving: Collection[str]) -> Steps:
    """Sort changes into steps. `held` and `target` are all that the kernel holds before and after; `leaving` are keys of units that go."""
    nft = with_dependents([change for change in changes if change.subject.layer == "nft"], target)
    early: list[Change] = []
    late: list[Change] = []
    arriving: list[Change] = []
    for change in changes:
        if change.subject.layer == "nft":
            continue
        if change.new is not None:
            arriving.append(change)
        elif change.key in leaving and _may_leave_early(change.subject):
            early.append(change)
        else:
            late.append(change)
    arriving += _dependents(arriving, held, target)
    return Steps(
        leave=_ranked(early, _LEAVE_RANK),
        stage=_ranked([change for change in arriving if _is_staged(change.subject)], _ARRIVE_RANK),
        commit=tuple(nft),
        connect=_ranked([change for change in arriving if not _is_staged(change.subject)], _ARRIVE_RANK),
        remove=_ranked(late, _REMOVE_RANK),
    )


def is_guard(item: Held | None) -> bool:
    """True for a route that fails closed."""
    return isinstance(item, Route) and item.is_guard


def _is_staged(item: Held) -> bool:
    return isinstance(item, Sysctl | PolicyRule) or (isinstance(item, Route) and not item.hops)


def _may_leave_early(item: Held) -> bool:
    return isinstance(item, Link | LinkAddress | WireguardPeer) or (isinstance(item, Route) and bool(item.hops))


def _dependents(arriving: Sequence[Change], held: Mapping[str, Held], target: Mapping[str, PlanObject]) -> list[Change]:
    """What the kernel dropped with a link that is made (again), to be written after it; where nothing was dropped, that does no harm."""
    remade = {change.new.name for change in arriving if isinstance(change.new, Link)}
    if not remade:
        return []
    known = {change.key for change in arriving}
    return [Change(held.get(key), item) for key, item in target.items() if key not in known and _links_of(item) & remade]


def _links_of(item: PlanObject) -> set[str]:
    match item:
        case LinkAddress() | WireguardPeer():
            return {item.link}
        case Route():
            return {hop.link for hop in item.hops}
    return set()


def _kind(item: Held) -> str:
    if isinstance(item, Route):
        return "guard" if not item.hops else "class route"
    return "class route" if item.layer == "route" else item.layer


_ARRIVE_RANK = ("guard", "sysctl", "rule", "link", "address", "wireguard", "class route")
_LEAVE_RANK = ("link", "class route", "wireguard", "address")
_REMOVE_RANK = ("class route", "wireguard", "address", "link", "rule", "sysctl", "guard")


def _ranked(changes: Sequence[Change], rank: tuple[str, ...]) -> tuple[Change, ...]:
    return tuple(sorted(changes, key=lambda change: (rank.index(_kind(change.subject)), _port_order(change), change.key)))


def _port_order(change: Change) -> int:
    """Tunnels that move to higher ports go from the last one on, others from the first: each finds its port left by the one before."""
    old, new = change.old, change.new
    if isinstance(old, WireguardLink) and isinstance(new, WireguardLink):
        return -new.listen_port if new.listen_port > old.listen_port else new.listen_port
    return 0
