"""Chains with their rules, as the kernel dumps them. Owns nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from services.kernel.netlink import Attributes, attributes, text_of
from services.kernel.nftread.dumps import Chain, Dumps, number
from services.kernel.nftread.nameless import Nameless
from services.kernel.nftread.rules import forms_by_chain
from services.kernel.transaction import ListedChain

_HOOK, _POLICY, _TYPE = 4, 5, 7
_HOOK_NUMBER, _PRIORITY = 1, 2
_HOOKS = ("prerouting", "input", "forward", "output", "postrouting", "ingress", "egress")
_POLICIES = {0: "drop", 1: "accept"}


def read_chains(dumps: Dumps, table: str, chains: Sequence[Chain], nameless: Nameless) -> Iterator[ListedChain]:
    """A table's chains, those with rules first. Raises Disturbed."""
    heads = {chain.name: chain.found for chain in chains}
    pieces = dumps.rules(table, {chain.name: chain.uses for chain in chains})
    for name, forms in forms_by_chain(pieces, nameless.content if nameless else None):
        yield _chain(table, name, heads.pop(name, {}), forms)
    yield from (_chain(table, name, head, ()) for name, head in heads.items())


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
