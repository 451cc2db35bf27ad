"""``meshmark status``: the same facts for people and for programs, and an exit code that means that something is missing."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from schemas import codec, subjects
from schemas.allocation import Rotation, RotationStage
from schemas.drift import DriftEvent, DriftLayer
from schemas.in_use import InUse, Use
from schemas.plan import HostPlan, digest_of
from schemas.status import ApplyReport, Capabilities, DeadTunnel, Outcome, Peers, Timings, TunnelHealth, UnitReport
from schemas.values import Key, Name
from services.cli import status as module
from services.cli.status import status
from services.planner.state import HostId
from services.runtime.errors import Permanent
from services.runtime.messages import Message
from tests.topologies import gateway, node, settled_plans, two_clusters
from tests.unit.cli.broker import StubBroker

PLANS = settled_plans(two_clusters(nodes=1))
GATEWAY = HostId("rome", "gateway")


def report(plan: HostPlan, generation: int, outcome: Outcome = "applied", error: str = "") -> ApplyReport:
    units = tuple(
        UnitReport(name, digest_of(unit) if outcome == "applied" else "", digest_of(unit), outcome, error)
        for name, unit in plan.units.items()
    )
    times = Timings(1_700_000_000.0, 1_700_000_000.25, 1_700_000_000.5, 1_700_000_001.0, 1_700_000_001.125)
    return ApplyReport(plan.cluster, plan.host, 1, generation, units, 12, times, Capabilities("6.1.0", "1.0.6", "kernel"))


def empty(cluster: str, host: str) -> HostPlan:
    return HostPlan(Name(cluster), Name(host), {})


@pytest.fixture
def mesh(broker: StubBroker) -> StubBroker:
    """Both gateways and both nodes hold generation 3."""
    broker.admit(*two_clusters(nodes=1))
    for plan in PLANS.values():
        broker.publish_plan(plan, 3)
        broker.report(report(plan, 3))
    return broker


async def states(broker: StubBroker, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, str]]:
    code = await status(output="json", nats=broker)
    return code, {f"{one['cluster']}/{one['host']}": one["state"] for one in json.loads(capsys.readouterr().out)}


async def test_all_is_well(mesh: StubBroker, capsys: pytest.CaptureFixture[str]):
    code, found = await states(mesh, capsys)
    assert code == 0
    assert set(found.values()) == {"applied"}


async def test_programs_are_told_what_the_table_shows(mesh: StubBroker, capsys: pytest.CaptureFixture[str]):
    """State, generations held and wanted, and hosts that never reported."""
    mesh.publish_plan(PLANS[GATEWAY], 4)
    mesh.admit(node("silent", 7))
    mesh.publish_plan(empty("milan", "fresh"))
    assert await status(output="json", nats=mesh) == 2
    found = {f"{one['cluster']}/{one['host']}": one for one in json.loads(capsys.readouterr().out)}
    behind = found["rome/gateway"]
    assert (behind["state"], behind["heldGeneration"], behind["wantedGeneration"]) == ("behind", 3, 4)
    assert behind["wantedUnits"] == PLANS[GATEWAY].digests()
    assert behind["report"]["operations"] == 12
    silent = found["rome/silent"]
    assert (silent["state"], silent["heldGeneration"], silent["wantedGeneration"], silent["report"]) == ("silent", None, None, None)
    assert await status(output="table", nats=mesh) == 2
    table = capsys.readouterr().out
    assert all(f"{one['cluster']}/{one['host']}" in table and one["state"] in table for one in found.values())


@pytest.mark.parametrize("outcome", ["waiting", "degraded"])
async def test_a_host_that_does_not_hold_its_plan_counts(mesh: StubBroker, capsys: pytest.CaptureFixture[str], outcome: Outcome):
    mesh.report(report(PLANS[GATEWAY], 3, outcome, "link eth1 is not there"))
    code, found = await states(mesh, capsys)
    assert (code, found["rome/gateway"]) == (2, outcome)


@pytest.mark.parametrize("reported", ["never", "before", "after"])
async def test_a_removed_host_is_gone_whether_it_answers_or_not(mesh: StubBroker, capsys: pytest.CaptureFixture[str], reported: str):
    mesh.publish_plan(empty("rome", "old"), 9)
    if reported == "before":
        mesh.report(ApplyReport(Name("rome"), Name("old"), 1, 8, (UnitReport("x", "", "1", "degraded", "no"),)))
    elif reported == "after":
        mesh.report(ApplyReport(Name("rome"), Name("old"), 1, 9, ()))
    code, found = await states(mesh, capsys)
    assert (code, found["rome/old"]) == (0, "gone")


async def test_what_a_removed_host_cannot_take_away_is_shown_and_does_not_count(mesh: StubBroker, capsys: pytest.CaptureFixture[str]):
    mesh.publish_plan(empty("rome", "old"), 9)
    mesh.report(ApplyReport(Name("rome"), Name("old"), 1, 9, (UnitReport("-", "", "", "degraded", "link wg7: busy"),)))
    code, found = await states(mesh, capsys)
    assert (code, found["rome/old"]) == (0, "degraded")


async def test_a_host_in_force_that_is_to_hold_nothing_is_not_gone_and_does_not_count(mesh: StubBroker, capsys: pytest.CaptureFixture[str]):
    mesh.admit(gateway("rome", "spare"))
    mesh.publish_plan(empty("rome", "spare"))
    code, found = await states(mesh, capsys)
    assert (code, found["rome/spare"]) == (0, "silent")


async def test_one_host_is_shown_with_its_units(mesh: StubBroker, capsys: pytest.CaptureFixture[str]):
    """Digests held and wanted, outcome, error and times, unit by unit."""
    mesh.report(report(PLANS[GATEWAY], 3, "waiting", "link eth1 is not there"))
    assert await status("rome/gateway", output="table", nats=mesh) == 2
    printed = capsys.readouterr().out
    (unit,) = PLANS[GATEWAY].units
    words = (
        unit,
        digest_of(PLANS[GATEWAY].units[unit])[:12],
        "waiting",
        "link eth1 is not there",
        "committed after 0.500 s",
        "12 operations",
    )
    assert all(word in printed for word in words), printed
    assert "2023-11-14 22:13:21 UTC" in printed
    assert "milan" not in printed.replace(unit, "")


async def test_one_host_is_one_document(mesh: StubBroker, capsys: pytest.CaptureFixture[str]):
    assert await status("rome/gateway", output="json", nats=mesh) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "applied"


async def test_a_unit_that_was_never_reported_is_shown(mesh: StubBroker, capsys: pytest.CaptureFixture[str]):
    mesh.report(report(empty("rome", "gateway"), 2))
    assert await status("rome/gateway", output="table", nats=mesh) == 2
    assert "not reported yet" in capsys.readouterr().out


async def test_a_host_that_is_not_there_is_an_error(mesh: StubBroker):
    with pytest.raises(Permanent, match="no host rome/typo"):
        await status("rome/typo", nats=mesh)


async def test_tunnels_that_are_withdrawn_are_shown_and_do_not_count(mesh: StubBroker, capsys: pytest.CaptureFixture[str]):
    """The host holds its plan: the table and the page of the host say which tunnel is out, since when and why, and the code is 0."""
    tunnels = TunnelHealth("handshake", withdrawn=(DeadTunnel("mt.1", 1_700_000_000.0, "no answer to 3 probes"),))
    mesh.report(replace(report(PLANS[GATEWAY], 3), tunnels=tunnels))
    for host in (None, "rome/gateway"):
        assert await status(host, output="table", nats=mesh) == 0
        printed = " ".join(capsys.readouterr().out.split())
        assert "tunnel mt.1 withdrawn since 2023-11-14 22:13:20 UTC: no answer to 3 probes" in printed
    assert "no right to send probes" in printed
    assert await status("rome/gateway", output="json", nats=mesh) == 0
    told = json.loads(capsys.readouterr().out)["report"]["tunnels"]
    assert told == {
        "judgedBy": "handshake",
        "withdrawn": [{"link": "mt.1", "sinceSeconds": 1_700_000_000.0, "reason": "no answer to 3 probes"}],
    }
    mesh.report(replace(report(PLANS[GATEWAY], 3), tunnels=TunnelHealth(dead=(DeadTunnel("mt.0", 1_700_000_000.0, "no handshake"),))))
    assert await status("rome/gateway", output="table", nats=mesh) == 0
    assert "tunnel mt.0 dead as all are since" in capsys.readouterr().out


async def test_numbers_that_others_use_are_shown_and_do_not_count(mesh: StubBroker, capsys: pytest.CaptureFixture[str]):
    """Those that the plan has as well are named in the table; all of them where one host is shown; the host holds its plan."""
    uses = InUse((Use(0x4000, "kube-proxy"),), (Use(52, "IPv4 routes", 4), Use(52, "IPv6 routes", 6)), (), (Use(53, "a UDP socket"),))
    told = replace(report(PLANS[GATEWAY], 3), in_use=uses, collisions=("mark bits 0xff00: kube-proxy",))
    mesh.report(told)
    assert await status(output="table", nats=mesh) == 0
    assert "others use its mark bits 0xff00: kube-proxy" in " ".join(capsys.readouterr().out.split())
    assert await status("rome/gateway", output="table", nats=mesh) == 0
    printed = capsys.readouterr().out
    assert "others use  marks 0x4000; tables 52; UDP ports 53\n" in printed
    assert "others use its mark bits 0xff00: kube-proxy" in printed
    mesh.report(replace(told, in_use=InUse(), collisions=()))
    assert await status("rome/gateway", output="table", nats=mesh) == 0
    assert "others use  nothing that was seen" in capsys.readouterr().out


async def test_what_is_contested_is_shown_and_counts(mesh: StubBroker, capsys: pytest.CaptureFixture[str]):
    """The host reports that it holds its plan, and somebody undoes it again and again. What is just being repaired is not named."""
    rule, next_s = "rule 900 fwmark 0xff00/0xff00 iif - to -", 1_700_000_000.0
    subject = subjects.drift("rome", "gateway", "rule")
    event = DriftEvent(Name("rome"), Name("gateway"), "rule", rule, "contested", count=4, next_repair_s=next_s)
    mesh.put(subject, codec.encode(replace(event, state="raised")))
    assert await status(output="table", nats=mesh) == 0
    mesh.put(subject, codec.encode(event))
    for host in (None, "rome/gateway"):
        assert await status(host, output="table", nats=mesh) == 2
        printed = " ".join(capsys.readouterr().out.split())
        assert f"contested: {rule}, made 4 times within a minute, next repair at 22:13:20 UTC" in printed
    assert await status("rome/gateway", output="json", nats=mesh) == 2
    found = json.loads(capsys.readouterr().out)
    assert (found["state"], [one["key"] for one in found["contested"]]) == ("applied", [rule])
    assert await status("milan/gateway", output="json", nats=mesh) == 0


@pytest.mark.parametrize(
    "host, layer, began_s, is_over",
    [
        ("gateway", "rule", 200.0, True),
        ("gateway", "rule", 50.0, False),
        ("gateway", "route", 200.0, False),
        ("worker-1", "rule", 200.0, False),
    ],
)
async def test_what_was_contested_is_over_when_a_later_auditor_says_so(
    mesh: StubBroker, host: str, layer: DriftLayer, began_s: float, is_over: bool
):
    """Of its own host and of the layer that it has looked at: what was told before it began, by one that has ended."""
    event = DriftEvent(Name("rome"), Name("gateway"), "rule", "rule 900 - iif - to -", "contested", count=4, at_s=100.0)
    said = DriftEvent(Name("rome"), Name(host), layer, f"layer {layer}", "resolved", first_seen_s=began_s, at_s=began_s + 1)
    for number, one in enumerate((event, said)):
        subject = subjects.drift("rome", one.host, one.layer)
        mesh.messages[f"{subject} {number}"] = Message(subject, codec.encode(one), sequence=number + 1)
    assert (await status("rome/gateway", output="json", nats=mesh) == 0) is is_over


async def test_what_was_contested_on_a_host_that_is_removed_does_not_count(mesh: StubBroker):
    """Its machine, and the auditor on it, may have gone before anybody could say that it is over."""
    event = DriftEvent(Name("rome"), Name("gateway"), "rule", "rule 900 - iif - to -", "contested", count=4)
    mesh.put(subjects.drift("rome", "gateway", "rule"), codec.encode(event))
    assert await status("rome/gateway", output="json", nats=mesh) == 2
    mesh.put(subjects.state("Gateway", "rome", "gateway"), b"")
    mesh.publish_plan(empty("rome", "gateway"), 4)
    mesh.report(report(empty("rome", "gateway"), 4))
    assert await status("rome/gateway", output="json", nats=mesh) == 0


async def test_peers_are_counted_and_a_name_without_address_counts(mesh: StubBroker, capsys: pytest.CaptureFixture[str]):
    """The host waits for it, and says for which and why; how many peers answer is on its page."""
    peers = Peers(4, 2, 1, 1, 9, ("gw-c.example.invalid: Name or service not known",))
    mesh.report(replace(report(PLANS[GATEWAY], 3), peers=peers))
    for host in (None, "rome/gateway"):
        assert await status(host, output="table", nats=mesh) == 2
        printed = " ".join(capsys.readouterr().out.split())
        assert "waiting for the address of gw-c.example.invalid: Name or service not known" in printed
        assert "and 8 more names" in printed
    assert "rome/gateway waiting" in printed
    assert "peers 4: 2 shake hands, 1 of them from elsewhere than planned, 1 no more, 1 never did" in printed


OLD, NEW = Key("1" * 42 + "A="), Key("2" * 42 + "A=")
CHANGE = Rotation(OLD, NEW, "beside", 3, ("milan/gateway has not followed yet",), peering="Peering/rome/rome-milan")


def change(mesh: StubBroker, rotation: Rotation | None, at_s: float = 0.0) -> None:
    mesh.put(subjects.allocation("rotation", "rome", "gateway"), codec.encode(rotation) if rotation else b"", at_s)


async def test_a_change_of_keys_is_shown_and_does_not_count(
    mesh: StubBroker, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """How far it is, and what it waits for when that lasts, in the table and on the page of the host; for programs all that is known."""
    monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: 1000.0))
    for at_s, words in (
        (999.0, "changes its key: a device with the new key comes beside the tunnels, at both ends"),
        (900.0, "changes its key, and waits: milan/gateway has not followed yet; for 2 more"),
    ):
        change(mesh, CHANGE, at_s)
        for host in (None, "rome/gateway"):
            assert await status(host, output="table", nats=mesh) == 0
            assert words in " ".join(capsys.readouterr().out.split())
    assert await status("rome/gateway", output="json", nats=mesh) == 0
    told = json.loads(capsys.readouterr().out)["keyChange"]
    assert (told["rotation"]["reasons"], told["sinceSeconds"]) == (["milan/gateway has not followed yet"], 900.0)
    assert await status("milan/gateway", output="json", nats=mesh) == 0
    assert json.loads(capsys.readouterr().out)["keyChange"] is None


async def test_who_waits_for_the_turn_is_told_for_whom_at_once(
    mesh: StubBroker, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """That is no trouble."""
    monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: 1000.0))
    change(mesh, replace(CHANGE, stage="queued", waiting=1, reasons=("milan/gateway changes its key first",)), 1000.0)
    assert await status(output="table", nats=mesh) == 0
    assert "changes its key, and waits: milan/gateway changes its key first" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("last", ["done", None])
async def test_a_change_of_keys_that_is_over_is_not_shown(mesh: StubBroker, capsys: pytest.CaptureFixture[str], last: RotationStage | None):
    """Whatever is left of it."""
    change(mesh, replace(CHANGE, stage=last) if last else None)
    assert await status(output="table", nats=mesh) == 0
    assert "changes its key" not in capsys.readouterr().out
