"""The nfnetlink engine: a batch of changes as one message train, with errors by object and the generation as compare-and-set.

Owns the socket of ``exchange``, from the first commit on a ``watch`` and ``chains``, and, once it is needed, the libnftables engine,
which writes what cannot be expressed here, as whole transactions. Keeps the generation that was current when our tables were last read
or written, so a restart changes nothing.

Of a chain that changes only the rules that differ are written, so that the others keep what they counted: where it is certain what the
kernel holds at the generation that it is to have. Else the chain is written as a whole.

When somebody else committed since, the kernel refuses the batch. If no own table was touched, it is sent again; after three times without
the generation, since a busy stranger must not hold us up. If one was touched, or the kernel does not hold what the batch starts from, that
is a Conflict; but for a batch so large that nothing is heard while it is sent: what somebody does to own tables in that moment, the auditor
finds. All other errors are the kernel's, with the object that it refused.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence

from schemas.host_objects import NftElement
from services.kernel.netlink import BE32, NetlinkError, attributes
from services.kernel.nfnetlink import wire
from services.kernel.nfnetlink.batch import Batch
from services.kernel.nfnetlink.chains import Chains
from services.kernel.nfnetlink.edits import Edit
from services.kernel.nfnetlink.elements import Header
from services.kernel.nfnetlink.exchange import Exchange, NotSent, Outcome
from services.kernel.nfnetlink.rules import Encoders
from services.kernel.nfnetlink.values import KINDS_BY_NUMBER, Inexpressible, Kind
from services.kernel.nfnetlink.watch import Watch
from services.kernel.nfnetlink.wire import Message, SetFlag
from services.kernel.nft.engine import CONFLICT, TRANSIENT, UNKNOWN, LibNftables
from services.kernel.nft.steps import Path, editable, path, steps
from services.kernel.transaction import Change, Marker
from services.runtime.errors import Conflict, MeshmarkError, OutcomeUnknown, Permanent, Transient

_TRIES = 3
_LARGE = 256
"""Messages from which on the kernel's telling of a transaction costs more than to stop listening to it."""
_HEAR_EVERY = 100
"""Sends between which the watch's socket has room for what the kernel tells of ours."""
_INET = bytes((wire.FAMILY_INET, 0, 0, 0))


