"""The numbers that others use on this host, looked at again and again: for reports. Reads only, in the calling thread's network namespace.

What meshmark made is told by its marks of ownership, as everywhere. A link of ours that is only half made has none yet: who looks while
the kernel is being written must throw away what was seen.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from schemas.in_use import BY_CHARACTERS, USES_MAX, InUse, Use
from services.kernel.netlink import NETLINK_ROUTE, NetlinkSocket
from services.kernel.survey import devices, foreign, netfilter, ports
from services.kernel.survey.values import ForeignRule, LinkSeen, MarkUse

T = TypeVar("T")


class Look:
    """Looks when it is called. Nftables rules are read anew only after a change; a part that cannot be read is as it was before."""

    def __init__(self) -> None:
        self._generation = -1
        self._marks: tuple[MarkUse, ...] = ()
        self._rules: tuple[ForeignRule, ...] = ()
        self._tables: list[tuple[int, int]] = []
        self._links: Mapping[int, LinkSeen] = {}
        self._own_ports: frozenset[int] = frozenset()
        self._sockets: Mapping[str, int] | None = None

    def __call__(self) -> InUse:
        # Sockets before links: a device of ours that is there now was made before its socket was seen.
        before, self._sockets = self._sockets, _or(self._sockets, ports.listening) or {}
        with contextlib.closing(NetlinkSocket(NETLINK_ROUTE)) as netlink:
            self._links = _or(self._links, lambda: foreign.links(netlink))
            self._rules = _or(self._rules, lambda: foreign.rules(netlink))
            self._tables = _or(self._tables, lambda: foreign.tables(netlink))
        self._own_ports = _or(self._own_ports, self._ask_own)
        self._marks = _or(self._marks, self._read_marks)
        # What resolvers and the like open for one question is gone the next time.
        lasting = self._sockets.keys() if before is None else self._sockets.keys() & before.keys()
        taken = {port for inode, port in self._sockets.items() if inode in lasting} - self._own_ports
        return summary(self._rules, self._tables, self._marks, taken, self._links.values())

    def _ask_own(self) -> frozenset[int]:
        own = {index: link for index, link in self._links.items() if link.is_own}
        return frozenset(link.port for link in devices.with_ports(own) if link.port)

    def _read_marks(self) -> tuple[MarkUse, ...]:
        now = netfilter.generation()
        if now != self._generation:
            self._marks, self._generation = netfilter.read().marks, now
        return self._marks


def summary(
    rules: Sequence[ForeignRule],
    tables: Iterable[tuple[int, int]],
    marks: Iterable[MarkUse],
    taken: Iterable[int],
    links: Iterable[LinkSeen],
) -> InUse:
    """The same from what was seen: family and number of the tables with routes of others, ports that are none of ours. Pure.

    Nothing is counted, so that what is in use by the same looks the same.
    """
    matched = ((rule.mask, rule.text, 0) for rule in rules if rule.mask)
    filled = ((table, f"IPv{family} routes", family) for family, table in tables)
    looked_up = ((rule.table, rule.text, rule.family) for rule in rules if rule.table not in foreign.USUAL_TABLES)
    holders = {link.port: f"{link.kind} device {link.name}" for link in links if link.port and not link.is_own}
    return InUse(
        marks=_uses([*((use.mask, use.text, 0) for use in marks), *matched]),
        tables=_uses([*filled, *looked_up]),
        priorities=_uses((rule.priority, rule.text, rule.family) for rule in rules),
        ports=_uses((port, holders.get(port, "a UDP socket"), 0) for port in taken),
    )


def _uses(found: Iterable[tuple[int, str, int]]) -> tuple[Use, ...]:
    """Number, words and family of uses: each number of a family once, by the first that has it, sorted and cut."""
    firsts: dict[tuple[int, int], str] = {}
    for number, by, family in found:
        firsts.setdefault((number, family), by)
    return tuple(Use(number, by[:BY_CHARACTERS], family) for (number, family), by in sorted(firsts.items())[:USES_MAX])


def _or(before: T, look: Callable[[], T]) -> T:
    try:
        return look()
    except OSError:
        return before
