"""Taking a lab down, whoever is left of it: a running supervisor, or the pieces after a crash."""

from __future__ import annotations

import contextlib
import os
import signal
import time

from services.cli.lab import namespaces
from services.cli.lab.state import CURRENT, SOCKETS, Folder, ProcessId, claim
from services.runtime.errors import OutcomeUnknown

_SUPERVISOR_S = 40.0


def down(folder: Folder) -> bool:
    """Leave nothing of the lab in this folder; False when there was nothing. Conflict when the machine's lab has another folder."""
    record = folder.read()
    if record is not None and record.supervisor.alive:
        _end(record.supervisor)
    with claim(folder):
        found = record is not None or bool(namespaces.existing())
        sweep(folder)
        CURRENT.unlink()
    return found


def sweep(folder: Folder, *, keep_logs: bool = False) -> None:
    """Remove every namespace of the lab with all that runs in it, and the lab's files. Only for who has claimed the machine's lab."""
    namespaces.remove(namespaces.existing())
    record = folder.read()
    if record is not None and record.socket_folder:
        with contextlib.suppress(OSError):
            SOCKETS.rmdir()
    folder.clear(keep_logs=keep_logs)


def _end(supervisor: ProcessId) -> None:
    """Ask the supervisor to take the lab down, which it does in order; kill it when it does not."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.kill(supervisor.pid, number)
        namespaces.wait_for_end([supervisor.pid], time.monotonic() + _SUPERVISOR_S)
        if not supervisor.alive:
            return
    msg = f"the lab's supervisor, process {supervisor.pid}, does not end"
    raise OutcomeUnknown(msg)
