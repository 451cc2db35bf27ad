"""nft text: a batch of changes as one transaction, and a whole plan as a loadable file.

Owns nothing: values in, text out. Text is the input form because libnftables' JSON input is slower and silently wrong in places. The order
inside a transaction is that of ``steps``. Fails with Permanent for a batch that holds something else than nftables objects; all other
errors are the kernel's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from schemas.host_objects import NftChain, NftElement, NftSet, NftTable, PlanObject
from schemas.values import Address
from services.kernel.nft.statements import chain_header, element_text, is_address, is_name, rule_text, set_header
from services.kernel.nft.steps import Path, Step, changed_sets, steps
from services.kernel.transaction import Change, Marker

_CHUNK = 1000


class Context(Struct, frozen=True):
    """What a batch's text depends on besides the batch, where nft 1.0.6 needs help.

    `is_ranged` says of a map that is not in the batch whether its values are prefixes: nft then wants a length even for one address.
    `refilled` gives what the sets of interface names in the batch hold (``needs_refill``). nft compares names in an interval set in the
    wrong byte order: most single additions fail with "interval overlaps with an existing one", and no name with ``*`` can be deleted.
    Emptying such a set and filling it again in the same transaction always works, and loses no packet.
    """

    is_ranged: Callable[[str, str], bool] = lambda _table, _set: False
    refilled: Mapping[Path, tuple[NftElement, ...]] = {}


def batch_text(batch: Sequence[Change], marker: Marker | None, context: Context = Context()) -> str:  # noqa: B008 - a constant
    """One transaction: all changes, and the marker written (None: removed). An empty batch still carries the marker."""
    ranged: dict[Path, bool] = {}
    lines: list[str] = []
    for step in steps(batch, marker, context.refilled):
        if isinstance(step.item, NftSet):
            ranged[step.table, step.name] = step.item.value_interval
        lines += _step_lines(step, ranged, context)
    return "\n".join(lines) + "\n"


def needs_refill(batch: Sequence[Change]) -> set[Path]:
    """Sets of interface names that are there before and after the batch, and whose elements change in it."""
    return changed_sets(batch, lambda item: is_name(item.element))


def _step_lines(step: Step, ranged: dict[Path, bool], context: Context) -> Iterator[str]:
    at = f"inet {step.table} {step.name}".rstrip()
    kind = ("map" if step.is_map else "set") if step.what in ("elements", "set") else step.what
    match step.verb, step.item:
        case "add", NftSet():
            yield f"add {set_line(step.item)}"
        case "add", NftChain():
            if step.what == "chain":
                yield f"add {chain_line(step.item)}"
            else:
                yield from (f"add rule {at} {rule_text(rule)}" for rule in step.item.rules)
        case (("add" | "delete"), None) if step.elements:
            yield from _element_lines(step, ranged, context)
        case "flush", _:
            yield f"flush {'chain' if kind == 'rules' else kind} {at}"
        case verb, _:
            yield f"{verb} {kind} {at}"


def _element_lines(step: Step, ranged: dict[Path, bool], context: Context) -> Iterator[str]:
    """Elements, deleted by their keys alone."""
    at = step.table, step.name
    elements = [replace(item, value="") for item in step.elements] if step.verb == "delete" else step.elements
    if at not in ranged and any(is_address(item.value) for item in elements):
        ranged[at] = context.is_ranged(*at)
    texts = [element_text(item, ranged_value=ranged.get(at, False)) for item in elements]
    for start in range(0, len(texts), _CHUNK):
        yield f"{step.verb} element inet {step.table} {step.name} {{ {', '.join(texts[start : start + _CHUNK])} }}"


def set_line(item: NftSet) -> str:
    """A set's declaration without elements, on one line, to come after ``add``."""
    kind, inside = set_header(item)
    return f"{kind} inet {item.table} {item.name} {{ {inside} }}"


def chain_line(item: NftChain) -> str:
    """A chain's declaration without rules, on one line, to come after ``add``."""
    inside = chain_header(item)
    return f"chain inet {item.table} {item.name}" + (f" {{ {inside} }}" if inside else "")


def table_text(objects: Mapping[str, PlanObject]) -> str:
    """All nft objects among `objects` as a file that ``nft -f`` loads: tables, sets, chains by name, elements by value."""
    found = sorted((item for item in objects.values() if isinstance(item, NftTable)), key=lambda item: item.name)
    return "\n".join(_one_table(item.name, objects) for item in found)


def _one_table(table: str, objects: Mapping[str, PlanObject]) -> str:
    sets = sorted((item for item in objects.values() if isinstance(item, NftSet) and item.table == table), key=lambda item: item.name)
    chains = sorted(
        (item for item in objects.values() if isinstance(item, NftChain) and item.table == table),
        key=lambda item: (item.hook is None, item.priority, item.name),
    )
    members = [item for item in objects.values() if isinstance(item, NftElement) and item.table == table]
    lines = [f"table inet {table} {{"]
    for item in sets:
        lines += _set_block(item, sorted(member_key(member, item.value_interval) for member in members if member.set == item.name))
    for chain in chains:
        inside = chain_header(chain)
        lines += [f"\tchain {chain.name} {{"] + ([f"\t\t{inside}"] if inside else [])
        lines += [f"\t\t{rule_text(rule)}" for rule in chain.rules] + ["\t}"]
    return "\n".join((*lines, "}")) + "\n"


def _set_block(item: NftSet, members: Sequence[tuple[tuple[int, ...], str]]) -> list[str]:
    kind, inside = set_header(item)
    lines = [f"\t{kind} {item.name} {{", *(f"\t\t{part.strip()}" for part in inside.rstrip(";").split(";"))]
    if members:
        texts = [text for _, text in members]
        lines += ["\t\telements = {", *(f"\t\t\t{text}," for text in texts[:-1]), f"\t\t\t{texts[-1]}", "\t\t}"]
    return [*lines, "\t}"]


def member_key(item: NftElement, ranged_value: bool) -> tuple[tuple[int, ...], str]:  # noqa: FBT001 - a field of the set
    """Sorts elements as people read them: addresses and numbers by value, then names; with the element's text."""
    text = element_text(item, ranged_value=ranged_value)
    first = item.element.partition("/")[0].partition("-")[0]
    if ":" in first:
        return tuple(Address(first).packed), text
    parts = first.split(".")
    return (tuple(int(part) for part in parts) if all(part.isdigit() for part in parts) else (1 << 32,)), text
