"""A batch of changes as the steps of one kernel transaction, in an order that works. Each engine renders them in its own form.

Owns nothing: values in, values out. The order is what the kernel's reference counts allow:

1. new tables; elements that go or change; all changed chains emptied, or rid of the rules that go where an engine changes them rule by
   rule: from here no rule that does not stay refers to anything;
2. chains and sets whose header changed are deleted, then all new headers are added, the chains' first (libnftables sends the elements of
   a new interval set together with its header, wherever they stand);
3. rules, then elements (their verdicts may jump to chains that were made just above);
4. removals: sets (a verdict map refers to chains), chains, tables; the marker last.

Members of a table that goes are not mentioned: they go with it. A set whose header changes is made anew and empty: its caller passes
all its elements and the chains that name it (``transaction.with_dependents`` adds them). Fails with Permanent for a batch that holds
something else than nftables objects.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from schemas.host_objects import OWN_TABLE_PREFIX, TRACE_TABLE, NftChain, NftElement, NftSet, NftTable
from schemas.nft import Comment, Verdict
from services.kernel.transaction import Change, Held, Listed, ListedChain, Marker, is_recreated_set
from services.runtime.errors import Permanent

MARKER_TABLE = f"{OWN_TABLE_PREFIX}marker"
MARKER_CHAIN = "plan"
SCRATCH_PREFIX = f"{OWN_TABLE_PREFIX}scratch."
_HOOKS = ("prerouting", "input", "forward", "output", "postrouting")
_Chain = NftChain | ListedChain
Path = tuple[str, str]
Refill = Mapping[Path, tuple[NftElement, ...]]


def is_heeded(table: str) -> bool:
    """Whether a change of a table is a change of what is ours to keep: scratch ones and that of traced flows come and go."""
    return table.startswith(OWN_TABLE_PREFIX) and table != TRACE_TABLE and not table.startswith(SCRATCH_PREFIX)


class Step(NamedTuple):
    """One command. `what` is what is added, deleted or emptied; an object that no plan knows is deleted by the kernel's word for it.

    `item` is the header to add, or the chain whose rules are added; `elements` are those to add or delete. Rules that are
    deleted, not flushed, are some of a chain.
    """

    verb: Literal["add", "delete", "flush"]
    what: str
    table: str
    name: str = ""
    item: NftSet | NftChain | None = None
    elements: Sequence[NftElement] = ()
    is_map: bool = False


class _Members(NamedTuple):
    """The changes of a batch by kind, without those of tables that go."""

    chains: list[Change]
    sets: list[Change]
    elements: list[Change]
    others: list[Change]


def steps(
    batch: Sequence[Change], marker: Marker | None, refilled: Refill | None = None, by_rule: Collection[Path] = frozenset()
) -> Iterator[Step]:
    """All changes, and the marker written (None: removed). An empty batch still carries the marker.

    `refilled` are sets that are emptied and filled again, with what they hold now; `by_rule` are chains, of the
    `editable` ones, of which only some rules change.
    """
    tables, gone, members = _sorted_out(batch)
    yield from (Step("add", "table", change.new.name) for change in tables if isinstance(change.new, NftTable))
    yield from _member_steps(members, refilled or {}, by_rule)
    yield from (Step("delete", "table", name) for name in sorted(gone))
    yield from _marker_steps(marker)


def _sorted_out(batch: Sequence[Change]) -> tuple[list[Change], set[str], _Members]:
    foreign = sorted(change.key for change in batch if (change.new or change.old).layer != "nft")  # type: ignore[union-attr]
    if foreign:
        msg = f"not nftables objects, write them one by one: {', '.join(foreign)}"
        raise Permanent(msg)
    tables: list[Change] = []
    elements: list[Change] = []
    rest: list[Change] = []
    for change in batch:
        item = change.new or change.old
        (elements if type(item) is NftElement else tables if is_table(change.subject) else rest).append(change)
    gone = {path(change.subject)[0] for change in tables if change.new is None}
    if gone:
        elements = [change for change in elements if path(change.subject)[0] not in gone]
    rest = [change for change in rest if path(change.subject)[0] not in gone]
    chains = sorted((change for change in rest if isinstance(change.subject, _Chain)), key=lambda change: _way(change.subject))
    sets = [change for change in rest if change.key.startswith("set ")]
    others = [change for change in rest if not isinstance(change.subject, _Chain) and not change.key.startswith("set ")]
    return tables, gone, _Members(chains, sets, elements, others)


def editable(batch: Sequence[Change]) -> list[Change]:
    """Chains that stay and of which only rules change, in tables of which no set is made anew: its rules must all go first."""
    found = [
        change
        for change in batch
        if type(change.new) is NftChain and isinstance(change.old, _Chain) and header(change.old) == header(change.new)
    ]
    anew = {path(change.subject)[0] for change in batch if is_recreated_set(change)} if found else ()
    return [change for change in found if path(change.subject)[0] not in anew]


def changed_sets(batch: Sequence[Change], which: Callable[[NftElement], bool]) -> set[Path]:
    """Sets that are there before and after the batch, and of whose elements one of `which` changes in it."""
    _, _, members = _sorted_out(batch)
    anew = {path(change.subject) for change in members.sets if change.old != change.new}
    changed = [change.subject for change in members.elements if change.old != change.new]
    return {path(item) for item in changed if isinstance(item, NftElement) and which(item) and path(item) not in anew}


def _member_steps(members: _Members, refilled: Refill, by_rule: Collection[Path]) -> Iterator[Step]:
    chains, sets = members.chains, members.sets
    yield from _stale_elements(members, refilled)
    for change in chains:
        if change.old is not None:
            yield Step("delete" if path(change.old) in by_rule else "flush", "rules", *path(change.old))
    for change in chains:
        if isinstance(change.old, _Chain) and isinstance(change.new, NftChain) and header(change.old) != header(change.new):
            yield Step("delete", "chain", *path(change.old))
    for change in sets:
        if change.old is not None and is_recreated_set(change):
            yield from _delete_set(change.old)
    for change in chains:
        if isinstance(change.new, NftChain) and path(change.new) not in by_rule:
            yield Step("add", "chain", *path(change.new), change.new)
    yield from (Step("add", "set", *path(change.new), change.new) for change in sets if isinstance(change.new, NftSet))
    yield from (Step("flush", "rules", *path(change.new)) for change in chains if change.new is not None and change.old is None)
    yield from (Step("add", "rules", *path(change.new), change.new) for change in chains if isinstance(change.new, NftChain))
    yield from _new_elements(members, refilled)
    yield from _removals(members)


def _stale_elements(members: _Members, refilled: Refill) -> Iterator[Step]:
    """Elements that go or change are deleted by key; what is emptied as a whole, or refilled, needs no such step."""
    maps = {at for at, items in refilled.items() if any(item.value for item in items)}
    maps |= {path(change.subject) for change in members.elements if refilled and change.subject.value}  # type: ignore[union-attr]
    yield from (Step("flush", "elements", *at, is_map=at in maps) for at in sorted(refilled))
    emptied = {path(change.subject) for change in members.sets if change.new is None or is_recreated_set(change)} | refilled.keys()
    stale = [change.old for change in members.elements if isinstance(change.old, NftElement) and change.old != change.new]
    yield from _element_steps("delete", stale, emptied)


def _new_elements(members: _Members, refilled: Refill) -> Iterator[Step]:
    mentioned = {change.key for change in members.elements} if refilled else set()
    kept = [item for items in refilled.values() for item in items if item.key not in mentioned]
    yield from _element_steps("add", kept + [change.new for change in members.elements if isinstance(change.new, NftElement)])


def _element_steps(
    verb: Literal["add", "delete"], elements: Iterable[NftElement], without: set[Path] | frozenset[Path] = frozenset()
) -> Iterator[Step]:
    groups: dict[Path, list[NftElement]] = {}
    for item in elements:
        groups.setdefault((item.table, item.set), []).append(item)
    yield from (Step(verb, "elements", *at, elements=groups[at]) for at in sorted(groups) if at not in without)


def _removals(members: _Members) -> Iterator[Step]:
    for change in members.sets:
        if change.new is None and change.old is not None:
            yield from _delete_set(change.old)
    yield from (Step("delete", "chain", *path(change.old)) for change in members.chains if change.new is None and change.old is not None)
    for change in members.others:
        if isinstance(change.old, Listed) and change.new is None:
            kind, table, name = change.old.key.rsplit(" ", 2)  # a kind may be two words, as `ct helper`
            yield Step("delete", kind, table, name)


def _delete_set(item: Held) -> Iterator[Step]:
    """Emptied first: older kernels let a deleted verdict map hold on to its chains until the transaction ends."""
    is_map = item.value_type is not None if isinstance(item, NftSet) else isinstance(item, Listed) and item.text.startswith("a map")
    yield Step("flush", "elements", *path(item), is_map=is_map)
    yield Step("delete", "set", *path(item), is_map=is_map)


def _marker_steps(marker: Marker | None) -> Iterator[Step]:
    """The marker's table written anew, or removed; it holds rules that no packet meets, whose comments are the marker."""
    yield Step("add", "table", MARKER_TABLE)
    if marker is None:
        yield Step("delete", "table", MARKER_TABLE)
        return
    comments = [f"epoch {marker.epoch} generation {marker.generation}"]
    comments += [f"unit {tag} {digest}" for tag, digest in sorted(marker.units.items())]
    chain = NftChain(MARKER_TABLE, MARKER_CHAIN, tuple((Verdict("return"), Comment(text)) for text in comments))
    yield Step("add", "chain", MARKER_TABLE, MARKER_CHAIN, chain)
    yield Step("flush", "rules", MARKER_TABLE, MARKER_CHAIN)
    yield Step("add", "rules", MARKER_TABLE, MARKER_CHAIN, chain)


def _way(chain: Held) -> tuple[int, int, str]:
    """Sorts chains as a packet meets them: nft lists a table's chains in the order in which they were made."""
    if not isinstance(chain, _Chain) or chain.hook is None:
        return 0, 0, chain.key
    return 1 + _HOOKS.index(chain.hook) if chain.hook in _HOOKS else 0, chain.priority, chain.key


def header(item: NftChain | ListedChain) -> tuple[str | None, str | None, int, str]:
    """What cannot change in place: type, hook, priority and policy."""
    return item.type, item.hook, item.priority, "" if item.policy == "accept" else item.policy


def is_table(item: Held) -> bool:
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
            *kind, table, name = item.key.split(" ")
            return table if kind else name, name
