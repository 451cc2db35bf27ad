"""What the adapter promises about streams, messages and commands, on a real nats-server."""

import asyncio
import contextlib
import socket

import pytest

from schemas import codec
from schemas.status import DeadLetter
from services.runtime import events
from services.runtime.broker import ERROR_HEADER, BatchMessage, Broker, BrokerSettings, ConsumerSpec, Message
from services.runtime.deadletters import dead_letter, describe
from services.runtime.errors import Conflict, MeshmarkError, OutcomeUnknown, Permanent, Transient, Waiting


async def take(messages, count):
    """The next `count` messages, within five seconds."""
    found = []
    async with asyncio.timeout(5), contextlib.aclosing(messages):
        async for message in messages:
            found.append(message)
            if message.reply:
                await message.ack()
            if len(found) == count:
                break
    return found


async def failure(action):
    """The error of the tree that awaiting `action` raises, or None."""
    try:
        await action
    except MeshmarkError as error:
        return error
    return None


async def test_publish_returns_the_sequence_and_last_reads_it_back(planner):
    """A stored message comes back with its place, its time and its CloudEvents attributes."""
    sequence = await planner.publish("mesh.state.node.rome.a", b"{}", headers={"x-own": "kept"})
    found = await planner.last("STATE", "mesh.state.node.rome.a")
    assert (found.sequence, found.subject, found.data) == (sequence, "mesh.state.node.rome.a", b"{}")
    assert found.stored_s > 1.7e9
    assert found.headers["x-own"] == "kept"
    assert found.headers["ce-specversion"] == "1.0"
    assert found.headers["ce-source"] == "/meshmark/planner"
    assert found.headers["ce-type"] == "meshmark.state"
    assert events.child(found.headers["traceparent"])[:35] == found.headers["traceparent"][:35]
    assert not any(name.startswith("Nats-") for name in found.headers)
    assert await planner.last("STATE", "mesh.state.node.rome.none") is None


async def test_compare_and_set(planner):
    """A writer that has not seen the subject's last message gets Conflict, and nothing is stored."""
    first = await planner.publish("mesh.plan.rome.a", b"1", expect=0)
    second = await planner.publish("mesh.plan.rome.a", b"2", expect=first)
    for stale in (0, first):
        with pytest.raises(Conflict, match=r"mesh\.plan\.rome\.a"):
            await planner.publish("mesh.plan.rome.a", b"3", expect=stale)
    assert (await planner.last("PLAN", "mesh.plan.rome.a")).sequence == second


async def test_a_message_id_is_stored_once(planner):
    """The same message id within the window is acknowledged but not stored again."""
    first = await planner.publish("mesh.refused.node.rome.a", b"1", message_id="m1")
    assert await planner.publish("mesh.refused.node.rome.a", b"1", message_id="m1") == first
    assert (await planner.stream_info("REFUSED")).messages == 1


async def test_batch_is_all_or_nothing(planner):
    """A batch is stored whole, and one stale expectation rejects all of it."""
    subjects = [f"mesh.snapshot.rome.a.{chunk}" for chunk in range(1000)]
    assert await planner.publish_batch([(subject, b"old") for subject in subjects]) == 1000
    with pytest.raises(Conflict):
        await planner.publish_batch([*(BatchMessage(subject, b"new") for subject in subjects[:9]), BatchMessage(subjects[9], b"new", 3)])
    assert {message.data async for message in planner.replay("SNAPSHOT", "mesh.snapshot.rome.a.*")} == {b"old"}
    assert await planner.publish_batch([BatchMessage(subjects[0], b"alone", 1)]) > 1000


@pytest.mark.parametrize("size", [0, 1001])
async def test_batch_sizes_that_cannot_be(planner, size):
    """An empty batch and one above the server's limit are refused before anything is sent."""
    with pytest.raises(Permanent, match="1 to 1000"):
        await planner.publish_batch([("mesh.snapshot.rome.a.0", b"x")] * size)


async def test_a_batch_to_a_stream_without_batches_is_refused(planner):
    """A stream that does not take atomic batches says so, and stores nothing."""
    with pytest.raises(Permanent, match="atomic"):
        await planner.publish_batch([("mesh.state.node.rome.a", b"x"), ("mesh.state.node.rome.b", b"x")])
    assert (await planner.stream_info("STATE")).messages == 0


async def test_oversize_is_refused_and_the_connection_lives(planner):
    """A message above the limit names both sizes, counts its headers, and never reaches the server, which would hang up."""
    limit = planner.max_payload_bytes
    with pytest.raises(Permanent, match=rf"{limit}; make it smaller"):
        await planner.publish("mesh.state.node.rome.a", b"x" * limit)
    with pytest.raises(Permanent, match="with headers"):
        await planner.publish("mesh.state.node.rome.a", b"", headers={"x": "y" * limit})
    assert await planner.publish("mesh.state.node.rome.a", b"x" * (limit - 1024)) == 1


