"""Chains with their rules, as the kernel dumps them. Owns nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import NamedTuple

from services.kernel.netlink import Attributes, attributes, text_of
from services.kernel.nftread.dumps import Chain, Dumps, Table, number
from services.kernel.nftread.nameless import Nameless
from services.kernel.nftread.rules import by_chain, forms
from services.kernel.transaction import ListedChain

_HOOK, _POLICY, _TYPE = 4, 5, 7
_CHANGING = (6, 8)
"""What changes without the chain: its number of users, and what it has counted."""
_DIGEST_BYTES = 16
_HOOK_NUMBER, _PRIORITY = 1, 2
_HOOKS = ("prerouting", "input", "forward", "output", "postrouting", "ingress", "egress")
_POLICIES = {0: "drop", 1: "accept"}


class ReadChain(NamedTuple):
    """A chain, and a digest of all that it was made from."""

    digest: bytes
    chain: ListedChain


Path = tuple[str, str]


def read_chains(
    dumps: Dumps, table: Table, chains: Sequence[Chain], nameless: Nameless, before: Mapping[Path, ReadChain]
) -> Iterator[ReadChain]:
    """A table's chains, those with rules first. One of `before` with the same digest is the same. Raises Disturbed.

    Rules with the same bytes name the same sets: of those without names each rule has its own, and a rule keeps its handle for its life.
    """
    heads = {chain.name: chain.found for chain in chains}
    pieces = dumps.rules(table.name, {chain.name: chain.uses for chain in chains})
    for name, rules in by_chain(pieces):
        head = heads.pop(name, {})
        digest, last = _digest(table, head, rules), before.get((table.name, name))
        if last is not None and last.digest == digest:
            yield last
        else:
            yield ReadChain(digest, _chain(table.name, name, head, forms(rules, nameless.content if nameless else None)))
    yield from (ReadChain(b"", _chain(table.name, name, head, ())) for name, head in heads.items())


def _digest(table: Table, head: Attributes, rules: Iterable[bytes]) -> bytes:
    told = [(kind, value) for kind, value in head.items() if kind not in _CHANGING]
    hashed = blake2b(table.handle + repr(told).encode(), digest_size=_DIGEST_BYTES)
    hashed.update(b"".join(rules))
    return hashed.digest()


def _chain(table: str, name: str, found: Attributes, forms: tuple[bytes, ...]) -> ListedChain:
    if _HOOK not in found:
        return ListedChain(table, name, forms)
    hook = attributes(found[_HOOK])
    place, policy = number(hook, _HOOK_NUMBER), number(found, _POLICY)
    return ListedChain(
        table,
        name,
        forms,
        text_of(found.get(_TYPE, b"")),
        _HOOKS[place] if place < len(_HOOKS) else f"hook {place}",
        int.from_bytes(hook.get(_PRIORITY, b""), signed=True),
        _POLICIES.get(policy, f"policy {policy}"),
    )
