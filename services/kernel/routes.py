"""Routes of both families, in any table.

Owns every route of protocol 77; that is how they are found after a restart. A route is made with NLM_F_EXCL: where one of the same table,
prefix and metric is there already, it is replaced (one message, no packet lost) if it is ours, and is a Conflict if it is not.
Fails with Waiting while a link is missing or down, a next hop cannot be reached, or the source is not an address of this host. A route
of ours with something that no plan can say (a metric on the MTU, a type of service) is `Listed`. An address that goes takes the IPv4
routes of main with that source along, without a message, and its trace out of IPv6 routes (Linux 6.1: of those by
the address's own link only); IPv4 routes of other tables keep it.

Routes are written many at a time, thousands in a system call: rtnetlink has no transaction, so what is refused is told route by route and
the others hold. Where refusals were lost, routes are sent once more, each by itself, which changes nothing where they were taken.

What IPv6 does otherwise: a route without a metric gets one; several routes of one prefix and metric may be there (appended by somebody),
which is `Listed`, and writing the wanted one removes the others after it; a route that does not forward names ``lo``; a link that goes
takes only its own hop out of a route.
"""

from __future__ import annotations

import errno
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from schemas.host_objects import OWN_PROTOCOL, NextHop, PlanObject, Route
from schemas.values import FAMILIES, SOCKET_FAMILY
from services.kernel.failures import Failures, blamed, mapped, unreadable
from services.kernel.interfaces import Interfaces
from services.kernel.netlink import CREATE, EXCL, REPLACE, U32, NetlinkError, NetlinkSocket, attribute
from services.kernel.route_messages import (
    DELROUTE,
    GETROUTE,
    INFO,
    NEWROUTE,
    TABLE,
    Decoder,
    Encoder,
    bare_body,
    by_one_name,
    in_kernel_form,
)
from services.kernel.rows import Mixed, Row, bodies
from services.kernel.transaction import Change, Held, Listed
from services.runtime.errors import Conflict, MeshmarkError, Permanent, Waiting

_TABLES_ONE_BY_ONE = 8
_PROTOCOL_AT = 5
_GONE = (errno.ESRCH, errno.ENODEV)
_WAITING = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EINVAL)
"""How the kernel says that a next hop cannot be reached (IPv4, IPv6 with and without a link of its own)."""

_NOTHING: Mapping[str, PlanObject] = {}

Placed = tuple[int, Change]
"""A change and its place among those that are to be made."""


class _Read(NamedTuple):
    """Routes by the bodies of their messages, each with its key, and the names that links had."""

    names: Mapping[int, str]
    routes: dict[bytes, tuple[str, Held]]


