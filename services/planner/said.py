"""A topology message as it was heard: which object its subject names, and what its payload says. Pure."""

from __future__ import annotations

from typing import NamedTuple

from msgspec import Struct

from schemas.codec import DecodeError
from schemas.topology import KINDS, Topology, decode_topology
from schemas.values import Name
from services.planner.admit import Problem

_NAME_CHARACTERS = 253
_REVISION = b'"revision"'
_OBJECT_BYTES_MAX = 512 * 1024
"""What is admitted is written again with more headers, and a broker takes 1 MiB in all."""
_KIND_BY_TOKEN = {kind.lower(): kind for kind in KINDS}


class Said(Struct, frozen=True):
    """One topology message: the subject and its tokens (none: they cannot be read), the payload (empty: delete), its place in the stream.

    `stored_s` is when the broker stored it (Unix time), `trace` its traceparent.
    """

    tokens: tuple[str, ...]
    payload: bytes
    sequence: int
    stored_s: float = 0.0
    trace: str = ""
    subject: str = ""

    @property
    def has_revision(self) -> bool:
        """Whether its payload may say a revision."""
        return _REVISION in self.payload


class Named(NamedTuple):
    """The object that a message is about, by its subject."""

    kind: str
    cluster: str
    name: str

    @property
    def ref(self) -> str:
        return f"{self.kind}/{self.cluster}/{self.name}"


def named(said: Said) -> Named | str:
    """The object that a subject names, or why it names none that anything could be said about."""
    if len(said.tokens) != len(Named._fields) or said.tokens[0] not in _KIND_BY_TOKEN:
        expected = f"<kind>.<cluster>.<name> with a kind of {', '.join(sorted(_KIND_BY_TOKEN))}"
        return f"the subject names no object: expected {expected}; dots and other special bytes of a name are written as %2E"
    kind, cluster, name = _KIND_BY_TOKEN[said.tokens[0]], said.tokens[1], said.tokens[2]
    return _unusable(cluster, name, said) or Named(kind, cluster, name)


def _unusable(cluster: str, name: str, said: Said) -> str | None:
    """Why a subject's names are not even good for a refusal: too long for a subject, or no names where only the subject has them."""
    if max(len(cluster), len(name)) > _NAME_CHARACTERS:
        return f"a name in the subject is longer than {_NAME_CHARACTERS} characters"
    try:
        if not said.payload:
            _ = Name.parse(cluster), Name.parse(name)
    except ValueError as error:
        return str(error)
    return None


def decoded(said: Said) -> Topology | None:
    """The object that a message holds, if it holds one."""
    try:
        return decode_topology(said.payload) if 0 < len(said.payload) <= _OBJECT_BYTES_MAX else None
    except DecodeError:
        return None


def read(ref: str, said: Said) -> tuple[Topology | None, Problem | None]:
    """The object that a message holds (None: it deletes `ref`), or what is wrong with it."""
    if not said.payload:
        return None, None
    if len(said.payload) > _OBJECT_BYTES_MAX:
        return None, Problem(f"the object has {len(said.payload)} bytes; {_OBJECT_BYTES_MAX} are the most", retry=False)
    try:
        item = decode_topology(said.payload)
    except DecodeError as error:
        return None, Problem(error.reason, error.field, retry=False)
    if item.ref != ref:
        return None, Problem(f"the subject names {ref}, the payload {item.ref}; they must be the same", "$.name", retry=False)
    return item, None