async def test_publishing_where_no_stream_is(connect):
    """Without streams the text says who makes them, and that waiting may help."""
    broker = await connect("planner")
    with pytest.raises(Waiting, match="start a planner"):
        await broker.publish("mesh.state.node.rome.a", b"x")
    with pytest.raises(Waiting, match="planner creates"):
        await broker.stream_info("STATE")


async def test_ensure_streams_is_idempotent_and_keeps_messages(planner):
    """Making the streams again changes nothing that is stored."""
    before = await planner.stream_info("STATE")
    await planner.publish("mesh.state.node.rome.a", b"x")
    await planner.ensure_streams()
    after = await planner.stream_info("STATE")
    assert (after.created_s, after.messages) == (before.created_s, 1)


async def test_consumer_delivers_in_order_one_at_a_time(planner):
    """With one message outstanding, the next comes only after the acknowledgement."""
    for number in range(5):
        await planner.publish("mesh.plan.rome.a", b"%d" % number)
    found = await take(planner.consume(ConsumerSpec("PLAN", "reader", filter_subject="mesh.plan.rome.a")), 5)
    assert [message.data for message in found] == [b"0", b"1", b"2", b"3", b"4"]
    assert [message.sequence for message in found] == [1, 2, 3, 4, 5]
    assert {message.deliveries for message in found} == {1}


async def test_acknowledged_messages_do_not_come_back(planner):
    """A durable consumer goes on where its last reader stopped."""
    for number in range(3):
        await planner.publish("mesh.plan.rome.a", b"%d" % number)
    first = await take(planner.consume(ConsumerSpec("PLAN", "reader")), 1)
    second = await take(planner.consume(ConsumerSpec("PLAN", "reader")), 2)
    assert [message.data for message in (*first, *second)] == [b"0", b"1", b"2"]


async def test_nak_delivers_again_and_term_does_not(planner):
    """A nak brings the message back at once with a higher count; a term leaves an advisory in DEADLETTER."""
    await planner.publish("mesh.plan.rome.a", b"bad")
    async with asyncio.timeout(5):
        async for message in planner.consume(ConsumerSpec("PLAN", "reader")):
            if message.deliveries == 1:
                await message.nak()
            else:
                await message.term("cannot be read")
                break
        advisories = []
        while not advisories:
            advisories = [found async for found in planner.replay("DEADLETTER", "$JS.EVENT.ADVISORY.>")]
    assert message.deliveries == 2
    assert b"cannot be read" in advisories[0].data


async def test_ensuring_a_consumer_is_idempotent(planner):
    """It may be done twice, and a changed setting is taken over."""
    await planner.ensure_consumer(ConsumerSpec("PLAN", "reader", "mesh.plan.rome.a"))
    await planner.ensure_consumer(ConsumerSpec("PLAN", "reader", "mesh.plan.rome.a", ack_wait_s=60))


async def test_consume_waits_for_a_consumer_that_is_not_there_yet(planner):
    """A host that starts before the planner made its consumer gets its messages once it is made."""
    await planner.publish("mesh.plan.rome.a", b"x")
    reading = asyncio.create_task(take(planner.consume(ConsumerSpec("PLAN", "late"), create=False), 1))
    await asyncio.sleep(0)
    await planner.ensure_consumer(ConsumerSpec("PLAN", "late", "mesh.plan.>"))
    assert (await reading)[0].data == b"x"


async def test_consume_ends_when_told_to_stop(planner):
    """Setting `stop` ends an idle consumer at once."""
    reading = asyncio.create_task(take(planner.consume(ConsumerSpec("PLAN", "reader")), 1))
    await asyncio.sleep(0.05)
    planner.stop.set()
    async with asyncio.timeout(1):
        assert await reading == []


@pytest.mark.parametrize("end", ["stop", "kill"])
async def test_consume_survives_a_server_restart(planner, server, end):
    """After the server came back the same loop goes on, and misses nothing.

    A server that is killed may forget the last acknowledgements, so that what it delivered comes again after the wait for them.
    """
    found = asyncio.Queue()

    async def read():
        async for message in planner.consume(ConsumerSpec("PLAN", "reader", ack_wait_s=1)):
            with contextlib.suppress(OutcomeUnknown):
                await message.ack()
            found.put_nowait(message.data)

    reading = asyncio.create_task(read())
    async with asyncio.timeout(10):
        await planner.publish("mesh.plan.rome.a", b"before")
        assert await found.get() == b"before"
        getattr(server, end)()
        server.start()
        while True:
            # The first one may leave on the old connection; its id keeps a second one from being stored twice.
            with contextlib.suppress(OutcomeUnknown):
                await planner.publish("mesh.plan.rome.a", b"after", message_id="after")
                break
        while await found.get() != b"after":
            pass
    planner.stop.set()
    await reading
    assert planner.metrics.nats_reconnects._value.get() == 1