class Nfnetlink:
    """The engine over our own messages. One thread at a time."""

    def __init__(self) -> None:
        self._library: LibNftables | None = None
        self._exchange = Exchange()
        self._encoders = Encoders()
        self._chains = Chains(self._encoders)
        self._headers: dict[Path, Header] = {}
        self._watch: Watch | None = None
        self._generation: int | None = None
        self._closed = False
        self._sends = 0
        self.version = "over nfnetlink"

    def commit(self, batch: Sequence[Change], marker: Marker | None) -> None:
        if self._closed:
            msg = "the nftables engine is closed"
            raise Permanent(msg)
        try:
            made, outcome = self._sent(batch, marker)
        except Inexpressible:
            self._commit_by_library(batch, marker)
            return
        except NotSent as error:
            raise unsent(error) from error
        except NetlinkError as error:
            self._reopen()
            msg = f"nft: {error.strerror}; read back before trying again"
            raise OutcomeUnknown(msg) from error
        if outcome.refusals:
            raise refused(made, outcome)
        if outcome.overrun:
            msg = "nft: the kernel's answers were lost; read back before trying again"
            raise OutcomeUnknown(msg)
        if self._library is not None:
            self._library.forget(batch)

    def looking(self) -> None:
        """From here on, what others change in own tables is told at the next commit."""
        if self._watch is not None:
            self._watch.culprit()
            self._generation = self._asked_generation()

    def close(self) -> None:
        self._closed = True
        if self._library is not None:
            self._library.close()
        self._exchange.close()
        self._chains.close()
        if self._watch is not None:
            self._watch.close()

    def library(self) -> LibNftables:
        """The engine for what cannot be said here, loaded when there is something of the kind."""
        if self._library is None:
            self._library = LibNftables()
        return self._library

    def _sent(self, batch: Sequence[Change], marker: Marker | None) -> tuple[Batch, Outcome]:
        """What came of the batch in the end. Raises Conflict when an own table was changed by somebody else meanwhile."""
        watch, made = self._watching(), None
        for left in reversed(range(_TRIES + 1)):
            is_certain = bool(left) and self._is_certain(watch)
            if not is_certain:
                self._headers.clear()
            edits = self._edits(batch, is_certain=is_certain) if left else {}
            expected = self._generation if left else None
            if made is None or edits or made.edits:
                made = Batch(steps(batch, marker, by_rule=edits), self._encoders, self._header, edits)
            outcome = self._sent_once(made, expected, watch)
            if not _is_stale(outcome):
                own = self._note(expected, outcome, heard_all=len(made.messages) < _LARGE)
                self._note_chains(batch, made, outcome, own)
                return made, outcome
            self._generation = outcome.generation
            if culprit := watch.culprit():
                msg = f"nft: somebody else changed {culprit}; read again"
                raise Conflict(msg)
        msg = "nft: the kernel refuses a generation that it was not given"
        raise Transient(msg)

    def _sent_once(self, made: Batch, expected: int | None, watch: Watch) -> Outcome:
        self._sends += 1
        if not self._sends % _HEAR_EVERY:
            watch.hear()
        if len(made.messages) < _LARGE:
            return self._exchange.send(made.messages, expected, asks=False)
        watch.pause()
        try:
            return self._exchange.send(made.messages, expected)
        finally:
            watch.resume()

    def _watching(self) -> Watch:
        """The watch. Before the first commit nothing is known, and nothing is expected of the kernel."""
        if self._watch is None:
            try:
                self._watch = Watch(self._exchange.port)
            except OSError as error:
                msg = f"nft: cannot listen to what others change: {error.strerror}"
                raise Transient(msg) from error
        return self._watch

    def _is_certain(self, watch: Watch) -> bool:
        """Whether what is remembered of own tables is so at the generation that the kernel is to have."""
        known = self._chains.generation
        if known is None or self._generation is None:
            return False
        return known == self._generation or watch.was_quiet(known, self._generation)

    def _edits(self, batch: Sequence[Change], *, is_certain: bool) -> dict[Path, Edit]:
        """How chains change rule by rule, at the generation that the kernel is to have; none where that cannot be told for sure."""
        found: dict[Path, Edit] = {}
        changed = editable(batch)
        if not changed:
            return found
        if self._generation is None:
            self._generation = self._asked_generation()
        try:
            for change in changed:
                if (edit := self._chains.edit(change, is_certain=is_certain)) is not None:
                    found[path(change.subject)] = edit
        except NetlinkError:
            self._chains.close()
            return {}
        return found

    def _note_chains(self, batch: Sequence[Change], made: Batch, outcome: Outcome, own: int | None) -> None:
        """Keep what own tables hold now. Of what was refused, or is not known to be alone at its generation, nothing is kept."""
        changed = {path(change.subject) for change in batch if type(change.new or change.old) is not NftElement}
        for at in [at for at in self._headers if at in changed or (at[0], "") in changed]:
            del self._headers[at]
        edited = made.handles(outcome.handles) if own is not None and not outcome.refusals and not outcome.overrun else {}
        self._chains.note(own, edited, changed)

    def _note(self, expected: int | None, outcome: Outcome, *, heard_all: bool) -> int | None:
        """Keep the generation of our own transaction: what came behind it is seen at the next one, if the watch has heard of it.

        The generation at which the kernel holds just what it held at the expected one and what was written now; None where there is none.
        """
        if outcome.refusals or outcome.generation == expected:
            return expected
        own = outcome.generation if expected is None else expected + 1
        self._generation = own if heard_all or own == outcome.generation else None
        return own if expected is not None else None

    def _commit_by_library(self, batch: Sequence[Change], marker: Marker | None) -> None:
        """What came before it is not looked at: libnftables knows no generation."""
        try:
            self.library().commit(batch, marker)
        finally:
            self._generation = None
            self._chains.forget()
            if self._watch is not None:
                self._watch.culprit()

    def _asked_generation(self) -> int:
        try:
            return self._exchange.generation()
        except NetlinkError as error:
            raise self._unanswered(error, "the generation") from error

    def _header(self, table: str, name: str) -> Header:
        """What a set is like that the batch does not make, by what is remembered or by what the kernel says."""
        found = self._headers.get((table, name))
        if found is None:
            found = self._headers[table, name] = self._asked_header(table, name)
        return found

    def _asked_header(self, table: str, name: str) -> Header:
        try:
            answer = self._exchange.ask(Message.GET_SET, _INET + wire.text(wire.SET_TABLE, table) + wire.text(wire.SET_NAME, name))
        except NetlinkError as error:
            raise self._unanswered(error, f"the set {table} {name}") from error
        found = attributes(answer, len(_INET))
        flags = _number(found, wire.SET_FLAGS)
        key = _kind(_number(found, wire.SET_KEY_TYPE))
        if key.size != _number(found, wire.SET_KEY_LENGTH):
            raise Inexpressible(name, "a set of keys of another length")
        if not flags & SetFlag.MAP:
            return Header(key, interval=bool(flags & SetFlag.INTERVAL))
        data, width = _kind(_number(found, wire.SET_DATA_TYPE)), _number(found, wire.SET_DATA_LENGTH)
        if width not in (data.size, 2 * data.size):
            raise Inexpressible(name, "a map to values of another length")
        return Header(key, data, bool(flags & SetFlag.INTERVAL), width == 2 * data.size)

    def _unanswered(self, error: NetlinkError, what: str) -> MeshmarkError:
        """A question has changed nothing; of one that was not answered the answer may still come."""
        reason = f"nft: cannot look at {what}: {os.strerror(error.errno or 0)}"
        if error.errno != errno.ENOENT:
            self._reopen()
            return Transient(reason)
        return Conflict(f"{reason}; the kernel does not hold what the batch starts from")

    def _reopen(self) -> None:
        """Leave behind what may still be answered."""
        self._exchange.close()
        self._exchange = Exchange()
        self._chains.close()
        self._generation = None
        if self._watch is not None:
            self._watch.close()
            self._watch = None


