"""The nftables vocabulary of a plan: sets, maps, elements, chains and rules, as values.

All tables are family ``inet``. A rule is a sequence of statements, read from left to right; a selector is named as nft names it.
Engines render the same values to text or to netlink; nothing here is text that only one of them understands.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from schemas.values import IPV4, Family

_VALUE = {"frozen": True, "rename": "camel", "tag_field": "kind"}  # defaults are written: see schemas.host_objects

Hook = Literal["prerouting", "input", "forward", "output", "postrouting"]
Policy = Literal["accept", "drop"]
ChainType = Literal["filter", "nat", "route"]
DataType = Literal["ipv4_addr", "ipv6_addr", "ifname", "verdict", "inet_service", "mark"]
Selector = Literal[
    "ip saddr",
    "ip daddr",
    "ip6 saddr",
    "ip6 daddr",
    "@nh,40,8",
    "iifname",
    "oifname",
    "meta mark",
    "meta nfproto",
    "meta l4proto",
    "tcp sport",
    "tcp dport",
    "udp sport",
    "udp dport",
    "udplite sport",
    "udplite dport",
    "sctp sport",
    "sctp dport",
    "dccp sport",
    "dccp dport",
    "th sport",
    "th dport",
    "icmpv6 type",
    "tcp flags",
    "tcp flags & (syn | rst)",
    "ct state",
    "ct status",
    "ct direction",
    "ct mark",
    "fib saddr type",
    "fib daddr type",
    "fib saddr . mark . iif oif",
    "fib saddr . mark oifname",
]


class Match(Struct, **_VALUE, tag="match"):
    """Go on with the rule only if the selector, under `mask`, is (or with `op` ``!=`` is not) one of `values`.

    ``@nh,40,8`` is the lower byte of an IPv4 packet's identification.

    A value is an address, a prefix, a name (``*`` at the end matches any rest), a number in decimal or hexadecimal, a
    range ``a-b``, a keyword of the selector's type, or ``@set``. Several values are an anonymous set.
    """

    selector: Selector
    values: tuple[str, ...]
    op: Literal["==", "!="] = "=="
    mask: int | None = None


class Counter(Struct, **_VALUE, tag="counter"):
    """Count packets and bytes that get here. The counts are no part of the state."""


class Verdict(Struct, **_VALUE, tag="verdict"):
    """End the rule: accept, drop, return, or jump to the chain `target` of the same table."""

    verdict: Literal["accept", "drop", "return", "jump"]
    target: str = ""


class VerdictMap(Struct, **_VALUE, tag="vmap"):
    """Look the selector up in a map whose values are verdicts."""

    selector: Selector
    map: str


class SetMark(Struct, **_VALUE, tag="mark"):
    """Write `value` into the bits of `mask` of the packet's mark and leave the other bits alone."""

    value: Annotated[int, Meta(ge=0, le=0xFFFFFFFF)]
    mask: Annotated[int, Meta(ge=1, le=0xFFFFFFFF)]


class SetCtMark(Struct, **_VALUE, tag="ctMark"):
    """The same for the mark of the tracked connection."""

    value: Annotated[int, Meta(ge=0, le=0xFFFFFFFF)]
    mask: Annotated[int, Meta(ge=1, le=0xFFFFFFFF)]


class CopyMark(Struct, **_VALUE, tag="copyMark"):
    """Make the packet's mark (`to` meta) or the connection's (ct) what the other one is under `mask`."""

    to: Literal["meta", "ct"]
    mask: Annotated[int, Meta(ge=1, le=0xFFFFFFFF)]


class NatTo(Struct, **_VALUE, tag="natTo"):
    """Translate the source or destination to one address (and `port`), or into a prefix as long as the one that was matched."""

    nat: Literal["snat", "dnat"]
    family: Literal["ip", "ip6"]
    to: str
    port: int | None = None


class Masquerade(Struct, **_VALUE, tag="masquerade"):
    """Translate the source to the address of the interface by which the packet leaves."""


class Reject(Struct, **_VALUE, tag="reject"):
    """Drop the packet and answer that the port is unreachable."""


class Comment(Struct, **_VALUE, tag="comment"):
    """A rule's comment, its last statement: at most 128 bytes, no quotes."""

    text: str


class Nat(Struct, **_VALUE, tag="nat"):
    """Translate the source (snat) or destination (dnat) address of packets of a family by looking the address itself up in `map`.

    With `prefix`, the map's values are prefixes as long as its keys, and the host part is kept.
    """

    nat: Literal["snat", "dnat"]
    map: str
    prefix: bool = True
    family: Family = IPV4


class Notrack(Struct, **_VALUE, tag="notrack"):
    """Keep the packet out of connection tracking."""


class Limit(Struct, **_VALUE, tag="limit"):
    """Go on with the rule for `rate` packets a second only, and for `burst` more that come at once."""

    rate: Annotated[int, Meta(ge=1, le=0xFFFFFFFF)]
    burst: Annotated[int, Meta(ge=1, le=0xFFFFFFFF)]


class Log(Struct, **_VALUE, tag="log"):
    """Show the packet's first `snaplen` bytes, with `prefix`, to who listens to a group of NFLOG, and go on with the rule."""

    group: Annotated[int, Meta(ge=0, le=0xFFFF)]
    prefix: Annotated[str, Meta(min_length=1, max_length=63, pattern='^[^"\\\\]*$')]
    snaplen: Annotated[int, Meta(ge=1, le=0xFFFF)]


class ClampMss(Struct, **_VALUE, tag="mss"):
    """Set the TCP maximum segment size to `size` bytes; 0 lowers it to what the route's MTU allows."""

    size: int = 0


class Trace(Struct, **_VALUE, tag="trace"):
    """Have the kernel tell of the packet at each rule, policy and end of a chain that it meets from here on."""


Statement = (
    Match
    | Counter
    | Verdict
    | VerdictMap
    | SetMark
    | SetCtMark
    | CopyMark
    | Nat
    | NatTo
    | Masquerade
    | Reject
    | Notrack
    | ClampMss
    | Limit
    | Log
    | Trace
    | Comment
)
Rule = tuple[Statement, ...]
