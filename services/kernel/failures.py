"""Errors of netlink and of files, as members of the error tree. What the kernel said is kept in the text.

Owns nothing. `Waiting` is for what another process or step will bring: a link, an address, a route to a next hop. An errno that is
not known here is Permanent: the same request will get the same answer.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterable, Iterator

from services.runtime.errors import Conflict, MeshmarkError, OutcomeUnknown, Permanent, Transient, Waiting

Failures = dict[int, MeshmarkError]
"""Of many changes those that could not be made: why, by their place among them."""

_WAITING = (errno.ENODEV, errno.ENXIO, errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL)
_TRANSIENT = (errno.EINTR, errno.EAGAIN, errno.EBUSY, errno.ENOMEM, errno.ERESTART, errno.EMFILE, errno.ENFILE, errno.ECONNREFUSED)
_UNKNOWN = (errno.ENOBUFS, errno.ETIMEDOUT, errno.ECONNRESET, errno.EPIPE)
_DENIED = (errno.EPERM, errno.EACCES)


def mapped(error: OSError, what: str, waiting_for: str = "") -> MeshmarkError:
    """The error tree's member for an OSError of the kernel. `what` says what failed on what, `waiting_for` what may be missing."""
    reason = f"{what}: {error.strerror or error}"
    number = error.errno
    if number in _WAITING and waiting_for:
        return Waiting(reason, waiting_for)
    if number in _UNKNOWN:
        return OutcomeUnknown(f"{reason}; read back before trying again")
    if number in _DENIED:
        return Permanent(f"{reason}; CAP_NET_ADMIN is needed in this network namespace")
    if number in _TRANSIENT:
        return Transient(reason)
    if number in (errno.EEXIST, errno.EADDRINUSE):
        return Conflict(f"{reason}; it belongs to somebody else")
    return Permanent(reason)


@contextlib.contextmanager
def blamed(failures: Failures, places: Iterable[int]) -> Iterator[None]:
    """What fails inside is the failure of the changes at these places."""
    try:
        yield
    except MeshmarkError as error:
        failures.update(dict.fromkeys(places, error))


def missing_kind(name: str, kind: str) -> str:
    """What is to be done where the kernel does not know a kind of link."""
    return f"link {name}: this host's kernel has no {kind}; load the module {kind} or boot a kernel that has it, or use another overlay"


def unreadable(error: OSError, what: str) -> Transient:
    """A layer that could not be read: try again, and never take it for empty."""
    return Transient(f"cannot read {what}: {error.strerror or error}")
