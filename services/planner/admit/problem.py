"""What is wrong with an object, and the words that several checks share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec import Struct

from schemas.values import Prefix
from services.planner.state import State


class Problem(Struct, frozen=True):
    """Why an object cannot be admitted: a reason for people, the field at fault, and the other object if there is one.

    `retry` is False when no change of other objects can make it right.
    """

    reason: str
    field: str = ""
    other: str = ""
    retry: bool = True


def as_problems(findings: Iterable[tuple[str, str, str]]) -> Iterator[Problem]:
    """Findings of reason, field and other object."""
    return (Problem(*finding) for finding in findings)


def missing_cluster(cluster: str, field: str, state: State) -> list[Problem]:
    """The problem of an object whose cluster is not known; none when it is."""
    if cluster in state.clusters:
        return []
    return [
        Problem(
            f"cluster {cluster!r} is not known; it is admitted when Cluster/{cluster}/{cluster} is", field, f"Cluster/{cluster}/{cluster}"
        )
    ]


def listed(prefixes: Iterable[Prefix]) -> str:
    """Prefixes as people read them."""
    return ", ".join(prefixes)
