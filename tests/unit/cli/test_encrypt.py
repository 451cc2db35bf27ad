"""``meshmark encrypt status``: what topology and appliers say, for people and for programs, also where some host does not answer."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from schemas import codec, subjects
from schemas.allocation import Rotation
from schemas.commands import EncryptionNow, PeerNow, PointNow
from schemas.drift import AlertLayer, ClearPacket, DriftEvent
from schemas.values import Address, Endpoint, Key, Name
from services.cli import encrypt
from services.cli.encrypt import _age, status
from services.cli.output import console
from services.runtime.errors import Permanent, Waiting
from services.runtime.messages import Message
from tests.topologies import encrypting, gateway
from tests.unit.cli.broker import StubBroker

ROME = Name("rome")
NOW_S = 1_800_000_000.0
PEER = PeerNow("worker-2", "me.0", Key("2" * 42 + "A="), True, Endpoint("172.18.0.12:51871"), NOW_S - 5.0, 3_500_000, 900)
CLEAN = tuple(PointNow(name, "plaintext", way, "pods", 0, 0) for name, way in (("to-network", "out"), ("from-network", "in")))  # type: ignore[arg-type]
NOW = EncryptionNow(ROME, Name("worker-1"), 5.0, "me.0", 51871, 1, (PEER,), (PointNow("to-crypto", "inner", "out", "all", 7, 700), *CLEAN))


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are not folded, and it is a certain time."""
    monkeypatch.setattr(console, "width", 300)
    monkeypatch.setattr(encrypt, "time", SimpleNamespace(time=lambda: NOW_S))
    monkeypatch.setattr(encrypt, "_AGAIN_S", 0.0)


@pytest.fixture
def rome(broker: StubBroker) -> StubBroker:
    """Two nodes that encrypt and answer, one that opted out."""
    broker.admit(*encrypting())
    say(broker, NOW)
    say(broker, replace(NOW, host=Name("worker-2"), peers=(replace(PEER, node="worker-1"),)))
    return broker


def say(broker: StubBroker, answer: EncryptionNow) -> None:
    broker.answers[subjects.command("rome", answer.host, "encryption")] = codec.encode(answer)


async def told(broker: StubBroker, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, dict[str, object]]]:
    code = await status(output="json", nats=broker)
    return code, {one["host"]: one for one in json.loads(capsys.readouterr().out)}


async def test_all_is_well(rome: StubBroker, capsys: pytest.CaptureFixture[str]) -> None:
    """Mode, strict mode, peers and what was counted; who opted out is not asked."""
    code, found = await told(rome, capsys)
    assert code == 0
    assert {name: one["state"] for name, one in found.items()} == {"worker-1": "encrypts", "worker-2": "encrypts", "worker-3": "optedOut"}
    one = found["worker-1"]
    assert (one["mode"], one["strict"], one["nodes"], one["leaked"], one["error"]) == ("native", "audit", False, 0, "")
    assert one["now"]["peers"][0]["node"] == "worker-2"  # type: ignore[index]
    assert await status(output="table", nats=rome) == 0
    table = capsys.readouterr().out
    assert "1, 1 fresh" in table
    assert "3.3 MiB in, 900 B out" in table


async def test_a_host_that_does_not_answer_is_said_and_the_others_shown(rome: StubBroker, capsys: pytest.CaptureFixture[str]) -> None:
    """It is silent, with the reason, in each form; the exit code says so."""
    del rome.answers[subjects.command("rome", "worker-2", "encryption")]
    code, found = await told(rome, capsys)
    assert code == 2
    assert (found["worker-2"]["state"], found["worker-1"]["state"]) == ("silent", "encrypts")
    assert "nobody serves" in str(found["worker-2"]["error"])
    assert await status(output="table", nats=rome) == 2
    (row,) = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("rome/worker-2")]
    assert (row[1], row[5:8]) == ("silent", ["-", "-", "-"])
    assert await status("rome/worker-2", output="table", nats=rome) == 2
    first, error, *more = capsys.readouterr().out.splitlines()
    assert first.startswith("rome/worker-2 silent")
    assert "nobody serves" in error
    assert not any("device" in line for line in more)
    assert await status("rome/worker-1", output="yaml", nats=rome) == 0


@pytest.mark.parametrize(
    "before_s, said",
    [(0, "0 s ago"), (119, "119 s ago"), (120, "2 min ago"), (7199, "120 min ago"), (7200, "2 h ago"), (86400 * 2, "2 d ago")],
)
def test_an_age_is_in_the_unit_of_which_there_are_two(before_s: float, said: str) -> None:
    assert _age(before_s) == said


