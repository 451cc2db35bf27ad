"""How long an applier and an auditor take to start: from the exec of ``meshmark applier`` until ``/readyz`` says yes.

A node of the example, whose network namespace is made anew for each round; nats-server and planner run, and the node's plan waits. The
applier is ready when it has applied the plan and told of it; the auditor, beside that applier as on any host, when it has the broker and
begins to audit. ``/readyz`` is what deploy/ asks. Bytecode is there, as in an image. The starts of a round come right after their
floors, so that all of them see the same machine.

Floor: an interpreter that imports what this service was seen to import of others' code, and nothing of meshmark but the module by which
parts of pyroute2 can be had alone. Goal: 0.7 s.
"""

from __future__ import annotations

import asyncio
import http.client
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from benchmarks import lab
from benchmarks.interval import interval
from benchmarks.result import Details, Figure, Result, median, result, rounded
from services.cli.lab import namespaces
from services.cli.lab.layout import host_namespace
from services.cli.lab.processes import Command
from services.runtime.errors import Transient
from services.runtime.server import end

_ROUNDS = 15
_GOAL_S = 0.7
_ROLES = ("applier", "auditor")
_HOST = "rome.worker-1"
_NAMESPACE = host_namespace(*_HOST.split("."))
_ROOT = Path(__file__).parent.parent.parent
_READY_S, _POLL_S = 30.0, 0.005
_TRACED = "import time:"
_NOT_OTHERS = sys.stdlib_module_names | {"schemas", "services", "imported package"}
"""The first parts of names that are meshmark's, Python's, or the heading of the list."""
_USED_TICKS = slice(11, 13)
"""Of ``/proc/PID/stat`` behind the program's name: ticks of the processor, in the program and in the kernel for it."""


class Start(Struct, frozen=True):
    """A start in seconds from its exec: until health was served, which is after all imports; until ready; and processor time until then."""

    served_s: float
    ready_s: float
    processor_s: float


class Round(Struct, frozen=True):
    """A start, and what came before it: an interpreter that imports nothing, and the floor."""

    bare_s: float
    floor_s: float
    start: Start


def run(say: Callable[[str], None]) -> list[Result]:
    return asyncio.run(_run(say))


async def _run(say: Callable[[str], None]) -> list[Result]:
    async with lab.standing(say, is_served=False) as standing:
        return await asyncio.to_thread(_measured, standing, say)


def _measured(standing: lab.Lab, say: Callable[[str], None]) -> list[Result]:
    commands = {role: as_deployed(standing.commands[f"{role}.{_HOST}"]) for role in _ROLES}
    imports = _seen_imports(standing, commands)
    found: dict[str, list[Round]] = {role: [] for role in _ROLES}
    for number in range(1, _ROUNDS + 1):
        standing.renew(_NAMESPACE)
        floors = {role: (imported_s(()), imported_s(imports[role])) for role in commands}  # while no service runs that would slow them
        with ExitStack() as running:
            for role, command in commands.items():
                found[role].append(Round(*floors[role], running.enter_context(_started(command))))
        say(f"round {number} of {_ROUNDS}: {', '.join(f'{role} {rounds[-1].start.ready_s:.2f} s' for role, rounds in found.items())}")
    return [summed_up(role, rounds, len(imports[role])) for role, rounds in found.items()]


def summed_up(role: str, rounds: Sequence[Round], modules: int) -> Result:
    """The figure of one service. `modules` is how many of others' modules it imports."""
    over = interval(rounds, lambda part: median(item.start.ready_s / item.floor_s for item in part))
    reached: dict[str, Callable[[Round], float]] = {
        "interpreter": lambda item: item.bare_s,
        "others' modules, alone": lambda item: item.floor_s,
        "health served": lambda item: item.start.served_s,
        "ready": lambda item: item.start.ready_s,
    }
    details: Details = {
        "reached after, s": {what: rounded(median(map(of, rounds)), 3) for what, of in reached.items()},
        "processor time, s": rounded(median(item.start.processor_s for item in rounds), 3),
        "modules of others": modules,
        "over the floor, same round": {"median": over.value, "from": over.low, "to": over.high},
    }
    floor = median(item.floor_s for item in rounds)
    return result(f"startup-{role}", [item.start.ready_s for item in rounds], "s", floor=floor, goal=_GOAL_S, details=details)