def _number(found: Mapping[int, bytes], kind: int) -> int:
    return int(BE32.unpack(found[kind])[0]) if kind in found else 0


def _kind(number: int) -> Kind:
    try:
        return KINDS_BY_NUMBER[number]
    except KeyError:
        raise Inexpressible(number, "a type") from None


def _is_stale(outcome: Outcome) -> bool:
    return any(refusal.number == errno.ERESTART for refusal in outcome.refusals)


def refused(made: Batch, outcome: Outcome) -> MeshmarkError:
    """The first refusal: those behind it may be its consequences."""
    refusal = min(outcome.refusals)
    more = f" ({refusal.text})" if refusal.text else ""
    more += f", and {len(outcome.refusals) - 1} more" if len(outcome.refusals) > 1 else ""
    culprit = made.culprit(refusal.sequence, refusal.offset)
    error = mapped(refusal.number, f"nft: cannot {culprit.deed}: {os.strerror(refusal.number)}{more}")
    error.key = culprit.key
    return error


def mapped(number: int, reason: str) -> MeshmarkError:
    """The error tree's member for an errno of nf_tables."""
    if number in UNKNOWN:
        return OutcomeUnknown(f"{reason}; read back before trying again")
    if number in (errno.EPERM, errno.EACCES):
        return Permanent(f"{reason}; CAP_NET_ADMIN is needed in this network namespace")
    if number in CONFLICT:
        return Conflict(f"{reason}; the kernel does not hold what the batch starts from")
    if number in TRANSIENT:
        return Transient(reason)
    return Permanent(reason)


def unsent(error: NetlinkError) -> MeshmarkError:
    """Nothing was done."""
    if error.errno == errno.EMSGSIZE:
        return Permanent(f"nft: {error.strerror}; the batch is larger than this socket's buffer may be, see net.core.wmem_max")
    return Transient(f"nft: {error.strerror}")
