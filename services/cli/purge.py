"""``meshmark purge``: take all that is meshmark's out of this network namespace."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, get_args

from cyclopts import App, Parameter
from msgspec import Struct
from rich.markup import escape

from schemas.host_objects import Layer
from schemas.plan import HostPlan
from schemas.status import ApplyReport
from schemas.values import Name, wire_name
from services.applier.core import Applier
from services.cli.output import EXIT_ERROR, Format, Output, console, default_format, emit, errors, fail
from services.kernel.linux import LinuxKernel
from services.kernel.port import Kernel
from services.kernel.privilege import CAP_NET_ADMIN, has_capability
from services.runtime import neighbour
from services.runtime.errors import Conflict, MeshmarkError, Permanent
from services.runtime.settings import from_environment

_NOTHING = HostPlan(Name("this"), Name("host"), {})
_MARKER = "table meshmark.marker"

DryRun = Annotated[bool, Parameter(negative=(), help="List what would go, and remove nothing")]
Yes = Annotated[bool, Parameter(name=["--yes", "-y"], negative=(), help="Do not ask")]
StateDir = Annotated[
    str | None,
    Parameter(help="The applier's folder, which keeps sysctls' old values [default: MESHMARK_STATE_DIR, else /var/lib/meshmark]"),
]


class Purged(Struct, frozen=True, rename=wire_name):
    """Keys of what was removed (with `dry_run`: would be), and of what could not be, with the first reason."""

    dry_run: bool
    removed: tuple[str, ...]
    left: tuple[str, ...] = ()
    error: str = ""


def register(app: App) -> None:
    """Add the command to the application."""
    app.command(purge)


async def purge(*, dry_run: DryRun = False, yes: Yes = False, state_dir: StateDir = None, output: Output = None) -> int:
    """Remove all that is meshmark's from this network namespace: what the applier made, in the order that lets nothing leak.

    That is nftables tables called meshmark.*, routes and policy rules of protocol 77, links with the alias meshmark; and sysctls get
    their old values back. Nothing else is touched, but what others put on these links (addresses, routes) goes with them. It refuses
    while an applier serves the namespace, and needs CAP_NET_ADMIN. Files stay: the WireGuard key is in the applier's folder.

    The exit code is 1 when something could not be removed.

    ```sh
    meshmark purge --dry-run
    systemctl stop meshmark-applier meshmark-auditor && meshmark purge
    ip netns exec gateway meshmark purge --yes --state-dir /srv/gateway
    ```
    """
    form = default_format(output)
    if not has_capability(CAP_NET_ADMIN):  # libnftables would complain on its own, in words of its own
        msg = "CAP_NET_ADMIN is needed in this network namespace; run it as root"
        raise Permanent(msg)
    folder = Path(from_environment({"state_dir": state_dir}).state_dir)
    # The kernel's sockets are for one thread, which is in the namespace that the command was started in.
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="kernel") as thread:
        loop = asyncio.get_running_loop()
        async with contextlib.AsyncExitStack() as stack:
            if not dry_run:
                await stack.enter_async_context(_alone())
            kernel = await loop.run_in_executor(thread, LinuxKernel, folder)
            stack.callback(kernel.close)
            found = await loop.run_in_executor(thread, held, kernel)
            if dry_run or not found:
                return _show(Purged(dry_run, found), form)
            if not yes:
                _ask(found)
            return _show(await loop.run_in_executor(thread, remove, kernel, found), form)


def held(kernel: Kernel) -> tuple[str, ...]:
    """Keys of all that is ours in the kernel, by layer; sysctls are those whose old value is kept."""
    order: list[str] = list(get_args(Layer))
    found = sorted(kernel.read({}).values(), key=lambda item: (order.index(item.layer), item.key))
    marker = [_MARKER] if kernel.marker() is not None else []
    return (*(item.key for item in found), *marker)


def remove(kernel: Kernel, found: Collection[str]) -> Purged:
    """Remove what is ours, as far as that goes, and look again."""
    report = Applier(kernel, time.time).apply(_NOTHING, 0, 0)
    left = held(kernel)
    return Purged(dry_run=False, removed=tuple(key for key in found if key not in left), left=left, error=_reason(report) if left else "")


def _reason(report: ApplyReport) -> str:
    return next((unit.error for unit in report.units if unit.error), "somebody makes it anew; stop that first")


@contextlib.asynccontextmanager
async def _alone() -> AsyncIterator[None]:
    """Keep appliers out of this network namespace while the body runs."""
    async with contextlib.AsyncExitStack() as stack:
        try:
            await stack.enter_async_context(neighbour.serving({}))
        except Conflict as error:
            msg = "an applier (or another purge) serves this network namespace, and would make everything anew; stop it first"
            raise Permanent(msg) from error
        yield


def _ask(found: Collection[str]) -> None:
    """Ask on the terminal whether all this may go; MeshmarkError when it may not, Permanent when there is nobody to ask."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        msg = f"{_count(found)} would be removed; give --yes to do so, or --dry-run to see them"
        raise Permanent(msg)
    for key in found:
        errors.print(f"  {escape(key)}")
    errors.print(f"Remove {_count(found)} from this network namespace? (y/N) ", end="")
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        msg = "nothing was removed"
        raise MeshmarkError(msg)


def _show(result: Purged, form: Format) -> int:
    if form != "table":
        emit(result, form)
    elif not result.removed and not result.left:
        console.print("there is nothing of meshmark in this network namespace")
    else:
        verb = "would remove" if result.dry_run else "removed"
        for key in result.removed:
            console.print(f"{verb} {escape(key)}")
        console.print(f"{verb} {_count(result.removed)}")
    if result.left:
        fail(f"{_count(result.left)} could not be removed ({', '.join(result.left)}): {result.error}")
    return EXIT_ERROR if result.left else 0


def _count(keys: Collection[str]) -> str:
    return "1 object" if len(keys) == 1 else f"{len(keys)} objects"
