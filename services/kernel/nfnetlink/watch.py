"""Whether somebody else changed a table of ours since we looked last: what a stale generation alone does not say.

Owns a netlink socket in nftables' multicast group. What it is told of waits in the socket until somebody has it heard; of what was more
than its buffer holds, it does not know.
"""

from __future__ import annotations

from services.kernel.events import NFT_GROUP, process_name
from services.kernel.listening import datagrams, listening
from services.kernel.netlink import BE32, NETLINK_NETFILTER, attributes, messages_with_sender, text_of
from services.kernel.nfnetlink.wire import SUBSYSTEM, Message
from services.kernel.nft.steps import is_heeded

_SOL_NETLINK, _ADD_MEMBERSHIP, _DROP_MEMBERSHIP = 270, 1, 2
_BUFFER_BYTES = 8 << 20
_DATAGRAM_BYTES = 1 << 18
_GENERATION_ID, _GENERATION_PID, _GENERATION_NAME = 1, 2, 3
_NFGEN_BYTES = 4
_TABLE = 1  # the attribute of every kind of object that names its table


class Watch:
    """Hears of all transactions from when it is made. `own_port` is the socket by which our own are sent."""

    def __init__(self, own_port: int) -> None:
        self._own_port = own_port
        self._touched = ""
        self._found = ""
        self._heard: int | None = None
        self._quiet_since: int | None = None
        self._socket = listening(NETLINK_NETFILTER, (NFT_GROUP,), _BUFFER_BYTES)

    def culprit(self) -> str:
        """Who changed which own table since this was asked last; empty when nobody did, or when it cannot be told."""
        self.hear()
        found, self._found = self._found, ""
        return found

    def was_quiet(self, since: int, until: int) -> bool:
        """Whether it is certain that nobody else changed an own table between two generations: every transaction was heard of."""
        self.hear()
        return self._quiet_since is not None and self._heard is not None and self._quiet_since <= since and until <= self._heard

    def hear(self) -> None:
        """Take what has been told up to now, so that there is room for more."""
        for data in datagrams(self._socket, _DATAGRAM_BYTES):
            if data is None:
                self._touched = ""
                self._heard = None
                continue
            for kind, sender, body in messages_with_sender(data):
                if kind & ~0xFF == SUBSYSTEM and sender != self._own_port:
                    self._note(kind & 0xFF, attributes(body, _NFGEN_BYTES))
                if kind == SUBSYSTEM | Message.NEW_GENERATION:
                    self._count(BE32.unpack(attributes(body, _NFGEN_BYTES)[_GENERATION_ID])[0])

    def _note(self, kind: int, found: dict[int, bytes]) -> None:
        """Objects come first, and then who it was."""
        if kind != Message.NEW_GENERATION:
            self._touched = self._touched or _own_table(text_of(found.get(_TABLE, b"")))
        elif self._touched:
            self._found = self._found or f"{self._touched}, by {_who(found)}"
            self._touched = ""
            self._heard = None

    def _count(self, generation: int) -> None:
        """Anybody's transactions, ours too: where one is missing, nothing before is certain."""
        if self._heard is None or generation != self._heard + 1:
            self._quiet_since = generation
        self._heard = generation

    def pause(self) -> None:
        """Hear nothing for a while: a large transaction goes faster when the kernel need not tell of it."""
        self._socket.setsockopt(_SOL_NETLINK, _DROP_MEMBERSHIP, NFT_GROUP)

    def resume(self) -> None:
        self._socket.setsockopt(_SOL_NETLINK, _ADD_MEMBERSHIP, NFT_GROUP)

    def close(self) -> None:
        self._socket.close()


def _own_table(name: str) -> str:
    return f"table {name}" if is_heeded(name) else ""


def _who(generation: dict[int, bytes]) -> str:
    pid = BE32.unpack(generation[_GENERATION_PID])[0] if _GENERATION_PID in generation else 0
    name = text_of(generation.get(_GENERATION_NAME, b"")) or process_name(pid)
    return f"{name or 'somebody'} (process {pid})" if pid else "somebody"
