"""``meshmark plan``: what each host would hold, on paper, and how that differs from what it holds."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter
from rich.markup import escape

from schemas import codec, subjects
from schemas.plan import HostPlan, diff_units
from schemas.topology import PublicKey, Topology
from services.cli import files
from services.cli.objects import admitted
from services.cli.output import EXIT_DIFFERENT, EXIT_ERROR, Format, console, default_format, emit, fail, note
from services.cli.render import plan_text
from services.cli.session import Nats
from services.planner.allocate import NUMBER, Allocations, Number, Rollout
from services.planner.compile import compile_all
from services.planner.core import Core, Said, settle_rollouts
from services.planner.state import HostId, State
from services.runtime.broker import Broker
from services.runtime.errors import MeshmarkError
from services.runtime.plans import fetch_plan

Files = Annotated[list[Path], Parameter(name=["--file", "-f"], negative=(), help="Topology file; without any, the topology in force")]
Against = Annotated[
    list[Path], Parameter(negative=(), help="With --diff: compare with the plans of these files instead of the running hosts")
]


def register(app: App) -> None:
    """Add the command to the application."""
    app.command(plan)


async def plan(
    host: str | None = None,
    *,
    file: Files = [],  # noqa: B006 - cyclopts reads the default
    diff: bool = False,
    against: Against = [],  # noqa: B006
    output: Format | None = None,
    nats: Nats | None = None,
) -> int:
    """Show what each host (or one HOST, as rome/gw) must hold: nft text, ip lines, WireGuard configuration.

    With files, nothing but the files is needed; public keys are not known then, so WireGuard peers are left out. With --diff, show how the
    plan differs from what the running hosts hold; the exit code is then 2 on a difference.
    """
    chosen = _host(host)
    if diff and not against:
        async with (nats or Nats()).connect() as broker:
            wanted = await _live_plans(broker, files.load(file))
            return await _diff_running(broker, _only(wanted, chosen), output)
    if file:
        wanted = _paper_plans(files.load(file))
    else:
        async with (nats or Nats()).connect() as broker:
            wanted = await _live_plans(broker, [])
    wanted = _only(wanted, chosen)
    if chosen is not None and not wanted:
        fail(f"no host {chosen} in the topology")
        return EXIT_ERROR
    if diff:
        other = _only(_paper_plans(files.load(against)), chosen)
        return _show_differences(
            {str(name): _between(other.get(name), wanted.get(name)) for name in sorted(wanted.keys() | other.keys())}, output
        )
    if (output or "table") == "table":
        sys.stdout.write("\n".join(plan_text(found) for _, found in sorted(wanted.items())))
    else:
        emit({str(name): found.objects() for name, found in sorted(wanted.items())}, output or default_format(None))
    return 0


def _paper_plans(items: Iterable[Topology]) -> dict[HostId, HostPlan]:
    """Plans of a topology on paper, after all rollouts. An object that would be refused is an error."""
    core = Core()
    said = [Said((item.kind.lower(), item.home, item.name), codec.encode(item), number) for number, item in enumerate(items, 1)]
    outcome = core.hear(said)
    admitted_refs = {entry.ref for entry in outcome.admitted}
    for refusal in outcome.refused:
        ref = f"{refusal.kind}/{refusal.cluster}/{refusal.name}"
        if ref not in admitted_refs:
            where = f"{refusal.field}: " if refusal.field else ""
            msg = f"{ref} would be refused: {where}{refusal.reason}"
            raise MeshmarkError(msg)
    settle_rollouts(core.state, core.allocations)
    return compile_all(core.state, core.allocations)


async def _live_plans(broker: Broker, items: list[Topology]) -> dict[HostId, HostPlan]:
    """Plans of these objects, or of the topology in force, with the public keys and allocations that are in force."""
    in_force = [item async for item in admitted(broker)]
    keys = [item for item in in_force if isinstance(item, PublicKey)]
    allocations = Allocations()
    async for message in broker.replay("ALLOCATION", f"{subjects.ALLOCATION}.>"):
        what, cluster, name = subjects.parse(message.subject).tokens
        if what == NUMBER:
            allocations.put_number(HostId(cluster, name), codec.decode(message.data, Number))
        else:
            allocations.rollouts[cluster, name] = codec.decode(message.data, Rollout)
    if not items:
        state = State(in_force)
        return compile_all(state, allocations)
    _paper_plans(items)
    state = State(items)
    for key in keys:
        if key.ref not in state.objects and state.host(HostId(key.cluster, key.name)) is not None:
            state.put(key)
    for item in items:
        allocations.allocate(state, item)
    settle_rollouts(state, allocations)
    return compile_all(state, allocations)


async def _diff_running(broker: Broker, wanted: dict[HostId, HostPlan], output: Format | None) -> int:
    """Compare plans with what hosts hold: their published plan, and their kernel's differences from that."""
    found: dict[str, list[str]] = {}
    for name, plan_wanted in sorted(wanted.items()):
        current = await fetch_plan(broker, *name)
        lines = _between(current.plan if current else None, plan_wanted)
        try:
            answer = await broker.request(subjects.command(*name, "diff"), b"", 10.0)
            lines += [f"~ {item['key']}  (kernel: {item['found'] or 'not there'})" for item in codec.decode(answer, list[dict[str, str]])]
        except MeshmarkError as error:
            if plan_wanted.units or current is not None:
                note(f"{name}: {error}")
                lines.append(f"? {name}: the applier does not answer, so its kernel is unknown")
        found[str(name)] = lines
    return _show_differences(found, output)


def _between(old: HostPlan | None, new: HostPlan | None) -> list[str]:
    before, after = (old.objects() if old else {}), (new.objects() if new else {})
    lines = []
    for step in diff_units(old.units if old else {}, new.units if new else {}):
        lines += [f"- {key}" for key in step.drop]
        lines += [f"{'~' if entry.key in before else '+'} {entry.key}" for entry in step.put if before.get(entry.key) != after[entry.key]]
    return lines


def _show_differences(found: dict[str, list[str]], output: Format | None) -> int:
    different = any(found.values())
    if (output or "table") == "table":
        colours = {"+": "green", "-": "red", "~": "yellow", "?": "yellow"}
        for host, lines in found.items():
            console.print(f"{host}: {'no difference' if not lines else f'{len(lines)} differences'}")
            for line in lines:
                console.print(f"  [{colours[line[0]]}]{escape(line)}[/]")
    else:
        emit({"different": different, "hosts": found}, output or "json")
    return EXIT_DIFFERENT if different else 0


def _host(text: str | None) -> HostId | None:
    if text is None:
        return None
    cluster, _, name = text.partition("/")
    return HostId(cluster, name)


def _only(plans: dict[HostId, HostPlan], host: HostId | None) -> dict[HostId, HostPlan]:
    return plans if host is None else {name: found for name, found in plans.items() if name == host}
