"""``meshmark publish`` and ``get``: whose word counts, and what is found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from msgspec.structs import replace

from schemas import codec, subjects
from schemas.allocation import Remap, Remaps
from schemas.status import Refusal
from schemas.values import Name, Prefix
from services.cli.objects import Verdicts, delete, get, publish
from services.runtime import events
from services.runtime.messages import Message
from tests.topologies import cluster, gateway, node, peering, two_clusters
from tests.unit.cli.broker import StubBroker


def refusal(sequence: int, reason: str = "cluster 'rome' is not known") -> Message:
    said = Refusal("Node", "rome", "worker-1", reason, "$.cluster", "", sequence)
    return Message(subjects.refused("Node", "rome", "worker-1"), codec.encode(said))


def admission(sequence: int) -> Message:
    return Message(subjects.state("Node", "rome", "worker-1"), b"{}", {events.SEQUENCE: str(sequence)})


@pytest.mark.parametrize("order", [(refusal, admission), (admission, refusal)], ids=["refused first", "admitted first"])
def test_an_admission_is_final(order):
    verdicts = Verdicts([5])
    for said in order:
        verdicts.hear(said(5))
    assert verdicts.admitted == {5}
    assert not verdicts.refused
    assert not verdicts.open


def test_a_refusal_without_an_admission_stands():
    verdicts = Verdicts([5, 6])
    verdicts.hear(refusal(5))
    verdicts.hear(admission(7))
    assert list(verdicts.refused) == [5]
    assert verdicts.open == {6}
    assert not verdicts.may_change({5, 6}), "sequence 7 is somebody else's"


@pytest.fixture
def wrong_order(tmp_path: Path) -> Path:
    """A node before its cluster, which is refused first and admitted as soon as the cluster is there."""
    file = tmp_path / "topology.yaml"
    file.write_text(yaml.safe_dump_all([codec.to_builtins(node("worker-1", 1)), codec.to_builtins(cluster("rome"))]))
    return file


async def test_what_was_refused_for_want_of_what_follows_is_admitted(broker: StubBroker, wrong_order: Path, capsys):
    """The planner's words in its order: refused 1; admitted 2, and 1 with it."""
    broker.follow = lambda message: [refusal(1)] if message.sequence == 1 else [admission(2), admission(1)]
    assert await publish(file=[wrong_order], nats=broker) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines() == ["Node/rome/worker-1 admitted", "Cluster/rome/rome admitted"]
    assert printed.err == ""


async def test_what_stays_refused_is_said(broker: StubBroker, wrong_order: Path, capsys):
    broker.follow = lambda message: [refusal(1, "[no] such thing")] if message.sequence == 1 else [admission(2)]
    assert await publish(file=[wrong_order], nats=broker) == 1
    assert capsys.readouterr().err == "error: Node/rome/worker-1 refused: $.cluster: [no] such thing\n"


async def test_without_a_planner_the_wait_ends(broker: StubBroker, wrong_order: Path, capsys):
    assert await publish(file=[wrong_order], wait_s=0.05, nats=broker) == 1
    assert capsys.readouterr().err.count("no verdict within 0.05 s") == 2


async def test_a_deletion_of_what_was_not_there_is_said(broker: StubBroker, capsys):
    """It is no failure: nothing of that name is in force afterwards. But a typo must not look like a deletion."""
    broker.admit(*two_clusters())
    broker.follow = lambda message: [admission(message.sequence)]
    assert await delete("Endpoint/rome/shop", "Endpoint/rome/shup", nats=broker) == 0
    assert capsys.readouterr().out.splitlines() == ["Endpoint/rome/shop deleted", "Endpoint/rome/shup was not there"]


async def test_what_is_refused_is_found(broker: StubBroker, capsys):
    """The newest refusal of each object, until something newer of that name is admitted."""
    broker.messages["a"] = refusal(5)
    broker.messages["b"] = refusal(7, "no such thing")
    assert await get(refused=True, output="json", nats=broker) == 0
    assert [item["reason"] for item in json.loads(capsys.readouterr().out)] == ["no such thing"]
    assert await get("nodes", "rome/worker-1", refused=True, output="table", nats=broker) == 0
    assert "$.cluster: no such thing" in capsys.readouterr().out
    broker.messages["c"] = admission(8)
    assert await get(refused=True, output="json", nats=broker) == 0
    assert json.loads(capsys.readouterr().out) == []


async def test_a_table_shows_what_came_from_pools(broker: StubBroker, capsys):
    """Beside what was said, which JSON shows alone: it can be published again as it is."""
    rome, milan = peering().ends
    item = peering(ends=(replace(rome, remap_pods=()), milan))
    broker.admit(cluster("rome"), cluster("milan"), item)
    remap = Remap(Name("rome"), Prefix("10.200.0.0/16"), Prefix("10.96.0.0/16"))
    broker.put(subjects.allocation("remaps", "rome", "rome-milan"), codec.encode(Remaps((remap,))))
    assert await get("peerings", output="table", nats=broker) == 0
    assert "fromPools=rome:10.200.0.0/16→10.96.0.0/16" in "".join(capsys.readouterr().out.split())
    assert await get("peering", "rome/rome-milan", output="json", nats=broker) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(codec.encode(item))


async def test_a_table_shows_no_python(broker: StubBroker, capsys):
    """Lists and objects are shown as people write them."""
    broker.admit(*two_clusters())
    assert await get(output="table", nats=broker) == 0
    printed = capsys.readouterr().out
    assert "podPrefixes=10.200.1.0/24" in printed
    assert "('" not in printed


async def test_objects_are_found_by_kind_and_name(broker: StubBroker, capsys):
    broker.admit(*two_clusters(), gateway("rome", "spare"))
    assert await get("gateways", "rome/spare", output="json", nats=broker) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "spare"
    assert await get("Gateway/rome/spare", output="json", nats=broker) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "spare"
    assert await get("Node", "worker-1", output="json", nats=broker) == 0
    assert [item["cluster"] for item in json.loads(capsys.readouterr().out)] == ["milan", "rome"]
    assert await get("Node", "typo", nats=broker) == 1
    assert "no Node named typo" in capsys.readouterr().err