class Routes:
    """Own routes. Who `remembers` has what was read last in memory, by the kernel's own bytes, and makes only the rest anew."""

    def __init__(self, netlink: NetlinkSocket, interfaces: Interfaces, *, remembers: bool = False) -> None:
        self._netlink = netlink
        self._interfaces = interfaces
        self._remembers = remembers
        self._read = _Read({}, {})
        self._links: frozenset[str] = frozenset()
        self.seen: bytes | None = None
        """The fingerprint of what was read last."""

    def read(self, wanted: Mapping[str, PlanObject] = _NOTHING) -> dict[str, Held]:
        """All own routes by key. Equal ones of `wanted` stand for those that were read, so that none is in memory twice."""
        names = self._interface_names()
        decoder = Decoder(names)
        before, now = self._read.routes if self._read.names == names else {}, _Read(names, {})
        found: dict[str, Held] = {}
        links: set[str] = set()
        hops: tuple[NextHop, ...] = ()
        digests: list[bytes] = []
        self.seen = None
        for family in FAMILIES:
            bodies, digest = self._dump(SOCKET_FAMILY[family])
            digests.append(digest)
            for body in bodies:
                if (known := before.get(body)) is None:
                    item = decoder.route(body)
                    planned = wanted.get(item.key)
                    known = item.key, planned if planned is not None and planned == item else item
                if self._remembers:
                    now.routes[body] = known
                key, item = known
                found[key] = Listed("route", key, "the same route more than once") if key in found else item
                if isinstance(item, Route) and item.hops is not hops:  # routes alike have the very same hops
                    hops = item.hops
                    links.update(hop.link for hop in hops)
        self._read = now
        self._links = frozenset(links)
        self.seen = _fingerprint(digests, {name: index for index, name in names.items() if name in links})
        return found

    def write_all(self, changes: Sequence[Change]) -> Failures:
        """Make the changes in their order; the errors of those that could not be made, by their place."""
        failures: Failures = {}
        behind = 0
        for is_removal, group in groupby([change.new is None for change in changes]):
            start, behind = behind, behind + len(list(group))
            run = list(zip(range(start, behind), changes[start:behind], strict=True))
            with blamed(failures, range(start, behind)):  # before anything is sent: what fails later is told more exactly
                if is_removal:
                    self._remove(run, failures)
                else:
                    self._put(run, failures)
        return failures

    def fingerprint(self) -> bytes:
        """Of all own routes, and of the names of the links that they were read with."""
        try:
            digests = [self._netlink.digest(GETROUTE, _all_own(SOCKET_FAMILY[family])) for family in FAMILIES]
        except NetlinkError as error:
            raise unreadable(error, "routes") from error
        named = self._interfaces.named(self._links)
        return _fingerprint(digests, {name: item.index for name, item in named.items() if name in self._links})

    # Making --------------------------------------------------------------------------------------------------------------------------

    def _put(self, run: Sequence[Placed], failures: Failures) -> None:
        wanted = _all_wanted(run)
        encoder = Encoder(self._interfaces.named(_links(wanted)))
        rows, unfit = encoder.rows(wanted)
        failures.update((run[index][0], error) for index, error in unfit.items())
        ready = [placed for index, placed in enumerate(run) if index not in unfit] if unfit else run
        refused = self._sent(rows, CREATE | EXCL)
        there = [index for index, error in refused.items() if error.errno == errno.EEXIST]
        if there:
            each = bodies(rows)
            for index in there:
                del refused[index]
            places = [ready[index] for index in there]
            with blamed(failures, [place for place, _ in places]):
                self._replace(places, [each[index] for index in there], failures)
            # A next hop may be one that is only reached by a route that has just been replaced.
            again = [index for index, error in refused.items() if error.errno in _WAITING]
            for index in again:
                del refused[index]
            once_more = [Mixed([each[index] for index in again])]
            refused.update((again[index], error) for index, error in self._sent(once_more, CREATE | EXCL).items())
        _explain(refused, ready, failures)

    def _replace(self, there: Sequence[Placed], bodies: Sequence[bytes], failures: Failures) -> None:
        """Put these in the place of ours with the same key."""
        held: dict[str, list[Held]] = {}
        for _, found in self._held({_wanted(change).table for _, change in there}):
            held.setdefault(found.key, []).append(found)
        differing: list[Placed] = []
        messages: list[bytes] = []
        for (place, change), body in zip(there, bodies, strict=True):
            found_here = held.get(change.key)
            if not found_here:
                msg = f"{change.key}: there is a route of another owner; remove it or give ours another metric"
                failures[place] = Conflict(msg)
            elif found_here != [in_kernel_form(_wanted(change))]:
                differing.append((place, change))
                messages.append(body)
        _explain(self._sent([Mixed(messages)], CREATE | REPLACE), differing, failures)
        left = [item for item in differing if len(held[item[1].key]) > 1 and item[0] not in failures]
        if left:
            with blamed(failures, [place for place, _ in left]):
                self._delete_others(left, failures)

    def _delete_others(self, wanted: Sequence[Placed], failures: Failures) -> None:
        """Leave each of these alone under its key."""
        kept = {change.key: (place, in_kernel_form(_wanted(change))) for place, change in wanted}
        extra = [
            (kept[found.key][0], found.key, by_one_name(body))
            for body, found in self._held({_wanted(change).table for _, change in wanted})
            if found.key in kept and found != kept[found.key][1]
        ]
        self._delete(extra, failures)

    def _sent(self, rows: Sequence[Row], flags: int) -> dict[int, NetlinkError]:
        """Send routes, and once more those of which it is not known what became; errors by their place over all rows."""
        refused = self._netlink.request_rows(NEWROUTE, rows, flags)
        lost = [index for index, error in refused.items() if error.errno == errno.ENOBUFS]
        each = bodies(rows) if lost else []
        for index in lost:
            again = self._netlink.request_all(NEWROUTE, [each[index]], flags)
            if again:
                refused[index] = again[0]
            else:
                del refused[index]
        return refused

    # Removing ------------------------------------------------------------------------------------------------------------------------

    def _remove(self, run: Sequence[Placed], failures: Failures) -> None:
        """Remove routes of ours whatever their hops.

        No metric means any to the kernel: so an IPv4 route without one is told by its hops, and if that finds none, looked for.
        """
        loose = {place: item for place, change in run if isinstance(item := change.old, Route) and not item.kernel_metric}
        encoder = Encoder(self._interfaces.named({hop.link for item in loose.values() for hop in item.hops}))
        told: list[tuple[int, str, bytes]] = []
        sought: dict[str, int] = {}
        for place, change in run:
            item = change.old
            if isinstance(item, Route) and place not in loose:
                told.append((place, change.key, bare_body(item)))
            elif isinstance(item, Route) and item.hops:
                try:
                    told.append((place, change.key, encoder.body(item)))
                except MeshmarkError:
                    sought[change.key] = place
            else:
                sought[change.key] = place
        missed = self._delete(told, failures)
        sought.update((loose[place].key, place) for place in missed if place in loose)
        if sought:
            with blamed(failures, sought.values()):
                found = [(sought[item.key], item.key, _name(item, body)) for body, item in self._held() if item.key in sought]
                self._delete(found, failures)

    def _delete(self, bodies: Sequence[tuple[int, str, bytes]], failures: Failures) -> set[int]:
        """The places of those of which there was none."""
        missed: set[int] = set()
        for index, error in self._netlink.request_all(DELROUTE, [body for _, _, body in bodies]).items():
            place, key, _ = bodies[index]
            if error.errno in _GONE:
                missed.add(place)
            else:
                failures[place] = mapped(error, f"remove {key}")
        return missed

    # Reading -------------------------------------------------------------------------------------------------------------------------

    def _held(self, tables: Collection[int] = ()) -> Iterable[tuple[bytes, Held]]:
        """Own routes with their bodies, of both families; of these tables alone where they are few."""
        decoder = Decoder(self._interface_names())
        for family in FAMILIES:
            for table in sorted(tables) if 0 < len(tables) <= _TABLES_ONE_BY_ONE else (0,):
                for body in self._dump(SOCKET_FAMILY[family], table)[0]:
                    yield body, decoder.route(body)

    def _interface_names(self) -> dict[int, str]:
        return {item.index: item.name for item in self._interfaces.all().values()}

    def _dump(self, family: int, table: int = 0) -> tuple[list[bytes], bytes]:
        """Bodies of all own routes of a family, or of one table's, and the dump's digest; the kernel filters where it can."""
        body = _all_own(family)
        if table:
            body += attribute(TABLE, U32.pack(table))
        try:
            found, digest = self._netlink.dump_digested(GETROUTE, body)
        except NetlinkError as error:
            if table and error.errno == errno.ENOENT:  # no such table yet
                return [], b""
            raise unreadable(error, "routes") from error
        # Without IPv6 in it, a kernel answers for all families.
        return [body for body in found if body[0] == family and body[_PROTOCOL_AT] == OWN_PROTOCOL], digest


