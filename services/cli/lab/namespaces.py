"""Network namespaces by name: made, entered, emptied of processes, removed.

Changes are scripts for ``ip -batch``: one process for many lines. Code that needs a namespace's sockets or sysctls runs in a thread
of its own that enters the namespace and ends there; no thread ever comes back from one.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from services.cli.lab.layout import PREFIX
from services.runtime.errors import OutcomeUnknown, Permanent

T = TypeVar("T")

FOLDER = Path("/run/netns")
_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


def existing() -> set[str]:
    """The lab's namespaces that are there, by name alone."""
    with contextlib.suppress(FileNotFoundError):
        return {entry.name for entry in FOLDER.iterdir() if entry.name.startswith(PREFIX)}
    return set()


def script(lines: Sequence[str], namespace: str = "") -> None:
    """Run ``ip`` commands in one go, in `namespace` if given; Permanent names the line that failed."""
    where = ["-n", namespace] if namespace else []
    done = subprocess.run(["ip", *where, "-batch", "-"], input="\n".join(lines), capture_output=True, text=True, check=False)
    if done.returncode:
        words = done.stderr.split()
        number = words[-1].removeprefix("-:") if words else ""
        line = lines[int(number) - 1] if number.isdigit() else "; ".join(lines)
        msg = f"ip {' '.join([*where, line])}: {done.stderr.strip().splitlines()[0] if words else 'failed'}"
        raise Permanent(msg)


def load_nft(namespace: str, text: str) -> None:
    """Load this nftables text in the namespace; Permanent says what nft has against it."""
    command = ["ip", "netns", "exec", namespace, "nft", "-f", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        msg = f"nft in {namespace}: {done.stderr.strip()}"
        raise Permanent(msg)


def enter(namespace: str) -> None:
    """Move the calling thread into the namespace, for good."""
    try:
        handle = os.open(FOLDER / namespace, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        msg = f"no network namespace {namespace}"
        raise Permanent(msg) from None
    try:
        if _libc.setns(handle, _CLONE_NEWNET):
            msg = f"cannot enter network namespace {namespace}: {os.strerror(ctypes.get_errno())}"
            raise Permanent(msg)
    finally:
        os.close(handle)


def inside(namespace: str, work: Callable[[], T]) -> T:
    """What `work` returns, or raises, when called inside the namespace. For short work, such as making a socket."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            enter(namespace)
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001 - carried to the caller's thread and raised there
            outcome.set_exception(error)

    thread = threading.Thread(target=run, name=f"inside {namespace}")
    thread.start()
    thread.join()
    return outcome.result()


def bound_socket(
    namespace: str, family: int, kind: int, address: tuple[str, int], options: Iterable[tuple[int, int, int]] = ()
) -> socket.socket:
    """A non-blocking socket of the namespace, with `options` (level, option, value), bound to `address`.

    None is left behind when that fails, which is an OSError.
    """
    opened = inside(namespace, lambda: socket.socket(family, kind))
    try:
        opened.setblocking(False)  # noqa: FBT003 - positional in the standard library
        for option in options:
            opened.setsockopt(*option)
        opened.bind(address)
    except BaseException:
        opened.close()
        raise
    return opened


def set_sysctls(namespace: str, values: Iterable[tuple[str, str]]) -> None:
    """Write files under /proc/sys/net (``ipv4/ip_forward``) of the namespace."""

    def write() -> None:
        for name, value in values:
            Path("/proc/sys/net", name).write_text(value, encoding="ascii")

    inside(namespace, write)


def processes(names: Iterable[str]) -> list[int]:
    """The processes whose main thread is in one of these namespaces, but for the caller's own."""
    marks = set()
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            marks.add(_identity(FOLDER / name))
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and _identity(entry / "ns/net") in marks:
                found.append(int(entry.name))
    return [pid for pid in found if pid != os.getpid()]


def remove(names: Iterable[str], patience_s: float = 3.0) -> None:
    """End every process in these namespaces and remove them; what is not there counts as removed."""
    wanted = set(names) & existing()
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + patience_s
        while (pids := processes(wanted)) and time.monotonic() < deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal_number)
            wait_for_end(pids, deadline)
    if pids := processes(wanted):
        msg = f"processes {pids} in the lab's namespaces do not end"
        raise OutcomeUnknown(msg)
    if wanted:
        script([f"netns delete {name}" for name in sorted(wanted)])


def wait_for_end(pids: Iterable[int], deadline: float) -> None:
    """Wait until these processes have ended, or the deadline (of the monotonic clock) is there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(pid)
            try:
                select.select([handle], [], [], max(0.0, deadline - time.monotonic()))
            finally:
                os.close(handle)


def _identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino
