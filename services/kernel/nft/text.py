"""nft text: a batch of changes as one transaction, and a whole plan as a loadable file.

Owns nothing: values in, text out. Text is the input form because libnftables' JSON input is slower and silently wrong in places.

The order inside a transaction is what the kernel's reference counts allow:

1. new tables; elements that go or change; all changed chains emptied: from here no rule of the old state refers to anything;
2. chains and sets whose header changed are deleted, then all new headers are added, the chains' first (libnftables sends the elements of
   a new interval set together with its header, wherever they stand);
3. rules, then elements (their verdicts may jump to chains that were made just above);
4. removals: sets (a verdict map refers to chains), chains, tables.

Members of a table that goes are not mentioned: they go with it. A set whose header changes is made anew and empty: its caller passes
all its elements and the chains that name it (``transaction.with_dependents`` adds them). Fails with Permanent for a batch that holds
something else than nftables objects; all other errors are the kernel's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from msgspec import Struct
from msgspec.structs import replace

from schemas.host_objects import OWN_TABLE_PREFIX, NftChain, NftElement, NftSet, NftTable, PlanObject
from schemas.values import Address
from services.kernel.nft.statements import chain_header, element_text, is_address, is_name, rule_text, set_header
from services.kernel.transaction import Change, Held, Listed, ListedChain, Marker, is_recreated_set
from services.runtime.errors import Permanent

MARKER_TABLE = f"{OWN_TABLE_PREFIX}marker"
MARKER_CHAIN = "plan"
SCRATCH_PREFIX = f"{OWN_TABLE_PREFIX}scratch."
_CHUNK = 1000
_HOOKS = ("prerouting", "input", "forward", "output", "postrouting")
_Chain = NftChain | ListedChain
Path = tuple[str, str]


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
    foreign = sorted(change.key for change in batch if change.subject.layer != "nft")
    if foreign:
        msg = f"not nftables objects, write them one by one: {', '.join(foreign)}"
        raise Permanent(msg)
    gone = {path(change.subject)[0] for change in batch if change.new is None and _is_table(change.subject)}
    tables = [change for change in batch if _is_table(change.subject)]
    members = [change for change in batch if not _is_table(change.subject) and path(change.subject)[0] not in gone]
    lines = [f"add table inet {change.new.name}" for change in tables if isinstance(change.new, NftTable)]
    lines += _member_lines(members, context)
    lines += [f"delete table inet {name}" for name in sorted(gone)]
    return "\n".join((*lines, *marker_lines(marker))) + "\n"


def needs_refill(batch: Sequence[Change]) -> set[Path]:
    """Sets of interface names that are there before and after the batch, and whose elements change in it."""
    anew = {path(change.subject) for change in batch if change.key.startswith("set ") and change.old != change.new}
    gone = {path(change.subject)[0] for change in batch if change.new is None and _is_table(change.subject)}
    changed = [change.subject for change in batch if isinstance(change.subject, NftElement) and change.old != change.new]
    return {path(item) for item in changed if is_name(item.element) and path(item) not in anew and item.table not in gone}


def _member_lines(members: Sequence[Change], context: Context) -> Iterator[str]:
    chains = sorted((change for change in members if isinstance(change.subject, _Chain)), key=lambda change: _way(change.subject))
    sets = [change for change in members if change.key.startswith("set ")]
    added = [change.new for change in sets if isinstance(change.new, NftSet)]
    yield from _stale_elements(
        members, {path(change.subject) for change in sets if change.new is None or is_recreated_set(change)}, context
    )
    yield from (f"flush chain inet {_at(change.old)}" for change in chains if change.old is not None)
    for change in chains:
        if isinstance(change.old, _Chain) and isinstance(change.new, NftChain) and header(change.old) != header(change.new):
            yield f"delete chain inet {_at(change.old)}"
    for change in sets:
        if change.old is not None and is_recreated_set(change):
            yield from _delete_set(change.old)
    yield from (f"add {chain_line(change.new)}" for change in chains if isinstance(change.new, NftChain))
    yield from (f"add {set_line(item)}" for item in added)
    yield from (f"flush chain inet {_at(change.new)}" for change in chains if change.new is not None and change.old is None)
    for change in chains:
        if isinstance(change.new, NftChain):
            yield from (f"add rule inet {_at(change.new)} {rule_text(rule)}" for rule in change.new.rules)
    yield from _new_elements(members, added, context)
    yield from _removal_lines([change.old for change in members if change.old is not None and change.new is None])


def _way(chain: Held) -> tuple[int, int, str]:
    """Sorts chains as a packet meets them: nft lists a table's chains in the order in which they were made."""
    if not isinstance(chain, _Chain) or chain.hook is None:
        return 0, 0, chain.key
    return 1 + _HOOKS.index(chain.hook) if chain.hook in _HOOKS else 0, chain.priority, chain.key


