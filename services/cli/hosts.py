"""Hosts as people name them on the command line: ``rome/gateway``."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from typing import Annotated

from cyclopts import Parameter

from services.planner.state import HostId
from services.runtime.errors import Permanent

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
        names = [str(one) for one in sorted(known)]
        close = difflib.get_close_matches(str(host), names, n=1)
        words = f"did you mean {close[0]}?" if close else f"there are {', '.join(names[:8])}{', …' if len(names) > 8 else ''}"  # noqa: PLR2004
        msg = f"no host {host}; {words if names else 'there are none yet'}"
        raise Permanent(msg)
    return [host]