def _fingerprint(digests: Sequence[bytes], links: Mapping[str, int]) -> bytes:
    return b"".join(digests) + repr(sorted(links.items())).encode()


def _all_own(family: int) -> bytes:
    return INFO.pack(family, 0, 0, 0, 0, OWN_PROTOCOL, 0, 0, 0)


def _name(item: Held, body: bytes) -> bytes:
    """How one route that was found is told."""
    return bare_body(item) if isinstance(item, Route) else by_one_name(body)


def _wanted(change: Change) -> Route:
    if not isinstance(change.new, Route):
        msg = f"{change.key} is not a route"
        raise Permanent(msg)
    return change.new


def _all_wanted(run: Sequence[Placed]) -> list[Route]:
    wanted = [change.new for _, change in run]
    if set(map(type, wanted)) != {Route}:
        return [_wanted(change) for _, change in run]
    return wanted  # type: ignore[return-value]


def _links(items: Iterable[Route]) -> set[str]:
    """The links of the routes' hops. Routes alike in a row have the very same hops."""
    found: set[str] = set()
    last: tuple[NextHop, ...] = ()
    for item in items:
        if item.hops is not last:
            last = item.hops
            found.update(hop.link for hop in last)
    return found


def _explain(refused: Mapping[int, NetlinkError], sent: Sequence[Placed], failures: Failures) -> None:
    for index, error in refused.items():
        place, change = sent[index]
        failures[place] = _explained(error, _wanted(change))


def _explained(error: NetlinkError, wanted: Route) -> MeshmarkError:
    waiting_for = f"link {wanted.hops[0].link}" if wanted.hops else ""
    if error.errno == errno.EINVAL and "exthop" in error.text:
        return Waiting(f"{wanted.key}: {error.text}", waiting_for)
    if error.errno == errno.EINVAL and wanted.source and ("prefsrc" in error.text or "source address" in error.text):
        return Waiting(f"{wanted.key}: this host does not have the source address {wanted.source}", f"address {wanted.source}")
    return mapped(error, f"write {wanted.key}", waiting_for)
