"""Who may say and read what, on a real nats-server with the rendered configuration."""

import asyncio
import contextlib
import json

import msgspec
import pytest

from schemas import subjects
from services.runtime.accounts import HostUsers, host_user
from services.runtime.broker import ConsumerSpec
from services.runtime.errors import Permanent, Transient, Waiting

HOST_A, HOST_B = ("rome", "ip-10-0-0-1.ec2.internal"), ("rome", "node-b")


@pytest.fixture
async def mesh(planner):
    """Streams, and for each host two consumers, a plan and a snapshot."""
    for host in (HOST_A, HOST_B):
        for role in ("applier", "auditor"):
            await planner.ensure_consumer(ConsumerSpec("PLAN", host_user(role, *host), subjects.plan(*host)))
        await planner.publish(subjects.plan(*host), f"plan of {host[1]}".encode())
        await planner.publish(subjects.snapshot(*host, "head"), f"snapshot of {host[1]}".encode())
    return planner


async def first(messages):
    async with asyncio.timeout(5), contextlib.aclosing(messages):
        async for message in messages:
            return message
    return None


@pytest.mark.parametrize("role", ["applier", "auditor"])
async def test_a_host_reads_its_own_plan_and_snapshot(mesh, connect, role):
    """A host whose name holds dots pulls and acknowledges its plan and gets its snapshot, all across accounts."""
    broker = await connect(role, HOST_A)
    async with asyncio.timeout(5):
        async for message in broker.consume(ConsumerSpec("PLAN", host_user(role, *HOST_A)), create=False):
            assert (message.subject, message.data) == (subjects.plan(*HOST_A), b"plan of ip-10-0-0-1.ec2.internal")
            assert message.sequence == 1
            await message.ack()
            await mesh.publish(subjects.plan(*HOST_A), b"next")
            break
        follow = await first(broker.consume(ConsumerSpec("PLAN", host_user(role, *HOST_A)), create=False))
    assert follow.data == b"next"
    assert (await broker.last("SNAPSHOT", subjects.snapshot(*HOST_A, "head"))).data == b"snapshot of ip-10-0-0-1.ec2.internal"
    assert (await broker.last("PLAN", subjects.plan(*HOST_A))).data == b"next"
    assert await broker.last("STATUS", subjects.status(*HOST_A)) is None


async def test_hosts_publish_what_is_theirs(mesh, connect):
    """The applier reports status and its key, the auditor drift, both dead letters."""
    applier, auditor = await connect("applier", HOST_A), await connect("auditor", HOST_A)
    await applier.publish(subjects.status(*HOST_A), b"{}")
    await applier.publish(subjects.topology("PublicKey", *HOST_A), b"{}")
    await applier.publish(subjects.deadletter(*HOST_A, "applier"), b"{}")
    await auditor.publish(subjects.drift(*HOST_A, "nft"), b"{}")
    await auditor.publish(subjects.deadletter(*HOST_A, "auditor"), b"{}")
    for stream, count in (("STATUS", 1), ("TOPOLOGY", 1), ("DRIFT", 1), ("DEADLETTER", 2)):
        assert (await mesh.stream_info(stream)).messages == count


async def test_an_auditor_reads_what_was_told_of_its_own_host_alone(mesh, connect):
    """Which may be by one before it; an applier has nothing to do with it."""
    auditor = await connect("auditor", HOST_A)
    assert await auditor.last("DRIFT", subjects.drift(*HOST_A, "nft")) is None
    await auditor.publish(subjects.drift(*HOST_A, "nft"), b"{}")
    assert (await auditor.last("DRIFT", subjects.drift(*HOST_A, "nft"))).data == b"{}"
    for broker, host in ((auditor, HOST_B), (await connect("applier", HOST_A), HOST_A)):
        with pytest.raises(Permanent, match="no permission"):
            await broker.last("DRIFT", subjects.drift(*host, "nft"))


FORBIDDEN_READS = [("PLAN", subjects.plan(*HOST_B)), ("SNAPSHOT", subjects.snapshot(*HOST_B, "head")), ("STATE", "mesh.state.node.rome.a")]
FORBIDDEN_WRITES = [
    subjects.status(*HOST_B),
    subjects.drift(*HOST_B, "nft"),
    subjects.topology("PublicKey", *HOST_B),
    subjects.topology("Node", *HOST_A),
    subjects.plan(*HOST_A),
    subjects.snapshot(*HOST_A, "head"),
    subjects.state("Node", *HOST_A),
    subjects.deadletter(*HOST_B, "applier"),
]


