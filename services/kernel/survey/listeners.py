"""Groups of NFLOG that somebody listens to, and who: from /proc."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from services.kernel import nflog
from services.kernel.netlink import NETLINK_NETFILTER
from services.kernel.survey.ports import owners

_PROTOCOL, _PORT, _INODE = 1, 2, 9
_OWN_MODULE = b"services.cli.main"


def listeners(proc: Path = Path("/proc")) -> dict[int, str]:
    """By group the process, as ``name (pid)``; empty where it cannot be seen. Meshmark's own has that name however it is run."""
    groups = nflog.listeners()
    inodes = _inodes(proc) if groups else {}
    found = owners(proc, {inodes[port] for port in groups.values() if port in inodes})
    return {group: _named(found.get(inodes.get(port, ""), ""), proc) for group, port in groups.items()}


def _inodes(proc: Path) -> dict[int, str]:
    """Sockets of netfilter's netlink by port. That is mostly another number than the process's, which has several."""
    try:
        lines = (proc / "thread-self/net/netlink").read_text(encoding="ascii").splitlines()[1:]
    except OSError:
        return {}
    rows = (line.split() for line in lines)
    return {int(row[_PORT]): row[_INODE] for row in rows if row[_PROTOCOL] == str(NETLINK_NETFILTER)}


def _named(owner: str, proc: Path) -> str:
    """As the owner is called, but where an interpreter runs meshmark as a module, as the lab does."""
    number = re.search(r"\((\d+)\)$", owner)
    with contextlib.suppress(OSError):
        if number and _OWN_MODULE in (proc / number[1] / "cmdline").read_bytes().split(b"\0"):
            return f"meshmark ({number[1]})"
    return owner
