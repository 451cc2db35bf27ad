"""Published routes: what is taken, in whatever spelling, and what is refused, with the field."""

from __future__ import annotations

from typing import Any

import pytest

from schemas.codec import DecodeError
from tests.routes import compiled, routes, to

V4, V6 = "10.9.0.0/16", "fd00:9::/32"
ONE = to(V4, "eth1")


def hop(**fields: Any) -> dict[str, Any]:
    return {"dev": "eth1", **fields}


def by(*hops: dict[str, Any], prefix: str = V4, **fields: Any) -> dict[str, Any]:
    return {"routes": [{"prefix": prefix, "nextHops": list(hops), **fields}]}


def ruled(**fields: Any) -> dict[str, Any]:
    return {"rules": [fields]}


@pytest.mark.parametrize(
    "fields, at, words",
    [
        ({}, "$", "give a route or a rule"),
        ({"routes": [ONE], "table": 0}, "$.table", ">= 1"),
        ({"routes": [ONE], "table": 253}, "$.table", "the kernel's own"),
        ({"routes": [ONE], "table": 255}, "$.table", "(local)"),
        ({"routes": [ONE, to(V4, "eth2")]}, "$.routes[1].prefix", "with metric 0 is there already ($.routes[0])"),
        ({"routes": [to(V6, "eth1"), to(V6, type="throw", metric=1024)]}, "$.routes[1].prefix", "with metric 1024 is there already"),
        ({"routes": [{"prefix": "10.9.0.1/16", "nextHops": [hop()]}]}, "$.routes[0].prefix", "has host bits set"),
        ({"routes": [to(V4, "eth1", metric=4278198272)]}, "$.routes[0].metric", "<= 4278198271"),
        (by(), "$.routes[0].nextHops", "give a next hop, or a type: blackhole"),
        (by(hop(), type="blackhole"), "$.routes[0].nextHops", "leads nowhere"),
        ({"routes": [to(V4, type="throw", source="10.0.0.1")]}, "$.routes[0].source", "gives no packet a source"),
        ({"routes": [to(V4, type="throw", scope="link")]}, "$.routes[0].scope", "has no scope"),
        (by(hop(), hop(dev="eth2", weight=0)), "$.routes[0].nextHops[1].weight", ">= 1"),
        (by(hop(), hop(dev="eth2", weight=257)), "$.routes[0].nextHops[1].weight", "<= 256"),
        (by(hop(), hop(weight=3)), "$.routes[0].nextHops[1]", "give it a weight instead"),
        (by(hop(dev="eth*")), "$.routes[0].nextHops[0].dev", "exact names only, and '@tunnels'"),
        (by(hop(dev="a-name-of-16-byt")), "$.routes[0].nextHops[0].dev", "at most 15"),
        (by(hop(dev="@tunnel")), "$.routes[0].nextHops[0].dev", "is not the name of an interface"),
        (by(hop(onlink=True)), "$.routes[0].nextHops[0].onlink", "give via"),
        (by(hop(via="fd00::1")), "$.routes[0].nextHops[0].via", "write an IPv4 address"),
        (by(hop(via="0.0.0.0")), "$.routes[0].nextHops[0].via", "cannot be a neighbour's address"),
        (by(hop(via="224.0.0.5")), "$.routes[0].nextHops[0].via", "cannot be a neighbour's address"),
        (by(hop(via="fe80::1", onlink=True), hop(), prefix=V6), "$.routes[0].nextHops[1].via", "an address for each of several IPv6"),
        (by(hop(dev="@tunnels", weight=2)), "$.routes[0].nextHops[0].weight", "from their peering"),
        (by(hop(dev="@tunnels", via="10.0.0.1")), "$.routes[0].nextHops[0].via", "from their peering"),
        (by(hop(), source="fd00::1"), "$.routes[0].source", "write an IPv4 address"),
        (by(hop(), source="0.0.0.0"), "$.routes[0].source", "cannot be the source"),
        (by(hop(), scope="nowhere"), "$.routes[0].scope", "the words are global, host, link, site"),
        (by(hop(), prefix=V6, scope="global"), "$.routes[0].scope", "only IPv4 routes"),
        (by(hop(via="10.0.0.1"), scope="link"), "$.routes[0].scope", "behind a neighbour"),
        (by(hop(), hop(dev="eth2"), scope="host"), "$.routes[0].scope", "one next hop"),
        (by(hop(dev="@tunnels"), scope="host"), "$.routes[0].scope", "one next hop"),
        (ruled(**{"from": V4, "to": V6}), "$.rules[0].to", "write a rule for each"),
        (ruled(iif="eth*"), "$.rules[0].iif", "exact names only"),
        (ruled(oif=""), "$.rules[0].oif", "is not the name of an interface"),
        (ruled(mask=1), "$.rules[0].mask", "give fwmark"),
        (ruled(fwmark=1, mask=0), "$.rules[0].mask", "a mask of 0"),
        (ruled(fwmark="0xfe01", mask="0xff00"), "$.rules[0].fwmark", "0xfe01 has bits outside of the mask 0xff00"),
        (ruled(fwmark="65279.5"), "$.rules[0].fwmark", "is not a mark"),
        (ruled(priority=0), "$.rules[0].priority", ">= 1"),
        (ruled(priority=32766), "$.rules[0].priority", "<= 32765"),
        ({"rules": [{"fwmark": "0xFE00"}, {"fwmark": 65024, "mask": "0xffffffff"}]}, "$.rules[1]", "is there already ($.rules[0])"),
        (ruled(source=V4), "$.rules[0]", "the fields are from, fwmark, iif, mask, oif, priority, to"),
        (by(hop(gw="10.0.0.1")), "$.routes[0].nextHops[0]", "the fields are dev, onlink, via, weight"),
    ],
)
def test_what_no_kernel_could_hold_is_refused_with_its_field(fields: dict[str, Any], at: str, words: str) -> None:
    with pytest.raises(DecodeError) as caught:
        routes(**fields)
    assert caught.value.field == at
    assert words in caught.value.reason


@pytest.mark.parametrize(
    "one, other",
    [
        (by(hop(), prefix="FD00:9:0::/32"), by(hop(), prefix=V6)),
        (ruled(fwmark="0xFE00"), ruled(fwmark=65024, mask="0xffffffff")),
        (ruled(to="0.0.0.0/0", iif="lo"), ruled(**{"from": "0.0.0.0/0", "iif": "lo"})),
        (ruled(), {"rules": [{"to": "0.0.0.0/0"}, {"to": "::/0"}]}),
    ],
    ids=["prefix", "mark", "everything", "both families"],
)
def test_the_spelling_does_not_matter(one: dict[str, Any], other: dict[str, Any]) -> None:
    """What says the same is the same in the plan."""
    assert compiled(routes(**one)) == compiled(routes(**other))
