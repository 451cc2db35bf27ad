"""Published firewalls for tests: short ways to write them, and a hypothesis strategy for any valid one."""

from __future__ import annotations

import contextlib
import ipaddress
import re
from typing import Any

from hypothesis import strategies as st

from schemas.codec import DecodeError
from schemas.firewall import FirewallConfiguration
from schemas.host_objects import PlanObject
from schemas.topology import convert_topology
from services.planner.allocate import Allocations
from services.planner.compile import firewall
from services.planner.state import HostId, State

HOST = HostId("rome", "gateway")


def configuration(name: str = "test", **fields: Any) -> FirewallConfiguration:
    """A configuration from plain data, checked as one that is published; DecodeError when it is not valid."""
    found = convert_topology({"kind": "FirewallConfiguration", "cluster": "rome", "name": name, **fields})
    assert isinstance(found, FirewallConfiguration)
    return found


def one_chain(
    *rules: dict[str, Any], hook: str = "forward", sets: Any = (), name: str = "test", hosts: Any = None, marks: bool = False, **chain: Any
) -> FirewallConfiguration:
    """A configuration with one chain."""
    chains = [{"name": "main", "hook": hook, "rules": list(rules), **chain}]
    return configuration(name, chains=chains, sets=list(sets), hosts=hosts or {}, classMarks=marks)


def match(field: str, value: Any, op: str = "eq", **more: Any) -> dict[str, Any]:
    return {"field": field, "value": value, "op": op, **more}


def rule(*matches: dict[str, Any], action: str | dict[str, Any] = "accept", **more: Any) -> dict[str, Any]:
    """A rule with one action."""
    return {"match": list(matches), "actions": [{"action": action} if isinstance(action, str) else action], **more}


def compiled(item: FirewallConfiguration, state: State | None = None, allocations: Allocations | None = None) -> dict[str, PlanObject]:
    """The plan objects of a configuration on the gateway of rome, by key."""
    facts = firewall.facts(item, HOST, state or State(), allocations or Allocations())
    return {found.key: found for found in firewall.build(item, facts)}


# Any configuration ---------------------------------------------------------------------------------------------------------------

_byte = st.integers(0, 255)
_v4 = st.builds(lambda *parts: ".".join(map(str, parts)), st.sampled_from([10, 192, 255, 0]), _byte, _byte, _byte)
_v6 = st.builds(
    lambda head, tail: f"{head}{tail:x}",
    st.sampled_from(["fd00::", "fd00:61::", "2001:db8:0:1::", "::", "::ffff:a00:"]),
    st.integers(0, 65535),
)
_address = {4: _v4, 6: _v6}
_names = st.sampled_from(["eth0", "eth1", "liqo-tunnel", "liqo-tunnel1", "mo.worker-1", "6in4-wan6", "a", "wg0", "x" * 15])
_patterns = st.sampled_from(["liqo*", "eth*", "mt.*", "y" * 14 + "*", "6*"])
_mark = st.one_of(st.integers(0, 0xFFFFFFFF), st.sampled_from(["0xfe00", "0xFF00", "0"]))
_port = st.one_of(st.integers(0, 65535), st.tuples(st.integers(0, 65535), st.integers(0, 65535)).map(lambda p: f"{min(p)}-{max(p)}"))


def _network(family: int) -> st.SearchStrategy[str]:
    """An address, a prefix or a range."""

    def prefix(address: str, length: int) -> str:
        return str(ipaddress.ip_network(f"{address}/{length}", strict=False))

    def span(one: str, other: str) -> str:
        low, high = sorted(map(ipaddress.ip_address, (one, other)), key=int)
        return f"{low}-{high}"

    address = _address[family]
    return st.one_of(
        address,
        st.builds(prefix, address, st.integers(0, 32 if family == 4 else 128)),
        st.builds(span, address, address),
    )