async def test_replay_is_complete_over_many_batches(planner):
    """Every message is read, in order, past the size of one batch; other subjects are not."""
    await planner.publish_batch([(f"mesh.snapshot.rome.a.{number}", b"%d" % number) for number in range(1000)])
    await planner.publish_batch([(f"mesh.snapshot.rome.b.{number}", b"%d" % number) for number in range(1000)])
    await planner.publish_batch([(f"mesh.snapshot.rome.a.{number}", b"%d" % number) for number in range(1000, 1600)])
    found = [int(message.data) async for message in planner.replay("SNAPSHOT", "mesh.snapshot.rome.a.>")]
    assert found == list(range(1600))


async def test_replay_while_others_write_ends_with_every_subject_seen(planner):
    """An object that is written again during the replay is seen in its old or its new form, never not at all."""
    await planner.publish_batch([(f"mesh.snapshot.rome.a.{number}", b"old") for number in range(1000)])
    seen = {}
    async for message in planner.replay("SNAPSHOT", "mesh.snapshot.>"):
        if len(seen) == 100:
            await planner.publish("mesh.snapshot.rome.a.999", b"new")
        seen[message.subject] = message.data
    assert len(seen) == 1000
    assert seen["mesh.snapshot.rome.a.999"] == b"new"


async def test_replay_of_nothing_and_of_the_newest_only(planner):
    """An empty stream replays as nothing; `last_per_subject` drops what was written over, in order."""
    assert [message async for message in planner.replay("TOPOLOGY", "mesh.topology.>")] == []
    for name in ("a", "b", "a"):
        await planner.publish(f"mesh.topology.node.rome.{name}", name.encode())
    newest = [message.sequence async for message in planner.replay("TOPOLOGY", "mesh.topology.>", last_per_subject=True)]
    assert newest == [2, 3]


async def test_request_and_serve(planner, connect):
    """A served command answers, refuses with its own text, and a command that nobody serves says so."""
    serving = await connect("planner")

    async def handle(message):
        if message.data == b"bad":
            refusal = "bad is no good\nat all"
            raise Permanent(refusal)
        return message.data.upper()

    task = asyncio.create_task(serving.serve("mesh.cmd.rome.a.*", handle))
    async with asyncio.timeout(5):
        while True:
            with contextlib.suppress(Waiting):
                assert await planner.request("mesh.cmd.rome.a.trace", b"good") == b"GOOD"
                break
        with pytest.raises(Permanent, match="bad is no good at all"):
            await planner.request("mesh.cmd.rome.a.trace", b"bad")
        with pytest.raises(Waiting, match="nobody serves"):
            await planner.request("mesh.cmd.rome.b.trace", b"good")
        serving.stop.set()
        await task


async def test_an_answer_that_is_too_large_is_told(planner, connect):
    """The asker of an answer above the limit hears why there is none, instead of a timeout."""
    serving = await connect("planner")

    async def handle(_):
        return b"x" * (serving.max_payload_bytes + 1)

    task = asyncio.create_task(serving.serve("mesh.cmd.rome.a.diff", handle))
    async with asyncio.timeout(5):
        while isinstance(refusal := await failure(planner.request("mesh.cmd.rome.a.diff", b"")), Waiting):
            pass
    assert isinstance(refusal, Permanent)
    assert "split it" in str(refusal)
    serving.stop.set()
    await task


async def test_a_request_without_an_answer_times_out_as_unknown(planner):
    """A service that got the request but is silent leaves the outcome open."""
    async with planner.listen("mesh.cmd.rome.a.slow"):
        with pytest.raises(OutcomeUnknown, match="may have happened"):
            await planner.request("mesh.cmd.rome.a.slow", b"", timeout_s=0.05)


async def test_messages_hears_what_is_published(planner):
    """A core subscription hears stored messages as they pass by."""
    async with planner.listen("mesh.drift.>") as heard:
        await planner.publish("mesh.drift.rome.a.nft", b"raised")
        async with asyncio.timeout(5):
            message = await anext(heard)
    assert (message.subject, message.data) == ("mesh.drift.rome.a.nft", b"raised")
    assert ERROR_HEADER not in message.headers


async def test_no_server_and_wrong_password(server):
    """A server that is not there is Transient within the deadline; a refused login is Permanent at once."""
    with pytest.raises(Transient, match=r"127\.0\.0\.1:9"):
        async with Broker.connect(BrokerSettings(url="nats://127.0.0.1:9", connect_s=0.3), "test"):
            pass
    with pytest.raises(Permanent, match="uthorization"):
        async with Broker.connect(BrokerSettings(url=server.url, user="planner", password="no"), "test"):
            pass


