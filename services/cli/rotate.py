"""``meshmark rotate``: let a node or gateway change its WireGuard key while packets flow."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Annotated

from cyclopts import App, Parameter
from rich.markup import escape

from schemas import codec, subjects
from schemas.commands import Rotate, Rotating
from schemas.topology import PublicKey, decode_topology
from schemas.values import Key
from services.cli import records
from services.cli.hosts import choose
from services.cli.key_change import KeyChange, step, unheard, waits
from services.cli.output import EXIT_DIFFERENT, console, note, utc
from services.cli.session import Nats
from services.planner.state import HostId
from services.runtime.broker import Broker
from services.runtime.errors import Permanent, Waiting

_LOOK_S = 0.5

HostName = Annotated[str, Parameter(help="CLUSTER/NAME of a node or gateway: rome/worker-1")]
Abort = Annotated[bool, Parameter(name=["--abort"], negative=(), help="Take the new key back, while no packet goes by it yet")]
Status = Annotated[bool, Parameter(name=["--status"], negative=(), help="Change nothing: say whether a change is under way, and its key")]
Wait = Annotated[bool, Parameter(name=["--wait"], help="Stay until it is done, and say what it waits for")]


def register(app: App) -> None:
    """Add the command to the application."""
    app.command(rotate)


async def rotate(host: HostName, *, abort: Abort = False, status: Status = False, wait: Wait = True, nats: Nats | None = None) -> int:
    """Let a node or gateway change its WireGuard key, without a lost packet.

    The host makes the new key and keeps it; a second device carries the packets while the first one gets it, on a gateway those of one
    tunnel after the other. One node of a cluster at a time, by name, and one end of a peering. A host that is there but does not follow,
    or cannot be met at the second device's port (the cluster's `wireguard.port` + 1, the peering's `port` + `tunnels`), holds it up, and is
    named once it has done so for five seconds; a far gateway that is away is waited for.

    It goes on by itself when this command is left. Asked again while it is under way, the command shows the same change; after its end, it
    begins another one, with another key. Whether it has ended says --status, which changes nothing.

    The exit code of --status is 2 while a change is under way, and 0 when none is. --abort ends with 0 when the new key is taken back, or
    none was to come, and with 1 when it is too late: packets go by the new key, or the change is done.

    ```sh
    meshmark rotate rome/worker-1
    meshmark rotate rome/worker-1 --status
    meshmark rotate rome/worker-1 --abort
    meshmark rotate rome/gateway
    ```
    """
    if abort and status:
        msg = "--abort takes a change back and --status changes nothing; give one of them"
        raise Permanent(msg)
    async with (nats or Nats()).connect() as broker:
        (name,) = choose(await records.hosts(broker), host)
        if status:
            return await _tell(broker, name)
        answer = await _ask(broker, name, abort=abort)
        if answer.next is None:
            await _take_back(broker, name, answer, wait=wait)
        elif not wait:
            _say(name, f"{answer.next} is to take the place of {answer.key}")
        else:
            teller = Teller(name, time.time())
            async for change in _progress(broker, name, answer.next):
                teller.tell(change)
            _say(name, f"its public key is {answer.next}")
    return 0


class Teller:
    """Says of a change that was asked for at `asked_s` (Unix time), and is looked at again and again, what is news."""

    def __init__(self, host: HostId, asked_s: float) -> None:
        self._host = host
        self._asked_s = asked_s
        self._step = ""
        self._waits: tuple[str, ...] = ()

    def tell(self, change: KeyChange | None) -> None:
        """Print the step, and for whom it waits, where they are others than last time; None is a change that the planner does not know."""
        if change is not None and (words := step(change)) != self._step:
            self._step, self._waits = words, ()
            _say(self._host, words)
        found = waits(change, time.time()) if change is not None else unheard(self._asked_s, time.time())
        if found != self._waits:
            self._waits = found
            for reason in found:
                note(f"waits: {reason}")


def _say(host: HostId, words: str) -> None:
    console.print(escape(f"{host}: {words}"))


async def _ask(broker: Broker, host: HostId, *, abort: bool) -> Rotating:
    try:
        reply = await broker.request(subjects.command(host.cluster, host.name, "rotate"), codec.encode(Rotate(abort)))
    except Waiting as error:
        msg = f"the applier of {host} does not answer; does it run?"
        raise Waiting(msg, "an applier") from error
    return codec.decode(reply, Rotating)


# How far it is ----------------------------------------------------------------------------------------------------------------------------


async def _progress(broker: Broker, host: HostId, new: Key) -> AsyncIterator[KeyChange | None]:
    """How far the change to a key is, looked at again and again until that is in force; Permanent when somebody takes it back.

    None while the planner does not know it.
    """
    was_known = False
    while True:
        change = await records.key_change(broker, host)
        key = await _key(broker, host)
        is_done = key is not None and key.key == new
        # One that is over although the key has not changed is an earlier one to the same key, which was taken back.
        is_known = change is not None and change.rotation.new == new and (is_done or not change.is_over)
        if was_known and not is_known and not is_done:
            msg = f"{host}: the new key was taken back meanwhile"
            raise Permanent(msg)
        yield change if is_known else None
        if is_done:
            return
        was_known = is_known
        await asyncio.sleep(_LOOK_S)


async def _tell(broker: Broker, host: HostId) -> int:
    """Say whether a change is under way and for whom it waits, or which key there is since when; returns the exit code."""
    change, key = await records.key_change(broker, host), await _key(broker, host)
    if key is None:
        _say(host, "its public key is not known: it has no WireGuard device, or its applier has not said it yet")
        return 0
    is_wished = True
    if change is not None and not change.is_over:
        _say(host, f"a change of its key is under way: {step(change)}")
        for reason in waits(change, time.time()):
            _say(host, f"waits since {utc(change.since_s)}: {reason}")
    elif key.next is not None:
        _say(host, "a change of its key is asked for, and the planner has not begun with it")
    elif await _has_another(broker, host, key.key):
        _say(host, "its applier has a second key, that comes or goes, and the planner or the applier has not followed yet: do both run?")
    else:
        is_wished = False
        _say(host, "no change of its key is under way")
    _say(host, f"its public key is {key.key}{_since(change, key.key)}{f', and {key.next} is to take its place' if key.next else ''}")
    return EXIT_DIFFERENT if is_wished else 0


def _since(change: KeyChange | None, key: Key) -> str:
    """Since when a host has its key, as far as its last change tells."""
    if change is None:
        return ", which was never changed"
    return f" since {utc(change.since_s)}" if change.is_over and change.rotation.new == key else ""


async def _has_another(broker: Broker, host: HostId, key: Key) -> bool:
    """Whether a host's last report tells of another key than this one."""
    report = await records.report(broker, host)
    return report is not None and any(other != key for other in report.keys)