def _stale_elements(members: Sequence[Change], emptied: set[Path], context: Context) -> Iterator[str]:
    """Elements that go or change are deleted by key; what is emptied as a whole, or refilled, needs no such line."""
    maps = {path(item) for change in members if isinstance(item := change.subject, NftElement) and item.value}
    maps |= {at for at, items in context.refilled.items() if any(item.value for item in items)}
    yield from (f"flush {'map' if at in maps else 'set'} inet {' '.join(at)}" for at in sorted(context.refilled))
    stale = [change.old for change in members if isinstance(change.old, NftElement) and change.old != change.new]
    left = [item for item in stale if path(item) not in emptied and path(item) not in context.refilled]
    yield from _element_lines("delete", [replace(item, value="") for item in left], {})


def _new_elements(members: Sequence[Change], added: Sequence[NftSet], context: Context) -> Iterator[str]:
    mentioned = {change.key for change in members}
    kept = [item for items in context.refilled.values() for item in items if item.key not in mentioned]
    elements = kept + [change.new for change in members if isinstance(change.new, NftElement)]
    ranged = {path(item): item.value_interval for item in added}
    for at in {path(item) for item in elements if is_address(item.value)} - ranged.keys():
        ranged[at] = context.is_ranged(*at)
    yield from _element_lines("add", elements, ranged)


def _element_lines(verb: str, elements: Iterable[NftElement], ranged: Mapping[Path, bool]) -> Iterator[str]:
    for at, group in groupby(sorted(elements, key=path), key=path):
        texts = [element_text(item, ranged_value=ranged.get(at, False)) for item in group]
        for start in range(0, len(texts), _CHUNK):
            yield f"{verb} element inet {' '.join(at)} {{ {', '.join(texts[start : start + _CHUNK])} }}"


def _removal_lines(removed: Sequence[Held]) -> Iterator[str]:
    for item in removed:
        if item.key.startswith("set "):
            yield from _delete_set(item)
    yield from (f"delete chain inet {_at(item)}" for item in removed if isinstance(item, _Chain))
    for item in removed:
        if isinstance(item, Listed) and not item.key.startswith("set "):
            kind, table, name = item.key.split(" ", 2)
            yield f"delete {kind} inet {table} {name}"


def _delete_set(item: Held) -> Iterator[str]:
    """Emptied first: older kernels let a deleted verdict map hold on to its chains until the transaction ends."""
    is_map = item.value_type is not None if isinstance(item, NftSet) else isinstance(item, Listed) and item.text.startswith("a map")
    kind = "map" if is_map else "set"
    yield f"flush {kind} inet {_at(item)}"
    yield f"delete {kind} inet {_at(item)}"


def set_line(item: NftSet) -> str:
    """A set's declaration without elements, on one line, to come after ``add``."""
    kind, inside = set_header(item)
    return f"{kind} inet {item.table} {item.name} {{ {inside} }}"


def chain_line(item: NftChain) -> str:
    """A chain's declaration without rules, on one line, to come after ``add``."""
    inside = chain_header(item)
    return f"chain inet {item.table} {item.name}" + (f" {{ {inside} }}" if inside else "")


def header(item: NftChain | ListedChain) -> tuple[str | None, str | None, int, str]:
    """What cannot change in place: type, hook, priority and policy."""
    return item.type, item.hook, item.priority, "" if item.policy == "accept" else item.policy


def marker_lines(marker: Marker | None) -> list[str]:
    """The marker's table written anew, or removed; it holds rules that no packet meets, whose comments are the marker."""
    at = f"inet {MARKER_TABLE}"
    if marker is None:
        return [f"add table {at}", f"delete table {at}"]
    comments = [f"epoch {marker.epoch} generation {marker.generation}"]
    comments += [f"unit {tag} {digest}" for tag, digest in sorted(marker.units.items())]
    lines = [f"add table {at}", f"add chain {at} {MARKER_CHAIN}", f"flush chain {at} {MARKER_CHAIN}"]
    return lines + [f'add rule {at} {MARKER_CHAIN} return comment "{text}"' for text in comments]


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


def _is_table(item: Held) -> bool:
    return isinstance(item, NftTable) or (isinstance(item, Listed) and item.key.startswith("table "))


def path(item: Held) -> Path:
    """The table that an nft object is in, and the name of the set or chain."""
    match item:
        case NftElement():
            return item.table, item.set
        case NftTable():
            return item.name, ""
        case NftSet() | NftChain() | ListedChain():
            return item.table, item.name
        case _:
            words = item.key.split(" ")
            return words[1], words[-1]


def _at(item: Held | None) -> str:
    return " ".join(path(item)) if item is not None else ""
