"""Which of the flow's packets are shown, by filters that are named as Hubble's. Pure."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from cyclopts import Parameter

from schemas.commands import TraceProtocol
from schemas.flow import FlowEvent, Layer4, Ports
from schemas.values import Address, Prefix
from services.auditor.trace.carriers import seconds
from services.auditor.trace.trails import Trail, Way
from services.auditor.trace.verdicts import packet_verdict
from services.cli.numbers import Whole
from services.cli.trace.ends import Only
from services.runtime.errors import Permanent

_SPAN = re.compile(r"([0-9]{1,9})(ms|s|m|h)?")
_UNITS = {"ms": 0.001, "s": 1.0, None: 1.0, "m": 60.0, "h": 3600.0}
_LAST_PORT = 65535


def span_s(text: str) -> float:
    """A span of time as people write it: 30s, 5m, 500ms; a bare number is seconds. Permanent for what is none, or too long to count."""
    found = _SPAN.fullmatch(text.strip())
    if found is None:
        msg = f"{text!r} is no span of time; write it as 30s, 5m or 500ms, without fractions, and with nine digits at most"
        raise Permanent(msg)
    return int(found[1]) * _UNITS[found[2]]


_Port = Annotated[list[Whole], Parameter(help="Only packets from or to this port, may be repeated", negative=())]
_Protocol = Annotated[list[TraceProtocol], Parameter(help="Only packets of this protocol, may be repeated", negative=())]
_Encrypted = Annotated[bool, Parameter(help="Only packets that were encrypted on every way between two hosts", negative=())]
_Unencrypted = Annotated[bool, Parameter(help="Only packets that went in clear between two hosts, on each way or on some", negative=())]
_Verdict = Annotated[Literal["FORWARDED", "DROPPED"] | None, Parameter(help="Only points with this verdict")]
_Ip = Annotated[
    list[str],
    Parameter(
        help="Only points where source or destination is this address, or in this prefix (10.200.0.0/16), also of outer packets; "
        "may be repeated",
        negative=(),
    ),
]
_Node = Annotated[list[str], Parameter(help="Only points of this host on the flow's way, CLUSTER/NAME, may be repeated", negative=())]
_First = Annotated[Whole | None, Parameter(help="End after so many packets")]
_Last = Annotated[Whole | None, Parameter(help="Show the last so many packets, at the end")]
_Since = Annotated[str | None, Parameter(help="Only packets of the last 5s, 2m, … of what was seen, at the end")]


@Parameter(name="*")
@dataclass(frozen=True)
class Filters:
    """What is shown. A packet is shown whole, with what carried it, but for --node, --ip and --verdict, which choose among its points."""

    port: _Port = field(default_factory=list)
    protocol: _Protocol = field(default_factory=list)
    encrypted: _Encrypted = False
    unencrypted: _Unencrypted = False
    verdict: _Verdict = None
    ip: _Ip = field(default_factory=list)
    node: _Node = field(default_factory=list)
    first: _First = None
    last: _Last = None
    since: _Since = None

    def check(self) -> None:
        """Permanent for what can choose nothing, whatever is seen: it would look like a flow without such packets."""
        _prefixes(self.ip)
        if self.since is not None and not span_s(self.since):
            msg = f"--since {self.since}: more than 0, please"
            raise Permanent(msg)
        for port in self.port:
            if not 1 <= port <= _LAST_PORT:
                msg = f"--port {port}: between 1 and {_LAST_PORT}, please"
                raise Permanent(msg)
        for option, count in (("--first", self.first), ("--last", self.last)):
            if count is not None and count < 1:
                msg = f"{option} {count}: at least 1, please"
                raise Permanent(msg)
        if self.port and self.protocol and set(self.protocol) <= {"icmp"}:
            msg = "--port: packets of ICMP have none"
            raise Permanent(msg)

    def among(self, hosts: Iterable[str], cluster: str | None) -> Filters:
        """The same with hosts named in full, those without a cluster as of `cluster`; Permanent for one that none of `hosts` is."""
        known = list(dict.fromkeys(hosts))
        named = [name if "/" in name or cluster is None else f"{cluster}/{name}" for name in self.node]
        for name in named:
            if name not in known:
                msg = f"--node {name}: no such host is on the flow's way; there are {', '.join(known)}"
                raise Permanent(msg)
        return replace(self, node=named)

    def chosen(self, found: Iterable[Trail]) -> list[Trail]:
        """Those of the packets that are shown for what they are, however many, and whenever they came."""
        return [trail for trail in found if self._takes(trail)]

    def recent(self, chosen: list[Trail], newest_s: float) -> list[Trail]:
        """Those that --since leaves, when the newest event of all packets was at that Unix time."""
        if self.since is None:
            return chosen
        begin_s = newest_s - span_s(self.since)
        return [trail for trail in chosen if seconds(trail.seen[0]) >= begin_s]

    def only(self, sample: int = 1) -> Only:
        """What of this hosts can be asked for, so that they tell of nothing else; one packet of so many."""
        return Only(tuple(dict.fromkeys(self.protocol)), tuple(dict.fromkeys(self.port)), sample)

    def points(self, events: Iterable[tuple[Way | None, FlowEvent]]) -> Iterator[tuple[Way | None, FlowEvent]]:
        """Those of their points that are shown."""
        prefixes = _prefixes(self.ip)
        for way, event in events:
            if self.node and event.node_name not in self.node:
                continue
            if self.verdict is not None and event.verdict != self.verdict:
                continue
            if prefixes and not _is_within(_addresses(event), prefixes):
                continue
            yield way, event

    def _takes(self, trail: Trail) -> bool:
        event = trail.seen[0]
        if self.port and not set(self.port) & set(_ports(event.l4)):
            return False
        if self.protocol and protocol_of(event.l4) not in self.protocol:
            return False
        if self.encrypted or self.unencrypted:
            known = packet_verdict(trail)
            return (self.encrypted and known == "encrypted") or (self.unencrypted and known in ("plaintext", "partial"))
        return True


def protocol_of(l4: Layer4 | None) -> TraceProtocol | None:
    """The protocol's name in small letters; ICMP of either family is one."""
    if l4 is None:
        return None
    named: tuple[tuple[object, TraceProtocol], ...] = ((l4.tcp, "tcp"), (l4.udp, "udp"), (l4.sctp, "sctp"), (l4.icmp4 or l4.icmp6, "icmp"))
    return next((name for found, name in named if found is not None), None)


def ports_of(l4: Layer4 | None) -> Ports | None:
    """The ports of a protocol that has any."""
    return (l4.tcp or l4.udp or l4.sctp) if l4 is not None else None


def _ports(l4: Layer4 | None) -> tuple[int, ...]:
    found = ports_of(l4)
    return (found.source_port, found.destination_port) if found else ()


def _addresses(event: FlowEvent) -> Iterator[Address]:
    """All that a recording or a host says in full; what is no address there is in no prefix."""
    for ip in (event.ip, event.tunnel.ip if event.tunnel else None):
        for text in (ip.source, ip.destination, ip.source_xlated, ip.destination_xlated) if ip else ():
            with contextlib.suppress(ValueError):
                yield Address.parse(text)


def _prefixes(texts: Iterable[str]) -> list[Prefix]:
    """Addresses and prefixes as they are written; Permanent says which one is neither."""
    try:
        return [Prefix.parse(text.strip()) for text in texts]
    except ValueError as error:
        msg = f"--ip takes an address or a prefix: {error}"
        raise Permanent(msg) from error


def _is_within(addresses: Iterable[Address], prefixes: Sequence[Prefix]) -> bool:
    return any(prefix.covers(address) for address in addresses for prefix in prefixes)
