"""The kernel as its own normaliser: how it would list the wanted chains.

Owns nothing that outlives a call. The wanted tables' set headers and chains are loaded where they move no packet and listed the same way as
the live ones:

- in a network namespace that a thread makes for itself and that dies with the thread (never under /run/netns; needs CAP_SYS_ADMIN);
- else in a child process's user namespace, where the host allows those;
- else in a dormant own table of the host's namespace, deleted in the same breath. It has no hooks and sees no packet, is left out of
  every listing and event, and is owned by the socket that made it: the kernel removes it with the process, however that ends, and its
  name is a new one each time, so that an applier and an auditor in one namespace never meet (needs Linux 5.12 or newer).

What is not allowed once is not tried again. Elements, sets and tables are their own reference: plans use the kernel's form for them.
Chains are cached by value of what they were made from, so a change of elements costs nothing. Fails with Permanent when the kernel refuses
the wanted chains.
"""

from __future__ import annotations

import contextlib
import json
import operator
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from schemas.host_objects import NftChain, NftElement, NftSet, NftTable, PlanObject
from services.kernel.namespace import enter_new_network
from services.kernel.nft.engine import LibNftables
from services.kernel.nft.listing import canonical_element, table_objects
from services.kernel.nft.statements import rule_text
from services.kernel.nft.steps import SCRATCH_PREFIX
from services.kernel.nft.text import chain_line, set_line
from services.kernel.transaction import Held, ListedChain
from services.runtime.errors import Conflict, MeshmarkError, Permanent, Transient

_CACHED_TABLES = 64
_TIMEOUT_S = 30.0
_LINES_PER_S = 500
"""What a busy machine manages at least: loading, listing and reading the listing take a tenth of a millisecond a rule on an idle one."""
_Member = TypeVar("_Member", NftSet, NftChain)
Skeleton = tuple[tuple[NftSet, ...], tuple[NftChain, ...]]


class Reference:
    """Wanted nft objects in the kernel's form. `dormant` runs in the host's namespace, only when nothing better is allowed."""

    def __init__(self, dormant: Callable[[], LibNftables]) -> None:
        self._dormant = dormant
        self._cache: dict[Skeleton, dict[str, Held]] = {}
        self._last: dict[str, tuple[Skeleton, dict[str, Held]]] = {}
        """By table what was asked for last: where it is the very same objects, their values need not be looked at."""
        self._allowed = [in_thread, in_user_namespace]
        self.method = ""

    def of(self, wanted: Mapping[str, PlanObject]) -> dict[str, Held]:
        """The nft objects among `wanted`, same keys, as a listing would show them."""
        found: dict[str, Held] = {}
        tables: dict[str, tuple[list[NftSet], list[NftChain]]] = {}
        for key, item in wanted.items():
            if isinstance(item, NftElement):  # first, since there are so many
                found[key] = canonical_element(item)
            elif isinstance(item, NftChain):
                tables.setdefault(item.table, ([], []))[1].append(item)
            elif isinstance(item, NftSet | NftTable):
                found[key] = item
                if isinstance(item, NftSet):
                    tables.setdefault(item.table, ([], []))[0].append(item)
        for skeleton in (_skeleton(*members) for members in tables.values() if members[1]):
            found |= self._chains(skeleton)
        return found

    def _chains(self, skeleton: Skeleton) -> dict[str, Held]:
        table = skeleton[1][0].table
        last = self._last.get(table)
        if last is not None and _is_very(last[0], skeleton):
            return last[1]
        cached = self._cache.pop(skeleton, None)
        if cached is None:
            listed = self._listing(table, skeleton)
            cached = {key: item for key, item in table_objects(listed, {}).items() if isinstance(item, ListedChain)}
        self._cache[skeleton] = cached
        while len(self._cache) > _CACHED_TABLES:
            del self._cache[next(iter(self._cache))]
        self._last.pop(table, None)
        self._last[table] = skeleton, cached
        while len(self._last) > _CACHED_TABLES:
            del self._last[next(iter(self._last))]
        return cached

    def _listing(self, table: str, skeleton: Skeleton) -> list[Any]:
        text = skeleton_text(table, skeleton)
        while self._allowed:
            self.method = self._allowed[0].__name__
            try:
                return self._allowed[0](text, table)
            except PermissionError:
                del self._allowed[0]
        self.method = in_dormant_table.__name__
        return in_dormant_table(self._dormant(), table, skeleton)


def _skeleton(sets: list[NftSet], chains: list[NftChain]) -> Skeleton:
    return tuple(sorted(sets, key=lambda item: item.name)), tuple(sorted(chains, key=lambda item: item.name))


def _is_very(one: Skeleton, other: Skeleton) -> bool:
    """Whether two skeletons are of the very same objects."""
    return all(len(mine) == len(theirs) and all(map(operator.is_, mine, theirs)) for mine, theirs in zip(one, other, strict=True))


def skeleton_text(table: str, skeleton: Skeleton, *, flags: str = "", name: str = "") -> str:
    """Set headers and chains of one table as nft text, without elements; under another name if one is given."""
    sets, chains = skeleton
    target = name or table
    lines = [f"add table inet {target} {flags}".rstrip()]
    lines += [f"add {set_line(_moved(item, target))}" for item in sets]
    lines += [f"add {chain_line(_moved(item, target))}" for item in chains]
    lines += [f"add rule inet {target} {item.name} {rule_text(rule)}" for item in chains for rule in item.rules]
    return "\n".join(lines) + "\n"


def _moved(item: _Member, table: str) -> _Member:
    return msgspec.structs.replace(item, table=table)


def load_and_list(engine: LibNftables, text: str, table: str) -> list[Any]:
    """Load text and list the table; Permanent when the kernel refuses it, whatever the reason: it starts from nothing."""
    try:
        engine.run(text)
        return engine.list_table(table) or []
    except Conflict as error:
        raise Permanent(str(error)) from error


def limit_s(text: str) -> float:
    """How long this text may take, in seconds."""
    return _TIMEOUT_S + text.count("\n") / _LINES_PER_S


def in_thread(text: str, table: str) -> list[Any]:
    """Load and list in a network namespace of a thread's own; PermissionError when it cannot make one."""
    answer: list[list[Any]] = []
    failure: list[BaseException] = []

    def work() -> None:
        try:
            enter_new_network()
        except OSError as error:  # EPERM, or ENOSPC where an administrator allows no more
            failure.append(PermissionError(str(error)))
            return
        try:
            engine = LibNftables()
            answer.append(load_and_list(engine, text, table))
            engine.close()
        except (OSError, MeshmarkError) as error:
            failure.append(error)

    thread = threading.Thread(target=work, name="nft-reference", daemon=True)
    thread.start()
    thread.join(limit_s(text))
    if failure:
        raise failure[0]
    if not answer:
        msg = f"the reference for table {table} took longer than {limit_s(text):g} s"
        raise Transient(msg)
    return answer[0]


def in_user_namespace(text: str, table: str) -> list[Any]:
    """Load and list in a child process in a user namespace of its own; PermissionError when the host does not allow those."""
    command = [sys.executable, "-m", "services.kernel.nft.scratch", table]
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=limit_s(text), check=False)
    except subprocess.TimeoutExpired as error:
        msg = f"the reference for table {table} took longer than {limit_s(text):g} s"
        raise Transient(msg) from error
    if done.returncode == os.EX_NOPERM:
        raise PermissionError(done.stderr.strip())
    if done.returncode:
        raise Permanent(done.stderr.strip() or f"the reference for table {table} failed")
    return list(json.loads(done.stdout))


def in_dormant_table(engine: LibNftables, table: str, skeleton: Skeleton) -> list[Any]:
    """Load and list under a scratch name in the engine's namespace, and close the engine, with which the kernel drops what is left."""
    scratch = f"{SCRATCH_PREFIX}{secrets.token_hex(8)}"
    text = skeleton_text(table, skeleton, flags="{ flags dormant; flags owner; }", name=scratch)
    try:
        return [renamed(item, table) for item in load_and_list_chains(engine, text, scratch, skeleton)]
    finally:
        with contextlib.suppress(MeshmarkError):
            engine.run(f"delete table inet {scratch}")
        engine.close()


def load_and_list_chains(engine: LibNftables, text: str, table: str, skeleton: Skeleton) -> list[Any]:
    """As ``load_and_list``, chain by chain: nft 1.0.6 prints stray memory for a table's flag, which need not even be JSON."""
    try:
        engine.run(text)
    except Conflict as error:
        raise Permanent(str(error)) from error
    try:
        return [item for chain in skeleton[1] for item in engine.list_json(f"list chain inet {table} {chain.name}")]
    except Conflict as error:  # a socket that is just being closed elsewhere had our number, and the kernel dropped our table for its own
        raise Transient(str(error)) from error


def renamed(item: Any, table: str) -> Any:  # noqa: ANN401 - plain JSON data has no narrower type
    """A listed object as if its table had this name."""
    return {kind: {**value, "table": table} if "table" in value else value for kind, value in item.items()}
