"""``meshmark publish``, ``get`` and ``delete``: topology objects in and out."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Container, Iterable, Mapping
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter, validators
from rich.markup import escape

from schemas import codec, subjects
from schemas.status import Refusal
from schemas.topology import KINDS, Peering, Topology
from services.cli import files, records
from services.cli.output import EXIT_ERROR, Format, Output, console, default_format, emit, fail, note, show_table
from services.cli.session import Nats
from services.planner.state import Attachment, State, seen_fields
from services.runtime import events
from services.runtime.broker import Broker
from services.runtime.errors import Permanent
from services.runtime.messages import Message

_SECOND_THOUGHTS_S = 0.5
"""What was refused for want of something is admitted right after that: so long may it take."""

Paths = Annotated[Path, Parameter(help="Topology file: YAML or JSON, any number of objects")]
Files = Annotated[list[Path], Parameter(name=["--file", "-f"], negative=(), help="The same; may be repeated")]
Refs = Annotated[str, Parameter(help="KIND/CLUSTER/NAME, as Peering/rome/rome-milan")]
Kind = Annotated[
    str | None,
    Parameter(help=f"{', '.join(list(KINDS)[:-1])} or {list(KINDS)[-1]}; capitals and a final s do not matter"),
]
ObjectName = Annotated[str | None, Parameter(help="CLUSTER/NAME, or NAME in whatever cluster")]
Refused = Annotated[bool, Parameter(negative=(), help="Show what was said last and is not in force, and why")]
Wait = Annotated[
    float, Parameter(validator=validators.Number(gte=0), help="How long to wait for the planner's verdict, in seconds; 0 not to wait")
]


def register(app: App) -> None:
    """Add the commands to the application."""
    app.command(publish)
    app.command(get)
    app.command(delete)


async def publish(*paths: Paths, file: Files = [], wait_s: Wait = 10.0, nats: Nats | None = None) -> int:  # noqa: B006 - cyclopts reads the default
    """Publish topology objects and wait until the planner has admitted or refused each.

    The kinds of objects are Cluster, Node, Gateway, Peering, Endpoint, IpMapping, EgressPolicy, FirewallConfiguration and
    RouteConfiguration.

    The exit code is 1 when one is refused, or when no verdict came in time.

    ```sh
    meshmark publish topology.yaml
    meshmark publish rome.yaml milan.yaml --wait-s 30
    ```
    """
    if not paths and not file:
        msg = "nothing to publish: name topology files, as in: meshmark publish topology.yaml"
        raise Permanent(msg)
    items = files.load([*paths, *file])
    async with (nats or Nats()).connect() as broker:
        return await _say([(item.ref, codec.encode(item)) for item in items], broker, wait_s)


async def delete(*refs: Refs, file: Files = [], wait_s: Wait = 10.0, nats: Nats | None = None) -> int:  # noqa: B006 - cyclopts reads the default
    """Delete topology objects, named as Kind/cluster/name or by the files that they were published from (last one first).

    An object that others still use stays in force until they are gone.

    The exit code is 1 when one is refused, or when no verdict came in time.

    ```sh
    meshmark delete Peering/rome/rome-milan
    meshmark delete -f topology.yaml
    ```
    """
    named = [parse_reference(ref) for ref in refs] + [item.ref for item in reversed(files.load(file))]
    if not named:
        msg = "nothing to delete: name objects as Peering/rome/rome-milan, or give files with -f"
        raise Permanent(msg)
    async with (nats or Nats()).connect() as broker:
        in_force = {item.ref for item in await records.admitted(broker)}
        return await _say([(ref, b"") for ref in named], broker, wait_s, in_force)


async def get(
    kind: Kind = None, name: ObjectName = None, /, *, refused: Refused = False, output: Output = None, nats: Nats | None = None
) -> int:
    """Show admitted topology objects: all of them, those of a KIND, or one; or with --refused those that are not admitted.

    ```sh
    meshmark get
    meshmark get nodes
    meshmark get Peering rome/rome-milan --output yaml
    meshmark get Peering/rome/rome-milan
    meshmark get --refused
    ```

    Peerings in the table show what they got from their clusters' pools as `fromPools`; with JSON and YAML, objects are as they were said.
    """
    if kind and "/" in kind and name is None:
        kind, _, name = kind.partition("/")
    chosen = _kind(kind) if kind else None
    form = default_format(output)
    async with (nats or Nats()).connect() as broker:
        if refused:
            return _show_refused(await records.refused(broker), chosen, name, form)
        in_force = await records.admitted(broker)
        remaps = (await records.allocations(broker)).remaps if form == "table" else {}
    items = [item for item in in_force if chosen in (None, item.kind) and name in (None, f"{item.home}/{item.name}", item.name)]
    if name is not None and not items:
        fail(f"no {chosen or 'object'} named {name} is admitted")
        return EXIT_ERROR
    if form == "table":
        state = State(in_force, remaps)
        rows = [(item.kind, item.home, item.name, escape(summary(item) + _from_pools(item, state))) for item in items]
        show_table(("KIND", "CLUSTER", "NAME", "WHAT"), rows)
    else:
        emit(items[0] if name is not None and len(items) == 1 else items, form)
    return 0


def _show_refused(refusals: Iterable[Refusal], kind: str | None, name: str | None, form: Format) -> int:
    shown = [item for item in refusals if kind in (None, item.kind) and name in (None, f"{item.cluster}/{item.name}", item.name)]
    if form == "table":
        show_table(("KIND", "CLUSTER", "NAME", "WHY"), [(item.kind, item.cluster, item.name, escape(item.what)) for item in shown])
    else:
        emit(shown, form)
    return 0


class Verdicts:
    """What the planner said about messages, by their sequence. An admission is final: no refusal comes before or after it."""

    def __init__(self, sequences: Iterable[int]) -> None:
        self.open = set(sequences)
        self.admitted: set[int] = set()
        self.refused: dict[int, Refusal] = {}

    def hear(self, message: Message) -> None:
        """Take a message from STATE or REFUSED in, about whatever object it is."""
        if message.subject.startswith(f"{subjects.REFUSED}."):
            refusal = codec.decode(message.data, Refusal)
            sequence = refusal.sequence
            if sequence not in self.admitted:
                self.refused[sequence] = refusal
        else:
            sequence = int(message.headers.get(events.SEQUENCE, "0"))
            self.admitted.add(sequence)
            self.refused.pop(sequence, None)
        self.open.discard(sequence)

    def may_change(self, sequences: Container[int]) -> bool:
        """Whether some of these were refused and others admitted: what was refused may have missed just those."""
        return any(one in sequences for one in self.refused) and any(one in sequences for one in self.admitted)


async def _say(messages: list[tuple[str, bytes]], broker: Broker, wait_s: float, in_force: Container[str] = ()) -> int:
    """Publish payloads by reference and report the verdicts. `in_force` is what there is to delete."""
    async with broker.listen(f"{subjects.STATE}.>") as states, broker.listen(f"{subjects.REFUSED}.>") as refusals:
        waiting: dict[int, str] = {}
        for ref, payload in messages:
            sequence = await broker.publish(subjects.topology(*ref.split("/")), payload)
            waiting[sequence] = ref
        if wait_s == 0:
            note(f"published {len(messages)} objects; not waiting for a verdict")
            return 0
        verdicts = Verdicts(waiting)
        changed = asyncio.Event()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s), asyncio.TaskGroup() as group:
                collecting = [group.create_task(_collect(source, verdicts, changed), name="verdicts") for source in (states, refusals)]
                await _settle(verdicts, waiting, changed)
                for task in collecting:
                    task.cancel()
    done = {ref: "admitted" if payload else "deleted" if ref in in_force else "was not there" for ref, payload in messages}
    return _tell(waiting, verdicts, wait_s, done)


async def _collect(source: AsyncIterator[Message], verdicts: Verdicts, changed: asyncio.Event) -> None:
    async for message in source:
        verdicts.hear(message)
        changed.set()


async def _settle(verdicts: Verdicts, waiting: Container[int], changed: asyncio.Event) -> None:
    """Wait until there is a verdict on everything, and a little longer where a refusal may be taken back."""
    while verdicts.open:
        await changed.wait()
        changed.clear()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_SECOND_THOUGHTS_S):
            while verdicts.may_change(waiting):
                await changed.wait()
                changed.clear()


def _tell(waiting: dict[int, str], verdicts: Verdicts, wait_s: float, done: Mapping[str, str]) -> int:
    code = 0
    for sequence, ref in sorted(waiting.items()):
        refusal = verdicts.refused.get(sequence)
        if sequence in verdicts.open:
            fail(f"{ref}: no verdict within {wait_s:g} s; is a planner running?")
            code = EXIT_ERROR
        elif refusal is not None:
            fail(f"{ref} refused: {refusal.what}")
            code = EXIT_ERROR
        else:
            console.print(f"{ref} {done[ref]}")
    return code


def summary(item: Topology) -> str:
    data = codec.to_builtins(item)
    shown = {key: value for key, value in data.items() if key not in ("kind", "name", "cluster", "revision")}
    return ", ".join(f"{key}={_short(value)}" for key, value in shown.items())


def _from_pools(item: Topology, state: State) -> str:
    """What a peering uses that came from pools; empty for anything else."""
    if not isinstance(item, Peering):
        return ""
    seen = [
        f"{end.cluster}:{one.real}→{one.seen}"
        for place, end in enumerate(item.ends)
        for one in seen_fields(state, Attachment(item, place))
        if not one.is_given and one.seen != one.real
    ]
    return f", fromPools={' '.join(seen)}" if seen else ""


def _short(value: object) -> str:
    if isinstance(value, list | tuple):
        return " ".join(_short(part) for part in value)
    if isinstance(value, dict):
        return "{" + " ".join(f"{key}={_short(part)}" for key, part in value.items()) + "}"
    return str(value)


def _kind(text: str) -> str:
    found = {kind.lower(): kind for kind in KINDS}.get(text.lower().removesuffix("s"))
    if found is None:
        msg = f"{text!r} is no kind; the kinds are {', '.join(KINDS)}"
        raise Permanent(msg)
    return found


def parse_reference(text: str) -> str:
    words = text.split("/")
    if len(words) != len(("kind", "cluster", "name")):
        msg = f"{text!r} names no object; write it as Kind/cluster/name, as Peering/rome/rome-milan"
        raise Permanent(msg)
    return "/".join((_kind(words[0]), *words[1:]))
