"""CloudEvents attributes and W3C trace context, as NATS headers (CloudEvents NATS binding, binary mode)."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from uuid import uuid4

TRACEPARENT = "traceparent"
SEQUENCE = "Meshmark-Sequence"
"""Header of a STATE message: the sequence in TOPOLOGY of what was admitted by it."""
_TRACE = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


def complete(headers: Mapping[str, str], *, source: str, type: str, traceparent: str | None = None) -> dict[str, str]:  # noqa: A002 - CloudEvents' own word
    """`headers` with every missing attribute filled in; those given stay. A missing trace goes on from `traceparent` or starts new."""
    now = datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    return {
        "ce-specversion": "1.0",
        "ce-id": str(uuid4()),
        "ce-source": source,
        "ce-type": type,
        "ce-time": now,
        TRACEPARENT: child(traceparent),
        **headers,
    }


def child(traceparent: str | None) -> str:
    """The traceparent of work caused by `traceparent`: same trace, a new span. A missing or malformed one starts a new trace.

    Source: W3C Trace Context, section 3.2.
    """
    match = _TRACE.fullmatch(traceparent or "")
    usable = match is not None and set(match[1]) != {"0"} and set(match[2]) != {"0"}
    trace, flags = (match[1], match[3]) if match and usable else (secrets.token_hex(16), "01")
    return f"00-{trace}-{secrets.token_hex(8)}-{flags}"
