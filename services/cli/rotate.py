"""``meshmark rotate``: let a node change its WireGuard key while packets flow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated

from cyclopts import App, Parameter
from rich.markup import escape

from schemas import codec, subjects
from schemas.allocation import Rotation, RotationStage
from schemas.commands import Rotate, Rotating
from schemas.topology import PublicKey, decode_topology
from schemas.values import Key
from services.cli.hosts import parse_host
from services.cli.output import console, note
from services.cli.session import Nats
from services.planner.rotation import ROTATION, is_under_way
from services.planner.state import HostId
from services.runtime.broker import Broker
from services.runtime.errors import Waiting

_LOOK_S = 0.5
_WORDS: dict[RotationStage, str] = {
    "queued": "waits for its turn",
    "beside": "a second device with the new key comes on all nodes",
    "moved": "packets go by the second device",
    "rekeyed": "the first device gets the new key",
    "back": "packets go by the first device again",
    "leaving": "the second device and the old key go",
    "done": "done",
}

NodeName = Annotated[str, Parameter(help="CLUSTER/NAME of a node: rome/worker-1")]
Abort = Annotated[bool, Parameter(name=["--abort"], negative=(), help="Take the new key back, while no packet has it yet")]
Wait = Annotated[bool, Parameter(name=["--wait"], help="Stay until it is done, and say what it waits for")]


def register(app: App) -> None:
    """Add the command to the application."""
    app.command(rotate)


async def rotate(host: NodeName, *, abort: Abort = False, wait: Wait = True, nats: Nats | None = None) -> int:
    """Let a node change its WireGuard key, without a lost packet.

    The node makes the new key and keeps it; a second device beside the first carries the packets while the first one gets it. One node of a
    cluster at a time, by name. It goes on by itself when this command is left; asked again, it is the same change. A node that is there
    but does not follow, or cannot be met at the second port (the cluster's `wireguard.port` + 1), holds it up, and is named.

    ```sh
    meshmark rotate rome/worker-1
    meshmark rotate rome/worker-1 --abort
    ```
    """
    name = parse_host(host)
    async with (nats or Nats()).connect() as broker:
        answer = await _ask(broker, name, abort=abort)
        if not wait:
            words = f"{answer.next} is to take the place of {answer.key}" if answer.next else f"{answer.key} stays its public key"
            console.print(f"{escape(str(name))}: {words}")
            return 0
        before: Rotation | None = None
        async for rotation in _progress(broker, name, answer):
            _show(name, before, rotation)
            before = rotation
        console.print(f"{escape(str(name))}: its public key is {answer.next or answer.key}")
    return 0


def _show(host: HostId, before: Rotation | None, rotation: Rotation) -> None:
    """Print what is news."""
    if before is None or before.stage != rotation.stage:
        console.print(f"{escape(str(host))}: {_WORDS[rotation.stage]}")
    if before is None or before.reasons != rotation.reasons:
        for reason in rotation.reasons:
            note(f"waits: {reason}")
        if rotation.waiting > len(rotation.reasons) > 0:
            note(f"and {rotation.waiting - len(rotation.reasons)} more")


async def _ask(broker: Broker, host: HostId, *, abort: bool) -> Rotating:
    try:
        reply = await broker.request(subjects.command(host.cluster, host.name, "rotate"), codec.encode(Rotate(abort)))
    except Waiting as error:
        msg = f"the applier of {host} does not answer; is that the node's name, and does it run?"
        raise Waiting(msg, "an applier") from error
    return codec.decode(reply, Rotating)


async def _progress(broker: Broker, host: HostId, answer: Rotating) -> AsyncIterator[Rotation]:
    """How far the change is, looked at again and again until it is at its end: the new key in force, or with none nothing under way."""
    while True:
        found = await broker.last("ALLOCATION", subjects.allocation(ROTATION, host.cluster, host.name))
        rotation = codec.decode(found.data, Rotation) if found is not None and found.data else None
        if rotation is not None and rotation.new == answer.next:
            yield rotation
        if answer.next is not None and await _key(broker, host) == answer.next:
            return
        if answer.next is None and (rotation is None or not is_under_way(rotation)):
            return
        await asyncio.sleep(_LOOK_S)


async def _key(broker: Broker, host: HostId) -> Key | None:
    """The public key of a host that is in force."""
    found = await broker.last("STATE", subjects.state("PublicKey", host.cluster, host.name))
    item = decode_topology(found.data) if found is not None and found.data else None
    return item.key if isinstance(item, PublicKey) else None
