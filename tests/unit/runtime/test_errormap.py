"""Every error of the client library lands in the error tree."""

import inspect

import nats.errors
import nats.js.errors
import pytest

from services.runtime import errormap
from services.runtime.errors import Conflict, MeshmarkError, OutcomeUnknown, Permanent, Transient, Waiting


def library_errors():
    for module in (nats.errors, nats.js.errors):
        for _, kind in inspect.getmembers(module, inspect.isclass):
            if issubclass(kind, nats.errors.Error) and kind.__module__ == module.__name__:
                yield kind


def made(kind):
    """An instance, whatever its constructor wants."""
    if kind is nats.errors.SlowConsumerError:
        return kind("s", "r", 1, None)
    if kind is nats.js.errors.ConsumerSequenceMismatchError:
        return kind(1, 1, 2)
    return kind()


@pytest.mark.parametrize("kind", list(library_errors()), ids=lambda kind: kind.__name__)
def test_every_error_is_mapped(kind):
    """Each error class of nats-py becomes one of ours, with what was being done in its text."""
    found = errormap.from_client(made(kind), "publishing on x")
    assert isinstance(found, MeshmarkError)
    assert type(found) is not MeshmarkError
    assert "publishing on x" in str(found)


@pytest.mark.parametrize(
    "error, sent, kind",
    [
        (nats.errors.TimeoutError(), False, Transient),
        (nats.errors.TimeoutError(), True, OutcomeUnknown),
        (TimeoutError(), True, OutcomeUnknown),
        (nats.errors.FlushTimeoutError(), False, Transient),
        (nats.errors.NoRespondersError(), False, Transient),
        (nats.errors.StaleConnectionError(), False, Transient),
        (nats.errors.UnexpectedEOF(), False, Transient),
        (ConnectionRefusedError("refused"), False, Transient),
        (nats.errors.AuthorizationError(), False, Permanent),
        (nats.errors.MaxPayloadError(), False, Permanent),
        (nats.errors.ConnectionClosedError(), False, Permanent),
        (nats.errors.BadSubjectError(), False, Permanent),
        (nats.js.errors.APIError(code=400, err_code=10071, description="wrong last sequence: 7"), False, Conflict),
        (nats.js.errors.NotFoundError(code=404, err_code=10059, description="stream not found"), False, Waiting),
        (nats.js.errors.ServiceUnavailableError(code=503, err_code=10008, description="not now"), False, Transient),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_what_to_do_next(error, sent, kind):
    """The kinds that matter: what is worth trying again, what must be read back, what never will do."""
    assert type(errormap.from_client(error, "x", sent=sent)) is kind


@pytest.mark.parametrize(
    "code, err_code, kind",
    [
        (400, 10071, Conflict),
        (400, 10164, Conflict),
        (404, 10059, Waiting),
        (404, 10014, Waiting),
        (503, 10076, Permanent),
        (400, 10176, Transient),
        (500, 10049, Transient),
        (400, 10174, Permanent),
    ],
)
def test_api_codes(code, err_code, kind):
    """JetStream's own codes decide before the HTTP-like class does."""
    assert type(errormap.from_api(code, err_code, "why", "x")) is kind


def test_our_own_errors_pass():
    """An error of the tree is not wrapped again."""
    error = Conflict("x")
    assert errormap.from_client(error, "y") is error