async def test_a_host_can_neither_read_nor_write_what_is_not_its_own(mesh, connect):
    """Each attempt fails at once with Permanent, is counted, and leaves the connection alive."""
    applier = await connect("applier", HOST_A)
    async with asyncio.timeout(5):
        for stream, subject in FORBIDDEN_READS:
            with pytest.raises(Permanent, match="no permission"):
                await applier.last(stream, subject)
        for subject in FORBIDDEN_WRITES:
            with pytest.raises(Permanent, match="no permission"):
                await applier.publish(subject, b"forged")
        with pytest.raises(Permanent, match="no permission"):
            await first(applier.consume(ConsumerSpec("PLAN", host_user("applier", *HOST_B)), create=False))
        with pytest.raises(Permanent, match="no permission"):
            async with applier.listen(subjects.command(*HOST_B, "repair")) as commands:
                await anext(commands)
        with pytest.raises(Permanent, match="no permission"):
            await applier.stream_info("PLAN")
        with pytest.raises(Permanent, match="no permission"):
            await first(applier.consume(ConsumerSpec("PLAN", "own")))
    assert await applier.publish(subjects.status(*HOST_A), b"{}") == 1
    assert applier.metrics.nats_denied.labels("publish")._value.get() >= len(FORBIDDEN_WRITES)
    assert applier.metrics.nats_denied.labels("subscription")._value.get() == 1


async def test_reply_subjects_write_nothing(mesh, connect):
    """Naming another host's subject as the reply of a publish, a pull, a read or a command never stores anything there."""
    applier, asker = await connect("applier", HOST_A), await connect("publisher")
    victim = subjects.status(*HOST_B)
    raw = applier._connection
    pull = f"$JS.API.CONSUMER.MSG.NEXT.PLAN.{host_user('applier', *HOST_A)}"
    await raw.send(subjects.status(*HOST_A), b"{}", reply=victim)
    await raw.send(pull, b'{"batch": 1, "no_wait": true}', reply=victim)
    await raw.send(f"$JS.API.DIRECT.GET.PLAN.{subjects.plan(*HOST_A)}", b"", reply=victim)

    async def answer(_):
        return b"forged"

    serving = asyncio.create_task(applier.serve(subjects.command(*HOST_A, "repair"), answer))
    async with asyncio.timeout(5):
        # The first answered request says that the command is served; only then does the trick mean something.
        while await ask(asker, subjects.command(*HOST_A, "repair")) is None:
            pass
        await asker._connection.send(subjects.command(*HOST_A, "repair"), b"", reply=victim)
        # The server handles a connection's messages in order: once this is answered, all the tricks were, too.
        await asker.request(subjects.command(*HOST_A, "repair"), b"")
        await applier.publish(subjects.status(*HOST_A), b"{}")
    assert await mesh.last("STATUS", victim) is None
    applier.stop.set()
    await serving


async def ask(broker, subject, data=b"now"):
    """The answer, or None when nobody serves the subject yet."""
    try:
        return await broker.request(subject, data)
    except Waiting:
        return None


@pytest.mark.parametrize("who", ["planner", "publisher", "anonymous"])
async def test_commands_reach_a_host_from_other_accounts(mesh, connect, who):
    """Planners and publishers command hosts by request and reply across accounts."""
    applier, asker = await connect("applier", HOST_A), await connect(who)

    async def answer(message):
        return message.data + b" done"

    serving = asyncio.create_task(applier.serve(subjects.command(*HOST_A, "repair"), answer))
    async with asyncio.timeout(5):
        while (found := await ask(asker, subjects.command(*HOST_A, "repair"))) is None:
            pass
    assert found == b"now done"
    with pytest.raises(Waiting, match="nobody serves"):
        await asker.request(subjects.command(*HOST_B, "repair"), b"")
    applier.stop.set()
    await serving


