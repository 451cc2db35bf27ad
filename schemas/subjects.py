"""Every NATS subject, built and parsed here and nowhere else.

A token holds any name: bytes that NATS reserves or that are not visible ASCII are percent-encoded, and so is ``%`` itself.
The kind is in lower case in subjects.
"""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import unquote_to_bytes

ROOT = "mesh"
TOPOLOGY, STATE, ALLOCATION, PLAN, SNAPSHOT, STATUS, DRIFT, REFUSED, DEADLETTER, FROZEN = (
    f"{ROOT}.{word}"
    for word in ("topology", "state", "allocation", "plan", "snapshot", "status", "drift", "refused", "deadletter", "frozen")
)
COMMAND = f"{ROOT}.cmd"
FLOW = f"{ROOT}.flow"
FREEZE = f"{FROZEN}.planner"
"""Where the planner says what it holds back; there is one planner."""
ACCEPT = f"{ROOT}.planner.accept"
"""Where a planner is asked to let it go."""

_PLAIN = frozenset(range(0x21, 0x7F)) - frozenset(b".*>%")


class Subject(NamedTuple):
    """A parsed subject: the stream's prefix (``mesh.topology``), and the names after it, decoded."""

    stream: str
    tokens: tuple[str, ...]


def token(name: str) -> str:
    """Encode any non-empty name as one subject token."""
    return "".join(chr(byte) if byte in _PLAIN else f"%{byte:02X}" for byte in name.encode()) or "%"


def untoken(text: str) -> str:
    """The name behind a token; ValueError when no name is encoded so.

    Only one token stands for a name. Other spellings of it (``%70ublickey``) would pass permissions that are written for the one.
    """
    name = "" if text == "%" else unquote_to_bytes(text).decode(errors="replace")
    if token(name) != text:
        msg = f"{text!r} is not how meshmark writes {name!r} in a subject; write {token(name)!r}"
        raise ValueError(msg)
    return name


def topology(kind: str, cluster: str, name: str) -> str:
    return _join(TOPOLOGY, kind.lower(), cluster, name)


def state(kind: str, cluster: str, name: str) -> str:
    return _join(STATE, kind.lower(), cluster, name)


def refused(kind: str, cluster: str, name: str) -> str:
    return _join(REFUSED, kind.lower(), cluster, name)


def allocation(what: str, cluster: str, name: str) -> str:
    return _join(ALLOCATION, what, cluster, name)


def plan(cluster: str, host: str) -> str:
    return _join(PLAN, cluster, host)


def snapshot(cluster: str, host: str, chunk: str) -> str:
    """`chunk` is ``head`` or a chunk number."""
    return _join(SNAPSHOT, cluster, host, chunk)


def status(cluster: str, host: str) -> str:
    return _join(STATUS, cluster, host)


def drift(cluster: str, host: str, layer: str) -> str:
    return _join(DRIFT, cluster, host, layer)


def deadletter(cluster: str, host: str, service: str) -> str:
    """`cluster` and `host` are empty for planners."""
    return _join(DEADLETTER, cluster, host, service)


def command(cluster: str, host: str, verb: str) -> str:
    return _join(COMMAND, cluster, host, verb)


def flow(cluster: str, host: str) -> str:
    return _join(FLOW, cluster, host)


def consumer(service: str, cluster: str, host: str) -> str:
    """Durable consumer name of a host's service: NATS allows no dots, spaces, slashes or wildcards in it.

    Different hosts have different names: ``-`` may stand in a name, so ``=`` is what separates them.
    """
    return "=".join((service, *(_inside(token(name), "=/\\") for name in (cluster, host))))


def parse(subject: str) -> Subject:
    """Split a subject into its stream prefix (``mesh.topology``) and its decoded tokens; ValueError when a token is none of ours."""
    words = subject.split(".")
    return Subject(".".join(words[:2]), tuple(untoken(word) for word in words[2:]))


def _inside(text: str, reserved: str) -> str:
    return "".join(f"%{ord(char):02X}" if char in reserved else char for char in text)


def _join(prefix: str, *names: str) -> str:
    return ".".join((prefix, *(token(name) for name in names)))
