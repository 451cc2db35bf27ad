"""Hosts as people name them on the command line: ``rome/gateway``."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from typing import Annotated

from cyclopts import Parameter

from schemas import subjects
from services.planner.state import HostId
from services.runtime.broker import Broker
from services.runtime.errors import OutcomeUnknown, Permanent, Transient

_NAMED = 8

HostName = Annotated[str | None, Parameter(help="CLUSTER/NAME, as its Node or Gateway is called: rome/gateway")]


def parse_host(text: str) -> HostId:
    """The host that is named; Permanent says how to write it."""
    cluster, slash, name = text.partition("/")
    if not cluster or not slash or not name or "/" in name:
        msg = f"{text!r} names no host; write it as CLUSTER/NAME, as rome/gateway"
        raise Permanent(msg)
    return HostId(cluster, name)


def choose(known: Collection[HostId], text: str | None) -> list[HostId]:
    """All known hosts in order, or the one that is named; Permanent when it is not among them."""
    if text is None:
        return sorted(known)
    host = parse_host(text)
    if host not in known:
        msg = f"no host {host}; {near(str(host), [str(one) for one in sorted(known)])}"
        raise Permanent(msg)
    return [host]


async def asked(broker: Broker, host: HostId, command: str, answer_s: float = 5.0) -> bytes:
    """What a host's applier answers to a command that changes nothing: Transient when it is silent for that long, else as the broker."""
    try:
        return await broker.request(subjects.command(*host, command), b"", answer_s)
    except OutcomeUnknown as error:
        msg = f"the applier of {host} does not answer within {answer_s:g} s; it is busy, or stands still: see its log"
        raise Transient(msg) from error


def near(text: str, known: Sequence[str]) -> str:
    """What to say to somebody whose name for a thing nothing has: the name that is like it, else which there are."""
    if not known:
        return "there are none yet"
    if close := difflib.get_close_matches(text, known, n=1):
        return f"did you mean {close[0]}?"
    return f"there are {', '.join(known[:_NAMED])}{', …' if len(known) > _NAMED else ''}"
