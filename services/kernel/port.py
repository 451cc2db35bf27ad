"""The interface to one host's kernel. All calls block; the caller runs them in one thread and never two at once.

A kernel is one network namespace: the one the process is in. Own objects are recognised after a restart by name and number alone
(``schemas.host_objects``: table prefix, route and rule protocol, link alias); anything else is never listed, changed or removed.

Errors are those of ``services.runtime.errors``: `Waiting` when a link or address that the object needs is not there, `Conflict` when
somebody else's object is in the way, `Permanent` when the kernel says that the object is wrong, `OutcomeUnknown` when the answer was lost.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from schemas.commands import TraceFlow
from schemas.host_objects import Layer, PlanObject
from schemas.status import Capabilities
from schemas.values import Address, Endpoint, Key
from services.kernel.transaction import Change, Marker, Observed
from services.runtime.errors import MeshmarkError

ALL_LAYERS: frozenset[Layer] = frozenset(("sysctl", "link", "address", "neighbour", "wireguard", "nft", "rule", "route"))


class Flow(Struct, frozen=True):
    """One connection-tracking entry: the original direction's addresses and the reply's. `protocol` is the IP protocol number."""

    protocol: int
    source: Address
    destination: Address
    reply_source: Address
    reply_destination: Address
    source_port: int = 0
    destination_port: int = 0
    zone: int = 0


class PeerSeen(Struct, frozen=True):
    """A WireGuard peer as it is now. `endpoint` is what the device sends to, None for nowhere yet; `handshake_s` is Unix time, 0 for never.

    The counters are of what was in the tunnel, since the peer was made.
    """

    public_key: Key
    endpoint: Endpoint | None = None
    handshake_s: float = 0.0
    received_bytes: int = 0
    sent_bytes: int = 0


class RuleCount(Struct, frozen=True):
    """What a rule with a comment has counted. `handle` is the kernel's number for it, which no other rule of its table ever has."""

    chain: str
    handle: int
    comment: str
    packets: int
    bytes: int


class KeyRing(Struct, frozen=True):
    """The public halves of a host's WireGuard keys: the one in force, the one that is to follow it, and one that is not to any more."""

    key: Key
    next: Key | None = None
    withdrawn: Key | None = None

    @property
    def all(self) -> tuple[Key, ...]:
        return tuple(key for key in (self.key, self.next, self.withdrawn) if key is not None)


class Kernel(Protocol):
    """One host's kernel: read, change one object, commit one nft batch."""

    def capabilities(self) -> Capabilities:
        """What this kernel and its tools can do; asked once, cheap after that."""
        ...

    def public_key(self) -> Key:
        """The public half of this host's WireGuard key; the key is made on first use and never leaves the host."""
        ...

    def keys(self) -> KeyRing:
        """All keys that this host has. A link is given the one that is planned for it, or that in force where the host has no such one."""
        ...

    def make_next_key(self) -> None:
        """Make the key that is to follow; the same one when it is asked again, also after it was withdrawn."""
        ...

    def withdraw_next_key(self) -> None:
        """Take back the coming of the next key. Links may have it until it is forgotten."""
        ...

    def forget_withdrawn_key(self) -> None:
        """Destroy the key that was withdrawn."""
        ...

    def promote_key(self, key: Key) -> None:
        """Let the next key, or one that was withdrawn, take the place of the one in force, which is destroyed; nothing for any other."""
        ...

    def read(self, wanted: Mapping[str, PlanObject], layers: Collection[Layer] = ALL_LAYERS) -> Observed:
        """Own objects of these layers as the kernel holds them, without the marker.

        `wanted` says which sysctls to read (they have no owner in the kernel); other objects are found by ownership. Raises Transient
        when a layer cannot be read: never an empty answer instead.
        """
        ...

    def fingerprint(self, layer: Layer) -> bytes | None:
        """Something short that says what ``read`` would show of a layer now; None where there is no such thing.

        Equal ones of one kernel object stand for equal objects, whoever changed what in between: of nftables it is the generation, of
        routes and rules a digest of the kernel's own bytes. It may differ though nothing does. Raises Transient when it cannot be read.
        """
        ...

    def seen(self, layer: Layer) -> bytes | None:
        """The fingerprint of what ``read`` showed of a layer last; None where that is not known."""
        ...

    def reference(self, wanted: Mapping[str, PlanObject]) -> Observed:
        """How ``read`` would show `wanted` once the kernel held it: same keys, the kernel's own normal form.

        Keys stay as they are, so plans name elements in the kernel's form: prefixes with their length, a single address bare (also as a
        value), ranges ``a-b`` that are no prefix, marks as ``0xff00``, names with a star as ``mo.*``. Raises Permanent when the kernel
        refuses a chain.
        """
        ...

    def write(self, change: Change) -> None:
        """Make one change outside nftables. Doing it twice, or removing what is not there, succeeds.

        An overlay link whose kind, VNI, port, family or count of far ends changes is made again and loses what is on it and its routes; a
        link that is removed takes them along, and one that gets another MAC loses its neighbours. Write those again after it.
        """
        ...

    def write_all(self, changes: Sequence[Change]) -> Mapping[str, MeshmarkError]:
        """Make changes of routes, of policy rules, or of peers of one WireGuard link, each as ``write`` does, but together.

        Routes and rules are made in this order, of rules and peers what comes before what goes, so that an AllowedIP that moves between
        peers is at one of them at any time. No key comes twice, but that a route may go and come. Returns the errors of those that failed,
        by key; with OutcomeUnknown, one may have been made. Changes of other kinds are made one after the other.
        """
        ...

    def commit(self, batch: Sequence[Change], marker: Marker | None) -> None:
        """Make all nft changes and write the marker (None: remove it) in one kernel transaction, or none of them.

        Raises Conflict when the kernel does not hold what the changes start from: read again. Where the header of a set changes, the batch
        has all elements of the set and all chains that name it (``transaction.with_dependents``).
        """
        ...

    def trace(self, wish: TraceFlow) -> bool:
        """Have the kernel tell of a flow, beside any plan, for as long as is wished; a flow that is traced for longer stays as it is.

        False where it tells, but cannot show what is inside overlay packets, as without NFLOG.
        It ends with whoever asked for it, at the latest with the time. Raises Conflict when too many flows are traced.
        """
        ...

    def forget_traced(self) -> float | None:
        """Take back from the kernel what is not traced any more; the seconds until there is more of that, None for never.

        Until then other packets pay for it.
        """
        ...

    def links(self) -> Mapping[str, bool]:
        """Every link of the namespace by name, ours and others', and whether it is up."""
        ...

    def marker(self) -> Marker | None:
        """Which plan the kernel says it holds."""
        ...

    def peers(self, link: str) -> Sequence[PeerSeen]:
        """The peers of a WireGuard link as they are now, read in one go; none for no such link of ours."""
        ...

    def greet(self, link: str, keys: Collection[Key]) -> None:
        """Greet these peers of a WireGuard link at once, whatever was said to them before: they are made anew as they are.

        Only those that have never shaken hands, and that the link knows the place of; nothing for others, or for no such link of ours.
        """
        ...

    def counted(self, table: str) -> Sequence[RuleCount]:
        """What the rules of an own table that have a comment and a counter have counted; none for no such table."""
        ...

    def flows(self) -> Iterable[Flow]:
        """Connection-tracking entries of both families."""
        ...

    def drop_flows(self, flows: Iterable[Flow]) -> int:
        """Delete these entries; returns how many were there."""
        ...

    def close(self) -> None:
        """Let go of sockets; the kernel's state stays as it is."""
        ...
