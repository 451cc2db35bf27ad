"""``meshmark drift``: one line for each open difference, with a key that can be pasted, and what people need beside it."""

from __future__ import annotations

import shlex

import pytest
from msgspec.structs import replace

from schemas import codec, subjects
from schemas.drift import DriftEvent, Suspect
from schemas.values import Name
from services.cli.drift import drift
from tests.unit.cli.broker import StubBroker

KEY = "rule 1000 fwmark 0x4d2/0xfff iif - to -"
EVENT = DriftEvent(Name("rome"), Name("worker-1"), "rule", KEY, "raised", "a rule", suspect=Suspect(1031, "ip"), at_s=1_700_000_000.0)


async def printed(broker: StubBroker, capsys: pytest.CaptureFixture[str], event: DriftEvent) -> list[str]:
    broker.put(subjects.drift("rome", "worker-1", event.layer), codec.encode(event))
    assert await drift(output="table", nats=broker) == 2  # type: ignore[arg-type]
    return capsys.readouterr().out.splitlines()


async def test_a_key_can_be_pasted_into_explain(broker: StubBroker, capsys: pytest.CaptureFixture[str]):
    """Layer, key and suspect are apart: the shell takes the key as one word."""
    first, wanted = await printed(broker, capsys, EVENT)
    assert first == f"22:13:20 raised    rome/worker-1  rule: '{KEY}'  by ip (1031)"
    assert shlex.split(first)[4] == KEY
    assert wanted.strip() == "wanted: a rule"


async def test_what_is_contested_says_when_it_is_repaired_next(broker: StubBroker, capsys: pytest.CaptureFixture[str]):
    """Where it is only told, by the cluster's policy, there is no repair to wait for."""
    contested = replace(EVENT, state="contested", count=5, next_repair_s=1_700_000_008.0)
    words = f"contested: {KEY}, made 5 times within a minute"
    assert (await printed(broker, capsys, contested))[1].strip() == f"{words}, next repair at 22:13:28 UTC"
    assert (await printed(broker, capsys, replace(contested, next_repair_s=0.0)))[1].strip() == words


async def test_an_alert_says_what_is_behind_it(broker: StubBroker, capsys: pytest.CaptureFixture[str]):
    """No plan has an object for it that could be explained."""
    alert = replace(EVENT, layer="plaintext", key="out pods 10.200.1.10 10.200.2.10", because=("Cluster/rome/rome", "Node/rome/worker-2"))
    lines = await printed(broker, capsys, alert)
    assert "because: Cluster/rome/rome, Node/rome/worker-2" in [line.strip() for line in lines]
