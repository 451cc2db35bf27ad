"""The order of steps: make before break, with one nft batch as the only switch. Pure.

1. leave    of units that go as a whole: links, then class routes. Their traffic meets `unreachable` from here on.
2. stage    guards and terminal routes, sysctls (those of a link follow it), policy rules. None of it moves a packet of the new plan until
            nft marks it.
3. commit   all of nftables, with the marker.
4. connect  links, addresses, neighbours, WireGuard peers, then class routes; until then, traffic meets `unreachable`. At last open rules.
5. remove   what is left over: class routes, peers, neighbours, addresses, links, rules, sysctls and at last guards.

A rule is open when no guard stands in its table, as published rules are: it may match packets at once, and without routes in the table
these would go elsewhere. So it comes after all routes, and goes before them, be it with its unit (step 1) or alone (step 5).

A link that has to be made again takes its addresses, neighbours, peers and routes with it: they are connected again after it. A link that
goes while another one takes its place in the kernel (the same far end and number, or the same port, under another name) goes just before
that comes. An address that goes from a link goes before routes by that link come which have it as their source: older kernels (Linux 6.1,
IPv6) take it from those routes, though the host has it on another link. Those that stay are written again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from schemas.host_objects import MAIN_TABLE, Link, LinkAddress, OnLink, PlanObject, PolicyRule, Route, Sysctl, WireguardLink
from schemas.values import Address
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
    guarded = _guarded([*(change.subject for change in changes), *held.values(), *target.values()])
    nft = with_dependents([change for change in changes if change.subject.layer == "nft"], target)
    early: list[Change] = []
    late: list[Change] = []
    giving_way: list[Change] = []
    taken = {_place(change.new) for change in changes if isinstance(change.new, Link)}
    sources = {source for item in target.values() for source in _sources_of(item)}
    arriving: list[Change] = []
    for change in changes:
        if change.subject.layer == "nft":
            continue
        if change.new is not None:
            arriving.append(change)
        elif change.key in leaving and _may_leave_early(change.subject, guarded):
            early.append(change)
        elif (isinstance(change.old, Link) and _place(change.old) in taken) or _address_of(change.old) in sources:
            giving_way.append(change)
        else:
            late.append(change)
    arriving += _dependents(changes, held, target)
    staged = [change for change in arriving if _is_staged(change.subject, guarded)]
    connecting = [*giving_way, *(change for change in arriving if not _is_staged(change.subject, guarded))]
    return Steps(
        leave=_ranked(early, _LEAVE_RANK, guarded),
        stage=_ranked(staged, _ARRIVE_RANK, guarded),
        commit=tuple(nft),
        connect=_ranked(connecting, _ARRIVE_RANK, guarded),
        remove=_ranked(late, _REMOVE_RANK, guarded),
    )


def is_guard(item: Held | None) -> bool:
    """True for a route that fails closed."""
    return isinstance(item, Route) and item.is_guard


def _guarded(items: Iterable[Held]) -> frozenset[int]:
    """The tables in which a guard stands. Main has guards for some prefixes only."""
    return frozenset(item.table for item in items if isinstance(item, Route) and item.is_guard) - {MAIN_TABLE}


def _is_open(item: Held, guarded: Collection[int]) -> bool:
    return isinstance(item, PolicyRule) and item.table not in guarded


def _is_staged(item: Held, guarded: Collection[int]) -> bool:
    if isinstance(item, PolicyRule):
        return not _is_open(item, guarded)
    return (isinstance(item, Sysctl) and not item.link) or (isinstance(item, Route) and not item.hops)


def _may_leave_early(item: Held, guarded: Collection[int]) -> bool:
    has_hops = isinstance(item, Route) and bool(item.hops)
    return has_hops or isinstance(item, Link | OnLink) or _is_open(item, guarded)


def _dependents(changes: Sequence[Change], held: Mapping[str, Held], target: Mapping[str, PlanObject]) -> list[Change]:
    """What the kernel dropped with a link that is made (again), or took from a route with an address, to be written after it.

    Where nothing was dropped, that does no harm.
    """
    remade = {change.new.name for change in changes if isinstance(change.new, Link)}
    gone = {_address_of(change.old) for change in changes if change.new is None} - {None}
    if not remade and not gone:
        return []
    known = {change.key for change in changes}
    return [
        Change(held.get(key), item)
        for key, item in target.items()
        if key not in known and (_links_of(item) & remade or _sources_of(item) & gone)
    ]


def _sources_of(item: PlanObject) -> set[tuple[str, Address]]:
    """By which link and as which address a route has packets leave."""
    return {(hop.link, item.source) for hop in item.hops} if isinstance(item, Route) and item.source is not None else set()


def _address_of(item: Held | None) -> tuple[str, Address] | None:
    return (item.link, item.address) if isinstance(item, LinkAddress) else None


def _links_of(item: PlanObject) -> set[str]:
    match item:
        case Route():
            return {hop.link for hop in item.hops}
        case Sysctl():
            return {item.link} - {""}
        case _:
            return {item.link} if isinstance(item, OnLink) else set()


def _place(link: Link) -> tuple[object, ...]:
    """What the kernel gives to one link of a kind only, whatever its name."""
    return ("port", link.listen_port) if isinstance(link, WireguardLink) else (type(link), link.vni, link.remote, link.port)


def _kind(item: Held, guarded: Collection[int]) -> str:
    if isinstance(item, Route):
        return "guard" if not item.hops else "class route"
    if _is_open(item, guarded):
        return "open rule"
    if isinstance(item, Sysctl) and item.link:
        return "link sysctl"
    return "class route" if item.layer == "route" else item.layer


_ARRIVE_RANK = ("guard", "sysctl", "rule", "link", "link sysctl", "address", "neighbour", "wireguard", "class route", "open rule")
_LEAVE_RANK = ("open rule", "link", "class route", "wireguard", "neighbour", "address")
_REMOVE_RANK = ("open rule", "class route", "wireguard", "neighbour", "address", "link sysctl", "link", "rule", "sysctl", "guard")


def _ranked(changes: Sequence[Change], rank: tuple[str, ...], guarded: Collection[int]) -> tuple[Change, ...]:
    return tuple(sorted(changes, key=lambda change: (rank.index(_kind(change.subject, guarded)), _within_rank(change), change.key)))


def _within_rank(change: Change) -> int:
    """Tunnels that move to higher ports go from the last one on, others from the first: each finds its port left by the one before.

    Before all of them a link goes that gives way. Routes by device come before those by a neighbour, whom the kernel must find by one.
    """
    old, new = change.old, change.new
    if isinstance(old, Link) and new is None:
        return -1 << 16
    if isinstance(old, WireguardLink) and isinstance(new, WireguardLink):
        return -new.listen_port if new.listen_port > old.listen_port else new.listen_port
    return int(isinstance(new, Route) and any(hop.via for hop in new.hops))
