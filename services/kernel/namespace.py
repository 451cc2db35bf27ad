"""Network namespaces of a thread: make one that nobody else sees, or enter one that has a name.

A thread that unshares leaves the process's namespace for good; do it only in a thread made for that. The namespace dies with the last
thread and socket in it. Fails with OSError: PermissionError without CAP_SYS_ADMIN.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_CLONE_NEWNET = 0x40000000
_CLONE_NEWUSER = 0x10000000
_libc = ctypes.CDLL(None, use_errno=True)


def enter_new_network(*, with_user: bool = False) -> None:
    """Move this thread into a new network namespace; `with_user` makes a user namespace around it (single-threaded processes only)."""
    _check(_libc.unshare(_CLONE_NEWNET | (_CLONE_NEWUSER if with_user else 0)), "unshare")


def enter_network(path: Path) -> None:
    """Move this thread into the network namespace at this path, as /run/netns/NAME or /proc/PID/ns/net."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _check(_libc.setns(descriptor, _CLONE_NEWNET), f"setns {path}")
    finally:
        os.close(descriptor)


def _check(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
