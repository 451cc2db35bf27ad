"""The kernel as its own normaliser: how it would hold the wanted chains.

Owns nothing that outlives a call. The wanted tables' set headers and chains are loaded where they move no packet and read the same way as
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

import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import msgspec

from schemas import codec
from schemas.host_objects import NftChain, NftElement, NftSet, NftTable, PlanObject
from services.kernel.namespace import enter_new_network
from services.kernel.nft.listing import canonical_element
from services.kernel.nft.skeleton import Skeleton
from services.kernel.nft.steps import SCRATCH_PREFIX
from services.kernel.transaction import Held, ListedChain
from services.runtime.errors import MeshmarkError, Permanent, Transient
from services.runtime.settings import NftEngineName

_CACHED_TABLES = 64
_TIMEOUT_S = 30.0
_RULES_PER_S = 500
"""What a busy machine manages at least: loading and listing take a tenth of a millisecond a rule on an idle one, by the slower engine."""


class Loader(Protocol):
    """Loads and reads chains, as one of the engines does. A new one in each namespace, closed after use.

    `dormant` is for a namespace that is in use: the table is to move no packet there, and to be gone with the loader.
    """

    def load(self, skeleton: Skeleton, *, dormant: bool) -> list[ListedChain]: ...

    def close(self) -> None: ...


class Loading(NamedTuple):
    """How a loader is made, and by which engine's name a child process makes one."""

    engine: NftEngineName
    loader: Callable[[], Loader]


class Reference:
    """Wanted nft objects in the kernel's form."""

    def __init__(self, loading: Loading) -> None:
        self._loading = loading
        self._cache: dict[Skeleton, dict[str, ListedChain]] = {}
        self._last: dict[str, tuple[Skeleton, dict[str, ListedChain]]] = {}
        """By table what was asked for last: where it is the very same objects, their values need not be looked at."""
        self._allowed = [in_thread, in_user_namespace]
        self.method = ""

    def of(self, wanted: Mapping[str, PlanObject]) -> dict[str, Held]:
        """The nft objects among `wanted`, same keys, as a listing would show them."""
        found: dict[str, Held] = {}
        tables: dict[str, tuple[list[NftSet], list[NftChain]]] = {}
        for key, item in wanted.items():
            if isinstance(item, NftElement):  # first, since there are so many
                found[key] = canonical_element(item) if "/" in item.element or "/" in item.value else item
            elif isinstance(item, NftChain):
                tables.setdefault(item.table, ([], []))[1].append(item)
            elif isinstance(item, NftSet | NftTable):
                found[key] = item
                if isinstance(item, NftSet):
                    tables.setdefault(item.table, ([], []))[0].append(item)
        for skeleton in (_skeleton(*members) for members in tables.values() if members[1]):
            found |= self._chains(skeleton)
        return found

    def known(self, chain: ListedChain) -> ListedChain:
        """The equal chain that was asked for last, so that none is in memory twice; else the chain itself."""
        _, chains = self._last.get(chain.table, (None, {}))
        last = chains.get(chain.key)
        return last if last is not None and last == chain else chain

    def _chains(self, skeleton: Skeleton) -> dict[str, ListedChain]:
        table = skeleton.table
        last = self._last.get(table)
        if last is not None and last[0].is_very(skeleton):
            return last[1]
        cached = self._cache.pop(skeleton, None)
        if cached is None:
            cached = {item.key: item for item in self._loaded(skeleton)}
        self._cache[skeleton] = cached
        while len(self._cache) > _CACHED_TABLES:
            del self._cache[next(iter(self._cache))]
        self._last.pop(table, None)
        self._last[table] = skeleton, cached
        while len(self._last) > _CACHED_TABLES:
            del self._last[next(iter(self._last))]
        return cached

    def _loaded(self, skeleton: Skeleton) -> list[ListedChain]:
        while self._allowed:
            self.method = self._allowed[0].__name__
            try:
                return self._allowed[0](self._loading, skeleton)
            except PermissionError:
                del self._allowed[0]
        self.method = in_dormant_table.__name__
        return in_dormant_table(self._loading, skeleton)


def _skeleton(sets: list[NftSet], chains: list[NftChain]) -> Skeleton:
    return Skeleton(tuple(sorted(sets, key=lambda item: item.name)), tuple(sorted(chains, key=lambda item: item.name)))


def limit_s(skeleton: Skeleton) -> float:
    """How long it may take to load this, in seconds."""
    return _TIMEOUT_S + sum(len(chain.rules) for chain in skeleton.chains) / _RULES_PER_S


def loaded(loading: Loading, skeleton: Skeleton, *, dormant: bool) -> list[ListedChain]:
    """Load and read in the calling thread's namespace."""
    loader = loading.loader()
    try:
        return loader.load(skeleton, dormant=dormant)
    finally:
        loader.close()


def in_thread(loading: Loading, skeleton: Skeleton) -> list[ListedChain]:
    """Load and read in a network namespace of a thread's own; PermissionError when it cannot make one."""
    answer: list[list[ListedChain]] = []
    failure: list[BaseException] = []

    def work() -> None:
        try:
            enter_new_network()
        except OSError as error:  # EPERM, or ENOSPC where an administrator allows no more
            failure.append(PermissionError(str(error)))
            return
        try:
            answer.append(loaded(loading, skeleton, dormant=False))
        except (OSError, MeshmarkError) as error:
            failure.append(error)

    thread = threading.Thread(target=work, name="nft-reference", daemon=True)
    thread.start()
    thread.join(limit_s(skeleton))
    if failure:
        raise failure[0]
    if not answer:
        msg = f"the reference for table {skeleton.table} took longer than {limit_s(skeleton):g} s"
        raise Transient(msg)
    return answer[0]


def in_user_namespace(loading: Loading, skeleton: Skeleton) -> list[ListedChain]:
    """Load and read in a child process in a user namespace of its own; PermissionError when the host does not allow those."""
    command = [sys.executable, "-m", "services.kernel.nft.scratch", loading.engine]
    table, limit = skeleton.table, limit_s(skeleton)
    try:
        done = subprocess.run(command, input=codec.encode(skeleton), capture_output=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired as error:
        msg = f"the reference for table {table} took longer than {limit:g} s"
        raise Transient(msg) from error
    reason = done.stderr.decode(errors="replace").strip()
    if done.returncode == os.EX_NOPERM:
        raise PermissionError(reason)
    if done.returncode:
        raise Permanent(reason or f"the reference for table {table} failed")
    return [ListedChain(table, name, tuple(rules), *more) for table, name, rules, *more in msgspec.msgpack.decode(done.stdout)]


def in_dormant_table(loading: Loading, skeleton: Skeleton) -> list[ListedChain]:
    """Load and read under a scratch name in this namespace, and close the loader, with which the kernel drops what is left."""
    scratch = skeleton.moved(f"{SCRATCH_PREFIX}{secrets.token_hex(8)}")
    return [msgspec.structs.replace(item, table=skeleton.table) for item in loaded(loading, scratch, dormant=True)]
