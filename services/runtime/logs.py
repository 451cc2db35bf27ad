"""Logging: an event name and fields, as JSON or for a console; contextvars carry host and generation; secrets never get out."""

from __future__ import annotations

import logging
import re
import sys
from typing import Literal

import structlog
from structlog.typing import EventDict, WrappedLogger

_SECRET = re.compile(r"password|passwd|secret|private_?key|preshared|credential$|(?<![a-z])token(?![a-z])", re.IGNORECASE)
_LOGIN_IN_URL = re.compile(r"(?<=://)[^/@\s]+@")
_HIDDEN = "***"
# Without the values of local variables: passwords and keys are among them.
_TRACEBACKS = structlog.processors.ExceptionRenderer(structlog.tracebacks.ExceptionDictTransformer(show_locals=False))


def configure(service: str, level: str = "info", form: Literal["json", "console"] = "json") -> None:
    """Set structlog up for this process; lines go to standard error. `level` is debug, info, warning or error."""
    render: structlog.typing.Processor = (
        structlog.processors.JSONRenderer() if form == "json" else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    # A console renderer prints tracebacks itself; JSON needs them as a field.
    errors = [_TRACEBACKS] if form == "json" else []
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            hide_secrets,
            *errors,
            render,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(service=service)
    # nats-py logs through the standard library; what it says is also in our own events, so only its errors are let through.
    logging.getLogger("nats").setLevel(logging.ERROR)


def hide_secrets(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """Replace the values of fields that are named like a secret, and the login in any URL."""
    for key, value in event.items():
        if _SECRET.search(key):
            event[key] = _HIDDEN
        elif isinstance(value, str) and "://" in value:
            event[key] = _LOGIN_IN_URL.sub(f"{_HIDDEN}@", value)
    return event
