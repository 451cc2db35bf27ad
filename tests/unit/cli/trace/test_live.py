"""A trace while it runs: what it asks of whom and when, what it hears, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest

from schemas import codec, subjects
from schemas.commands import TraceFlow, Tracing
from schemas.flow import FlowMessage, LostEvents
from services.cli.trace import live, stream
from services.cli.trace.command import trace
from services.cli.trace.filters import Filters
from services.runtime.errors import Permanent, Transient, Waiting
from services.runtime.messages import Message
from tests.unit.cli.broker import StubBroker
from tests.unit.cli.trace.said import HOSTS, messages


async def test_hosts_on_the_way_are_asked_and_heard(mesh: StubBroker, capsys, monkeypatch: pytest.MonkeyPatch):
    """Those alone, for what both need; what they lost is said, and what they saw is shown."""
    monkeypatch.setattr(live, "_TICK_S", 0.01)
    monkeypatch.setattr(live, "_LATE_S", 0.1)
    monkeypatch.setattr(stream, "SETTLED_S", 0.05)
    for host in HOSTS:
        mesh.answers[subjects.command(*host, "trace")] = codec.encode(Tracing(7, 1))
    lost = FlowMessage("rome/worker-2", "2026-01-01T00:00:00Z", lost_events=LostEvents("OBSERVER_EVENTS_QUEUE", 5))
    said = [Message(subjects.flow(*message.node_name.split("/")), codec.encode(message)) for message in [*messages("native"), lost]]
    mesh.follow = lambda asked: said if asked.subject == subjects.command("rome", "worker-2", "trace") else []
    assert await trace(source="rome/shop", destination="10.200.2.10", duration="1s", output="compact", nats=mesh) == 0  # type: ignore[arg-type]
    asked = {message.subject: codec.decode(message.data, TraceFlow) for message in mesh.asked}
    assert set(asked) == {subjects.command(*host, "trace") for host in HOSTS}
    (wish,) = set(asked.values())
    assert wish.flow == ("10.200.1.10", "fd00:200:0:1::10", "10.200.2.10")
    assert wish.outer == ("172.18.0.11", "2001:db8:18::11", "172.18.0.12", "2001:db8:18::12")
    assert (51871 in wish.ports, 51871 in wish.overlay_ports) == (True, False)
    assert set(wish.overlay_ports) <= set(wish.ports)
    told_of = capsys.readouterr()
    assert told_of.out.count("to-crypto") == 2
    assert "rome/worker-2 lost events of traced packets: 5" in told_of.err


@pytest.fixture
def answering(mesh: StubBroker, monkeypatch: pytest.MonkeyPatch) -> StubBroker:
    """Hosts that answer, and tell of an encrypted request and its answer; times are short."""
    monkeypatch.setattr(live, "_TICK_S", 0.01)
    monkeypatch.setattr(live, "_LATE_S", 0.1)
    monkeypatch.setattr(stream, "SETTLED_S", 0.05)
    for host in HOSTS:
        mesh.answers[subjects.command(*host, "trace")] = codec.encode(Tracing(7, 1))
    said = [Message(subjects.flow(*message.node_name.split("/")), codec.encode(message)) for message in messages("native")]
    mesh.follow = lambda asked: said if asked.subject == subjects.command("rome", "worker-2", "trace") else []
    return mesh


async def traced(broker: StubBroker, **options: object) -> int:
    return await trace(source="rome/shop", destination="rome/stock", duration="1s", nats=broker, **options)  # type: ignore[arg-type]


async def test_events_that_were_given_up_are_said(answering: StubBroker, capsys, monkeypatch: pytest.MonkeyPatch):
    """Once, at the end, and how many."""
    monkeypatch.setattr(stream, "_EVENTS_MAX", len(messages("native")) - 2)
    await traced(answering, output="compact")
    assert "2 events came faster than they could be judged, and were given up" in capsys.readouterr().err


async def test_nothing_is_left_of_a_trace_that_has_enough(answering: StubBroker):
    """With --first, nobody listens any more once the command returns, while the connection is there."""
    assert await traced(answering, output="compact", filters=Filters(first=1)) == 0
    assert [task for task in asyncio.all_tasks() if task.get_name() == "flows"] == []


async def test_a_message_that_is_none_ends_nothing(answering: StubBroker, capsys):
    """It is counted and said, and what else the hosts tell is heard."""
    said = answering.follow
    answering.follow = lambda asked: [Message(subjects.flow("rome", "worker-2"), b"nonsense"), *said(asked)]
    assert await traced(answering, output="compact") == 0
    printed = capsys.readouterr()
    assert "rome/shop ↔ rome/stock: encrypted" in printed.out
    assert "2 messages of hosts could not be understood" in printed.err


async def test_messages_without_room_are_said(answering: StubBroker, capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stream, "_MESSAGES_MAX", len(messages("native")) - 4)
    await traced(answering, output="compact")
    assert "4 messages of hosts came faster than they were taken, and were lost" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error,known,words",
    [
        (None, Transient, "rome/worker-1 is not heard any more"),
        (Permanent("no permission to subscribe"), Permanent, "no permission"),
    ],
)
async def test_a_host_that_is_not_heard_any_more_is_an_error(
    answering: StubBroker, monkeypatch: pytest.MonkeyPatch, error: Exception | None, known: type[Exception], words: str
):
    """A part of the answer would look like all of it."""
    listen = answering.listen

    @contextlib.asynccontextmanager
    async def ending(subject: str) -> AsyncIterator[AsyncIterator[Message]]:
        async def nothing() -> AsyncIterator[Message]:
            if error is not None:
                raise error
            for message in ():
                yield message

        async with listen(subject) as source:
            yield nothing() if subject == subjects.flow("rome", "worker-1") else source

    monkeypatch.setattr(answering, "listen", ending)
    with pytest.raises(known, match=words):
        await traced(answering, output="compact")


async def test_a_trace_that_saw_nothing_says_how_to_see_something(mesh: StubBroker, capsys, monkeypatch: pytest.MonkeyPatch):
    """Hosts answer, and nobody speaks."""
    monkeypatch.setattr(live, "_TICK_S", 0.01)
    monkeypatch.setattr(live, "_LATE_S", 0.1)
    for host in HOSTS:
        mesh.answers[subjects.command(*host, "trace")] = codec.encode(Tracing(7, 1))
    assert await trace(source="rome/pod/shop", destination="rome/stock", duration="1s", output="json", nats=mesh) == 3  # type: ignore[arg-type]
    assert "let the ends speak meanwhile, as in the lab by: meshmark lab check" in capsys.readouterr().err


async def test_without_any_host_there_is_nothing_to_show(mesh: StubBroker):
    with pytest.raises(Waiting):
        await trace(source="rome/shop", destination="rome/stock", nats=mesh)  # type: ignore[arg-type]


class Clock:
    """Stands in for ``asyncio`` where a trace looks at the time: it passes as fast as all that sleep allow."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._sleeping: list[float] = []
        self.asyncio = SimpleNamespace(**{**vars(asyncio), "sleep": self._sleep, "get_running_loop": self._loop})

    def _loop(self) -> SimpleNamespace:
        loop = asyncio.get_running_loop()
        return SimpleNamespace(
            time=lambda: self.now_s, add_signal_handler=loop.add_signal_handler, remove_signal_handler=loop.remove_signal_handler
        )

    async def _sleep(self, seconds: float) -> None:
        wakes_s = self.now_s + seconds
        self._sleeping.append(wakes_s)
        try:
            await asyncio.sleep(0)
            while wakes_s > min(self._sleeping):  # noqa: ASYNC110 - whoever is woken first says so by sleeping no more
                await asyncio.sleep(0)
        finally:
            self._sleeping.remove(wakes_s)
        self.now_s = max(self.now_s, wakes_s)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(live, "asyncio", made.asyncio)
    return made


