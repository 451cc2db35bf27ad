"""What libnftables lists of one own table, as plan objects and listed chains.

Owns nothing: decoded JSON in, values out. What the listing leaves out on nft 1.0.6 (comments and sizes of sets, what kind of values an
empty map takes) is no part of the state. What is not known here (an expression, a data type, a named counter) is kept as JSON text, so it
is seen as a difference and never lost or mistaken for nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from msgspec.structs import replace

from schemas.host_objects import NftElement, NftSet, NftTable, PlanObject
from services.kernel.nft import marks
from services.kernel.transaction import Held, Listed, ListedChain, Marker

_KNOWN_FLAGS = {"interval", "timeout"}
_LONE = ("/32", "/128")
Json = Any


def table_objects(listing: Iterable[Json], wanted: Mapping[str, PlanObject]) -> dict[str, Held]:
    """Objects of one table by key. `wanted` is asked only for what the listing cannot say: the value kind of an empty map."""
    found: dict[str, Held] = {}
    rules: dict[str, list[str]] = {}
    chains = []
    for item in listing:
        [(kind, value)] = item.items()
        match kind:
            case "metainfo":
                continue
            case "rule":
                rules.setdefault(value["chain"], []).append(rule_form(value))
            case "chain":
                chains.append(value)
            case "table":
                add(found, _table(value))
            case "set" | "map":
                for member in _set_objects(value, wanted):
                    add(found, member)
            case _:
                add(found, Listed("nft", f"{kind} {value.get('table')} {value.get('name')}", canonical_json(value)))
    for value in chains:
        add(found, _chain(value, tuple(rules.get(value["name"], ()))))
    return found


def add(found: dict[str, Held], item: Held) -> None:
    found[item.key] = item


def _table(value: Json) -> Held:
    if "flags" in value:
        return Listed("nft", f"table {value['name']}", "a table with flags (dormant or owned)")
    return NftTable(value["name"])


def _chain(value: Json, rules: tuple[str, ...]) -> ListedChain:
    return ListedChain(
        value["table"], value["name"], rules, value.get("type"), value.get("hook"), value.get("prio", 0), value.get("policy", "")
    )


def _set_objects(value: Json, wanted: Mapping[str, PlanObject]) -> list[Held]:
    table, name, flags = value["table"], value["name"], value.get("flags", [])
    key_type, value_type = type_text(value["type"]), value.get("map")
    elements = value.get("elem", [])
    header = NftSet(table, name, key_type, value_type and type_text(value_type), "interval" in flags, timeout="timeout" in flags)  # type: ignore[arg-type]
    if value_type:
        planned = wanted.get(header.key)
        empty = isinstance(planned, NftSet) and planned.value_interval
        ranges = any(_is_range(element[1]) for element in elements) if elements else empty
        header = replace(header, value_interval=ranges)
    odd = sorted(set(flags) - _KNOWN_FLAGS) + [word for word in ("timeout", "gc-interval", "policy", "stmt") if word in value]
    found: list[Held] = [Listed("nft", header.key, f"a {'map' if value_type else 'set'} with {', '.join(odd)}") if odd else header]
    for element in elements if not header.timeout else ():
        key, data = element if value_type else (element, None)
        found.append(NftElement(table, name, value_text(key, key_type), value_text(data, value_type or "") if value_type else ""))
    return found


def _is_range(value: Json) -> bool:
    return isinstance(value, dict) and ("prefix" in value or "range" in value)


def type_text(value: Json) -> str:
    """A data type as nft text; concatenations join with dots."""
    return " . ".join(value) if isinstance(value, list) else str(value)


def value_text(value: Json, data_type: str) -> str:
    """A key or a value in the form that plans use: 10.61.0.0/16, 10.61.0.1, 80-90, mo.*, 0xff00 for marks, ``jump CHAIN``."""
    match value:
        case int() if data_type == "mark":
            text = f"{value:#x}"
        case str() | int():
            text = str(value)
        case {"prefix": {"addr": address, "len": length}}:
            text = bare(f"{address}/{length}")
        case {"range": [low, high]}:
            text = f"{value_text(low, data_type)}-{value_text(high, data_type)}"
        case {"elem": {"val": inner}}:
            text = value_text(inner, data_type)
        case {"jump": {"target": target}} | {"goto": {"target": target}}:
            text = f"{next(iter(value))} {target}"
        case {"accept": None} | {"drop": None} | {"return": None} | {"continue": None}:
            text = str(next(iter(value)))
        case {"concat": list(parts)}:
            text = " . ".join(value_text(part, "") for part in parts)
        case _:
            text = canonical_json(value)
    return text


def rule_form(value: Json) -> str:
    """A rule's normal form: its expressions as JSON, counters masked, anonymous sets sorted, its comment if it has one."""
    masked = _masked(value.get("expr", []))
    return canonical_json({"expr": masked, "comment": value["comment"]} if "comment" in value else masked)


def _masked(value: Json) -> Json:
    if isinstance(value, list):
        return [_masked(item) for item in value]
    if not isinstance(value, dict):
        return value
    if isinstance(value.get("counter"), dict):
        return {**value, "counter": None}
    return {
        key: sorted((_masked(item) for item in inner), key=canonical_json) if key == "set" and isinstance(inner, list) else _masked(inner)
        for key, inner in value.items()
    }


def canonical_json(value: Json) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=True)


def marker_of(listing: Iterable[Json]) -> Marker | None:
    """The marker in the listing of its table; None when what is there is not one."""
    return marks.marker_of(item["rule"].get("comment", "") for item in listing if "rule" in item)


def canonical_element(item: NftElement) -> NftElement:
    """An element as the listing would show it: a prefix of one address is a bare address."""
    if not item.element.endswith(_LONE) and not item.value.endswith(_LONE):
        return item
    return NftElement(item.table, item.set, bare(item.element), bare(item.value))


def bare(text: str) -> str:
    """An element's text without a length that says nothing."""
    return text.removesuffix("/128") if ":" in text else text.removesuffix("/32")
