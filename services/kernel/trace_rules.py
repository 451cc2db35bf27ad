"""What the kernel holds while somebody traces a flow: chains that see packets, sets of what is traced, rules by which the kernel tells.

A packet is told of from where it comes into a network stack, by prerouting or by output. It loses that where it is encapsulated or leaves
the namespace, so each wrapping is found anew: outer packets by their addresses and port. Between any two of the addresses, since a flow has
others before and after it is translated, and answers go the other way; and by protocol and ports, so that nothing else that two busy hosts
say to each other is told of.

The kernel tells of so few bytes of an outer packet that what is inside is not among them. So the rule that begins to tell of an overlay's
packet shows it by NFLOG, too, whole enough: one limit, so that each packet is told of and shown, or neither. It ends its chain, so that a
packet is shown once, whoever else traces it, and so that its message says that it was (``services.auditor.trace.inners``).

The chains without rules are where a packet is seen again: as forward and input find it, and as it leaves. Elements have a time to live:
when it is over nothing more is told, whatever has become of who asked. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct

from schemas.commands import TraceFlow, TraceProtocol
from schemas.host_objects import TRACE_GROUP, TRACE_PREFIX, TRACE_TABLE, NftChain, NftElement, NftSet
from schemas.nft import DataType, Limit, Log, Match, Rule, Selector, Trace, Verdict
from schemas.values import FAMILIES, IPV4, IPV6, Address, Family

PRIORITY_FIRST = -350
"""After fragments are put together, before anything that looks at a packet or changes it."""
PRIORITY_LAST = 350
"""A packet is what it leaves as."""
BEGINNING = (("arriving", "prerouting"), ("leaving", "output"))
"""Chains whose rules begin to tell of a packet, and where they are."""
SESSIONS_MAX = 32
"""So many flows are traced on a host at once: each is some rules that other packets meet."""
_INNER = Limit(rate=200, burst=100)
_OUTER = Limit(rate=400, burst=200)
"""A busy flow is sampled: the kernel tells of each packet some twenty times."""
_SHOWN_BYTES = 192
"""Of an overlay's packet: its own headers with some options, the inner Ethernet's and IPv6's, and the head of TCP."""
_SHOWN, _SHOWN_AND_OVER = Log(TRACE_GROUP, TRACE_PREFIX, _SHOWN_BYTES), Verdict("accept")
_PROTOCOLS: Mapping[TraceProtocol, tuple[str, ...]] = {"tcp": ("tcp",), "udp": ("udp",), "sctp": ("sctp",), "icmp": ("icmp", "icmpv6")}
_WITH_PORTS: tuple[TraceProtocol, ...] = ("tcp", "udp", "sctp")
_ENDS: tuple[Selector, ...] = ("th dport", "th sport")


class _Words(Struct, frozen=True):
    """How nftables calls what differs between the families."""

    suffix: str
    source: Selector
    destination: Selector


_WORDS: Mapping[Family, _Words] = {IPV4: _Words("", "ip saddr", "ip daddr"), IPV6: _Words("6", "ip6 saddr", "ip6 daddr")}


class Session(Struct, frozen=True):
    """A flow that is traced under a number that no other has at the time."""

    number: int
    wish: TraceFlow

    def _name(self, what: str) -> str:
        return f"{what}_{self.number}"

    def sets(self) -> list[NftSet]:
        """The sets of what is traced, of the families of which there is anything."""
        found = {item.set: item for item in self.elements()}
        types = {name: _type_of(item) for name, item in found.items()}
        return [NftSet(TRACE_TABLE, name, kind, timeout=True) for name, kind in types.items()]

    def elements(self) -> list[NftElement]:
        """What is traced, none twice."""
        wish = self.wish
        places = [(name, address) for name, many in (("flows", wish.flow), ("outer", wish.outer)) for address in many]
        found = [NftElement(TRACE_TABLE, self._name(f"{name}{_WORDS[item.family].suffix}"), item) for name, item in places]
        ports = (("overlays" if port in wish.overlay_ports else "ports", port) for port in (*wish.ports, *wish.overlay_ports))
        found += [NftElement(TRACE_TABLE, self._name(name), str(port)) for name, port in ports]
        return list({item.key: item for item in found}.values())

    def rules(self, *, shows: bool = True) -> Iterator[Rule]:
        """The rules of a chain that begins to tell; with `shows` False those for a kernel without NFLOG."""
        for family in FAMILIES:
            words = _WORDS[family]
            if _has_two(self.wish.flow, family):
                flow = (f"@{self._name(f'flows{words.suffix}')}",)
                between = Match(words.source, flow), Match(words.destination, flow)
                for which in _which(self.wish, family):
                    yield (*between, *which, _INNER, Trace())
            if _has_two(self.wish.outer, family):
                outer = (f"@{self._name(f'outer{words.suffix}')}",)
                between = Match(words.source, outer), Match(words.destination, outer)
                if set(self.wish.ports) - set(self.wish.overlay_ports):
                    yield (*between, self._to("ports"), _OUTER, Trace())
                if self.wish.overlay_ports:
                    told = (_SHOWN, Trace(), _SHOWN_AND_OVER) if shows else (Trace(),)
                    yield (*between, self._to("overlays"), _OUTER, *told)

    def _to(self, ports: str) -> Match:
        return Match("udp dport", (f"@{self._name(ports)}",))


def chains(sessions: Sequence[Session], *, shows: bool = True) -> list[NftChain]:
    """All chains, with the rules of these sessions; with `shows` False those for a kernel without NFLOG."""
    rules = tuple(rule for session in sessions for rule in session.rules(shows=shows))
    begin = [NftChain(TRACE_TABLE, name, rules, "filter", hook, PRIORITY_FIRST) for name, hook in BEGINNING]  # type: ignore[arg-type]
    return [
        *begin,
        NftChain(TRACE_TABLE, "entering", (), "filter", "input", PRIORITY_FIRST),
        NftChain(TRACE_TABLE, "passing", (), "filter", "forward", PRIORITY_FIRST),
        NftChain(TRACE_TABLE, "left", (), "filter", "postrouting", PRIORITY_LAST),
    ]


def _which(wish: TraceFlow, family: Family) -> Iterator[tuple[Match, ...]]:
    """What of the packets between the addresses is meant: each is a rule's matches. A port is one of either end."""
    drawn = (_sample(wish.sample),) if family == IPV4 and wish.sample > 1 else ()
    if not wish.flow_ports:
        yield (*((_of(wish.protocols),) if wish.protocols else ()), *drawn)
        return
    protocols = tuple(each for each in wish.protocols or _WITH_PORTS if each in _WITH_PORTS)
    ports = tuple(str(port) for port in dict.fromkeys(wish.flow_ports))
    for end in _ENDS if protocols else ():
        yield _of(protocols), Match(end, ports), *drawn


def _sample(one_of: int) -> Match:
    """Packets whose identification can be divided by it, which are the same on all hosts."""
    return Match("@nh,40,8", tuple(str(number) for number in range(0, 256, one_of)))


def _of(protocols: Iterable[TraceProtocol]) -> Match:
    return Match("meta l4proto", tuple(name for each in protocols for name in _PROTOCOLS[each]))


def _has_two(addresses: Iterable[Address], family: Family) -> bool:
    return len({address for address in addresses if address.family == family}) > 1


def _type_of(item: NftElement) -> DataType:
    if item.set.startswith(("ports", "overlays")):
        return "inet_service"
    return "ipv6_addr" if ":" in item.element else "ipv4_addr"
