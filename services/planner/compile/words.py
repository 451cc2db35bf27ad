"""How a plan's objects speak of each family: names of sets, types, selectors, sysctls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from schemas.nft import DataType, Selector
from schemas.values import IPV4, IPV6, Family, Prefix


class Words(NamedTuple):
    """One family in nftables: the end of its sets' names, the type of its addresses, and its selectors."""

    suffix: str
    type: DataType
    source: Selector
    destination: Selector


WORDS: dict[Family, Words] = {
    IPV4: Words("", "ipv4_addr", "ip saddr", "ip daddr"),
    IPV6: Words("6", "ipv6_addr", "ip6 saddr", "ip6 daddr"),
}
EVERYWHERE: dict[Family, Prefix] = {IPV4: Prefix("0.0.0.0/0"), IPV6: Prefix("::/0")}
FORWARDING: dict[Family, str] = {IPV4: "net/ipv4/ip_forward", IPV6: "net/ipv6/conf/all/forwarding"}


def of_family(prefixes: Iterable[Prefix], family: Family) -> list[Prefix]:
    return [prefix for prefix in prefixes if prefix.family == family]
