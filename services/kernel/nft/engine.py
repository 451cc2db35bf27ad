"""The libnftables engine: text in, JSON listings out, over one kept context.

Owns the context (a netlink socket in the network namespace of the thread that made it). Keeps nothing else, so a restart changes
nothing: own tables are found by their names. Fails as libnftables does, with English text and nothing else: the text holds the kernel's
``strerror``, which is mapped into the error tree here and nowhere else. In a batch libnftables blames the first lines of its buffer, so an
error does not name the object.

``NftEngine`` is what a second engine (our own nfnetlink encoder) has to give; each is the other's oracle.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from schemas.host_objects import NftElement, PlanObject
from services.kernel.netlink import NETLINK_NETFILTER, NetlinkError, NetlinkSocket, attributes, text_of
from services.kernel.nft.listing import marker_of, table_objects
from services.kernel.nft.steps import MARKER_TABLE, Path, path
from services.kernel.nft.text import Context, batch_text, needs_refill
from services.kernel.nftread.dumps import is_own
from services.kernel.transaction import Change, Held, Listed, Marker
from services.runtime.errors import Conflict, MeshmarkError, OutcomeUnknown, Permanent, Transient

_GET_TABLE = 10 << 8 | 1  # NFNL_SUBSYS_NFTABLES, NFT_MSG_GETTABLE
_INET = bytes((1, 0, 0, 0))  # nfgenmsg: NFPROTO_INET, version, resource
_TABLE_NAME, _TABLE_FLAGS = 1, 2  # NFTA_TABLE_NAME, NFTA_TABLE_FLAGS

CONFLICT = (errno.ENOENT, errno.EEXIST, errno.EBUSY, errno.ENOTEMPTY)
UNKNOWN = (errno.ENOBUFS, errno.ETIMEDOUT, errno.EAGAIN)
TRANSIENT = (errno.EINTR, errno.ENOMEM, errno.ERESTART, errno.EMFILE, errno.ENFILE)


class NftEngine(Protocol):
    """Writes own tables. `commit` is one kernel transaction or nothing; `looking` says that what there is is about to be read."""

    version: str

    def commit(self, batch: Sequence[Change], marker: Marker | None) -> None: ...

    def looking(self) -> None: ...

    def close(self) -> None: ...


class LibNftables:
    """The engine over libnftables. One thread at a time."""

    def __init__(self) -> None:
        import nftables  # noqa: PLC0415 - a process that has no need of it is not to load it

        self._context: Any = nftables.Nftables()
        self._ranged: dict[tuple[str, str], bool] = {}
        self._context.set_json_output(True)
        self._context.set_handle_output(False)
        listed = self.list_json("list limits inet")
        self.version = next((str(item["metainfo"]["version"]) for item in listed if "metainfo" in item), "")

    def commit(self, batch: Sequence[Change], marker: Marker | None) -> None:
        self.run(batch_text(batch, marker, Context(self._is_ranged, self._refilled(batch))))
        self.forget(batch)

    def forget(self, batch: Sequence[Change]) -> None:
        """Know nothing any more of sets and tables that were written."""
        if not self._ranged:
            return
        gone = {item.subject.key for item in batch if not isinstance(item.subject, NftElement)}
        self._ranged = {path: value for path, value in self._ranged.items() if not gone & {f"set {' '.join(path)}", f"table {path[0]}"}}

    def looking(self) -> None:
        """Who reads matters to an engine that knows what others change."""

    def tables(self) -> list[str]:
        """Own tables without the marker's and scratch ones."""
        return sorted(name for name, flags in self._flags().items() if is_own(name, flags))

    def _flags(self) -> dict[str, int]:
        """The flags of every table by name. Asked of the kernel: nft 1.0.6 prints stray memory where a table has flags, anybody's."""
        try:
            with contextlib.closing(NetlinkSocket(NETLINK_NETFILTER)) as asked:
                bodies = asked.dump(_GET_TABLE, _INET)
        except NetlinkError as error:
            msg = f"nft: cannot list tables: {error}"
            raise Transient(msg) from error
        found = [attributes(body, len(_INET)) for body in bodies if body]
        return {text_of(table[_TABLE_NAME]): int.from_bytes(table.get(_TABLE_FLAGS, b""), "big") for table in found}

    def read(self, table: str, wanted: Mapping[str, PlanObject]) -> dict[str, Held]:
        """Own objects of one table; none when it went away meanwhile. A table with flags is not looked into: no plan has one."""
        if self._flags().get(table):
            return {f"table {table}": Listed("nft", f"table {table}", "a table with flags (dormant or owned)")}
        listed = self.list_table(table)
        return table_objects(listed, wanted) if listed is not None else {}

    def read_all(self, wanted: Mapping[str, PlanObject]) -> dict[str, Held]:
        """Own objects of all tables."""
        return {key: item for table in self.tables() for key, item in self.read(table, wanted).items()}

    def marker(self) -> Marker | None:
        listed = self.list_table(MARKER_TABLE)
        return marker_of(listed) if listed is not None else None

    def list_table(self, table: str) -> list[Any] | None:
        """The listing of one table, None when there is none."""
        try:
            return self.list_json(f"list table inet {table}")
        except Conflict:
            return None

    def list_json(self, command: str) -> list[Any]:
        output = self.run(command)
        try:
            return list(json.loads(output)["nftables"]) if output else []
        except ValueError as error:
            msg = f"nft: {command} printed what is no JSON: {error}"
            raise Transient(msg) from error

    def run(self, text: str) -> str:
        """Run nft text as one transaction and return its output."""
        if self._context is None:
            msg = "the nftables engine is closed"
            raise Permanent(msg)
        code, output, error = self._context.cmd(text)
        if code:
            raise mapped(str(error), text)
        return str(output)

    def _refilled(self, batch: Sequence[Change]) -> dict[Path, tuple[NftElement, ...]]:
        """What the sets hold that the batch has to fill again; Conflict when an element is not there that is to go."""
        found: dict[Path, tuple[NftElement, ...]] = {}
        for table, name in needs_refill(batch):
            held = self.read(table, {})
            elements = tuple(item for item in held.values() if isinstance(item, NftElement) and item.set == name)
            values = {item.key: item for item in elements}
            members = [item for item in batch if isinstance(item.subject, NftElement) and path(item.subject) == (table, name)]
            wrong = [item for item in members if item.old != item.new and not _fits(item, values.get(item.key))]
            if wrong:
                msg = f"cannot {wrong[0].verb} {wrong[0].key}: the kernel holds {values.get(wrong[0].key)}; read again"
                raise Conflict(msg)
            found[table, name] = elements
        return found

    def _is_ranged(self, table: str, name: str) -> bool:
        """Whether a map's values are prefixes. Only the text listing tells; it is asked once for each map."""
        if (table, name) not in self._ranged:
            self._context.set_json_output(False)
            self._context.set_terse_output(True)
            try:
                self._ranged[table, name] = " : interval " in self.run(f"list map inet {table} {name}")
            finally:
                self._context.set_terse_output(False)
                self._context.set_json_output(True)
        return self._ranged[table, name]

    def close(self) -> None:
        self._context = None


