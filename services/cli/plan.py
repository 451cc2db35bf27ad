"""``meshmark plan``: what each host would hold, on paper, and how that differs from what it holds."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter
from rich.markup import escape

from schemas import codec
from schemas.plan import HostPlan, diff_units
from schemas.topology import PublicKey, Topology
from services.cli import files, records
from services.cli.hosts import HostName, asked, choose
from services.cli.output import EXIT_DIFFERENT, Format, console, emit
from services.cli.render import plan_text
from services.cli.session import Nats
from services.planner.compile import compile_all
from services.planner.core import Core, Said, settle_rollouts
from services.planner.state import HostId, State
from services.runtime.broker import Broker
from services.runtime.errors import MeshmarkError, Permanent
from services.runtime.plans import fetch_plan

_ANSWER_S = 10.0
_ANSWERED_MAX = 500
"""An applier tells no more differences than this."""

Files = Annotated[
    list[Path], Parameter(name=["--file", "-f"], negative=(), help="Topology file, may be repeated; without any, the topology in force")
]
Diff = Annotated[bool, Parameter(negative=(), help="Show how the plan differs from what the running hosts hold")]
Against = Annotated[
    list[Path], Parameter(negative=(), help="With --diff: compare with the plans of these files instead of the running hosts")
]
Output = Annotated[Format | None, Parameter(alias="-o", help="table is text to read, and the default; json and yaml list the objects")]


def register(app: App) -> None:
    """Add the command to the application."""
    app.command(plan)


async def plan(
    host: HostName = None,
    /,
    *,
    file: Files = [],  # noqa: B006 - cyclopts reads the default
    diff: Diff = False,
    against: Against = [],  # noqa: B006
    output: Output = None,
    nats: Nats | None = None,
) -> int:
    """Show what each host (or one HOST) must hold: nft text, ip lines, WireGuard configuration.

    With files, nothing but the files is needed; public keys are not known then, so WireGuard peers are left out. With --diff, show how the
    plan differs from what the running hosts hold, down to their kernels: + is to come, - to go, ~ to change, ? is not known.

    The exit code is 2 on a difference, and where it is not known whether there is one.

    ```sh
    meshmark plan rome/gateway
    meshmark plan -f topology.yaml rome/gateway
    meshmark plan -f topology.yaml --diff       # what publishing would change
    meshmark plan -f new.yaml --diff --against old.yaml    # without any host
    ```
    """
    if against and not diff:
        msg = "--against is for --diff; give both"
        raise Permanent(msg)
    items, others = files.load(file), files.load(against)
    if file and not (diff and not against):
        wanted = paper_plans(items)
        return _show_against(wanted, others, host, output) if diff else _show_plans(wanted, host, output)
    async with (nats or Nats()).connect() as broker:
        wanted = await _live_plans(broker, items)
        if not diff:
            return _show_plans(wanted, host, output)
        if against:
            return _show_against(wanted, others, host, output)
        # A host that the files do not have any more is to hold nothing, which is a difference until it does; then it is nobody's host.
        names = choose(wanted.keys() | (await records.heads(broker)).keys(), host)
        found = {name: await _from_running(broker, name, wanted.get(name)) for name in names}
        return _show_differences({name: lines for name, lines in found.items() if lines or host or name in wanted}, output)


def paper_plans(items: Iterable[Topology]) -> dict[HostId, HostPlan]:
    """Plans of a topology on paper, after all rollouts. An object that would be refused is an error."""
    core = Core()
    said = [Said((item.kind.lower(), item.home, item.name), codec.encode(item), number) for number, item in enumerate(items, 1)]
    outcome = core.hear(said)
    admitted_refs = {entry.ref for entry in outcome.admitted}
    for refusal in outcome.refused:
        ref = f"{refusal.kind}/{refusal.cluster}/{refusal.name}"
        if ref not in admitted_refs:
            msg = f"{ref} would be refused: {refusal.what}"
            raise MeshmarkError(msg)
    settle_rollouts(core.state, core.allocations)
    return compile_all(core.state, core.allocations)


async def _live_plans(broker: Broker, items: list[Topology]) -> dict[HostId, HostPlan]:
    """Plans of these objects, or of the topology in force, with the public keys and allocations that are in force."""
    in_force = await records.admitted(broker)
    allocations = await records.allocations(broker)
    if not items:
        return compile_all(State(in_force, allocations.remaps), allocations)
    paper_plans(items)
    state = State(items, allocations.remaps)
    for key in in_force:
        if isinstance(key, PublicKey) and key.ref not in state.objects and state.host(HostId(key.cluster, key.name)) is not None:
            state.put(key)
    allocations.allocate(state, items)
    settle_rollouts(state, allocations)
    return compile_all(state, allocations)


async def _from_running(broker: Broker, host: HostId, wanted: HostPlan | None) -> list[str]:
    """How a plan (None: nothing) differs from what the host holds: from its published plan, and its kernel from that."""
    current = await fetch_plan(broker, *host)
    held = current.plan if current else None
    lines = _between(held, wanted)
    try:
        answer = await asked(broker, host, "diff", _ANSWER_S)
    except MeshmarkError as error:
        # The kernel of a host that holds nothing and is to hold nothing is nobody's business: its machine may be gone.
        if (held and held.units) or (wanted and wanted.units):
            lines.append(f"? its kernel is not known: {error}")
        return lines
    told = codec.decode(answer, list[dict[str, str]])
    lines += [f"~ {item['key']}  (kernel: {item['found'] or 'not there'})" for item in told]
    if len(told) >= _ANSWERED_MAX:
        lines.append(f"? the applier tells at most {_ANSWERED_MAX} differences of its kernel; there may be more")
    return lines


def _between(old: HostPlan | None, new: HostPlan | None) -> list[str]:
    before, after = (old.objects() if old else {}), (new.objects() if new else {})
    lines = []
    for step in diff_units(old.units if old else {}, new.units if new else {}):
        lines += [f"- {key}" for key in step.drop]
        lines += [f"{'~' if entry.key in before else '+'} {entry.key}" for entry in step.put if before.get(entry.key) != after[entry.key]]
    return lines


def _show_plans(plans: dict[HostId, HostPlan], host: str | None, output: Format | None) -> int:
    names = choose(plans, host)
    if (output or "table") == "table":
        sys.stdout.write("\n".join(plan_text(plans[name]) for name in names))
    else:
        emit({str(name): plans[name].objects() for name in names}, output or "json")
    return 0


def _show_against(wanted: dict[HostId, HostPlan], others: Iterable[Topology], host: str | None, output: Format | None) -> int:
    """Compare with the plans of other files."""
    held = paper_plans(others)
    names = choose(wanted.keys() | held.keys(), host)
    return _show_differences({name: _between(held.get(name), wanted.get(name)) for name in names}, output)


def _show_differences(found: dict[HostId, list[str]], output: Format | None) -> int:
    different = any(found.values())
    if (output or "table") == "table":
        colours = {"+": "green", "-": "red", "~": "yellow", "?": "yellow"}
        for host, lines in found.items():
            console.print(f"{host}: {_count(lines)}")
            for line in lines:
                console.print(f"  [{colours[line[0]]}]{escape(line)}[/]")
    else:
        emit({"different": different, "hosts": {str(host): lines for host, lines in found.items()}}, output or "json")
    return EXIT_DIFFERENT if different else 0


def _count(lines: list[str]) -> str:
    """How many differences the lines tell; those with a question mark tell what is not known."""
    count = sum(not line.startswith("?") for line in lines)
    words = "no difference" if count == 0 else "1 difference" if count == 1 else f"{count} differences"
    return f"{words}, as far as is known" if count < len(lines) else words