def as_deployed(command: Command) -> Command:
    """The same service by what deploy/ starts: the program that the package installs."""
    return replace(command, argv=[str(Path(sys.executable).with_name("meshmark")), command.argv[-1]])


# What is imported ------------------------------------------------------------------------------------------------------------------------


def _seen_imports(standing: lab.Lab, commands: Mapping[str, Command]) -> dict[str, tuple[str, ...]]:
    """Others' modules by service. These starts are not counted: they compile modules, and bring files into memory."""
    standing.renew(_NAMESPACE)
    found = {}
    with ExitStack() as running:
        for role, command in commands.items():
            running.enter_context(_started(replace(command, environment={**command.environment, "PYTHONPROFILEIMPORTTIME": "1"})))
            found[role] = others_modules(command.log.read_text(encoding="utf-8", errors="replace").splitlines())
            imported_s(found[role])
            command.log.unlink()
    return found


def others_modules(lines: Iterable[str]) -> tuple[str, ...]:
    """Modules of neither Python itself nor meshmark, of what ``-X importtime`` prints; in its order: what a module imports comes first."""
    names = (line.rpartition("|")[2].strip() for line in lines if line.startswith(_TRACED))
    return tuple(name for name in names if name.partition(".")[0] not in _NOT_OTHERS)


def imported_s(modules: Sequence[str]) -> float:
    """Seconds from the exec of an interpreter until it has imported these. One that is not there was looked for by the service, too."""
    lines = [f"try: import {name}\nexcept ImportError: pass" for name in modules]
    if lines:
        lines.insert(0, "import services.kernel.pyroute_parts")
    code = "\n".join([*lines, "print(flush=True)"])
    began = time.perf_counter()
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=_ROOT) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        took_s = time.perf_counter() - began
    if not said:
        msg = f"an interpreter that imports {len(modules)} modules ended with code {process.returncode}"
        raise Transient(msg)
    return took_s


# Starting --------------------------------------------------------------------------------------------------------------------------------


@contextmanager
def _started(command: Command) -> Iterator[Start]:
    """A service that runs in the host's network namespace while the body does, and how it started."""
    process, found = namespaces.inside(_NAMESPACE, lambda: start(command))
    try:
        yield found
    finally:
        end(process)


def start(command: Command) -> tuple[subprocess.Popen[bytes], Start]:
    """Start in the namespace that this thread is in, and wait until it is ready; Transient when it does not come to that."""
    with command.log.open("ab") as output:
        began = time.perf_counter()
        process = subprocess.Popen(
            command.argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=command.folder, env=command.environment
        )
    try:
        return process, _awaited(process, command, began)
    except BaseException:
        end(process)
        raise


def _awaited(process: subprocess.Popen[bytes], command: Command, began: float) -> Start:
    served_s = 0.0
    while process.poll() is None and time.perf_counter() - began < _READY_S:
        status = _status(command.environment["MESHMARK_HTTP"])
        now_s = time.perf_counter() - began
        if status:
            served_s = served_s or now_s
        if status == http.client.OK:
            return Start(served_s, now_s, _processor_s(process.pid))
        time.sleep(_POLL_S)
    last = command.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:]
    msg = f"{command.name} was not ready after {time.perf_counter() - began:.1f} s: {' | '.join(last)}"
    raise Transient(msg)


def _status(address: str) -> int:
    """What ``/readyz`` answers; 0 while nobody does."""
    with closing(http.client.HTTPConnection(address, timeout=1)) as asked:
        try:
            asked.request("GET", "/readyz")
            return asked.getresponse().status
        except OSError:
            return 0


def _processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return sum(map(int, fields[_USED_TICKS])) / os.sysconf("SC_CLK_TCK")


FIGURE = Figure("startup", f"applier and auditor from exec to ready, {_ROUNDS} times", run, needs_root=True)