async def test_requests_in_flight_fail_when_the_server_dies(planner, server):
    """A request whose connection breaks is of unknown outcome at once; one made while there is no server was never sent."""
    async with planner.listen("mesh.cmd.rome.a.slow"):
        asking = asyncio.create_task(planner.request("mesh.cmd.rome.a.slow", b"", timeout_s=30))
        await asyncio.sleep(0.05)
        server.kill()
        async with asyncio.timeout(5):
            with pytest.raises(OutcomeUnknown, match="broke before the answer"):
                await asking
            with pytest.raises(Transient, match="not connected"):
                await planner.request("mesh.cmd.rome.a.slow", b"", timeout_s=0.1)


async def test_a_lost_broker_is_told_after_its_deadline(connect, server):
    """When the server stays away, `closed` is set, loops end with Permanent, and closing does not hang."""
    broker = await connect("planner", lost_after_s=0.2)
    await broker.ensure_streams()
    reading = asyncio.create_task(take(broker.consume(ConsumerSpec("PLAN", "reader")), 1))
    await asyncio.sleep(0.05)
    server.kill()
    async with asyncio.timeout(5):
        await broker.closed.wait()
        with pytest.raises(Permanent, match="lost"):
            await reading
    assert "no broker for 0.2 s" in broker.lost_reason


async def heard(broker):
    """The first message that is published on any subject from now on."""
    async with broker.listen("mesh.>") as messages:
        return await anext(messages)


async def test_cancelling_anything_leaves_the_connection_alive(planner):
    """Cancelling requests, subscriptions and flushes at any point never kills the read loop (nats-py's own flush would)."""
    for turn in range(60):
        tasks = [
            asyncio.create_task(planner.publish("mesh.state.node.rome.a", b"x")),
            asyncio.create_task(take(planner.consume(ConsumerSpec("STATE", "reader")), 1)),
            asyncio.create_task(heard(planner)),
        ]
        for _ in range(turn % 12):
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        done, pending = await asyncio.wait(tasks, timeout=2)
        assert not pending
        for task in done:
            assert task.cancelled() or not task.exception()
    async with asyncio.timeout(2):
        assert await planner.publish("mesh.state.node.rome.a", b"alive") > 0


async def test_closing_is_quick_after_reading(connect, server):
    """Leaving after an idle pull takes no drain timeout."""
    broker = await connect("planner")
    await broker.ensure_streams()
    reading = asyncio.create_task(take(broker.consume(ConsumerSpec("PLAN", "reader")), 1))
    await asyncio.sleep(0.1)
    broker.stop.set()
    await reading
    async with asyncio.timeout(1):
        await broker._connection.close()


async def test_a_dead_letter_is_stored_once_with_its_reason(planner):
    """What could not be handled is found in DEADLETTER with the original; a second try to bury it stores nothing."""
    message = Message("mesh.topology.node.rome.a", b"\x00no json", sequence=7, deliveries=5)
    for _ in range(2):
        await dead_letter(planner, "planner", message, "not JSON")
    found = [one async for one in planner.replay("DEADLETTER", "mesh.deadletter.>")]
    assert [codec.decode(one.data, DeadLetter) for one in found] == [describe(message, "not JSON")]


async def test_a_subject_that_is_no_text_stops_nobody(planner, server):
    """One message whose subject holds bytes that are not UTF-8 is delivered with them escaped, and so are those after it; so by replay."""
    publish_raw(server.url, b"mesh.topology.node.rome.\xff\xfe", b"{}")
    await planner.publish("mesh.topology.node.rome.after", b"{}")
    consumed = []
    async with asyncio.timeout(10):
        async for message in planner.consume(ConsumerSpec("TOPOLOGY", "raw")):
            await message.ack()
            consumed.append(message)
            if len(consumed) == 2:
                break
        replayed = [message async for message in planner.replay("TOPOLOGY", "mesh.topology.>")]
    assert [message.subject for message in consumed] == ["mesh.topology.node.rome.\\xff\\xfe", "mesh.topology.node.rome.after"]
    assert [message.sequence for message in replayed] == [1, 2]
    assert replayed[1].subject == "mesh.topology.node.rome.after"


def publish_raw(url, subject, data):
    """Publish as the anonymous user, byte by byte as given, and wait until the server has taken it."""
    host, port = url.removeprefix("nats://").rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=5) as wire:
        wire.sendall(b'CONNECT {"verbose":false}\r\nPUB ' + subject + b" %d\r\n" % len(data) + data + b"\r\nPING\r\n")
        answer = b""
        while b"PONG" not in answer:
            answer += wire.recv(4096)