def _one_or_more(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(values, st.lists(values, min_size=1, max_size=4))


@st.composite
def _sets(draw: st.DrawFn) -> list[dict[str, Any]]:
    kinds = {
        "ipv4_addr": _network(4),
        "ipv6_addr": _network(6),
        "inet_service": _port,
        "ifname": st.one_of(_names, _patterns),
        "mark": _mark,
    }
    chosen = draw(st.lists(st.sampled_from(sorted(kinds)), unique=True, max_size=5))
    return [{"name": f"set-{kind}", "type": kind, "elements": draw(st.lists(kinds[kind], max_size=4))} for kind in chosen]


@st.composite
def _matches(draw: st.DrawFn, hook: str, sets: list[str]) -> list[dict[str, Any]]:
    family = draw(st.sampled_from([4, 6]))
    fields: dict[str, st.SearchStrategy[Any]] = {
        "source": _one_or_more(_network(family)),
        "destination": _one_or_more(_network(family)),
        "inInterface": st.one_of(_one_or_more(st.one_of(_names, _patterns)), st.sampled_from(["@tunnels", "wg\\*"])),
        "outInterface": st.one_of(_one_or_more(st.one_of(_names, _patterns)), st.just("@tunnels")),
        "mark": _one_or_more(_mark),
        "ctMark": _one_or_more(_mark),
        "ctState": _one_or_more(st.sampled_from(["new", "established", "related", "invalid", "untracked"])),
        "protocol": _one_or_more(st.sampled_from(["tcp", "udp", "icmp", "icmpv6", "gre", 99, "sctp", "dccp", "udplite"])),
    }
    named = {
        "source": f"set-ipv{family}_addr",
        "destination": f"set-ipv{family}_addr",
        "inInterface": "set-ifname",
        "outInterface": "set-ifname",
        "mark": "set-mark",
        "ctMark": "set-mark",
    }
    unknown = {"output": ("inInterface",), "prerouting": ("outInterface",), "input": ("outInterface",)}.get(hook, ())
    found = []
    for field in draw(st.lists(st.sampled_from(sorted(fields)), unique=True, max_size=5)):
        if field in unknown:
            continue
        values = [fields[field]] + [st.just(f"@{named.get(field)}")] * (named.get(field) in sets)
        item = match(field, draw(st.one_of(values)), draw(st.sampled_from(["eq", "neq"])))
        if field in ("mark", "ctMark") and isinstance(item["value"], int) and draw(st.booleans()):
            item["mask"] = (item["value"] | draw(st.integers(1, 0xFFFFFFFF))) or 1
        found.append(item)
    if draw(st.booleans()):
        found = [item for item in found if item["field"] != "protocol"]
        found.append(match("protocol", draw(_one_or_more(st.sampled_from(["tcp", "udp", "sctp", "dccp", "udplite"])))))
        values = [_one_or_more(_port)] + [st.just("@set-inet_service")] * ("set-inet_service" in sets)
        for field in draw(st.lists(st.sampled_from(["sourcePort", "destinationPort"]), unique=True, max_size=2)):
            found.append(match(field, draw(st.one_of(values)), draw(st.sampled_from(["eq", "neq"]))))
    return draw(st.permutations(found))


_masked = st.fixed_dictionaries({"value": st.integers(0, 255)}, optional={"mask": st.integers(0, 0xFFFFFF).map(lambda m: m | 255)})
_copied = st.fixed_dictionaries({}, optional={"mask": st.integers(1, 0xFFFFFFFF)})


@st.composite
def _actions(draw: st.DrawFn, matches: list[dict[str, Any]], kind: str, hook: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for name in draw(
        st.lists(st.sampled_from(["setMark", "setCtMark", "markFromCtMark", "ctMarkFromMark", "notrack", "clampMss"]), max_size=2)
    ):
        detail = draw(_masked if name.startswith("set") else _copied if name.startswith(("mark", "ct")) else st.just({}))
        if name == "clampMss" and draw(st.booleans()):
            detail = {"size": draw(st.integers(1, 65535))}
        found.append({"action": name, **detail})
    last = draw(st.sampled_from(["", "accept", "drop", "reject", "masquerade", "snat", "dnat"]))
    if last in ("snat", "dnat"):
        field = "source" if last == "snat" else "destination"
        given = next((item["value"] for item in matches if item["field"] == field and isinstance(item["value"], str)), "")
        family = 6 if any(":" in str(item["value"]) for item in matches) else 4
        to = draw(_address[family])
        if "/" in given and draw(st.booleans()):
            to = str(ipaddress.ip_network(f"{to}/{given.partition('/')[2]}", strict=False))
        found.append({"action": last, "to": to, **draw(st.fixed_dictionaries({}, optional={"port": st.integers(1, 65535)}))})
    elif last:
        found.append({"action": last})
    return found


_places = st.sampled_from(
    [("filter", hook) for hook in ("prerouting", "input", "forward", "output", "postrouting")]
    + [("nat", hook) for hook in ("prerouting", "input", "output", "postrouting")]
    + [("route", "output")]
)


@st.composite
def _chain(draw: st.DrawFn, name: str, sets: list[str]) -> dict[str, Any]:
    kind, hook = draw(_places)
    priority = draw(st.one_of(st.integers(-199, 1000), st.sampled_from(["raw", "mangle", "dstnat", "filter", "security", "srcnat"])))
    rules = []
    for _ in range(draw(st.integers(0, 4))):
        matches = draw(_matches(hook, sets))
        rules.append(
            {
                "match": matches,
                "actions": draw(_actions(matches, kind, hook)),
                "counter": draw(st.booleans()),
                "comment": draw(st.text(max_size=140)),
            }
        )
    return {
        "name": name,
        "type": kind,
        "hook": hook,
        "priority": priority,
        "policy": draw(st.sampled_from(["accept", "drop"])),
        "rules": rules,
    }


@st.composite
def configurations(draw: st.DrawFn) -> FirewallConfiguration:
    """Any valid configuration: what is drawn and not valid loses the set, rule or chain that admission names, until it is."""
    sets = draw(_sets())
    chains = [draw(_chain(f"chain-{number}", [item["name"] for item in sets])) for number in range(draw(st.integers(1, 4)))]
    fields: dict[str, Any] = {"chains": chains, "sets": sets, "order": draw(st.integers(-100, 100))}
    while True:
        try:
            return configuration(**fields)
        except DecodeError as error:
            _without(fields, error.field)


def _without(fields: dict[str, Any], field: str) -> None:
    """Take out what an error's field names: an element, a rule or a chain."""
    what, place, inner, index = re.match(r"\$\.(\w+)\[(\d+)\](?:\.(\w+)\[(\d+)\])?", field).groups()  # type: ignore[union-attr]
    holder = fields[what]
    if inner in ("elements", "rules"):
        del holder[int(place)][inner][int(index)]
    elif len(holder) > 1 or what == "sets":
        del holder[int(place)]
    else:
        with contextlib.suppress(KeyError):
            holder[int(place)] = {"name": "main", "hook": "forward", "rules": []}
