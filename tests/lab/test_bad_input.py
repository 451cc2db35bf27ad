"""What publishers get wrong, by the command and by any NATS client: a clear refusal, the last good value stays, all else goes on."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import nats
import nats.errors
import pytest
import yaml

from schemas import codec, subjects
from schemas.status import DeadLetter
from schemas.topology import Node, Pod
from schemas.values import Address, Name, Prefix

pytestmark = pytest.mark.privileged

Change = Callable[[dict[str, Any]], None]

PEERING = "Peering/rome/rome-milan"
NODE: dict[str, Any] = {
    "kind": "Node",
    "cluster": "rome",
    "name": "worker-9",
    "addresses": ["172.18.0.19"],
    "podPrefixes": ["10.200.9.0/24"],
}
LONG_NAME = "ip-10-0-0-13.eu-west-1.compute.internal0"  # 40 characters, as EC2 makes them
WILD_NAME = "ip-10-0-0-13.%eu*west-1.compute.internal"

# What is said (a change of the example's peering, or of a new node), the field at fault, and words of the reason.
WRONG: dict[str, tuple[str, Change, str, str]] = {
    "remap lengths that differ": (
        "peering",
        lambda item: item["ends"][0].update(remapPods=["10.61.0.0/20"]),
        "$.ends[0].remapPods[0]",
        "10.61.0.0/20 and 10.200.0.0/16 of Cluster/milan/milan differ in length",
    ),
    "overlapping remap": (
        "peering",
        lambda item: item["ends"][1].update(remapExternal=["10.71.0.0/16"]),
        "$.ends[1].remapExternal[0]",
        "10.71.0.0/16 overlaps 10.71.0.0/16 of Cluster/milan/milan",
    ),
    "overlapping prefixes": (
        "node",
        lambda item: item.update(podPrefixes=["10.200.9.0/24", "10.200.2.128/25"]),
        "$.podPrefixes[1]",
        "10.200.2.128/25 overlaps 10.200.2.0/24 of Node/rome/worker-2",
    ),
    "host bits": (
        "node",
        lambda item: item.update(podPrefixes=["10.200.9.1/24"]),
        "$.podPrefixes[0]",
        "has host bits set; write 10.200.9.0/24",
    ),
    "a name with % and *": ("node", lambda item: item.update(name=WILD_NAME), "$.name", "is not a name"),
    "an unknown field": ("node", lambda item: item.update(colour="red"), "", "unknown field `colour`"),
    "a missing cluster": ("node", lambda item: item.update(cluster="genoa"), "$.cluster", "cluster 'genoa' is not known"),
    "a value of another type": ("node", lambda item: item.update(addresses="172.18.0.19"), "$.addresses", "Expected `array`, got `str`"),
}


def wrong(mesh, case: str) -> tuple[dict[str, Any], str, str]:
    """The object of a case as plain data, the field at fault, and words of the reason."""
    base, change, field, words = WRONG[case]
    data = codec.to_builtins(mesh.object(PEERING)) if base == "peering" else json.loads(json.dumps(NODE))
    change(data)
    return data, field, words


def subject(data: dict[str, Any]) -> str:
    return subjects.topology(data["kind"], data["cluster"], data["name"])


def ref(data: dict[str, Any]) -> str:
    return f"{data['kind']}/{data['cluster']}/{data['name']}"


@contextlib.asynccontextmanager
async def unmoved(live) -> AsyncIterator[None]:
    """What is in force stays: not one message about state or plans, and the gateway's kernel as it was."""

    async def places() -> list[int]:
        return [(await broker.stream_info(stream)).last_sequence for stream in ("STATE", "PLAN", "SNAPSHOT", "ALLOCATION")]

    async with live.broker("reader") as broker:
        before, kernel = await places(), live.mesh.own_state("rome.gateway")
        yield
        assert await places() == before
    assert live.mesh.own_state("rome.gateway") == kernel


async def goes_on(live) -> None:
    """A good event right after is admitted, and takes the place of the bad one."""
    peering = live.mesh.object(PEERING)
    spoken = (peering.kind, peering.cluster, peering.name)
    async with live.broker() as broker, live.broker("reader") as reader:
        for kind, cluster, name in (("node", "rome", NODE["name"]), ("node", "rome", WILD_NAME), ("node", "genoa", NODE["name"])):
            await broker.publish(subjects.topology(kind, cluster, name), b"")
        sequence = await broker.publish(subjects.topology(*spoken), codec.encode(peering))

        async def admitted() -> bool:
            last = await reader.last("STATE", subjects.state(*spoken))
            return last is not None and last.headers["Meshmark-Sequence"] == str(sequence)

        await live.eventually(admitted, "what is good is admitted")
    await live.settled()


@pytest.mark.parametrize("case", WRONG)
async def test_any_client_is_told_what_is_wrong(mesh, live, case: str):
    """Published straight to NATS: a refusal event names the field and says what is right; nothing moves, and what is good is taken."""
    data, field, words = wrong(mesh, case)
    async with unmoved(live):
        client = await nats.connect(mesh.url)
        heard = await client.subscribe(subject(data).replace(subjects.TOPOLOGY, subjects.REFUSED))
        await client.publish(subject(data), json.dumps(data).encode())
        refusal = json.loads((await heard.next_msg(timeout=10)).data)
        await client.close()
    assert f"{refusal['kind']}/{refusal['cluster']}/{refusal['name']}" == ref(data)
    assert words in refusal["reason"], refusal
    assert refusal.get("field", "").startswith(field), refusal
    await goes_on(live)


