"""``meshmark status``: what each host holds of what it is to hold, from published plans and reports."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Literal

from cyclopts import App
from msgspec import Struct
from msgspec.structs import replace
from rich.markup import escape

from schemas.drift import DriftEvent
from schemas.in_use import InUse
from schemas.plan import SnapshotHead
from schemas.status import ApplyReport, Peers, Timings, TunnelHealth, UnitReport
from schemas.values import wire_name
from services.cli import records
from services.cli.accept import summary
from services.cli.drift import contest
from services.cli.hosts import HostName, choose
from services.cli.key_change import KeyChange, under_way
from services.cli.output import EXIT_DIFFERENT, Output, console, default_format, emit, note, show_table, utc
from services.cli.session import Nats
from services.planner.state import HostId

State = Literal["applied", "waiting", "degraded", "behind", "silent", "gone"]
_COLOURS = {"applied": "green", "waiting": "yellow", "degraded": "red", "behind": "yellow", "silent": "red", "gone": "dim", "-": "dim"}
_DIGEST_SHOWN = 12


class Standing(Struct, frozen=True, rename=wire_name):
    """Where one host stands. Generations are None for a host without a plan, or without a report.

    `wanted_units` are the digests of the published plan by unit; `report` is the host's last word. `frozen` is the token of what the
    planner holds back, on whatever host, if it does. `contested` are the differences that somebody makes again and again, so that they are
    repaired later and later. `key_change` is the host's change of WireGuard keys that is under way, None for none.
    """

    cluster: str
    host: str
    state: State
    held_generation: int | None
    wanted_generation: int | None
    wanted_units: Mapping[str, str]
    report: ApplyReport | None
    frozen: str = ""
    contested: tuple[DriftEvent, ...] = ()
    key_change: KeyChange | None = None

    @property
    def is_fine(self) -> bool:
        """True when nothing is missing: the host holds its newest plan uncontested, or is to hold nothing, whatever it reported."""
        if self.state == "gone":
            return True
        if self.contested:
            return False
        return self.state == "applied" or (self.wanted_generation is not None and not self.wanted_units)


def standing(host: HostId, report: ApplyReport | None, head: SnapshotHead | None, *, in_force: bool, frozen: str = "") -> Standing:
    """Where a host stands by its last report and its published plan. `in_force`: the topology has it as a node or gateway."""
    return Standing(
        *host,
        _state(report, head, in_force=in_force),
        report.generation if report else None,
        head.generation if head else None,
        head.units if head else {},
        report,
        frozen,
    )


def _state(report: ApplyReport | None, head: SnapshotHead | None, *, in_force: bool) -> State:
    is_behind = report is not None and head is not None and report.generation < head.generation
    if report is not None and not is_behind and report.outcome != "applied":
        return report.outcome
    if report is not None and not is_behind and report.peers.waiting:
        return "waiting"
    if not in_force and head is not None and not head.units:
        # Nobody waits for a removed host: its machine is often gone before its last plan is written.
        return "gone"
    if report is None:
        return "silent"
    return "behind" if is_behind else "applied"


def register(app: App) -> None:
    """Add the command to the application."""
    app.command(status)


async def status(host: HostName = None, /, *, output: Output = None, nats: Nats | None = None) -> int:
    """Show what each host holds of its plan, or all about one HOST.

    States: *applied* holds its newest plan; *waiting* for something, as a link, or the address of an endpoint's name; *degraded*: a part
    failed; *behind*: has not reported on its newest plan; *silent*: has never reported; *gone*: removed from the topology.

    A planner that holds plans back, because too much would go at once, is said to be frozen; see `meshmark accept`.

    A tunnel that is dead leaves the routes, and is named: the host holds its plan all the same. So is a number of the plan (mark, table,
    priority, port) that somebody else has begun to use on the host, and a change of its key that is under way, with what it waits for.

    A difference that somebody makes again and again is *contested*, and repaired later and later: it is named, with the time of the next
    repair. `meshmark drift` shows all that are open.

    The exit code is 2 unless every host (or HOST) holds its newest plan uncontested and nothing is held back. A host that is to hold
    nothing does not count.

    ```sh
    meshmark status
    meshmark status rome/gateway
    meshmark status --output json | jq '.[] | select(.state != "applied")'
    ```
    """
    form = default_format(output)
    async with (nats or Nats()).connect() as broker:
        heads, reports, in_force = await records.heads(broker), await records.reports(broker), await records.hosts(broker)
        freeze, drift = await records.freeze(broker), await records.open_drift(broker)
        changes = await records.key_changes(broker)
    names = choose(heads.keys() | reports.keys() | in_force, host)
    token = freeze.token if freeze.is_on else ""
    found = [
        replace(
            standing(name, reports.get(name), heads.get(name), in_force=name in in_force, frozen=token),
            contested=tuple(event for event in drift if event.state == "contested" and (event.cluster, event.host) == name),
            key_change=changes.get(name),
        )
        for name in names
    ]
    if freeze.is_on and form != "table":
        note(f"the planner is frozen: {freeze.count} of {freeze.planned} units would go; see: meshmark status --output table")
    elif freeze.is_on:
        console.print(f"{summary(freeze)}\nplans that take something away are held back; to let them go: meshmark accept --token {token}\n")
    if form != "table":
        emit(found[0] if host else found, form)
    elif host:
        _show_one(found[0], time.time())
    else:
        show_table(("HOST", "STATE", "HELD", "WANTED", "WIREGUARD", "WHAT"), [_row(one, time.time()) for one in found])
    return 0 if all(one.is_fine for one in found) and not freeze.is_on else EXIT_DIFFERENT


def _row(one: Standing, now_s: float) -> tuple[str, ...]:
    name, wanted = f"{one.cluster}/{one.host}", _number(one.wanted_generation)
    if one.report is None:
        return (name, _coloured(one.state), "-", wanted, "-", "removed" if one.state == "gone" else "no report yet")
    errors = "; ".join(f"{unit.unit}: {unit.error}" for unit in one.report.units if unit.error)
    count = len(one.report.units)
    units = "removed" if one.state == "gone" else f"{count} unit{'' if count == 1 else 's'}"
    held = _number(one.held_generation)
    what = "; ".join(
        (
            errors or units,
            *map(contest, one.contested),
            *_dead(one.report.tunnels),
            *_shared(one.report),
            *_nameless(one.report.peers),
            *_changing(one, now_s),
        )
    )
    return (name, _coloured(one.state), held, wanted, one.report.capabilities.wireguard, escape(what))


def _dead(tunnels: TunnelHealth) -> list[str]:
    """What to say of tunnels that do not work."""
    found = [f"tunnel {item.link} withdrawn since {utc(item.since_s)}: {item.reason}" for item in tunnels.withdrawn]
    return found + [f"tunnel {item.link} dead as all are since {utc(item.since_s)}: {item.reason}" for item in tunnels.dead]


def _shared(report: ApplyReport) -> list[str]:
    """What to say of numbers that the host's plan and somebody else both use."""
    return [f"others use its {collision}" for collision in report.collisions]