async def test_peers_that_are_missing_or_strange_are_said(rome: StubBroker, capsys: pytest.CaptureFixture[str]) -> None:
    """Each with what is known of it."""
    missing, strange = PeerNow("worker-2", "me.0", PEER.public_key, is_there=False), replace(PEER, node="", handshake_s=0.0, endpoint=None)
    for one in (missing, strange):
        say(rome, replace(NOW, peers=(one,)))
        assert await status(output="json", nats=rome) == 2
    capsys.readouterr()
    say(rome, replace(NOW, peer_count=2, peers=(missing, strange)))
    assert await status(output="table", nats=rome) == 2
    assert "lacks its peer worker-2; 1 peers that are not planned" in capsys.readouterr().out
    assert await status("rome/worker-1", output="table", nats=rome) == 2
    shown = capsys.readouterr().out
    assert "missing" in shown
    assert "not planned" in shown
    assert "never" in shown


async def test_leaks_are_counted_and_open_alerts_said(rome: StubBroker, capsys: pytest.CaptureFixture[str]) -> None:
    """What was counted long ago is no reason to fail; an alert that is open is."""
    say(rome, replace(NOW, points=(*NOW.points[:1], replace(CLEAN[0], packets=12, bytes=900), CLEAN[1])))
    code, found = await told(rome, capsys)
    assert (code, found["worker-1"]["leaked"]) == (0, 12)
    event = DriftEvent(ROME, Name("worker-1"), "plaintext", "out pods 10.200.1.10 10.200.2.10", "raised", "encrypted", "udp … in clear")
    rome.put(subjects.drift("rome", "worker-1", "plaintext"), codec.encode(event))
    assert await status("rome/worker-1", output="table", nats=rome) == 2
    shown = capsys.readouterr().out
    assert "12 out" in shown
    assert "alert: udp … in clear" in shown
    assert (await told(rome, capsys))[0] == 2


async def test_of_one_host_each_far_end_in_clear_is_named(rome: StubBroker, capsys: pytest.CaptureFixture[str]) -> None:
    """Which pair leaks, by what open alerts say, and which is in clear on purpose; among all hosts, only what leaks."""
    packet = ClearPacket("out", "pods", "udp", Address("10.200.1.10"), Address("10.200.2.10"), 40521, 7000)
    event = DriftEvent(ROME, Name("worker-1"), "plaintext", "out pods 10.200.1.10 10.200.2.10", "raised", count=12, packet=packet)
    rome.put(subjects.drift("rome", "worker-1", "plaintext"), codec.encode(event))
    assert await status("rome/worker-1", output="table", nats=rome) == 2
    shown = capsys.readouterr().out
    assert "leaks with worker-2: at least 12 packets, by 1 open alert\n" in shown
    assert "in clear, and meant to be, with worker-3 (opted out)" in shown
    leaks = {"node": "worker-2", "state": "encrypts", "alerts": 1, "shown": 12}
    _, found = await told(rome, capsys)
    assert {name: one["farEnds"] for name, one in found.items()} == {"worker-1": [leaks], "worker-2": [], "worker-3": []}
    assert await status("rome/worker-1", output="json", nats=rome) == 2
    one = json.loads(capsys.readouterr().out)
    assert one["farEnds"] == [leaks, {"node": "worker-3", "state": "optedOut", "alerts": 0, "shown": 0}]


def leaking(packets: int) -> EncryptionNow:
    return replace(NOW, points=(*NOW.points[:1], replace(CLEAN[0], packets=packets), CLEAN[1]))


@pytest.mark.parametrize(
    "later,shown,words",
    [
        (12, (12, 0), "12 out; none now"),
        (15, (15, 3), "15 out; 3 of them now"),
        (2, (2, 0), "2 out; none now"),  # the rules were written again meanwhile
        (None, (12, None), "12 out"),
    ],
)
async def test_an_old_leak_is_told_from_one_that_goes_on(
    rome: StubBroker, capsys: pytest.CaptureFixture[str], later: int | None, shown: tuple[int, int | None], words: str
) -> None:
    """A host that has counted any is asked again, and it alone; one that is silent by then is shown as it answered."""
    counts = iter((12, later) * 2)

    def answered(asked: Message) -> list[Message]:
        if asked.subject == subjects.command("rome", "worker-1", "encryption"):
            if (count := next(counts)) is None:
                msg = "silent now"
                raise Waiting(msg, "an answer")
            say(rome, replace(NOW, points=(*NOW.points[:1], replace(CLEAN[0], packets=count), CLEAN[1])))
        return []

    rome.follow = answered
    code, found = await told(rome, capsys)
    assert code == 0
    assert (found["worker-1"]["leaked"], found["worker-1"]["leaking"]) == shown
    assert found["worker-2"]["leaking"] is None
    assert len(rome.asked) == 3
    assert await status(output="table", nats=rome) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("rome/worker-1"))
    assert f"  {words}  " in row


