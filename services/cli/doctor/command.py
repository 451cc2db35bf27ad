"""The command: gather a survey, judge it, print."""

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Parameter
from msgspec import Struct
from rich.markup import escape

from schemas.topology import Encryption, Marks, Overlay, WireguardSettings
from services.cli.doctor import abilities, collisions
from services.cli.doctor.check import Check, Role
from services.cli.doctor.collisions import Plans
from services.cli.numbers import Whole
from services.cli.output import EXIT_ERROR, Output, default_format, emit, show_table
from services.kernel.survey.gather import survey
from services.planner import layout

_COLOURS = {"ok": "green", "warning": "yellow", "problem": "red", "unknown": "magenta"}
_FIRST_TUNNEL_PORT = 51840
_MASK = Marks().mask

RoleName = Annotated[Role, Parameter(help="What this host is to be: a gateway uses marks, tunnels and tables that a node does not")]
OverlayName = Annotated[Overlay, Parameter(help="the overlay of this host's cluster")]
EncryptionName = Annotated[
    Encryption, Parameter(help="the encryption of a node's cluster: what it needs is then no warning, but a problem")
]
Mask = Annotated[Whole, Parameter(help="the mask of the cluster's marks", show_default=hex)]
Ports = Annotated[
    list[Whole],
    Parameter(
        name="--port",
        negative=(),
        help="UDP port of a tunnel here; may be repeated [default: 51840, a peering's first]. On a node that of its WireGuard device "
        "[default: 51871]; the next one is looked at, too",
    ),
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
    encryption: EncryptionName = "none",
    marks: Mask = _MASK,
    port: Ports = [],  # noqa: B006 - cyclopts reads the default
    output: Output = None,
) -> int:
    """Look whether meshmark can work on this host, in this network namespace, and whom it would meet there.

    It changes nothing and loads no kernel module: features are tried in a scratch network namespace that ends with the question, where
    that is allowed. Run it as root: what cannot be looked at is called unknown, and is no problem.

    The exit code is 1 when there is a problem.

    ```sh
    meshmark doctor
    meshmark doctor --role node --encryption wireguard
    ip netns exec gateway meshmark doctor --port 51840 --port 51841
    ```
    """
    plans = Plans(role, encryption, marks, _ports(role, port))
    found = survey(plans.table_spans, [layout.OVERLAY_PORT[overlay], *plans.ports])
    checks = (*abilities.checks(found, role, overlay, encrypts=plans.encrypts), *collisions.checks(found, plans))
    result = Examination(all(check.verdict != "problem" for check in checks), checks)
    form = default_format(output)
    if form == "table":
        show_table(("CHECK", "VERDICT", "DETAIL", "WHAT TO DO"), map(_row, checks))
    else:
        emit(result, form)
    return 0 if result.ok else EXIT_ERROR


def _ports(role: Role, given: list[int]) -> tuple[int, ...]:
    """The ports of tunnels; of a node that of its device, and the one beside it while keys change."""
    if role == "gateway":
        return tuple(given or [_FIRST_TUNNEL_PORT])
    first = given[0] if given else WireguardSettings().port
    return (first, first + 1)


def _row(check: Check) -> tuple[str, str, str, str]:
    return (escape(check.name), f"[{_COLOURS[check.verdict]}]{check.verdict}[/]", escape(check.detail), escape(check.advice))
