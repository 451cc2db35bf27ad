"""What every host holds so that a flow can be traced: sets of what is to be traced, and rules that have the kernel tell of such packets.

The sets are empty until somebody asks (``schemas.commands.TraceFlow``), and empty by themselves some time after: whoever asked may be
gone by then. A packet is told of from where it comes into a network stack, by prerouting or by output. It loses that where it is
encapsulated or leaves the namespace, so each wrapping is found anew: outer packets by their addresses and port. Between any two of the
addresses, since a flow has others before and after it is translated, and answers go the other way.

The chains without rules are where a packet is seen again: as forward and input find it, and as it leaves. What a link of the host is to
a packet, its name says, but for the uplink, which is an element of a set.

These objects are part of each unit of a host, peering or mesh, and the same in all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from schemas.host_objects import TRACE_TABLE, NftChain, NftElement, NftSet, NftTable, PlanObject
from schemas.nft import Limit, Match, Rule, Trace
from schemas.topology import Cluster, Gateway, Node
from schemas.values import FAMILIES, Family
from services.planner import layout
from services.planner.compile.words import WORDS

UPLINKS = "uplinks"
_INNER = Limit(rate=200, burst=100)
_OUTER = Limit(rate=400, burst=200)
"""A busy flow is sampled: the kernel tells of each packet some twenty times."""


def objects(cluster: Cluster, host: Node | Gateway) -> Iterator[PlanObject]:
    """All of it, in the families of the cluster's pods and of the host."""
    found = {item.family for item in cluster.pod_prefixes} | {item.family for item in host.addresses}
    families = [family for family in FAMILIES if family in found]
    yield NftTable(TRACE_TABLE)
    yield NftSet(TRACE_TABLE, UPLINKS, "ifname")
    yield NftElement(TRACE_TABLE, UPLINKS, host.uplink)
    yield NftSet(TRACE_TABLE, "ports", "inet_service", timeout=True)
    for family in families:
        words = WORDS[family]
        yield NftSet(TRACE_TABLE, f"flows{words.suffix}", words.type, timeout=True)
        yield NftSet(TRACE_TABLE, f"outer{words.suffix}", words.type, timeout=True)
    rules = tuple(_rules(families))
    first, last = layout.PRIORITY_TRACE_FIRST, layout.PRIORITY_TRACE_LAST
    yield NftChain(TRACE_TABLE, "arriving", rules, "filter", "prerouting", first)
    yield NftChain(TRACE_TABLE, "entering", (), "filter", "input", first)
    yield NftChain(TRACE_TABLE, "passing", (), "filter", "forward", first)
    yield NftChain(TRACE_TABLE, "leaving", rules, "filter", "output", first)
    yield NftChain(TRACE_TABLE, "left", (), "filter", "postrouting", last)


def _rules(families: Iterable[Family]) -> Iterator[Rule]:
    for family in families:
        words = WORDS[family]
        flow, outer = (f"@flows{words.suffix}",), (f"@outer{words.suffix}",)
        yield (Match(words.source, flow), Match(words.destination, flow), _INNER, Trace())
        yield (Match(words.source, outer), Match(words.destination, outer), Match("udp dport", ("@ports",)), _OUTER, Trace())
