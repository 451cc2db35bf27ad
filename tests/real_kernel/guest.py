"""A Debian kernel in an emulated machine, which runs tests of this repository and says what came of each.

virtme-ng boots the kernel under qemu, without KVM, over the files of this machine: the guest has the same programs and the same virtual
environment, and can write nothing but one folder. Tests inside are ordinary tests, run by one pytest there; ``report.py`` writes a line of
JSON for each into that folder, which is read here while the guest runs. A guest that says nothing for too long is ended, by its process
group, and what it was still to run fails with the last lines of its console.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import msgspec
from msgspec import Struct

from tests.real_kernel.report import STARTED

INSIDE = "tests/real_kernel/inside"
"""Tests that are for the guest alone."""
MESHES, ENCRYPTION = "tests/integration/mesh/", "tests/encryption/"
"""Tests that share what the first of a module makes."""
TRACE = "tests/trace/"
"""The same; few of their cases are run, as what differs there is WireGuard in the kernel, and Geneve."""
TRACED = {
    "test_points.py": ("native", "geneve"),
    "test_broken.py": ("outer overlay in clear",),
    "test_inside.py": ("geneve",),
    "test_sessions.py": ("fragmented-geneve in clear-4",),
    "test_between_clusters.py": ("4",),
}
"""By file, those cases."""
ROOT = Path(__file__).parent.parent.parent
VNG = ROOT / ".cache" / "real-kernel" / "bin" / "vng"
BOOT_S = 600.0
"""From the start to the first word of the pytest inside: on two idle cores the kernel boots in 30 s and imports take 20 s, on busy ones ten
times that."""
SILENCE_S = 600.0
"""The longest that a test may take inside, above the limit that it has there (``inside.sh``)."""
CACHED = "cached"
"""The mount tag of a second way to the files of this machine, which ``inside.sh`` puts in the place of the first."""
_END_S = 10.0
_POLL_S = 0.1
_CONSOLE_LINES = 40
CASES_MAX = 1
"""Of a test with more cases than these, as many are run: an emulated machine needs two seconds of a processor for each, and half a minute
where a stream is watched."""
PATHS_CASES_MAX = 6
"""The same of those that follow packets on every path, for which this is all about."""
_SHARED_WEIGHT = 3
"""How many other tests take as long as one that shares a mesh."""


class Result(Struct, frozen=True):
    """What came of one test inside: `outcome` is passed, failed or skipped, `text` why."""

    id: str
    outcome: str
    text: str = ""
    seconds: float = 0.0


class GuestError(Exception):
    """The guest cannot be started, ended early or said nothing for too long; with the last lines of its console."""


def find_kernel() -> Path | None:
    """The newest installed kernel that has WireGuard and Geneve as modules."""
    found = []
    for image in Path("/boot").glob("vmlinuz-*"):
        modules = Path("/lib/modules") / image.name.removeprefix("vmlinuz-") / "kernel" / "drivers" / "net"
        if list(modules.glob("wireguard/wireguard.ko*")) and list(modules.glob("geneve.ko*")):
            found.append(image)
    return max(found, key=_version, default=None)


def _version(image: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", image.name)]


def split(items: Sequence[str]) -> list[list[str]]:
    """The items for two runs beside each other that take about as long: a guest has two processors. Those of one mesh stay together."""
    runs = [[item for item in items if item.startswith(ENCRYPTION)], [item for item in items if item.startswith((MESHES, TRACE, INSIDE))]]
    weights = [_SHARED_WEIGHT * len(run) for run in runs]
    shared = {item for run in runs for item in run}
    for item in items:
        if item not in shared:
            lighter = weights.index(min(weights))
            runs[lighter].append(item)
            weights[lighter] += 1
    return [run for run in runs if run]


def sample(items: Sequence[str]) -> list[str]:
    """The items without most cases of the tests that have many, in the order given. Half of what is left is about Geneve, if anything is.

    Those of the folder INSIDE are one story, and all there.
    """
    cases: dict[str, list[str]] = {}
    kept = {item for item in items if (_is_traced(item) if item.startswith(TRACE) else item.startswith(INSIDE))}
    for item in items:
        if item not in kept and not item.startswith(TRACE):
            cases.setdefault(item.partition("[")[0], []).append(item)
    for name, group in cases.items():
        count = min(len(group), PATHS_CASES_MAX if "/test_paths.py::" in name else CASES_MAX)
        geneve = [item for item in group if "geneve" in item]
        others = [item for item in group if "geneve" not in item]
        draw = random.Random(name)  # so that not all tests are about the same family and way, and each run about the same cases
        about_geneve = max(min(len(geneve), (count + 1) // 2), count - len(others))
        kept.update(draw.sample(geneve, about_geneve))
        kept.update(draw.sample(others, count - about_geneve))
    return [item for item in items if item in kept]


def _is_traced(item: str) -> bool:
    path, _, case = item.removesuffix("]").partition("[")
    return case in TRACED.get(path.removeprefix(TRACE).partition("::")[0], ())


class Guest:
    """One boot, which runs `items` (node ids of pytest). `folder` is empty and the guest's to write in."""

    def __init__(self, folder: Path, items: Sequence[str]) -> None:
        self._folder = folder
        self._items = items
        self._process: subprocess.Popen[bytes] | None = None
        self._results: dict[str, Result] = {}
        self._read_bytes: dict[Path, int] = {}
        self._spoke_s = 0.0
        self._limit_s = BOOT_S
        self._failure = ""
        self._listener: threading.Thread | None = None

    def start(self) -> None:
        """Boot. GuestError when something is missing."""
        kernel = find_kernel()
        if kernel is None or not VNG.exists():
            msg = "there is no kernel to boot, or no virtme-ng; './run test --suite real-kernel' installs both"
            raise GuestError(msg)
        for number, run in enumerate(split(self._items)):
            (self._folder / f"items.{number}").write_text("\n".join(run), encoding="utf-8")
        options = ["--disable-kvm", "--force-9p", "--verbose", "--memory", "2G", "--cpus", "2", "--user", "root", "--cwd", str(ROOT)]
        # Without them each system call empties the emulated machine's translation cache: half of the guest's time.
        # And the kernel is not to try whether its timer ticks: on a busy machine an emulated one does not in time, and it would panic.
        options += ["--append", "mitigations=off loglevel=5 no_timer_check"]
        # virtme-ng gives the guest five serial buses of 31 ports, and qemu would look at all their queues whenever anything happens.
        # What the guest has read is to stay in its memory, which virtme-ng's own way to the files of this machine rules out.
        again = f"-fsdev local,id={CACHED},path=/,security_model=none,readonly=on,multidevs=remap"
        again += f" -device virtio-9p-pci,fsdev={CACHED},mount_tag={CACHED}"
        options.append(f"--qemu-opts=-global virtio-serial-device.max_ports=2 {again}")
        options += [f"--rwdir={self._folder}", "--exec", f"sh {ROOT}/tests/real_kernel/inside.sh {self._folder}"]
        command = [str(VNG), "--run", str(kernel), *options]
        scratch = self._folder / "tmp"
        scratch.mkdir()
        environment = {**os.environ, "TMPDIR": str(scratch), "PATH": f"{VNG.parent}:{os.environ['PATH']}"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        self._console.touch()
        self._listener = threading.Thread(target=self._listen, args=(self._process.stdout,), name="console")
        self._listener.start()
        self._spoke_s = time.monotonic()

    def result(self, item: str) -> Result:
        """What came of this test, as soon as the guest says it. GuestError when it never will."""
        while item not in self._results:
            running = self._process is not None and self._process.poll() is None
            self._take()
            if item in self._results:
                break
            if self._failure:
                raise GuestError(self._failure)
            if not running:
                self._fail("the guest ended before this test")
            elif time.monotonic() > self._spoke_s + self._limit_s:
                self._fail(f"the guest said nothing for {self._limit_s:g} s")
            else:
                time.sleep(_POLL_S)
        return self._results[item]

    def end(self) -> None:
        """End the guest and wait until nothing of it runs. What ended by itself is fine."""
        process, self._process = self._process, None
        if process is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            deadline = time.monotonic() + _END_S
            while time.monotonic() < deadline:
                if not _lives(process.pid):
                    process.wait()
                    if self._listener is not None:
                        self._listener.join()
                    return
                time.sleep(_POLL_S)
        msg = f"processes of group {process.pid} do not end"
        raise GuestError(msg)

    def complaints(self) -> str:
        """What the runs inside say beyond their tests, as that something was left behind; empty for nothing. After all results."""
        if any(result.outcome == "failed" for result in self._results.values()) or self._failure:
            return ""
        for number, run in enumerate(split(self._items)):
            self.result(run[-1])
            file = self._folder / f"exit.{number}"
            deadline = time.monotonic() + SILENCE_S
            while not file.exists() or not file.read_text(encoding="ascii"):
                if time.monotonic() > deadline:
                    return f"run {number} does not end"
                time.sleep(_POLL_S)
            if file.read_text(encoding="ascii").strip() != "0":
                self.end()  # then all that it printed has been heard
                return self._last_words(f"run {number} failed, though each of its tests passed")
        return ""

    @property
    def _console(self) -> Path:
        return self._folder / "console"

    def _listen(self, output: IO[bytes]) -> None:
        """Write down what the guest prints. Through a pipe: qemu opens what it is given several times, and each time from the start."""
        with output, self._console.open("wb", buffering=0) as console:
            while data := os.read(output.fileno(), 65536):
                console.write(data)

    def _fail(self, reason: str) -> None:
        self.end()
        self._failure = self._last_words(reason)

    def _last_words(self, reason: str) -> str:
        text = self._console.read_text(encoding="utf-8", errors="replace")
        lines = [line for line in text.splitlines() if line.strip()]
        return "\n".join([f"{reason}; the console's last lines:", *lines[-_CONSOLE_LINES:]])

    def _take(self) -> None:
        """Read the whole lines that have come since the last call."""
        for path in self._folder.glob("results.*"):
            start = self._read_bytes.get(path, 0)
            with path.open("rb") as file:
                file.seek(start)
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read_bytes[path] = start + len(whole)
            for line in whole.splitlines():
                self._note(msgspec.json.decode(line, type=Result))

    def _note(self, result: Result) -> None:
        self._spoke_s = time.monotonic()
        self._limit_s = SILENCE_S
        if result.outcome != STARTED:
            self._results[result.id] = result


def _lives(group: int) -> bool:
    """Whether a process of the group runs. One that has ended and that nobody waits for is still listed, as a zombie."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            state, _, number = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[:3]
            if int(number) == group and state != "Z":
                return True
    return False
