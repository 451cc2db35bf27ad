"""The lab on disk: its state folder, what runs and what was made, and which lab this machine has.

``lab.json`` is written before a namespace is made, so that ``lab down`` finds all of it after a crash. Processes need no such care:
all but the supervisor live in namespaces of the lab and are found there.

A machine has one lab, because the names of its namespaces are fixed: the supervisor holds a lock on ``CURRENT`` as long as it lives, and
the file says where the state folder is.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from pathlib import Path
from typing import Literal, TextIO

import msgspec
from msgspec import Struct

from services.runtime.errors import Conflict, Permanent

DEFAULT_FOLDER = Path("/run/meshmark-lab")
CURRENT = Path("/run/meshmark-lab.current")
SOCKETS = Path("/run/wireguard")
"""Where wireguard-go keeps its sockets; each host of the lab sees a folder of its own there."""

Phase = Literal["starting", "ready", "failed"]


class ProcessId(Struct, frozen=True):
    """A process that no later one can be taken for: its id, when it started (clock ticks), and in which boot."""

    pid: int
    started: int
    boot: str

    @property
    def alive(self) -> bool:
        with contextlib.suppress(ProcessLookupError):
            return identify(self.pid) == self
        return False


class Record(Struct, omit_defaults=True):
    """What ``lab.json`` holds. `processes` is by service, as the logs are named; `namespaces` may not be there yet or any more.

    `socket_folder` says that the lab made ``SOCKETS``.
    """

    supervisor: ProcessId
    phase: Phase = "starting"
    namespaces: list[str] = []
    processes: dict[str, ProcessId] = {}
    socket_folder: bool = False


class Folder:
    """The paths of one lab's state folder. Nothing is made or read before it is asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()

    @property
    def record(self) -> Path:
        return self.path / "lab.json"

    @property
    def url(self) -> Path:
        return self.path / "nats.url"

    def credentials(self, user: str) -> Path:
        """Of ``publisher``, ``reader``, ``planner``, or a host's service by its user name (``accounts.host_user``)."""
        return self.path / "creds" / f"{user}.json"

    def log(self, service: str) -> Path:
        return self.path / "log" / f"{service}.log"

    @property
    def nats(self) -> Path:
        return self.path / "nats"

    def host(self, name: str) -> Path:
        """The state folder of the applier and auditor of the host ``<cluster>.<host>``."""
        return self.path / "hosts" / name

    def wireguard(self, name: str) -> Path:
        """What the host ``<cluster>.<host>`` sees as /run/wireguard."""
        return self.host(name) / "wireguard"

    def make(self) -> None:
        """Make the folder, without what an earlier lab left there."""
        self.clear()
        for name in ("creds", "log", "hosts", "nats"):
            (self.path / name).mkdir(parents=True, exist_ok=True)
        (self.path / "creds").chmod(0o700)

    def clear(self, *, keep_logs: bool = False) -> None:
        """Remove the lab's own files, and the folder if nothing else is in it."""
        for name in ("creds", "hosts", "nats", *(() if keep_logs else ("log",))):
            shutil.rmtree(self.path / name, ignore_errors=True)
        for file in (self.record, self.url):
            file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.path.rmdir()

    def read(self) -> Record | None:
        """What the lab wrote last; None when there is none."""
        try:
            return msgspec.json.decode(self.record.read_bytes(), type=Record)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except msgspec.MsgspecError as error:
            msg = f"{self.record} is not this lab's: {error}"
            raise Permanent(msg) from None

    def write(self, record: Record) -> None:
        write_private(self.record, msgspec.json.format(msgspec.json.encode(record), indent=1))


def find_folder(path: Path | None) -> Folder:
    """The folder that is asked for; else the one of this machine's lab; else the default."""
    if path is None:
        with contextlib.suppress(FileNotFoundError):
            path = Path(CURRENT.read_text(encoding="utf-8").strip() or DEFAULT_FOLDER)
    return Folder(path or DEFAULT_FOLDER)


def claim(folder: Folder) -> TextIO:
    """Make this process the supervisor of the machine's one lab, until the returned file is closed; Conflict when there is one."""
    while True:
        lock = CURRENT.open("a+", encoding="utf-8")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            where = lock.read().strip()
            lock.close()
            msg = f"a lab is already up on this machine, in {where or 'a folder of its own'}; end it with: meshmark lab down"
            raise Conflict(msg) from None
        if _is_current(lock):
            break
        lock.close()  # another one removed the file before it let go of the lock
    lock.truncate(0)
    lock.write(f"{folder.path}\n")
    lock.flush()
    return lock


def _is_current(lock: TextIO) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(lock.fileno()), CURRENT.stat())
    return False


def identify(pid: int) -> ProcessId:
    """What tells this process from a later one of the same id; ProcessLookupError when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except FileNotFoundError:
        raise ProcessLookupError(pid) from None
    if fields[0] in "ZX":
        raise ProcessLookupError(pid)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ProcessId(pid, int(fields[19]), boot)


def write_private(path: Path, content: bytes) -> None:
    """Replace a file at once; only its owner may read it, from the start."""
    fresh = path.with_name(f"{path.name}.new")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
    fresh.rename(path)
