"""The JetStream streams, as values: which subjects each stores, and for how long.

Plain streams, not KV buckets: subjects can be authorized per host, and a batch can be written atomically.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from schemas import subjects

_DAY_S = 24 * 3600
_NANOSECONDS = 10**9
_ADVISORIES = "$JS.EVENT.ADVISORY.CONSUMER"


class StreamSpec(Struct, frozen=True):
    """One stream. `max_age_s` 0 and `per_subject` -1 mean no limit."""

    name: str
    subjects: tuple[str, ...]
    max_age_s: int = 0
    per_subject: int = -1
    atomic: bool = False


STREAMS = (
    StreamSpec("TOPOLOGY", (f"{subjects.TOPOLOGY}.>",), max_age_s=7 * _DAY_S),
    StreamSpec("STATE", (f"{subjects.STATE}.>",), per_subject=1),
    StreamSpec("ALLOCATION", (f"{subjects.ALLOCATION}.>",), per_subject=1),
    StreamSpec("PLAN", (f"{subjects.PLAN}.>",), per_subject=64),
    StreamSpec("SNAPSHOT", (f"{subjects.SNAPSHOT}.>",), per_subject=1, atomic=True),
    StreamSpec("STATUS", (f"{subjects.STATUS}.>",), per_subject=1),
    StreamSpec("DRIFT", (f"{subjects.DRIFT}.>",), max_age_s=7 * _DAY_S),
    StreamSpec("FROZEN", (f"{subjects.FROZEN}.>",), per_subject=1),
    StreamSpec("REFUSED", (f"{subjects.REFUSED}.>",), max_age_s=7 * _DAY_S),
    # The advisories name stream, consumer and sequence of a message that was given up; the original stays readable by sequence.
    StreamSpec(
        "DEADLETTER",
        # Of what was terminated, only what a service gave up: a report that a newer one replaces counts as terminated, too.
        (f"{subjects.DEADLETTER}.>", f"{_ADVISORIES}.MAX_DELIVERIES.>", f"{_ADVISORIES}.MSG_TERMINATED.PLAN.>"),
        max_age_s=7 * _DAY_S,
    ),
)


def configuration(spec: StreamSpec, current: Mapping[str, object] | None = None) -> dict[str, object]:
    """The stream's configuration as the JetStream API takes it, times in nanoseconds.

    `current`, the one in force, keeps what meshmark has no opinion on: replicas, placement, limits that an operator set.
    """
    return {
        "storage": "file",
        "retention": "limits",
        "discard": "old",
        "num_replicas": 1,
        "duplicate_window": 120 * _NANOSECONDS,
        **(current or {}),
        "name": spec.name,
        "subjects": list(spec.subjects),
        "max_age": spec.max_age_s * _NANOSECONDS,
        "max_msgs_per_subject": spec.per_subject,
        "allow_direct": True,
        "allow_atomic": spec.atomic,
    }