async def test_publishers_alone_accept_what_a_planner_holds_back(mesh, connect):
    """An acceptance reaches the planner across accounts; a reader's and a host's do not. Readers see the freeze."""
    publisher, reader, applier = await connect("publisher"), await connect("reader"), await connect("applier", HOST_A)

    async def answer(message):
        return message.data + b" accepted"

    serving = asyncio.create_task(mesh.serve(subjects.ACCEPT, answer))
    async with asyncio.timeout(5):
        while (found := await ask(publisher, subjects.ACCEPT, b"token")) is None:
            pass
        assert found == b"token accepted"
        for other in (reader, applier):
            with pytest.raises(Permanent, match="no permission"):
                await other.request(subjects.ACCEPT, b"token")
    await mesh.publish(subjects.FREEZE, b"frozen")
    assert (await reader.last("FROZEN", subjects.FREEZE)).data == b"frozen"
    mesh.stop.set()
    await serving


async def test_people_read_everything_and_publish_topology(mesh, connect):
    """A client without credentials publishes topology, replays streams, and hears what hosts and planners say."""
    people, applier = await connect("anonymous"), await connect("applier", HOST_A)
    async with people.listen("mesh.>") as heard, asyncio.timeout(5):
        await people.publish("mesh.topology.node.rome.a", b"1")
        assert (await anext(heard)).data == b"1"
        await applier.publish(subjects.status(*HOST_A), b"2")
        assert (await anext(heard)).data == b"2"
        await mesh.publish("mesh.refused.node.rome.a", b"3")
        assert (await anext(heard)).data == b"3"
    assert [message.data async for message in people.replay("TOPOLOGY", "mesh.topology.>")] == [b"1"]
    assert [message.data async for message in people.replay("STATUS", "mesh.status.>")] == [b"2"]
    assert (await people.last("PLAN", subjects.plan(*HOST_B))).data == b"plan of node-b"
    assert (await people.stream_info("PLAN")).messages == 2


async def test_people_cannot_forge(mesh, connect):
    """Publishers may not publish keys or internal subjects, nor make consumers; readers may publish nothing."""
    publisher, reader = await connect("publisher"), await connect("reader")
    async with asyncio.timeout(5):
        for subject in (subjects.topology("PublicKey", *HOST_A), subjects.state("Node", *HOST_A), subjects.plan(*HOST_A)):
            with pytest.raises(Permanent, match="no permission"):
                await publisher.publish(subject, b"forged")
        with pytest.raises(Permanent, match="no permission"):
            await publisher.ensure_consumer(ConsumerSpec("PLAN", "own", "mesh.plan.>"))
        for subject in ("mesh.topology.node.rome.a", subjects.command(*HOST_A, "repair")):
            with pytest.raises(Permanent, match="no permission"):
                await reader.request(subject, b"forged")
        # A read of stored bytes of one's own choice, answered to a plan's subject, would be a forged plan.
        await publisher.publish("mesh.topology.node.rome.a", json.dumps({"forged": True}).encode())
        await publisher._connection.send("$JS.API.DIRECT.GET.TOPOLOGY.mesh.topology.node.rome.a", b"", reply=subjects.plan(*HOST_A))
        await publisher.publish("mesh.topology.node.rome.b", b"{}")
    assert (await mesh.last("PLAN", subjects.plan(*HOST_A))).data == b"plan of ip-10-0-0-1.ec2.internal"


async def test_a_host_is_added_by_reload(mesh, connect, server, config):
    """After a reload the new host connects, and brokers that were connected stay so."""
    newcomer = ("milan", "node-new")
    applier = await connect("applier", HOST_A)
    with pytest.raises(Permanent):
        await connect("applier", newcomer)

    users = HostUsers(*newcomer, applier=f"applier of {newcomer[1]}", auditor="x")
    server.reload(msgspec.structs.replace(config, hosts=(*config.hosts, users)))
    async with asyncio.timeout(5):
        while True:
            try:
                added = await connect("applier", newcomer)
                break
            except (Permanent, Transient):
                continue
    assert await added.publish(subjects.status(*newcomer), b"{}") == 1
    assert await applier.publish(subjects.status(*HOST_A), b"{}") == 2
    assert applier.metrics.nats_reconnects._value.get() == 0


async def test_a_host_that_is_taken_out_loses_its_connection(mesh, connect, server, config):
    """A reload without a host ends its connection for good, and its service is told."""
    applier = await connect("applier", HOST_A, lost_after_s=5.0)
    server.reload(msgspec.structs.replace(config, hosts=config.hosts[1:]))
    async with asyncio.timeout(8):
        await applier.closed.wait()
    assert applier.lost_reason