def noting(broker: StubBroker, clock: Clock, *, interrupted_s: float | None = None, name: str = "native") -> dict[str, list[float]]:
    """When each host was asked for the flow, which it tells of each time. Somebody interrupts once it is so late."""
    asked: dict[str, list[float]] = {}
    before = signal.getsignal(signal.SIGINT)
    said = [Message(subjects.flow(*message.node_name.split("/")), codec.encode(message)) for message in messages(name)]

    def follow(message: Message) -> list[Message]:
        asked.setdefault(message.subject, []).append(clock.now_s)
        if interrupted_s is not None and clock.now_s > interrupted_s:
            assert signal.getsignal(signal.SIGINT) != before, "it would end the tests"
            signal.raise_signal(signal.SIGINT)
        return said

    for host in HOSTS:
        broker.answers[subjects.command(*host, "trace")] = codec.encode(Tracing(7, 30))
    broker.follow = follow
    return asked


async def test_a_flow_that_is_followed_is_asked_for_again_before_hosts_forget_it(mesh: StubBroker, clock: Clock) -> None:
    """Each host, for the same, until somebody interrupts; nobody is asked for anything after that."""
    asked = noting(mesh, clock, interrupted_s=100.0)
    assert await trace(source="rome/shop", destination="rome/stock", duration="30s", follow=True, output="json", nats=mesh) == 0  # type: ignore[arg-type]
    assert asked == {subjects.command(*host, "trace"): [15.0 * time for time in range(8)] for host in HOSTS}
    assert len({message.data for message in mesh.asked}) == 1


