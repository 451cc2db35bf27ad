"""Published firewalls: nftables content for hosts that a selector picks, as one table of their own per object.

The words are the seed's (Liqo's FirewallConfiguration): chains at hooks, rules of matches and actions, named sets. A rule's matches are
looked at in the order given, all must hold, then its counter counts, then its actions are done. What the words mean in detail, and what
the kernel does not take, is checked in ``schemas.firewall_check``.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from schemas.nft import ChainType, Hook
from schemas.objects import PassThrough, Strict

Number = int | str
"""A number, or its decimal or hexadecimal text: JSON has no ``0xff00``."""
Value = int | str | Annotated[tuple[int | str, ...], Meta(max_length=1000)]
Field = Literal[
    "source",
    "destination",
    "sourcePort",
    "destinationPort",
    "protocol",
    "inInterface",
    "outInterface",
    "mark",
    "ctState",
    "ctMark",
]
SetType = Literal["ipv4_addr", "ipv6_addr", "inet_service", "ifname", "mark"]
PriorityName = Literal["raw", "mangle", "dstnat", "filter", "security", "srcnat"]
PRIORITIES: dict[PriorityName, int] = {"raw": -300, "mangle": -150, "dstnat": -100, "filter": 0, "security": 50, "srcnat": 100}
FAMILIES: dict[SetType, Literal["ip", "ip6"]] = {"ipv4_addr": "ip", "ipv6_addr": "ip6"}
ALL_TUNNELS = "tunnels"
"""``@tunnels`` stands for all tunnels that a host has: a named set that the planner fills."""
PRIORITY_LIMIT = 100_000


class FirewallMatch(Strict, frozen=True, kw_only=True):
    r"""Go on only if the field is (or with `op` neq is not) `value`, or one of several values.

    - source, destination: an address, a prefix or a range ``a-b``, IPv4 or IPv6; ``@set``
    - sourcePort, destinationPort: a port, a range ``a-b``; ``@set``; the rule also matches on the protocol
    - protocol: tcp, udp, udplite, sctp, dccp, icmp, icmpv6, gre, esp, ah, or a number
    - inInterface, outInterface: a name; ``liqo-tunnel*`` for any that begins so; ``wg\*`` for the one that ends in a star; ``@set``;
      ``@tunnels`` for all tunnels of the host
    - mark, ctMark: a number, under `mask` if given; ``@set``
    - ctState: new, established, related, invalid, untracked
    """

    field: Field
    value: Value
    op: Literal["eq", "neq"] = "eq"
    mask: Number | None = None


class Accept(Strict, frozen=True, kw_only=True, tag_field="action", tag="accept"):
    """Let the packet go on to the next chain of the hook."""


class Drop(Strict, frozen=True, kw_only=True, tag_field="action", tag="drop"):
    """Throw the packet away."""


class Reject(Strict, frozen=True, kw_only=True, tag_field="action", tag="reject"):
    """Throw the packet away and say so: port unreachable."""


class NoTrack(Strict, frozen=True, kw_only=True, tag_field="action", tag="notrack"):
    """Keep the packet out of connection tracking."""


class MarkWith(Strict, frozen=True, kw_only=True, tag_field="action", tag="setMark"):
    """Write `value` into the bits of `mask` of the packet's mark; without a mask, into all."""

    value: Number
    mask: Number | None = None


class CtMarkWith(Strict, frozen=True, kw_only=True, tag_field="action", tag="setCtMark"):
    """The same for the mark of the tracked connection."""

    value: Number
    mask: Number | None = None


class MarkFromCtMark(Strict, frozen=True, kw_only=True, tag_field="action", tag="markFromCtMark"):
    """Make the connection's mark the packet's. With `mask` only those bits are taken over, and all others become 0."""

    mask: Number | None = None


class CtMarkFromMark(Strict, frozen=True, kw_only=True, tag_field="action", tag="ctMarkFromMark"):
    """Make the packet's mark the connection's. With `mask` only those bits are taken over, and all others become 0."""

    mask: Number | None = None


class ClampMssTo(Strict, frozen=True, kw_only=True, tag_field="action", tag="clampMss"):
    """In TCP SYN packets, set the maximum segment size to `size` bytes; 0 lowers it to what the route's MTU allows."""

    size: Annotated[int, Meta(ge=0, le=65535)] = 0


class Masquerade(Strict, frozen=True, kw_only=True, tag_field="action", tag="masquerade"):
    """Translate the source to the address of the interface by which the packet leaves."""


class SourceNat(Strict, frozen=True, kw_only=True, tag_field="action", tag="snat"):
    """Translate the source to an address (and `port`), or prefix to prefix: the host part is kept."""

    to: str
    port: Annotated[int, Meta(ge=1, le=65535)] | None = None


class DestinationNat(Strict, frozen=True, kw_only=True, tag_field="action", tag="dnat"):
    """The same for the destination."""

    to: str
    port: Annotated[int, Meta(ge=1, le=65535)] | None = None


Action = (
    Accept
    | Drop
    | Reject
    | NoTrack
    | MarkWith
    | CtMarkWith
    | MarkFromCtMark
    | CtMarkFromMark
    | ClampMssTo
    | Masquerade
    | SourceNat
    | DestinationNat
)


class FirewallRule(Strict, frozen=True, kw_only=True):
    """One rule. `comment` may be any text: nftables keeps 128 bytes of it."""

    match: Annotated[tuple[FirewallMatch, ...], Meta(max_length=32)] = ()
    counter: bool = False
    actions: Annotated[tuple[Action, ...], Meta(max_length=16)] = ()
    comment: str = ""


class FirewallChain(Strict, frozen=True, kw_only=True):
    """A chain at a hook. `priority` is a number or one of nftables' names; the configuration's `order` is added to it."""

    name: str
    hook: Hook
    type: ChainType = "filter"
    priority: Annotated[int, Meta(ge=-PRIORITY_LIMIT, le=PRIORITY_LIMIT)] | PriorityName = "filter"
    policy: Literal["accept", "drop"] = "accept"
    rules: Annotated[tuple[FirewallRule, ...], Meta(max_length=1000)] = ()

    def place(self, order: int) -> int:
        """The priority that the kernel gets."""
        return order + (PRIORITIES[self.priority] if isinstance(self.priority, str) else self.priority)


class FirewallSet(Strict, frozen=True, kw_only=True):
    """A named set for the rules of its configuration; a rule names it as ``@name``."""

    name: str
    type: SetType
    elements: Annotated[tuple[int | str, ...], Meta(max_length=10_000)] = ()


class FirewallConfiguration(PassThrough, frozen=True, kw_only=True, tag=True):
    """nftables content for hosts of a cluster, in a table of its own.

    On a gateway that serves a peering, some bits of the packet's mark are meshmark's. `class_marks` says that this configuration writes
    them on purpose.
    """

    chains: Annotated[tuple[FirewallChain, ...], Meta(min_length=1, max_length=64)]
    sets: Annotated[tuple[FirewallSet, ...], Meta(max_length=64)] = ()
    class_marks: bool = False
