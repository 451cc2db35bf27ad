"""What keeps a host's own traffic with its broker and management apart from all that is planned, where a cluster names them.

Only what the host itself sends is let by: a packet of a pod, or out of a tunnel, that is for such an address has no business there, and
meets what any other meets.
"""

from __future__ import annotations

from collections.abc import Iterator

from schemas.host_objects import MAIN_TABLE, NftElement, NftSet, PlanObject, PolicyRule
from schemas.nft import Hook, Match, Rule, Verdict
from schemas.topology import Cluster
from schemas.values import FAMILIES, Prefix
from services.planner import layout
from services.planner.compile.words import WORDS, of_family

_SET = "control"
_OWN = Match("fib saddr type", ("local",))


def objects(table: str, cluster: Cluster) -> Iterator[PlanObject]:
    """The sets that ``passes`` asks, one for each family that has such addresses."""
    for family in FAMILIES:
        if prefixes := of_family(cluster.control, family):
            name = f"{_SET}{WORDS[family].suffix}"
            yield NftSet(table, name, WORDS[family].type, interval=True)
            yield from (NftElement(table, name, prefix.bare) for prefix in prefixes)


def passes(cluster: Cluster) -> tuple[Rule, ...]:
    """The first rules of a chain that could drop or translate what the host sends."""
    return tuple(
        (_OWN, Match(WORDS[family].destination, (f"@{_SET}{WORDS[family].suffix}",)), Verdict("return"))
        for family in FAMILIES
        if of_family(cluster.control, family)
    )


def passes_both(cluster: Cluster, *, arriving: bool) -> tuple[Rule, ...]:
    """The same where answers count too: of a host that others reach as broker or management, what it says to them is kept as well.

    `arriving` is for a chain that packets meet as they come in.
    """
    own = Match("fib daddr type", ("local",)) if arriving else _OWN
    return tuple(
        (own, Match(selector, (f"@{_SET}{WORDS[family].suffix}",)), Verdict("return"))
        for family in FAMILIES
        if of_family(cluster.control, family)
        for selector in (WORDS[family].source, WORDS[family].destination)
    )


def kept(prefixes: tuple[Prefix, ...], hook: Hook) -> Iterator[Rule]:
    """The first rules of a published chain: what the host says to broker and management, and they to it, is none of its business."""
    if hook == "forward":
        return
    arrives = hook in ("prerouting", "input")
    for family in FAMILIES:
        if found := tuple(prefix.bare for prefix in of_family(prefixes, family)):
            words = WORDS[family]
            there = Match(words.source if arrives else words.destination, found)
            yield (Match("fib daddr type", ("local",)) if arrives else _OWN, there, Verdict("accept"))


def rules(cluster: Cluster) -> Iterator[PolicyRule]:
    """Where others on the host mark packets, the bits of a class must not lead these into its table."""
    for prefix in cluster.control:
        yield PolicyRule(layout.RULE_CONTROL, MAIN_TABLE, iif="lo", to=prefix, family=prefix.family)