async def test_nothing_is_asked_again_that_is_not_followed(mesh: StubBroker, clock: Clock) -> None:
    """Each host once; and it ends when the time is over."""
    asked = noting(mesh, clock)
    assert await trace(source="rome/shop", destination="rome/stock", duration="30s", output="json", nats=mesh) == 0  # type: ignore[arg-type]
    assert asked == {subjects.command(*host, "trace"): [0.0] for host in HOSTS}
    assert 30 < clock.now_s < 33


@pytest.mark.parametrize("is_followed", [False, True])
async def test_packets_are_shown_as_they_come(mesh: StubBroker, clock: Clock, is_followed: bool) -> None:
    """And as many as were wanted end it, long before the time is over."""
    noting(mesh, clock)
    ends = {"source": "rome/shop", "destination": "rome/stock", "duration": "10m"}
    assert await trace(**ends, follow=is_followed, filters=Filters(first=1), output="compact", nats=mesh) == 0  # type: ignore[arg-type]
    assert clock.now_s < 10


@pytest.mark.parametrize("form", ["compact", "table", "path"])
async def test_an_interrupt_ends_what_is_followed_with_its_answer(mesh: StubBroker, clock: Clock, capsys, form: str) -> None:
    """Also of what is shown at the end only, and of packets that had just come; nothing goes on, and the next interrupt is as ever."""
    noting(mesh, clock, interrupted_s=1.0, name="reply-in-clear")
    before = signal.getsignal(signal.SIGINT)
    assert await trace(source="rome/shop", destination="rome/stock", duration="2s", follow=True, output=form, nats=mesh) == 2  # type: ignore[arg-type]
    assert capsys.readouterr().out.splitlines()[-1] == "rome/shop ↔ rome/stock: partial (→ encrypted, ← plaintext)"
    assert signal.getsignal(signal.SIGINT) == before
    assert [task for task in asyncio.all_tasks() if task.get_name() == "flows"] == []


async def test_an_interrupt_does_not_wait_for_a_silent_host(answering: StubBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the others told by then is the answer."""
    ask, before = answering.request, signal.getsignal(signal.SIGINT)

    async def request(subject: str, data: bytes, timeout_s: float) -> bytes:
        answer = await ask(subject, data, timeout_s)
        if subject == subjects.command("rome", "worker-2", "trace"):
            assert signal.getsignal(signal.SIGINT) != before, "it would end the tests"
            signal.raise_signal(signal.SIGINT)
            await asyncio.Event().wait()
        return answer

    monkeypatch.setattr(answering, "request", request)
    assert await asyncio.wait_for(traced(answering, follow=True, output="compact"), 5) == 0
    assert signal.getsignal(signal.SIGINT) == before


async def test_a_followed_flow_goes_on_while_hosts_are_silent(
    mesh: StubBroker, clock: Clock, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that does not answer when it is asked again delays nobody else, and that none answers ends nothing: each is named."""
    noting(mesh, clock, interrupted_s=15.0)
    ask, refused, silent = mesh.request, [4.0, 5.0, 6.0], subjects.command("rome", "worker-1", "trace")
    asked: list[tuple[float, bool]] = []

    async def request(subject: str, data: bytes, timeout_s: float) -> bytes:
        asked.append((clock.now_s, subject == silent))
        if clock.now_s in refused:
            msg = "nobody serves it"
            raise Waiting(msg, "a service")
        if subject == silent and clock.now_s > 10:
            await asyncio.Event().wait()
        return await ask(subject, data, timeout_s)

    monkeypatch.setattr(mesh, "request", request)
    ends = {"source": "rome/shop", "destination": "rome/stock", "duration": "2s"}
    assert await trace(**ends, follow=True, output="compact", nats=mesh) == 0  # type: ignore[arg-type]
    assert [at_s for at_s, is_silent in asked if is_silent] == [float(second) for second in range(12)]
    assert [at_s for at_s, is_silent in asked if not is_silent][:17] == [float(second) for second in range(17)]
    said = capsys.readouterr().err.splitlines()
    assert [line for line in said if "does not tell" in line] == [
        f"rome/{name} does not tell: nobody serves it" for _ in refused for name in ("worker-1", "worker-2")
    ]
