"""Wanted chains loaded and listed by libnftables, as text; and by which loader each engine asks for their form."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

from services.kernel.nft.engine import LibNftables
from services.kernel.nft.listing import table_objects
from services.kernel.nft.reference import Loading
from services.kernel.nft.skeleton import Skeleton
from services.kernel.nftread.loading import ByMessages
from services.kernel.transaction import ListedChain
from services.runtime.errors import Conflict, MeshmarkError, Permanent, Transient
from services.runtime.settings import NftEngineName


class ByText:
    """A loader that writes nft text and reads listings."""

    def __init__(self) -> None:
        self._engine = LibNftables()

    def load(self, skeleton: Skeleton, *, dormant: bool) -> list[ListedChain]:
        table = skeleton.table
        try:
            self._engine.run(skeleton.text(dormant=dormant))
        except Conflict as error:
            raise Permanent(str(error)) from error
        if not dormant:
            return _chains(self._engine.list_table(table) or [])
        try:
            # Chain by chain: nft 1.0.6 prints stray memory for a table's flag, which need not even be JSON.
            return _chains(item for chain in skeleton.chains for item in self._engine.list_json(f"list chain inet {table} {chain.name}"))
        except Conflict as error:
            # A socket that was just being closed elsewhere had our number, and the kernel dropped our table for its own.
            raise Transient(str(error)) from error
        finally:
            with contextlib.suppress(MeshmarkError):
                self._engine.run(f"delete table inet {table}")

    def close(self) -> None:
        self._engine.close()


def _chains(listed: Iterable[Any]) -> list[ListedChain]:
    return [item for item in table_objects(listed, {}).values() if isinstance(item, ListedChain)]


LOADING: dict[NftEngineName, Loading] = {"nfnetlink": Loading("nfnetlink", ByMessages), "libnftables": Loading("libnftables", ByText)}
