"""A supervisor in the background: forked off, and listened to until it says that the lab is ready."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from services.cli.output import system_words
from services.runtime.errors import MeshmarkError, Permanent


class Progress(Protocol):
    """Who watches a lab come up."""

    def say(self, text: str) -> None:
        """Something happened that a person who waits wants to know."""

    def ready(self) -> None:
        """The lab is up. Called once, or never."""


def in_background(supervise: Callable[[Progress], None], watcher: Progress) -> int:
    """Run `supervise` in a process of its own and return its pid when it is ready; raises Permanent with its own words when it fails.

    To be called before there are threads or an event loop. The process goes on when the terminal is gone; while it comes up,
    Ctrl-C ends it.
    """
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _be_background(supervise, writing)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as lines:
        try:
            for line in lines:
                said = json.loads(line)
                if "failed" in said:
                    os.waitpid(pid, 0)
                    raise Permanent(said["failed"])
                if "ready" in said:
                    watcher.ready()
                    return pid
                watcher.say(said["said"])
        except KeyboardInterrupt:
            os.kill(pid, signal.SIGTERM)
            os.waitpid(pid, 0)
            raise
    os.waitpid(pid, 0)
    msg = "the lab's supervisor ended before the lab was ready"
    raise Permanent(msg)


def redirect(log: Path) -> None:
    """Send what this process prints from now on to a file."""
    with log.open("ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)


class _Pipe:
    """Progress as lines of JSON, for as long as somebody listens."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def say(self, text: str) -> None:
        self.tell(said=text)

    def ready(self) -> None:
        self.tell(ready=True)
        os.close(self._handle)
        self._handle = -1

    def tell(self, **words: object) -> None:
        if self._handle >= 0:
            with contextlib.suppress(BrokenPipeError):
                os.write(self._handle, f"{json.dumps(words)}\n".encode())


def _be_background(supervise: Callable[[Progress], None], handle: int) -> None:
    """The forked process's whole life."""
    code = 1
    try:
        os.setsid()
        # Ctrl-C at the terminal is the waiting parent's, which passes it on as SIGTERM.
        pipe = _Pipe(handle)
        try:
            supervise(pipe)
            code = 0
        except MeshmarkError as error:
            pipe.tell(failed=str(error))
        except OSError as error:
            pipe.tell(failed=system_words(error))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