async def _key(broker: Broker, host: HostId) -> PublicKey | None:
    """The public key of a host that is in force, and the one that is to follow it."""
    found = await broker.last("STATE", subjects.state("PublicKey", host.cluster, host.name))
    item = decode_topology(found.data) if found is not None and found.data else None
    return item if isinstance(item, PublicKey) else None


# Taking it back ---------------------------------------------------------------------------------------------------------------------------


async def _take_back(broker: Broker, host: HostId, answer: Rotating, *, wait: bool) -> None:
    """Say what has come of it: taken back, or nothing was there to take back. Permanent where it came too late."""
    if answer.withdrawn is None:
        change = await records.key_change(broker, host)
        if change is not None and change.rotation.new == answer.key:
            raise _too_late(host, answer.key, change)
        _say(host, "nothing to take back: no change of its key is under way")
    elif not wait:
        _say(host, f"{answer.withdrawn} is being taken back")
    else:
        change = await _ended(broker, host)
        key = await _key(broker, host)
        if key is not None and key.key == answer.withdrawn:
            raise _too_late(host, answer.withdrawn, change)
        _say(host, f"taken back: {answer.withdrawn} does not take the place of {answer.key}")
    _say(host, f"its public key is {answer.key}")


async def _ended(broker: Broker, host: HostId) -> KeyChange | None:
    """What is known of a host's change of keys when none is under way any more."""
    while True:
        change = await records.key_change(broker, host)
        if change is None or change.is_over:
            return change
        await asyncio.sleep(_LOOK_S)


def _too_late(host: HostId, key: Key, change: KeyChange | None) -> Permanent:
    when = f" since {utc(change.since_s)}" if change is not None and change.is_over else ""
    msg = f"{host}: too late to take back: the change is done, and the old key is gone; its public key is {key}{when}"
    return Permanent(msg)
