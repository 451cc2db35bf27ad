"""A trace while it runs: hosts are asked to tell of a flow, again while it is followed, and heard until the time is over."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterable, Iterator
from typing import Any, NoReturn

from schemas import codec, subjects
from schemas.commands import TraceFlow
from schemas.flow import FlowMessage
from services.auditor.trace.trails import Trail
from services.cli.output import note
from services.cli.trace.ends import Session
from services.cli.trace.stream import Inbox, Stream
from services.planner.state import HostId
from services.runtime import tasks
from services.runtime.broker import Broker
from services.runtime.errors import MeshmarkError, Transient
from services.runtime.messages import Message

_TICK_S = 0.3
_ANSWER_S = 5.0
_LATE_S = 1.0


async def packets(broker: Broker, wanted: Session, *, follow: bool) -> AsyncGenerator[list[Trail], None]:
    """Ask the hosts; packets of the flow as they become known, until the time is over.

    With `follow`, until the first SIGINT or SIGTERM: hosts are asked again each time that half of what was asked for is over, so that none
    forgets the flow meanwhile, and one that began anew learns of it. What was heard by then is given out before the end.

    Raises what went wrong where no host answers at first; Transient, or what else ended it, when a host cannot be heard any more: what it
    would have told is missing then.
    """
    loop = asyncio.get_running_loop()
    seconds_asked = next(iter(wanted.hosts.values())).seconds
    stream, inbox = Stream(wanted), Inbox()
    with _interrupts(are_taken=follow) as interrupted:
        try:
            async with _listening(broker, wanted.hosts, inbox) as listening:
                await _unless(interrupted, _ask(broker, wanted))
                if follow:
                    listening += [asyncio.create_task(_keep_asking(broker, *each), name="asking") for each in wanted.hosts.items()]
                end_s = loop.time() + seconds_asked
                while not interrupted.is_set() and (follow or loop.time() < end_s + _LATE_S):
                    await asyncio.sleep(_TICK_S)
                    _take(inbox, stream, loop.time())
                    if found := stream.complete(loop.time()):
                        yield found
                    for ended in (task for task in listening if task.done()):
                        ended.result()
                _take(inbox, stream, loop.time())
            yield stream.complete(loop.time(), all_of_them=True)
        finally:
            _note_missing(inbox, stream)


@contextlib.contextmanager
def _interrupts(*, are_taken: bool) -> Iterator[asyncio.Event]:
    """Set once somebody has interrupted while the body ran; where they are not taken, an interrupt ends the command as any other."""
    interrupted, loop = asyncio.Event(), asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in ((signal.SIGINT, signal.SIGTERM) if are_taken else ())}
    for number in before:
        loop.add_signal_handler(number, interrupted.set)
    try:
        yield interrupted
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


@contextlib.asynccontextmanager
async def _listening(broker: Broker, hosts: Iterable[HostId], inbox: Inbox) -> AsyncIterator[list[asyncio.Task[NoReturn]]]:
    """Hear the hosts while the body runs, by tasks that end only by an error; to which more of that kind may be added."""
    async with contextlib.AsyncExitStack() as stack:
        heard = [(host, await stack.enter_async_context(broker.listen(subjects.flow(*host)))) for host in hosts]

        async def pump(host: HostId, source: AsyncIterator[Message]) -> NoReturn:
            async for message in source:
                inbox.put(message.data)
            msg = f"{host} is not heard any more: the subscription ended; trace again"
            raise Transient(msg)

        pumps = [asyncio.create_task(pump(*each), name="flows") for each in heard]
        try:
            yield pumps
        finally:
            await tasks.end(pumps)


def _take(inbox: Inbox, stream: Stream, now_s: float) -> None:
    """Have all that was heard in the stream, and say what hosts lost."""
    for message in inbox.take():
        _note_lost(message)
        if message.flow is not None:
            stream.add(message.flow, now_s)


async def _unless(interrupted: asyncio.Event, asking: Coroutine[Any, Any, None]) -> None:
    """Wait for the hosts' answers, but no longer than until an interrupt: each silent host takes seconds. Raises what asking does."""
    waiting = asked, _ = asyncio.create_task(asking), asyncio.create_task(interrupted.wait())
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            asked.result()
    finally:
        await tasks.end(waiting)


async def _ask(broker: Broker, wanted: Session) -> None:
    """Have all hosts tell of the flow. Those that do not answer are named; Permanent or what went wrong when none does."""
    errors = await asyncio.gather(*(_ask_host(broker, *each) for each in wanted.hosts.items()))
    if (first := errors[0]) is not None and None not in errors:
        raise first


async def _keep_asking(broker: Broker, host: HostId, wish: TraceFlow) -> NoReturn:
    """Have a host tell of the flow again each time that half of what was asked for is over, whatever it answers: it may be back then."""
    while True:
        await asyncio.sleep(wish.seconds / 2)
        await _ask_host(broker, host, wish)


async def _ask_host(broker: Broker, host: HostId, wish: TraceFlow) -> MeshmarkError | None:
    """Have one host tell of the flow; why it does not, which is said, too."""
    try:
        await broker.request(subjects.command(*host, "trace"), codec.encode(wish), _ANSWER_S)
    except MeshmarkError as error:
        note(f"{host} does not tell: {error}")
        return error
    return None


def _note_missing(inbox: Inbox, stream: Stream) -> None:
    """Say at the end, once, what did not become part of the answer here."""
    missing = (
        (inbox.not_understood, "messages of hosts could not be understood"),
        (inbox.turned_away, "messages of hosts came faster than they were taken, and were lost"),
        (stream.given_up, "events came faster than they could be judged, and were given up"),
    )
    for count, what in missing:
        if count:
            note(f"{count} {what}; ways may be unknown for that")


def _note_lost(message: FlowMessage) -> None:
    if message.lost_events is not None:
        count = message.lost_events.num_events_lost
        how_many = "some, and the kernel does not say how many" if count is None else str(count)
        note(f"{message.node_name} lost events of traced packets: {how_many}; ways may be unknown for that")
