"""The fake's nftables: one transaction over keyed objects, or none of it.

Owns nothing: a function from what is held and a batch to what is held after it. It refuses what the kernel refuses (missing, doubled and
busy objects are a Conflict) in the order in which ``nft.steps`` puts a batch; what the kernel accepts silently is accepted here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from schemas.host_objects import NftChain, NftElement, NftSet, NftTable
from schemas.nft import Verdict
from schemas.values import Prefix
from services.kernel.nft.listing import canonical_element
from services.kernel.nft.statements import rule_text
from services.kernel.nft.steps import header
from services.kernel.transaction import Change, Held, Listed, ListedChain, is_recreated_set, named_sets
from services.runtime.errors import Conflict, MeshmarkError, Permanent

Objects = dict[str, Held]


def committed(held: Mapping[str, Held], batch: Sequence[Change]) -> Objects:
    """What is held after the batch; Conflict or Permanent, and nothing changed, when the kernel would refuse it."""
    foreign = sorted(change.key for change in batch if change.subject.layer != "nft")
    if foreign:
        msg = f"not nftables objects, write them one by one: {', '.join(foreign)}"
        raise Permanent(msg)
    result = dict(held)
    tables = [change for change in batch if isinstance(change.subject, NftTable)]
    gone = {change.key for change in tables if change.new is None}
    members = [change for change in batch if change not in tables and table_key(change.subject) not in gone]
    for change in tables:
        if change.new is not None:
            result[change.key] = change.new
    _prepare(result, members)
    _add_headers(result, members)
    _fill(result, members)
    _remove(result, members)
    for key in gone:
        _need(result, key)
        for name in [name for name, item in result.items() if item.layer == "nft" and table_key(item) == key]:
            del result[name]
    return result


def listed(item: Held) -> Held:
    """An object as a listing shows it."""
    if isinstance(item, NftChain):
        rules = tuple(rule_text(rule) for rule in item.rules)
        return ListedChain(item.table, item.name, rules, item.type, item.hook, item.priority, item.policy if item.hook else "")
    return canonical_element(item) if isinstance(item, NftElement) else item


def table_key(item: Held) -> str:
    match item:
        case NftTable():
            return item.key
        case NftSet() | NftElement() | NftChain() | ListedChain():
            return f"table {item.table}"
        case _:
            return f"table {item.key.split(' ')[1]}"


def _prepare(result: Objects, members: Sequence[Change]) -> None:
    """Take stale elements away, empty changed chains, delete what is to be made anew."""
    for change in members:
        stale = isinstance(change.old, NftElement) and change.old != change.new
        if stale and not _set_goes(change, members):
            _need(result, change.key)
            del result[change.key]
    for change in members:
        if isinstance(change.old, NftChain | ListedChain):
            _need(result, change.key)
            result[change.key] = _emptied(change.old)
    for change in members:
        remade = (
            isinstance(change.old, NftChain | ListedChain) and isinstance(change.new, NftChain) and header(change.old) != header(change.new)
        )
        if remade or is_recreated_set(change):
            with _blaming(change.key):
                _delete(result, change.key)


def _emptied(chain: NftChain | ListedChain) -> NftChain:
    kind, hook, priority, policy = header(chain)
    return NftChain(chain.table, chain.name, (), kind, hook, priority, policy or "accept")  # type: ignore[arg-type]


def _add_headers(result: Objects, members: Sequence[Change]) -> None:
    for change in members:
        if isinstance(change.new, NftChain | NftSet):
            with _blaming(change.key):
                _add_header(result, change.new)


def _add_header(result: Objects, new: NftChain | NftSet) -> None:
    if table_key(new) not in result:
        msg = f"{new.key}: {table_key(new)} is not there"
        raise Conflict(msg)
    present = result.get(new.key)
    other_set = isinstance(new, NftSet) and present not in (None, new)
    other_chain = isinstance(new, NftChain) and isinstance(present, NftChain | ListedChain) and header(present) != header(new)
    if other_set or other_chain:
        msg = f"{new.key} is there with another header"
        raise Conflict(msg) if other_set else Permanent(msg)  # the kernel says EEXIST for a set, EOPNOTSUPP for a chain
    result[new.key] = _emptied(new) if isinstance(new, NftChain) else new


def _fill(result: Objects, members: Sequence[Change]) -> None:
    """Add rules, then elements; what they refer to has to be there."""
    for change in members:
        if isinstance(change.new, NftChain):
            with _blaming(change.key):
                _check_references(result, change.new)
            result[change.key] = change.new
    for change in members:
        if isinstance(change.new, NftElement):
            with _blaming(change.key):
                _check_element(result, change.new)
            result[change.key] = change.new


def _check_references(result: Objects, chain: NftChain) -> None:
    for rule in chain.rules:
        needed = {f"set {chain.table} {name}" for name in named_sets(rule)}
        needed |= {f"chain {chain.table} {item.target}" for item in rule if isinstance(item, Verdict) and item.target}
        for key in sorted(needed):
            _need(result, key)


def _check_element(result: Objects, item: NftElement) -> None:
    key = f"set {item.table} {item.set}"
    _need(result, key)
    if item.value.startswith("jump "):
        _need(result, f"chain {item.table} {item.value.removeprefix('jump ')}")
    present = result.get(item.key)
    if isinstance(present, NftElement) and present.value != item.value:
        msg = f"{item.key} is there with value {present.value}"
        raise Conflict(msg)
    parent = result[key]
    if present is None and isinstance(parent, NftSet) and parent.interval and parent.key_type in ("ipv4_addr", "ipv6_addr"):
        for other in _elements(result, item.table, item.set):
            if _overlap(item.element, other.element):
                msg = f"{item.key} overlaps with {other.element}"
                raise Conflict(msg)


def _overlap(one: str, other: str) -> bool:
    if "-" in one or "-" in other:
        return False
    return Prefix.parse(one).overlaps(Prefix.parse(other))


def _remove(result: Objects, members: Sequence[Change]) -> None:
    removed = [change for change in members if change.new is None and not isinstance(change.old, NftElement)]
    for change in sorted(removed, key=lambda item: not isinstance(item.old, NftSet)):
        with _blaming(change.key):
            _delete(result, change.key)


def _delete(result: Objects, key: str) -> None:
    """Delete a set with its elements, a chain or anything else; Conflict when a rule or an element refers to it."""
    _need(result, key)
    item = result[key]
    for user, reference in _references(result):
        if reference == key:
            msg = f"{key} is in use by {user}"
            raise Conflict(msg)
    if isinstance(item, NftSet):
        for element in list(_elements(result, item.table, item.name)):
            del result[element.key]
    if isinstance(item, Listed) and key.startswith("set "):
        _, table, name = key.split(" ")
        for element in list(_elements(result, table, name)):
            del result[element.key]
    del result[key]


def _references(result: Objects) -> Iterator[tuple[str, str]]:
    for item in result.values():
        if isinstance(item, NftChain):
            for rule in item.rules:
                yield from ((item.key, f"set {item.table} {name}") for name in named_sets(rule))
                yield from ((item.key, f"chain {item.table} {step.target}") for step in rule if isinstance(step, Verdict) and step.target)
        elif isinstance(item, NftElement) and item.value.startswith("jump "):
            yield item.key, f"chain {item.table} {item.value.removeprefix('jump ')}"


def _elements(result: Objects, table: str, name: str) -> Iterator[NftElement]:
    return (item for item in result.values() if isinstance(item, NftElement) and (item.table, item.set) == (table, name))


def _set_goes(change: Change, members: Sequence[Change]) -> bool:
    item = change.subject
    key = f"set {item.table} {item.set}" if isinstance(item, NftElement) else ""
    return any(other.key == key and (other.new is None or is_recreated_set(other)) for other in members)


@contextmanager
def _blaming(key: str) -> Iterator[None]:
    """Within it, what is refused is said of the object with this key."""
    try:
        yield
    except MeshmarkError as error:
        error.key = key
        raise


def _need(result: Objects, key: str) -> None:
    if key not in result:
        error = Conflict(f"{key} is not there; read again")
        error.key = key
        raise error