def _fits(change: Change, held: NftElement | None) -> bool:
    """What the kernel itself would say of an element that is deleted or added: the first must be there, the second must not differ."""
    return held is not None if change.old is not None else held in (None, change.new)


def mapped(error: str, text: str) -> MeshmarkError:
    """The error tree's member for what libnftables said. Its own complaints about the text itself are Permanent."""
    first = next((line for line in error.splitlines() if "Error:" in line), error.strip() or "no reason given")
    reason = f"nft: {first.strip()} (in {len(text.splitlines())} lines)"
    if "syntax error, unexpected" in error:
        return Permanent(f"{reason}; a set or chain may not have the name of a word of nft, as dnat, mark or fwd")
    if _says(error, UNKNOWN):
        return OutcomeUnknown(f"{reason}; read back before trying again")
    if _says(error, (errno.EPERM, errno.EACCES)):
        return Permanent(f"{reason}; CAP_NET_ADMIN is needed in this network namespace")
    if _says(error, CONFLICT) or "existing" in error:
        return Conflict(f"{reason}; the kernel does not hold what the batch starts from")
    if _says(error, TRANSIENT):
        return Transient(reason)
    return Permanent(reason)


def _says(error: str, numbers: Sequence[int]) -> bool:
    return any(os.strerror(number) in error for number in numbers)