async def test_a_hosts_name_is_not_folded(rome: StubBroker, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal of 80 columns, too, where all else is."""
    monkeypatch.setattr(console, "width", 80)
    assert await status(output="table", nats=rome) == 0
    firsts = [line.split()[0] for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]
    assert firsts == ["HOST", "rome/worker-1", "rome/worker-2", "rome/worker-3"]


@pytest.mark.parametrize(
    "layer,host,since_s,closed",
    [
        ("plaintext", "worker-1", 200.0, True),
        ("plaintext", "worker-1", 50.0, False),
        ("plaintext", "worker-2", 200.0, False),
        ("nft", "worker-1", 200.0, False),
    ],
)
async def test_an_alert_of_an_auditor_that_has_ended_is_over(
    rome: StubBroker, layer: AlertLayer, host: str, since_s: float, closed: bool
) -> None:
    """When the one after it says so: of its own host, and of what was told before it began."""
    key = "out pods 10.200.1.10 10.200.2.10"
    alert = DriftEvent(ROME, Name("worker-1"), "plaintext", key, "raised", at_s=100.0)
    said = DriftEvent(ROME, Name(host), layer, f"layer {layer}", "resolved", first_seen_s=since_s, at_s=since_s + 15)
    for number, event in enumerate((alert, said)):
        subject = subjects.drift("rome", event.host, event.layer)
        rome.messages[f"{subject} {number}"] = Message(subject, codec.encode(event), sequence=number + 1)
    assert (await status("rome/worker-1", output="json", nats=rome) == 0) is closed


async def test_a_cluster_that_does_not_encrypt_is_off(broker: StubBroker, capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody is asked."""
    broker.admit(*encrypting(encryption="none", strict="off"))
    code, found = await told(broker, capsys)
    assert code == 0
    assert {one["state"] for one in found.values()} == {"off", "optedOut"} or {one["state"] for one in found.values()} == {"off"}


async def test_a_node_without_a_key_is_asked_too(broker: StubBroker, capsys: pytest.CaptureFixture[str]) -> None:
    """Its applier may be what is missing."""
    broker.admit(*(item for item in encrypting() if item.kind != "PublicKey"))
    say(broker, NOW)
    _, found = await told(broker, capsys)
    assert (found["worker-1"]["state"], found["worker-2"]["state"]) == ("noKey", "silent")


async def test_a_change_of_keys_is_said(rome: StubBroker, capsys: pytest.CaptureFixture[str]) -> None:
    """With what it waits for, in the table and of the node alone; it is no reason to fail."""
    rotation = Rotation(PEER.public_key, Key("3" * 42 + "A="), "beside", 1, ("rome/worker-2 has not followed yet",))
    rome.put(subjects.allocation("rotation", "rome", "worker-1"), codec.encode(rotation), NOW_S - 60.0)
    for host in (None, "rome/worker-1"):
        assert await status(host, output="table", nats=rome) == 0
        assert "changes its key, and waits: rome/worker-2 has not followed yet" in capsys.readouterr().out
    code, found = await told(rome, capsys)
    assert code == 0
    assert found["worker-1"]["keyChange"]["sinceSeconds"] == NOW_S - 60.0  # type: ignore[index]
    assert found["worker-2"]["keyChange"] is None


async def test_a_gateway_is_no_node(rome: StubBroker) -> None:
    """It is said where to look instead; a host that is not there is said to be none."""
    rome.admit(gateway("rome"))
    with pytest.raises(Permanent, match=r"rome/gateway is a gateway.*see: meshmark status rome/gateway"):
        await status("rome/gateway", nats=rome)
    with pytest.raises(Permanent, match=r"no host rome/worker-9; did you mean rome/worker-"):
        await status("rome/worker-9", nats=rome)
