"""Published routes for tests: short ways to write them, and a hypothesis strategy for any valid one."""

from __future__ import annotations

import ipaddress
from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

from schemas.codec import DecodeError
from schemas.host_objects import PlanObject
from schemas.routing import RouteConfiguration
from schemas.topology import convert_topology
from services.planner.compile import routing
from services.planner.compile.facts import NO_FACTS, Facts


def routes(name: str = "test", **fields: Any) -> RouteConfiguration:
    """A configuration from plain data, checked as one that is published; DecodeError when it is not valid."""
    found = convert_topology({"kind": "RouteConfiguration", "cluster": "rome", "name": name, **fields})
    assert isinstance(found, RouteConfiguration)
    return found


def to(prefix: str, dev: str = "", **fields: Any) -> dict[str, Any]:
    """A route; by an interface, where one is given."""
    hops = {"nextHops": [{"dev": dev}]} if dev else {}
    return {"prefix": prefix, **hops, **fields}


def compiled(item: RouteConfiguration, known: Facts = NO_FACTS) -> dict[str, PlanObject]:
    """The plan objects of a configuration, by key."""
    return {found.key: found for found in routing.build(item, known)}


# Any configuration ---------------------------------------------------------------------------------------------------------------

_byte = st.integers(0, 255)
_v4 = st.builds(lambda *parts: ".".join(map(str, parts)), st.sampled_from([10, 100, 192]), _byte, _byte, st.integers(1, 254))
_v6 = st.builds(lambda head, tail: f"{head}{tail:x}", st.sampled_from(["fd00:9::", "2001:db8:0:1::", "fe80::"]), st.integers(0x100, 0xFFFF))
_address = {4: _v4, 6: _v6}


def _prefix(family: int, least: int = 0) -> st.SearchStrategy[str]:
    length = st.integers(least, 32 if family == 4 else 128)
    return st.builds(lambda address, size: str(ipaddress.ip_network(f"{address}/{size}", strict=False)), _address[family], length)


@st.composite
def _hops(draw: st.DrawFn, family: int, links: list[str]) -> list[dict[str, Any]]:
    count = draw(st.integers(1, 4))
    found = []
    for _ in range(count):
        hop: dict[str, Any] = {"dev": draw(st.sampled_from([*links, "@tunnels"]))}
        if hop["dev"] != "@tunnels":
            if draw(st.booleans()) or (family == 6 and count > 1):
                hop |= {"via": draw(_address[family]), "onlink": True}
            if draw(st.booleans()):
                hop["weight"] = draw(st.integers(1, 256))
        found.append(hop)
    return found


@st.composite
def _routes(draw: st.DrawFn, links: list[str], sources: dict[int, str]) -> dict[str, Any]:
    family = draw(st.sampled_from([4, 6]))
    found: dict[str, Any] = {"prefix": draw(_prefix(family)), "metric": draw(st.sampled_from([0, 1, 256, 1024, 4278198271]))}
    if draw(st.integers(0, 3)) == 0:
        return found | {"type": draw(st.sampled_from(["blackhole", "prohibit", "unreachable", "throw"]))}
    found["nextHops"] = draw(_hops(family, links))
    if draw(st.booleans()):
        found["source"] = sources[family]
    if family == 4 and draw(st.booleans()):
        found["scope"] = draw(st.sampled_from(["global", "site", "link", "host"]))
    return found


@st.composite
def _rules(draw: st.DrawFn, links: list[str]) -> dict[str, Any]:
    family = draw(st.sampled_from([4, 6]))
    fields: dict[str, st.SearchStrategy[Any]] = {
        "from": _prefix(family),
        "to": _prefix(family),
        "iif": st.sampled_from([*links, "lo", "not-there", "@tunnels"]),
        "oif": st.sampled_from([*links, "not-there", "@tunnels"]),
        "fwmark": st.one_of(st.integers(0, 0xFFFFFFFF), st.sampled_from(["0xfe00", "0"])),
        "priority": st.integers(1002, 1007),
    }
    chosen = draw(st.lists(st.sampled_from(sorted(fields)), unique=True, max_size=5))
    found = {name: draw(fields[name]) for name in chosen}
    if "fwmark" in found and draw(st.booleans()):
        found["mask"] = int(str(found["fwmark"]), 0) | draw(st.integers(1, 0xFFFFFFFF))
    return found


@st.composite
def configurations(draw: st.DrawFn, links: list[str], sources: dict[int, str]) -> RouteConfiguration:
    """Any valid configuration over these interfaces, with these source addresses by family."""
    fields: dict[str, Any] = {
        "routes": draw(st.lists(_routes(links, sources), max_size=6)),
        "rules": draw(st.lists(_rules(links), max_size=6)),
        "order": draw(st.integers(-100, 100)),
    }
    if draw(st.booleans()):
        fields["table"] = draw(st.sampled_from([1, 100, 252, 256, 4294967295]))
    try:
        return routes(**fields)
    except DecodeError as error:
        # Each is a rule of its own, with a test of its own; what is drawn at random meets it now and then.
        assume("already" not in error.reason and "scope" not in error.reason and error.field != "$")
        raise