@pytest.mark.parametrize("case", WRONG)
async def test_the_command_says_what_is_wrong_in_one_line(mesh, live, tmp_path: Path, case: str):
    """Published by the command: exit code 1 and one line on stderr with the object, the field and what is right; nothing moves."""
    data, field, words = wrong(mesh, case)
    file = tmp_path / "wrong.yaml"
    file.write_text(yaml.safe_dump(data))
    async with unmoved(live):
        done = await live.meshmark("publish", "-f", str(file))
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    assert words in done.stderr, done.stderr
    assert field in done.stderr, done.stderr
    assert data["name"] in done.stderr, done.stderr
    await goes_on(live)


@pytest.mark.parametrize(
    "payload,words",
    [
        (b'{"kind": "Node", "cluster": "rome', "not valid JSON"),
        (b"\xff\xfe\x00garbage", "not valid JSON"),
        (b"null", "got `null`"),
        (b'{"kind": "Nodule", "cluster": "rome", "name": "worker-9"}', "the kinds are Cluster, Node"),
        (json.dumps({**NODE, "name": "worker-8"}).encode(), "the subject names Node/rome/worker-9, the payload Node/rome/worker-8"),
    ],
    ids=["cut off", "bytes", "null", "no kind", "another name"],
)
async def test_what_is_no_object_is_refused(mesh, live, payload: bytes, words: str):
    """Bytes that are no object of that subject are refused with the reason, and nothing moves."""
    async with unmoved(live):
        after = len(live.board.refusals)
        async with live.broker() as broker:
            await broker.publish(subject(NODE), payload)
        refusal = await live.refusal(ref(NODE), after)
        assert words in refusal.reason
    await goes_on(live)


@pytest.mark.parametrize(
    "words,reason",
    [
        ("node.rome", "<kind>.<cluster>.<name>"),
        ("node", "<kind>.<cluster>.<name>"),
        ("node.rome.ip-10-0-0-1.eu-west-1.compute", "dots and other special bytes of a name are written as %2E"),
        ("nodule.rome.worker-9", "with a kind of cluster, egresspolicy, endpoint,"),
        ("node.rome.*", "special bytes of a name are written as %2E"),
        ("node.rome.%zz", "special bytes of a name are written as %2E"),
    ],
)
async def test_a_subject_that_names_no_object_is_a_dead_letter(mesh, live, eventually, words: str, reason: str):
    """A subject with too few or too many tokens, of no kind or with bytes that it must encode is set aside with reason and original."""
    spoken = f"{subjects.TOPOLOGY}.{words}"
    payload = json.dumps(NODE).encode()
    async with unmoved(live), live.broker("reader") as reader, live.broker() as broker:
        sequence = await broker.publish(spoken, payload)

        async def letter() -> DeadLetter | None:
            async for message in reader.replay("DEADLETTER", f"{subjects.DEADLETTER}.>"):
                found = codec.decode(message.data, DeadLetter)
                if found.sequence == sequence:
                    return found
            return None

        await eventually(letter, "the message is set aside")
        found = await letter()
    assert (found.subject, found.payload) == (spoken, payload)
    assert reason in found.reason


async def test_three_megabytes_are_too_much(mesh, live, tmp_path: Path):
    """An object larger than a message may be: any client says so, the command what is too long in it, and nothing moves by it."""
    data = {**NODE, "podPrefixes": [f"10.200.{index // 250 % 250}.{index % 250}/32" for index in range(150_000)]}
    payload = json.dumps(data).encode()
    assert len(payload) > 3_000_000
    file = tmp_path / "large.json"
    file.write_bytes(payload)
    async with unmoved(live):
        client = await nats.connect(mesh.url)
        with pytest.raises(nats.errors.MaxPayloadError):
            await client.publish(subject(data), payload)
        await client.close()
        done = await live.meshmark("publish", "-f", str(file))
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1, done.stderr
    assert "$.podPrefixes: Expected `array` of length <= 256" in done.stderr, done.stderr
    await goes_on(live)


async def test_the_last_good_value_outlives_the_planner(mesh, live, tmp_path: Path):
    """With bad words waiting, a killed planner comes back with what was good: nothing is published anew, all pods reach each other, and
    what is good is taken."""
    texts = {case: wrong(mesh, case)[0] for case in ("remap lengths that differ", "host bits", "a missing cluster")}
    after = len(live.board.refusals)
    async with live.undisturbed(("rome/shop", "milan/bank")), unmoved(live):
        async with live.broker() as broker:
            for data in texts.values():
                await broker.publish(subject(data), json.dumps(data).encode())
        for data in texts.values():
            await live.refusal(ref(data), after)
        refused = len(live.board.refusals)
        await mesh.kill("planner")
        # The new planner has read everything once it refuses the next bad word.
        async with live.broker() as broker:
            await broker.publish(subject(NODE), b"null")
        await live.refusal(ref(NODE), refused)
        assert len(live.board.refusals) == refused + 1, "what was refused before is not told again"
        assert live.objects[PEERING] == mesh.object(PEERING)
    assert len(await live.carries()) == 24
    await goes_on(live)


async def test_a_long_name_with_dots_works(mesh, live):
    """A node whose name has 40 characters and dots is admitted, planned and applied, and its pod is reached from everywhere."""
    assert len(LONG_NAME) == len(WILD_NAME) == 40
    node = Node(name=Name(LONG_NAME), cluster=Name("rome"), addresses=(Address("172.18.0.13"),), pod_prefixes=(Prefix("10.200.3.0/24"),))
    pod = Pod(name=Name("till.of.the.shop"), cluster=Name("rome"), node=node.name, addresses=(Address("10.200.3.10"),))
    await live.publish(node, pod)
    checks = await live.carries()
    assert sum(pod.name in check.name for check in checks) == 16
