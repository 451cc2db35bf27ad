"""``meshmark rotate``: let a node or gateway change its WireGuard key while packets flow."""

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
from services.planner import names
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
_TUNNEL_WORDS: dict[RotationStage, str] = {
    **_WORDS,
    "beside": "a device with the new key comes beside the tunnels, at both ends",
    "moved": "packets of {tunnel} go by the device beside",
    "rekeyed": "{tunnel} gets the new key",
    "back": "packets go by all tunnels again",
    "leaving": "the device beside and the old key go",
}

HostName = Annotated[str, Parameter(help="CLUSTER/NAME of a node or gateway: rome/worker-1")]
Abort = Annotated[bool, Parameter(name=["--abort"], negative=(), help="Take the new key back, while no packet has it yet")]
Wait = Annotated[bool, Parameter(name=["--wait"], help="Stay until it is done, and say what it waits for")]


def register(app: App) -> None:
    """Add the command to the application."""
    app.command(rotate)


async def rotate(host: HostName, *, abort: Abort = False, wait: Wait = True, nats: Nats | None = None) -> int:
    """Let a node or gateway change its WireGuard key, without a lost packet.

    The host makes the new key and keeps it; a second device carries the packets while the first one gets it, on a gateway those of one
    tunnel after the other. One node of a cluster at a time, by name, and one end of a peering. It goes on by itself when this command is
    left; asked again, it is the same change. A host that is there but does not follow, or cannot be met at the second device's port (the
    cluster's `wireguard.port` + 1, the peering's `port` + `tunnels`), holds it up, and is named; a far gateway that is away is waited for.

    ```sh
    meshmark rotate rome/worker-1
    meshmark rotate rome/worker-1 --abort
    meshmark rotate rome/gateway
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
    if before is None or (before.stage, before.tunnel) != (rotation.stage, rotation.tunnel):
        words = _TUNNEL_WORDS if rotation.peering else _WORDS
        console.print(f"{escape(str(host))}: {words[rotation.stage].format(tunnel=names.tunnel_link(rotation.tunnel))}")
    if before is None or before.reasons != rotation.reasons:
        for reason in rotation.reasons:
            note(f"waits: {reason}")
        if rotation.waiting > len(rotation.reasons) > 0:
            note(f"and {rotation.waiting - len(rotation.reasons)} more")


async def _ask(broker: Broker, host: HostId, *, abort: bool) -> Rotating:
    try:
        reply = await broker.request(subjects.command(host.cluster, host.name, "rotate"), codec.encode(Rotate(abort)))
    except Waiting as error:
        msg = f"the applier of {host} does not answer; is that the host's name, and does it run?"
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
