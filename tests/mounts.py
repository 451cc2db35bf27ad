"""Folders of its own for a thread or process, in a mount namespace that nobody else sees. Needs root."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_CLONE_NEWNS = 0x20000
_MS_REC, _MS_PRIVATE = 0x4000, 1 << 18
_libc = ctypes.CDLL(None, use_errno=True)


def enter_with_own(folder: Path) -> None:
    """Move this thread, and what it starts, to where `folder` is empty and its own."""
    _check(_libc.unshare(_CLONE_NEWNS), "unshare")
    _check(_libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None), "make / private")
    _check(_libc.mount(b"none", os.fsencode(folder), b"tmpfs", 0, None), f"mount on {folder}")


def enter_with_own_run() -> None:
    """The same for /run, where network namespaces have their names and wireguard-go its sockets: labs of two processes would meet there.

    To be called by a process's first thread before it starts others.
    """
    enter_with_own(Path("/run"))
    Path("/run/netns").mkdir()


def _check(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
