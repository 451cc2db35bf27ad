"""The command ``meshmark lab``."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from cyclopts import App, Parameter
from rich.console import Console
from rich.markup import escape

from schemas.topology import Topology
from services.cli.files import load
from services.cli.lab import clear, namespaces, probe, teardown
from services.cli.lab.crew import host_view
from services.cli.lab.demo import demo
from services.cli.lab.detach import Progress, in_background
from services.cli.lab.feed import Feed
from services.cli.lab.layout import find_namespace, spelled
from services.cli.lab.probe import Check
from services.cli.lab.state import Folder, find_folder
from services.cli.lab.supervisor import supervise
from services.cli.output import console as printer
from services.runtime.errors import Permanent

lab = App(name="lab", help="A whole mesh on this machine: each host and pod in a network namespace of its own. Needs root.")


def register(app: App) -> None:
    """Add the commands to the application."""
    app.command(lab)


State = Annotated[Path | None, Parameter(name="--state", help="State folder; default the running lab's, else /run/meshmark-lab.")]
Where = Annotated[str, Parameter(help="CLUSTER/HOST, CLUSTER/POD (CLUSTER/pod/POD where a host has that name, too) or underlay")]
Command = Annotated[str, Parameter(allow_leading_hyphen=True, help="What to run, after --")]
Output = Annotated[Literal["table", "json"], Parameter(alias="-o", help="A table to read, or one JSON document.")]


@lab.command
def up(
    *,
    file: Annotated[
        list[Path] | None, Parameter(name=["--file", "-f"], help="Topology files, published in this order.", negative="")
    ] = None,
    state: State = None,
    detach: Annotated[bool, Parameter(help="Come back when the lab is ready; else stay until Ctrl-C.", negative="")] = False,
) -> int:
    """Bring a lab up. Hosts and pods appear as they are admitted, now from the files, later from whoever publishes.

    A machine has one lab at a time.
    """
    _need_root()
    folder, topology, console = Folder(state) if state else find_folder(None), load(file or []), Console(stderr=True)
    if detach:
        in_background(_supervise(folder, topology), Lines(console))
        console.print(_HOW_TO_GO_ON.format(url=folder.url.read_text().strip(), folder=folder.path), highlight=False, soft_wrap=True)
    else:
        supervise(folder, topology, Lines(console))
    return 0


@lab.command
def check(*, state: State = None, output: Output = "table") -> int:
    """Send UDP and TCP between all pods of the lab that the topology joins, and compare what arrives with what it says.

    So do nodes to a pod of each peer, and a pod of each peer to every address that a cluster maps. Of a cluster that encrypts, the uplinks
    of its nodes are looked at meanwhile: nothing that should be encrypted may be in clear there.
    """
    _need_root()
    folder = _running(state)
    with Console(stderr=True).status("probing all pairs of pods"):
        checks = asyncio.run(_check(folder))
    if output == "json":
        print_checks(checks)
    else:
        show_checks(printer, checks)
    return 0 if all(item.ok for item in checks) else 1


@lab.command(name="exec")
def execute(host: Where, /, *command: Command, state: State = None) -> int:
    """Run a command on a host or in a pod of the lab.

    ```sh
    meshmark lab exec rome/worker-1 -- wg show
    meshmark lab exec rome/shop -- ip route
    ```
    """
    _need_root()
    if not command:
        msg = "nothing to run; write: meshmark lab exec HOST -- COMMAND"
        raise Permanent(msg)
    folder = _running(state)
    known = sorted(namespaces.existing())
    namespace = find_namespace(host, known)
    if namespace is None:
        msg = f"the lab has no {host}; there are {', '.join(map(spelled, known))}"
        raise Permanent(msg)
    argv = [*host_view(folder, namespace), *command]
    os.execvp(argv[0], argv)  # noqa: S606 - the command is the user's own


@lab.command
def down(*, state: State = None) -> int:
    """Take the lab down and leave nothing of it, also when its supervisor has crashed."""
    _need_root()
    folder = find_folder(state)
    found = teardown.down(folder)
    Console(stderr=True).print("the lab is down" if found else f"no lab is up in {folder.path}", highlight=False)
    return 0


@lab.command(name="demo")
def guided(
    *,
    file: Annotated[
        list[Path] | None, Parameter(name=["--file", "-f"], help="Topology files; default two clusters that are joined.", negative="")
    ] = None,
    keep: Annotated[bool, Parameter(help="Leave the lab up at the end.", negative="")] = False,
    state: State = None,
    output: Output = "table",
) -> int:
    """The guided tour, about a minute: a mesh comes up, is checked, broken by hand, repaired, changed under traffic, and taken down.

    Of one's own files, what they have is shown: tunnels are added and taken away where clusters are joined, uplinks are looked at where
    nodes encrypt.

    With JSON, the one document of all checks goes to the standard output, and the story to the standard error.
    """
    _need_root()
    story = demo(Folder(state) if state else find_folder(None), Console(stderr=output == "json"), file or (), keep=keep)
    if output == "json":
        print_checks(story.checks)
    return 0 if story.ok else 1


_HOW_TO_GO_ON = """\
[bold green]the lab is ready[/]
  NATS     {url} (no credentials needed; {folder}/creds has a publisher and a reader)
  logs     {folder}/log
  check    meshmark lab check
  look in  meshmark lab exec CLUSTER/HOST -- nft list ruleset
  end      meshmark lab down"""


class Lines:
    """Progress as lines on a console."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def say(self, text: str) -> None:
        self._console.print(f"[dim]lab:[/] {escape(text)}", highlight=False)

    def ready(self) -> None:
        self.say("ready")


def print_checks(checks: list[Check]) -> None:
    """One JSON document with every check."""
    document = {"ok": all(item.ok for item in checks), "checks": checks}
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n")


def show_checks(console: Console, checks: list[Check]) -> None:
    """One line per check, and one that sums them up."""
    width = max((len(item.name) for item in checks), default=0)
    for item in checks:
        mark = "[green]✓[/]" if item.ok else "[bold red]✗[/]"
        console.print(f"{mark} {escape(item.name.ljust(width))}  [dim]{escape(item.detail)}[/]", highlight=False, soft_wrap=True)
    failed = sum(not item.ok for item in checks)
    words = f"[bold red]{failed} of {len(checks)} probes failed[/]" if failed else f"[green]all {len(checks)} probes passed[/]"
    console.print(words if checks else "there are no two pods that the topology joins", highlight=False)


def _supervise(folder: Folder, topology: list[Topology]) -> Callable[[Progress], None]:
    return lambda progress: supervise(folder, topology, progress, log=folder.log("lab"))


async def _check(folder: Folder) -> list[Check]:
    async with Feed.open(folder.url.read_text(encoding="ascii").strip(), "lab-check") as feed:
        topology = feed.board.as_seen()
        with clear.watching(topology) as watch:
            checks = await probe.check(topology, feed.board.chosen)
        return [*checks, *watch.checks()]


def _running(state: Path | None) -> Folder:
    folder = find_folder(state)
    record = folder.read()
    if record is None or not record.supervisor.alive:
        msg = f"no lab is up in {folder.path}; start one with: meshmark lab up -f examples/two-clusters.yaml --detach"
        raise Permanent(msg)
    return folder


def _need_root() -> None:
    if os.geteuid() != 0:
        msg = "the lab makes network namespaces: run it as root"
        raise Permanent(msg)
