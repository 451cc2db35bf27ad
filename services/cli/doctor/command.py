"""The command: gather a survey, judge it, print."""

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Parameter
from msgspec import Struct
from rich.markup import escape

from schemas.topology import Overlay
from services.cli.doctor import abilities, collisions
from services.cli.doctor.check import Check, Role
from services.cli.output import EXIT_ERROR, Output, default_format, emit, show_table
from services.kernel.survey.gather import survey
from services.planner import layout

_COLOURS = {"ok": "green", "warning": "yellow", "problem": "red", "unknown": "magenta"}
_FIRST_TUNNEL_PORT = 51840

RoleName = Annotated[Role, Parameter(help="What this host is to be: a gateway uses marks, tunnels and tables that a node does not")]
OverlayName = Annotated[Overlay, Parameter(help="the overlay of this host's cluster")]
Ports = Annotated[
    list[int], Parameter(name="--port", negative=(), help="UDP port of a tunnel here; may be repeated [default: 51840, a peering's first]")
]


class Examination(Struct, frozen=True):
    """What all checks say; `ok` is False when one found a problem."""

    ok: bool
    checks: tuple[Check, ...]


def register(app: App) -> None:
    """Add the command to the application."""
    app.command(doctor)


def doctor(
    *,
    role: RoleName = "gateway",
    overlay: OverlayName = "vxlan",
    port: Ports = [],  # noqa: B006 - cyclopts reads the default
    output: Output = None,
) -> int:
    """Look whether meshmark can work on this host, in this network namespace, and whom it would meet there.

    It changes nothing and loads no kernel module: features are tried in a scratch network namespace that ends with the question, where
    that is allowed. Run it as root: what cannot be looked at is called unknown, and is no problem.

    The exit code is 1 when there is a problem.

    ```sh
    meshmark doctor
    meshmark doctor --role node
    ip netns exec gateway meshmark doctor --port 51840 --port 51841
    ```
    """
    ports = [layout.OVERLAY_PORT[overlay], *((port or [_FIRST_TUNNEL_PORT]) if role == "gateway" else [])]
    found = survey(collisions.tables(role), ports)
    checks = (*abilities.checks(found, role, overlay), *collisions.checks(found, role))
    result = Examination(all(check.verdict != "problem" for check in checks), checks)
    form = default_format(output)
    if form == "table":
        show_table(("CHECK", "VERDICT", "DETAIL", "WHAT TO DO"), map(_row, checks))
    else:
        emit(result, form)
    return 0 if result.ok else EXIT_ERROR


def _row(check: Check) -> tuple[str, str, str, str]:
    return (escape(check.name), f"[{_COLOURS[check.verdict]}]{check.verdict}[/]", escape(check.detail), escape(check.advice))