def _nameless(peers: Peers) -> list[str]:
    """What to say of endpoints' names that have no address yet."""
    more = [f"and {left} more names"] if (left := peers.waiting - len(peers.waiting_for)) > 0 else []
    return [f"waiting for the address of {name}" for name in peers.waiting_for] + more


def _changing(one: Standing, now_s: float) -> list[str]:
    """What to say of a change of keys that is under way."""
    return [under_way(one.key_change, now_s)] if one.key_change is not None else []


def _show_one(one: Standing, now_s: float) -> None:
    """All about one host: a line for each fact, then a table of the units."""
    console.print(f"[bold]{one.cluster}/{one.host}[/] {_coloured(one.state)}")
    console.print(f"  generation  {_number(one.held_generation)} held, {_number(one.wanted_generation)} wanted")
    for event in one.contested:
        console.print(f"  [magenta]{escape(contest(event))}[/]")
    if one.report is not None:
        has = one.report.capabilities
        console.print(escape(f"  kernel      {has.kernel or '-'}, nftables {has.nftables or '-'}, WireGuard {has.wireguard}"))
        console.print(f"  last turn   {_operations(one.report.operations)}; {_times(one.report.timings)}")
        if (peers := one.report.peers).count:
            silent = peers.count - peers.fresh - peers.stale
            roamed = f", {peers.roamed} of them from elsewhere than planned" if peers.roamed else ""
            console.print(f"  peers       {peers.count}: {peers.fresh} shake hands{roamed}, {peers.stale} no more, {silent} never did")
        if one.report.tunnels.judged_by == "handshake":
            console.print("  tunnels     judged by handshakes only: no right to send probes (sysctl net/ipv4/ping_group_range)")
        console.print(f"  others use  {_in_use(one.report.in_use)}")
        for line in (*_dead(one.report.tunnels), *_shared(one.report), *_nameless(one.report.peers)):
            console.print(escape(f"  {line}"))
    for line in _changing(one, now_s):
        console.print(escape(f"  {line}"))
    reported = {unit.unit: unit for unit in one.report.units} if one.report else {}
    names = sorted(reported.keys() | one.wanted_units.keys())
    if names:
        console.print()
        show_table(
            ("UNIT", "STATE", "HELD", "WANTED", "ERROR"),
            [_unit_row(name, reported.get(name), one.wanted_units.get(name)) for name in names],
        )


def _in_use(seen: InUse | None) -> str:
    """The numbers that others use on a host, in one line."""
    if seen is None:
        return "not looked yet"
    marks = ", ".join(f"{use.number:#x}" for use in seen.marks)
    parts = {"marks": marks} | {
        name: ", ".join(map(str, dict.fromkeys(use.number for use in uses)))
        for name, uses in (("tables", seen.tables), ("priorities", seen.priorities), ("UDP ports", seen.ports))
    }
    return "; ".join(f"{name} {numbers}" for name, numbers in parts.items() if numbers) or "nothing that was seen"


def _unit_row(name: str, reported: UnitReport | None, wanted: str | None) -> tuple[str, ...]:
    if reported is None:
        return (escape(name), "-", "-", _digest(wanted), "not reported yet")
    return (escape(name), _coloured(reported.outcome), _digest(reported.held), _digest(wanted), escape(reported.error or "-"))


def _times(timings: Timings) -> str:
    """When the turn was reported, and how long after the plan was received each step of it ended."""
    steps = {"staged": timings.staged_s, "committed": timings.committed_s, "connected": timings.connected_s, "reported": timings.reported_s}
    after = [f"{step} after {at_s - timings.received_s:.3f} s" for step, at_s in steps.items() if at_s and timings.received_s]
    return ", ".join((f"reported at {utc(timings.reported_s)}", *after)) if timings.reported_s else "no times"


def _operations(count: int) -> str:
    return "1 operation" if count == 1 else f"{count} operations"


def _digest(text: str | None) -> str:
    return text[:_DIGEST_SHOWN] if text else "-"


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


def _coloured(state: str) -> str:
    return f"[{_COLOURS[state]}]{state}[/]"
