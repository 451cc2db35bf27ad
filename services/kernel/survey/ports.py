"""UDP ports in use in this network namespace, and by whom: from /proc."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from services.kernel.survey.values import PortSeen

_LOCAL, _REMOTE, _INODE = 1, 2, 9


def in_use(wanted: Iterable[int], proc: Path = Path("/proc")) -> tuple[PortSeen, ...]:
    """Those of the wanted UDP ports that a socket is bound to, of either family, in order. Raises OSError where /proc cannot be read.

    A process in another PID namespace, or of somebody else when we are not root, is not seen; nor has a socket of the kernel one.
    """
    ports = set(wanted)
    inodes = {fields[_INODE]: port for fields in _sockets(proc) if (port := _port(fields)) in ports}
    holders = owners(proc, set(inodes)) if inodes else {}
    found = {PortSeen(port, holders.get(inode)) for inode, port in inodes.items()}
    return tuple(sorted(found, key=lambda seen: (seen.port, seen.process or "")))


def listening(proc: Path = Path("/proc")) -> dict[str, int]:
    """The ports of all UDP sockets that take datagrams from anybody, by inode. Raises OSError where /proc cannot be read."""
    return {fields[_INODE]: _port(fields) for fields in _sockets(proc) if not fields[_REMOTE].strip("0:")}


def _sockets(proc: Path) -> Iterator[list[str]]:
    for family in ("udp", "udp6"):
        file = proc / "thread-self/net" / family
        for line in file.read_text(encoding="ascii").splitlines()[1:] if file.exists() else ():
            yield line.split()


def _port(fields: list[str]) -> int:
    return int(fields[_LOCAL].rpartition(":")[2], 16)


def owners(proc: Path, inodes: set[str]) -> dict[str, str]:
    """Processes by the sockets that they hold, as ``name (pid)``."""
    wanted = {f"socket:[{inode}]": inode for inode in inodes}
    found: dict[str, str] = {}
    for process in proc.glob("[0-9]*"):
        try:
            held = set(_links(process / "fd")) & wanted.keys()
            name = (process / "comm").read_text(encoding="utf-8", errors="replace").strip() if held else ""
        except OSError:  # it ended meanwhile, or is another user's
            continue
        found |= {wanted[link]: f"{name} ({process.name})" for link in held}
    return found


def _links(folder: Path) -> Iterator[str]:
    """Where the links of a folder lead; those that go away meanwhile are none, as one of a process that looks at itself."""
    for entry in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            yield str(entry.readlink())
