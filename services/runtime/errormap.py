"""Every error of nats-py and of the JetStream API, mapped into the error tree.

`sent` says that the request had left: then a missing answer leaves the outcome open.
Codes: nats-server ``server/errors.json``.
"""

from __future__ import annotations

import nats.errors
import nats.js.errors

from services.runtime.errors import Conflict, MeshmarkError, OutcomeUnknown, Permanent, Transient, Waiting

_CONFLICTS = frozenset((10071, 10164))  # wrong last sequence; the same, when another write is in flight
_STREAM_MISSING = 10059
_CONSUMER_MISSING = 10014
_BATCH_RETRIED = frozenset((10176, 10210, 10211))  # batch incomplete, too many in flight: another batch may pass
_NOT_ENABLED = frozenset((10076, 10039))

_AGAIN: tuple[type[Exception], ...] = (
    nats.errors.StaleConnectionError,
    nats.errors.OutboundBufferLimitError,
    nats.errors.ConnectionReconnectingError,
    nats.errors.NoServersError,
    nats.errors.SlowConsumerError,
    nats.errors.ProtocolError,
    nats.errors.NoRespondersError,
    nats.js.errors.NoStreamResponseError,
    nats.js.errors.TooManyStalledMsgsError,
    nats.js.errors.ConsumerSequenceMismatchError,
)


def from_client(error: Exception, doing: str, *, sent: bool = False) -> MeshmarkError:
    """The tree's form of an error of nats-py or of the socket below it; `doing` says what was being done."""
    text = f"{doing}: {error}"
    if isinstance(error, MeshmarkError):
        return error
    if isinstance(error, nats.js.errors.APIError):
        # Some of its kinds are made without the fields that the class declares.
        code, err_code = getattr(error, "code", None) or 0, getattr(error, "err_code", None) or 0
        return from_api(code, err_code, getattr(error, "description", None) or str(error), doing)
    if isinstance(error, TimeoutError | nats.errors.TimeoutError):
        return OutcomeUnknown(f"{doing}: no answer in time; it may have happened") if sent else Transient(text)
    if isinstance(error, _AGAIN) or (isinstance(error, OSError) and not isinstance(error, PermissionError)):
        return Transient(text)
    # What is left are a refused login, TLS, bad arguments and a connection that is closed for good.
    return Permanent(text)


def from_api(code: int, err_code: int, description: str, doing: str) -> MeshmarkError:
    """The tree's form of a JetStream API error: `code` as in HTTP, `err_code` JetStream's own."""
    text = f"{doing}: {description} ({err_code or code})"
    if err_code in _CONFLICTS:
        return Conflict(text)
    if err_code == _STREAM_MISSING:
        return Waiting(f"{text}; a planner creates the streams when it starts", "the stream")
    if err_code == _CONSUMER_MISSING:
        return Waiting(f"{text}; a planner creates the hosts' consumers", "the consumer")
    if err_code in _NOT_ENABLED:
        return Permanent(f"{text}; turn JetStream on in the server and the account")
    if err_code in _BATCH_RETRIED or code >= 500:  # noqa: PLR2004 - HTTP's class of server errors
        return Transient(text)
    return Permanent(text)
