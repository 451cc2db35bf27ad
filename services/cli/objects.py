"""``meshmark publish``, ``get`` and ``delete``: topology objects in and out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from schemas import codec, subjects
from schemas.status import Refusal
from schemas.topology import KINDS, Topology, decode_topology
from services.cli import files
from services.cli.output import EXIT_ERROR, Format, console, default_format, emit, fail, note, show_table
from services.cli.session import Nats
from services.runtime.broker import Broker
from services.runtime.errors import Permanent
from services.runtime.messages import Message

_SEQUENCE_HEADER = "Meshmark-Sequence"

Files = Annotated[list[Path], Parameter(name=["--file", "-f"], negative=(), help="Topology file: YAML or JSON, any number of objects")]
Wait = Annotated[float, Parameter(help="How long to wait for the planner's verdict, in seconds; 0 not to wait")]


def register(app: App) -> None:
    """Add the commands to the application."""
    app.command(publish)
    app.command(get)
    app.command(delete)


async def publish(*, file: Files, wait_s: Wait = 10.0, nats: Nats | None = None) -> int:
    """Publish topology objects and wait until the planner has admitted or refused each.

    The exit code is 1 when one is refused, or when no verdict came in time.
    """
    items = files.load(file)
    async with (nats or Nats()).connect() as broker:
        return await _say([(item.ref, codec.encode(item)) for item in items], broker, wait_s)


async def delete(*refs: str, file: Files = [], wait_s: Wait = 10.0, nats: Nats | None = None) -> int:  # noqa: B006 - cyclopts reads the default
    """Delete topology objects, named as Kind/cluster/name or by the files that they were published from (last one first).

    An object that others still use stays in force until they are gone.
    """
    named = [_reference(ref) for ref in refs] + [item.ref for item in reversed(files.load(file))]
    if not named:
        msg = "nothing to delete: name objects as Peering/rome/rome-milan, or give files with -f"
        raise Permanent(msg)
    async with (nats or Nats()).connect() as broker:
        return await _say([(ref, b"") for ref in named], broker, wait_s)


async def get(kind: str | None = None, name: str | None = None, *, output: Format | None = None, nats: Nats | None = None) -> int:
    """Show admitted topology objects: all of them, those of a KIND, or one, as ``get Node rome/worker-1``."""
    chosen = _kind(kind) if kind else None
    form = default_format(output)
    async with (nats or Nats()).connect() as broker:
        items = [
            item async for item in admitted(broker) if chosen in (None, item.kind) and name in (None, f"{item.home}/{item.name}", item.name)
        ]
    if name is not None and not items:
        fail(f"no {chosen or 'object'} named {name} is admitted")
        return EXIT_ERROR
    if form == "table":
        show_table(("KIND", "CLUSTER", "NAME", "WHAT"), [(item.kind, item.home, item.name, _summary(item)) for item in items])
    else:
        emit(items[0] if name is not None and len(items) == 1 else items, form)
    return 0


async def admitted(broker: Broker) -> AsyncIterator[Topology]:
    """The topology in force, clusters first."""
    found: dict[str, Topology] = {}
    async for message in broker.replay("STATE", f"{subjects.STATE}.>"):
        if message.data:
            found[message.subject] = decode_topology(message.data)
        else:
            found.pop(message.subject, None)
    for item in sorted(found.values(), key=lambda item: (list(KINDS).index(item.kind), item.ref)):
        yield item


async def _say(messages: list[tuple[str, bytes]], broker: Broker, wait_s: float) -> int:
    """Publish payloads by reference and report the verdicts."""
    async with broker.listen(f"{subjects.STATE}.>") as states, broker.listen(f"{subjects.REFUSED}.>") as refusals:
        waiting: dict[int, str] = {}
        for ref, payload in messages:
            sequence = await broker.publish(subjects.topology(*ref.split("/")), payload)
            waiting[sequence] = ref
        if wait_s == 0:
            note(f"published {len(messages)} objects; not waiting for a verdict")
            return 0
        verdicts: dict[int, Refusal | None] = {}
        try:
            async with asyncio.timeout(wait_s), asyncio.TaskGroup() as group:
                complete = asyncio.Event()
                collecting = [
                    group.create_task(_collect(source, verdicts, complete, waiting), name="verdicts") for source in (states, refusals)
                ]
                await complete.wait()
                for task in collecting:
                    task.cancel()
        except TimeoutError:
            pass
    return _tell(waiting, verdicts, wait_s, deleted=all(not payload for _, payload in messages))


async def _collect(
    source: AsyncIterator[Message], verdicts: dict[int, Refusal | None], complete: asyncio.Event, waiting: dict[int, str]
) -> None:
    async for message in source:
        if message.subject.startswith(f"{subjects.REFUSED}."):
            refusal = codec.decode(message.data, Refusal)
            verdicts[refusal.sequence] = refusal
        else:
            verdicts[int(message.headers.get(_SEQUENCE_HEADER, "0"))] = None
        if waiting.keys() <= verdicts.keys():
            complete.set()


def _tell(waiting: dict[int, str], verdicts: dict[int, Refusal | None], wait_s: float, *, deleted: bool) -> int:
    code = 0
    for sequence, ref in sorted(waiting.items()):
        refusal = verdicts.get(sequence)
        if sequence not in verdicts:
            fail(f"{ref}: no verdict within {wait_s:g} s; is a planner running?")
            code = EXIT_ERROR
        elif refusal is not None:
            where = f"{refusal.field}: " if refusal.field else ""
            fail(f"{ref} refused: {where}{refusal.reason}")
            code = EXIT_ERROR
        else:
            console.print(f"{ref} {'deleted' if deleted else 'admitted'}")
    return code


def _summary(item: Topology) -> str:
    data = codec.to_builtins(item)
    shown = {key: value for key, value in data.items() if key not in ("kind", "name", "cluster", "revision")}
    return ", ".join(f"{key}={_short(value)}" for key, value in shown.items())


def _short(value: object) -> str:
    if isinstance(value, list):
        return " ".join(_short(part) for part in value)
    if isinstance(value, dict):
        return "{" + " ".join(f"{key}={_short(part)}" for key, part in value.items()) + "}"
    return str(value)


def _kind(text: str) -> str:
    found = {kind.lower(): kind for kind in KINDS}.get(text.lower().removesuffix("s")) or {kind.lower(): kind for kind in KINDS}.get(
        text.lower()
    )
    if found is None:
        msg = f"{text!r} is no kind; the kinds are {', '.join(KINDS)}"
        raise Permanent(msg)
    return found


def _reference(text: str) -> str:
    words = text.split("/")
    if len(words) != len(("kind", "cluster", "name")):
        msg = f"{text!r} names no object; write it as Kind/cluster/name, as Peering/rome/rome-milan"
        raise Permanent(msg)
    return "/".join((_kind(words[0]), *words[1:]))
