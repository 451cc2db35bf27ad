"""``meshmark explain``: from an object of a plan back to the topology events that it comes from, and the other way round."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Annotated, get_args

from cyclopts import App, Parameter
from msgspec import Struct
from msgspec.structs import replace
from rich.markup import escape

from schemas import subjects
from schemas.drift import DriftEvent
from schemas.host_objects import Layer
from schemas.plan import HostPlan
from schemas.topology import Topology, decode_topology
from schemas.values import wire_name
from services.cli import files, records
from services.cli.hosts import choose
from services.cli.objects import parse_reference, summary
from services.cli.origin import Origin, Place, Standing, descendants, drift_of, is_reference, near, places, refuse_alert, standing
from services.cli.output import Format, Output, console, default_format, emit, show_table
from services.cli.plan import Files, paper_plans
from services.cli.render import object_lines
from services.cli.session import Nats
from services.planner.state import HostId
from services.runtime import events
from services.runtime.broker import Broker
from services.runtime.errors import Permanent
from services.runtime.plans import Update, fetch_plan

Words = Annotated[
    str,
    Parameter(
        help="A key as plan, diff and drift print it, in quotes or as several words; or KIND/CLUSTER/NAME",
        negative=(),
        allow_leading_hyphen=True,
    ),
]
Host = Annotated[str | None, Parameter(help="CLUSTER/NAME of one host; without it, all hosts whose plan has the object")]


class Explained(Struct, frozen=True, rename=wire_name):
    """An object of plans: where it stands, and the topology objects behind it."""

    key: str
    places: tuple[Place, ...]
    origins: tuple[Origin, ...]


class Followed(Struct, frozen=True, rename=wire_name):
    """A topology object, and the keys of what comes from it by host and layer."""

    origin: Origin
    hosts: Mapping[str, Mapping[str, list[str]]]


def register(app: App) -> None:
    """Add the command to the application."""
    app.command(explain)


async def explain(
    *words: Words,
    host: Host = None,
    file: Files = [],  # noqa: B006 - cyclopts reads the default
    output: Output = None,
    nats: Nats | None = None,
) -> int:
    """Say where an object on a host comes from: the topology objects behind it, and the messages that brought them.

    For a key, as `drift` and `plan --diff` print it: its unit and value on each host, whether the host reports that it holds it, drift that
    is open for it, and each topology object behind it with the message that said so. For a topology object: what comes of it, by host
    and layer. With files, plans are made from them, and nothing is known of messages, reports and drift. An alert of `drift` about packets
    in clear has no object in a plan; it is said what is behind it.

    ```sh
    meshmark explain route 7002 10.200.1.0/24 0
    meshmark explain 'rule 900 fwmark 0xff00/0xff00 iif - to -'
    meshmark explain Peering/rome/rome-milan
    meshmark explain -f topology.yaml link mt.0 --host rome/gateway
    ```
    """
    text = " ".join(" ".join(words).split())
    if not text:
        msg = "nothing to explain: give a key, as route 7002 10.200.1.0/24 0, or a topology object, as Peering/rome/rome-milan"
        raise Permanent(msg)
    if strange := [word for word in words if word.startswith("--")]:
        msg = f"Unknown option: {strange[0]}. See: meshmark explain --help"
        raise Permanent(msg)
    form = default_format(output)
    if file:
        items = {item.ref: item for item in files.load(file)}
        return _explain_on_paper(items, text, host, form)
    async with (nats or Nats()).connect() as broker:
        return await _explain_running(broker, text, host, form)


def _explain_on_paper(items: Mapping[str, Topology], text: str, host: str | None, form: Format) -> int:
    """Explain by plans of these objects alone."""
    plans = paper_plans(items.values())
    plans = {name: plans[name] for name in choose(plans, host)}
    if not is_reference(text):
        refuse_alert(text, ())
        found = places(plans, text)
        return _show_explained(Explained(text, tuple(found), tuple(Origin(ref, items.get(ref)) for ref in _refs(found))), form)
    ref = parse_reference(text)
    if ref not in items:
        msg = f"no {ref} in these files; {near(ref, items)}"
        raise Permanent(msg)
    return _show_followed(_followed(Origin(ref, items[ref]), plans), form, in_full=host is not None)


async def _explain_running(broker: Broker, text: str, host: str | None, form: Format) -> int:
    """Explain by the published plans, with messages, reports and drift."""
    updates = await _published(broker, host)
    plans = {name: update.plan for name, update in updates.items()}
    if is_reference(text):
        origin = await _origin(broker, parse_reference(text))
        followed = _followed(origin, plans)
        if origin.value is None and not followed.hosts:
            known = {item.ref for item in await records.admitted(broker)}
            msg = f"{origin.ref} is not admitted, and nothing comes from it; {near(origin.ref, known)}"
            raise Permanent(msg)
        return _show_followed(followed, form, in_full=host is not None)
    reports, drift = await records.reports(broker), await records.open_drift(broker)
    refuse_alert(text, drift)
    found = []
    for place in places(plans, text):
        name = HostId(place.cluster, place.host)
        stands = standing(plans[name], place.unit, reports.get(name))
        event = drift_of(name, text, place.value, drift)
        found.append(replace(place, generation=updates[name].generation, standing=stands, drift=event))
    origins = [await _origin(broker, ref) for ref in _refs(found)]
    return _show_explained(Explained(text, tuple(found), tuple(origins)), form)


async def _published(broker: Broker, host: str | None) -> dict[HostId, Update]:
    """The published plans of all hosts, or of the one that is named."""
    found = {name: await fetch_plan(broker, *name) for name in choose((await records.heads(broker)).keys(), host)}
    return {name: update for name, update in found.items() if update is not None}


async def _origin(broker: Broker, ref: str) -> Origin:
    """The object as it is admitted, and the message that it was admitted by; that message is kept for some days only."""
    words = ref.split("/")
    message = await broker.last("STATE", subjects.state(*words))
    if message is None or not message.data:
        return Origin(ref)
    sequence = int(message.headers.get(events.SEQUENCE, "0")) or None
    published_s = None
    async for said in broker.replay("TOPOLOGY", subjects.topology(*words)):
        if said.sequence == sequence:
            published_s = said.stored_s
    return Origin(ref, decode_topology(message.data), sequence, published_s, message.stored_s)


def _refs(found: Iterable[Place]) -> list[str]:
    return sorted({ref for place in found for ref in place.because})


def _followed(origin: Origin, plans: Mapping[HostId, HostPlan]) -> Followed:
    return Followed(origin, {str(host): layers for host, layers in descendants(plans, origin.ref).items()})


# Printing ----------------------------------------------------------------------------------------------------------------------------


def _show_explained(found: Explained, form: Format) -> int:
    if form != "table":
        emit(found, form)
        return 0
    console.print(f"[bold]{escape(found.key)}[/]")
    for place in found.places:
        plan = "" if place.generation is None else f", generation {place.generation}"
        console.print(f"\n{place.cluster}/{place.host}  [dim]unit {escape(place.unit)}{plan}[/]")
        _print_lines("value", map(escape, object_lines(place.value)))
        _print_lines("because", [escape(", ".join(place.because)) or "-"])
        if place.standing is not None:
            _print_lines("held", [_held(place.standing)])
            _print_lines("drift", _drift(place.drift))
    for origin in found.origins:
        console.print()
        _print_origin(origin)
    return 0


def _show_followed(found: Followed, form: Format, *, in_full: bool) -> int:
    if form != "table":
        emit(found, form)
        return 0
    _print_origin(found.origin)
    console.print()
    if not found.hosts:
        console.print("no object of a plan comes from it")
    elif in_full:
        for layers in found.hosts.values():
            for keys in layers.values():
                for key in keys:
                    console.print(escape(key))
    else:
        columns = [layer for layer in get_args(Layer) if any(layer in one for one in found.hosts.values())]
        rows = [(escape(host), *(str(len(one.get(layer, ()))) for layer in columns)) for host, one in found.hosts.items()]
        show_table(("HOST", *(layer.upper() for layer in columns)), rows)
    return 0


def _print_origin(origin: Origin) -> None:
    console.print(f"[bold]{escape(origin.ref)}[/]  [dim]{_message(origin)}[/]")
    if origin.value is not None:
        console.print(f"  {escape(summary(origin.value))}")


def _message(origin: Origin) -> str:
    """Which message the object was admitted by, and when it was published and admitted."""
    if origin.value is None:
        return "not admitted now"
    if origin.admitted_s is None:
        return "from the files"
    said = f"message {origin.sequence} of TOPOLOGY" if origin.sequence else "admitted by a message that is not known"
    published = f", published at {_time(origin.published_s)}" if origin.published_s else ", not kept any more"
    return f"{said}{published}, admitted at {_time(origin.admitted_s)}"


def _held(found: Standing) -> str:
    colour = {"yes": "green", "no": "red", "unknown": "yellow"}[found.held]
    when = f" [dim](reported at {_time(found.reported_s)})[/]" if found.reported_s else ""
    return f"[{colour}]{found.held}[/]{f': {escape(found.detail)}' if found.detail else ''}{when}"


def _drift(event: DriftEvent | None) -> list[str]:
    if event is None:
        return ["[green]none open[/]"]
    about = f"{event.state} since {_time(event.first_seen_s)}, {escape(event.key)}"
    return [f"[red]{about}[/]", f"found: {escape(event.found) or 'nothing'}"]


def _print_lines(label: str, lines: Iterable[str]) -> None:
    """Lines under one label; they may hold markup only where it is meant."""
    for index, text in enumerate(lines):
        console.print(f"  [dim]{label if index == 0 else '':8}[/] {text}")


def _time(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).isoformat(" ", "seconds").removesuffix("+00:00") + " UTC"
