"""Wanted chains loaded by messages of our own, and read from the kernel's.

Owns two sockets in the network namespace of the thread that made it; what is loaded into a dormant table is gone with the first. Chains
that our messages have no words for are loaded by libnftables.
"""

from __future__ import annotations

from services.kernel.netlink import NetlinkError
from services.kernel.nfnetlink import wire
from services.kernel.nfnetlink.batch import Batch
from services.kernel.nfnetlink.elements import Header
from services.kernel.nfnetlink.engine import refused, unsent
from services.kernel.nfnetlink.exchange import FIRST, Exchange, NotSent
from services.kernel.nfnetlink.rules import Encoders
from services.kernel.nfnetlink.values import Inexpressible
from services.kernel.nfnetlink.wire import Message
from services.kernel.nft.engine import LibNftables
from services.kernel.nft.skeleton import Skeleton
from services.kernel.nftread import sets
from services.kernel.nftread.chains import read_chains
from services.kernel.nftread.dumps import OWNED, Dumps, Table
from services.kernel.nftread.nameless import Nameless
from services.kernel.transaction import ListedChain
from services.runtime.errors import Conflict, Permanent, Transient

_DORMANT = 1


class ByMessages:
    """A loader of the nfnetlink engine."""

    def __init__(self) -> None:
        self._exchange = Exchange()
        self._dumps = Dumps()
        self._library: LibNftables | None = None

    def load(self, skeleton: Skeleton, *, dormant: bool) -> list[ListedChain]:
        try:
            self._write(skeleton, dormant=dormant)
        except Conflict as error:  # it starts from nothing
            raise Permanent(str(error)) from error
        with self._dumps.patiently():
            found = self._read(skeleton.table)
        if len(found) != len(skeleton.chains):
            # A socket that was just being closed elsewhere had our number, and the kernel dropped our table for its own.
            msg = f"the scratch table for {skeleton.table} is gone"
            raise Transient(msg)
        return found

    def close(self) -> None:
        if self._library is not None:
            self._library.close()
        self._exchange.close()
        self._dumps.close()

    def _write(self, skeleton: Skeleton, *, dormant: bool) -> None:
        try:
            made = Batch(skeleton.steps(), Encoders(), _no_header)
        except Inexpressible:
            self._library = LibNftables()
            self._library.run(skeleton.text(dormant=dormant))
            return
        if dormant:
            name, flags = wire.text(wire.TABLE_NAME, skeleton.table), wire.be32(wire.TABLE_FLAGS, _DORMANT | OWNED)
            made.messages[0] = wire.request(Message.NEW_TABLE, wire.CREATE, FIRST, name, flags)
        try:
            outcome = self._exchange.send(made.messages, None)
        except NotSent as error:
            raise unsent(error) from error
        except NetlinkError as error:
            msg = f"nft: {error.strerror}"
            raise Transient(msg) from error
        if outcome.refusals:
            raise refused(made, outcome)

    def _read(self, name: str) -> list[ListedChain]:
        table = Table(name, 0, b"")
        nameless = Nameless(self._dumps, table, {}, {})
        for found in self._dumps.sets(name):
            head = sets.head_of(found)
            if head.is_anonymous:
                nameless.add(head, found)
        return [read.chain for read in read_chains(self._dumps, table, self._dumps.chains().get(name, []), nameless, {})]


def _no_header(table: str, name: str) -> Header:
    """No step is about elements, for which alone a set's header is asked for."""
    raise Inexpressible((table, name), "a set that is there")
