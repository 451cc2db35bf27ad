"""``meshmark explain``: where an object comes from, what a topology object leads to, and what is told of messages, reports and drift."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from schemas import codec, subjects
from schemas.drift import DriftEvent
from schemas.plan import digest_of
from schemas.status import ApplyReport, Outcome, Timings, UnitReport
from schemas.values import Name
from services.cli.explain import explain
from services.cli.main import application
from services.cli.origin import is_reference, near
from services.planner.state import HostId
from services.runtime.errors import Permanent
from services.runtime.events import SEQUENCE
from services.runtime.messages import Message
from tests.topologies import settled_plans, two_clusters
from tests.unit.cli.broker import StubBroker

EXAMPLE = Path("examples/two-clusters.yaml")
ITEMS = two_clusters(nodes=1)
PLANS = settled_plans(ITEMS)
GATEWAY = HostId("rome", "gateway")
UNIT = "peering/rome/rome-milan"
TABLE = "meshmark.rome.rome-milan"
ROUTE = "route 7002 10.200.1.0/24 0"
ADMITTED_S = 1_700_000_000.0


def report(outcome: Outcome = "applied", held: str | None = None, error: str = "") -> ApplyReport:
    wanted = digest_of(PLANS[GATEWAY].units[UNIT])
    told = UnitReport(UNIT, wanted if held is None else held, wanted, outcome, error)
    return ApplyReport(Name("rome"), Name("gateway"), 1, 3, (told,), timings=Timings(reported_s=ADMITTED_S + 2))


@pytest.fixture
def mesh(broker: StubBroker) -> StubBroker:
    """Everything admitted and planned; object number N is message N of TOPOLOGY, published a second before it was admitted."""
    for number, item in enumerate(ITEMS, 1):
        words = (item.kind, item.home, item.name)
        said, state = subjects.topology(*words), subjects.state(*words)
        broker.messages[said] = Message(said, codec.encode(item), {}, number, ADMITTED_S - 1)
        broker.messages[state] = Message(state, codec.encode(item), {SEQUENCE: str(number)}, number, ADMITTED_S)
    for plan in PLANS.values():
        broker.publish_plan(plan, 3)
    return broker


async def told(capsys: pytest.CaptureFixture[str], *words: str, **options: object) -> dict:
    assert await explain(*words, output="json", **options) == 0  # type: ignore[arg-type]
    return json.loads(capsys.readouterr().out)


async def test_an_object_is_traced_to_the_messages_behind_it(mesh: StubBroker, capsys):
    """On every host that has it: unit, generation, value, because; of each topology object the value, the message and its times."""
    found = await told(capsys, *ROUTE.split(), nats=mesh)
    assert [(one["cluster"], one["host"], one["unit"], one["generation"]) for one in found["places"]] == [
        ("milan", "gateway", UNIT, 3),
        ("rome", "gateway", UNIT, 3),
    ]
    rome = found["places"][1]
    assert rome["value"]["prefix"] == "10.200.1.0/24"
    assert tuple(rome["because"]) == PLANS[GATEWAY].because(ROUTE)
    origins = {one["ref"]: one for one in found["origins"]}
    assert origins.keys() == {ref for host in PLANS for ref in PLANS[host].because(ROUTE)}
    peering = origins["Peering/rome/rome-milan"]
    number = next(number for number, item in enumerate(ITEMS, 1) if item.ref == "Peering/rome/rome-milan")
    assert (peering["sequence"], peering["publishedSeconds"], peering["admittedSeconds"]) == (number, ADMITTED_S - 1, ADMITTED_S)
    assert peering["value"]["tunnels"] == 3


async def test_a_message_that_is_not_kept_any_more_still_has_its_number(mesh: StubBroker, capsys):
    del mesh.messages[subjects.topology("peering", "rome", "rome-milan")]
    found = await told(capsys, ROUTE, nats=mesh)
    peering = next(one for one in found["origins"] if one["ref"] == "Peering/rome/rome-milan")
    assert peering["sequence"] > 0
    assert peering["publishedSeconds"] is None


@pytest.mark.parametrize(
    "said, held, words",
    [
        (None, "unknown", "never reported"),
        (report(), "yes", ""),
        (report("waiting", "", "link eth1 is not there"), "no", "waiting: link eth1 is not there"),
        (report("degraded", "0" * 32, "no"), "unknown", "degraded: no"),
        (report("applied", "0" * 32), "unknown", "older version"),
        (ApplyReport(Name("rome"), Name("gateway"), 1, 2, ()), "no", "has not reported on this unit"),
    ],
)
async def test_what_the_host_reports_is_told(mesh: StubBroker, capsys, said: ApplyReport | None, held: str, words: str):
    if said is not None:
        mesh.report(said)
    (place,) = (await told(capsys, ROUTE, host="rome/gateway", nats=mesh))["places"]
    assert place["standing"]["held"] == held
    assert words in place["standing"]["detail"]


@pytest.mark.parametrize(
    "key, drifting, concerned",
    [
        (ROUTE, ROUTE, True),
        (ROUTE, "route 7002 10.200.9.0/24 0", False),
        (ROUTE, "layer route", True),
        (ROUTE, "layer nft", False),
        (f"chain {TABLE} classify", f"table {TABLE}", True),
        (f"chain {TABLE} classify", "table meshmark.other", False),
        (ROUTE, "link mo.worker-1", True),
        (ROUTE, "link mo.worker-2", False),
        ("address mt.0 169.254.18.1/30", "link mt.0", True),
        ("address mt.0 169.254.18.1/30", "link mt.1", False),
    ],
)
async def test_open_drift_that_concerns_the_object_is_told(mesh: StubBroker, capsys, key: str, drifting: str, concerned: bool):
    """Its own, that of the table it is in or the link it needs, and that its layer cannot be read; not somebody else's."""
    layer = "nft" if key.startswith("chain") else "route"
    event = DriftEvent(Name("rome"), Name("gateway"), layer, drifting, "raised", "this", "that", first_seen_s=ADMITTED_S)
    mesh.put(subjects.drift("rome", "gateway", layer), codec.encode(event))
    (place,) = (await told(capsys, key, host="rome/gateway", nats=mesh))["places"]
    assert (place["drift"] is not None) == concerned


async def test_a_topology_object_is_followed_to_all_that_comes_of_it(mesh: StubBroker, capsys):
    found = await told(capsys, "peering/rome/rome-milan", nats=mesh)
    assert found["origin"]["ref"] == "Peering/rome/rome-milan"
    assert found["hosts"].keys() == {str(host) for host in PLANS}
    for host, plan in PLANS.items():
        keys = {key for layer in found["hosts"][str(host)].values() for key in layer}
        assert keys == {key for key in plan.objects() if "Peering/rome/rome-milan" in plan.because(key)}


async def test_people_see_the_same(mesh: StubBroker, capsys):
    mesh.report(report())
    assert await explain(ROUTE, host="rome/gateway", output="table", nats=mesh) == 0
    out = capsys.readouterr().out
    lines = (
        "rome/gateway  unit peering/rome/rome-milan, generation 3",
        "  value    ip route add 10.200.1.0/24 via ",
        "  held     yes (reported at 2023-11-14 22:13:22 UTC)",
        "  drift    none open",
        "published at 2023-11-14 22:13:19 UTC, admitted at 2023-11-14 22:13:20 UTC",
        "  addresses=172.18.0.10, uplink=eth0",
    )
    assert all(line in out for line in lines), out


async def test_files_are_enough(capsys):
    """No broker: plans from the files, objects as the files say; nothing about messages, reports and drift."""
    found = await told(capsys, f"chain {TABLE} classify", file=[EXAMPLE], host="rome/gateway")
    (place,) = found["places"]
    assert (place["generation"], place["standing"], place["drift"]) == (None, None, None)
    assert all(one["value"] is not None and one["sequence"] is None for one in found["origins"])
    assert await explain("Peering/rome/rome-milan", file=[EXAMPLE], output="table") == 0
    out = capsys.readouterr().out
    assert "from the files" in out
    header, gateway = (next(line for line in out.splitlines() if line.startswith(word)) for word in ("HOST", "rome/gateway"))
    assert header.split() == ["HOST", "SYSCTL", "LINK", "ADDRESS", "NFT", "RULE", "ROUTE"]
    assert all(int(count) > 0 for count in gateway.split()[1:])
    assert await explain("Peering/rome/rome-milan", file=[EXAMPLE], host="rome/gateway", output="table") == 0
    assert f"chain {TABLE} classify\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, said",
    [
        ("route 7002 10.200.1.0/24", f"did you mean '{ROUTE}'"),
        ("link mt.7", "did you mean 'link mt."),
        ("Peering/rome/rome-mila", "did you mean 'Peering/rome/rome-milan'"),
        ("nonsense", "lists all keys"),
        ("", "nothing to explain"),
    ],
)
async def test_what_is_not_there_is_an_error_that_says_what_is_like_it(mesh: StubBroker, words: str, said: str):
    with pytest.raises(Permanent, match=said):
        await explain(words, nats=mesh)
    if words:
        with pytest.raises(Permanent, match=said):
            await explain(words, file=[EXAMPLE])


@pytest.mark.parametrize(
    "words", [("rule 900 fwmark 0xff00/0xff00 iif - to -",), ("rule", "900", "fwmark", "0xff00/0xff00", "iif", "-", "to", "-")]
)
def test_a_key_is_one_word_or_several(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]):
    """A dash that stands alone is a word of it, and options come before or behind."""
    arguments = ["explain", *words, "--host", "rome/gateway", "-f", str(EXAMPLE), "--output", "json"]
    assert application()(arguments, print_error=False, exit_on_error=False) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["key"], len(found["places"])) == ("rule 900 fwmark 0xff00/0xff00 iif - to -", 1)


async def test_an_option_that_is_not_there_is_no_word_of_a_key():
    with pytest.raises(Permanent, match="Unknown option: --hots"):
        await explain("rule", "900", "--hots", "rome/gateway", file=[EXAMPLE])


@pytest.mark.parametrize("words", ["out pods 10.200.1.10 10.200.2.10", "plaintext out pods 10.200.1.10 10.200.2.10"])
async def test_an_alert_has_no_object_and_says_what_is_behind_it(mesh: StubBroker, words: str):
    """Whether it is open or not, it is not looked for among keys that are like it."""
    with pytest.raises(Permanent, match=r"no plan has an object for it; .* none such is now"):
        await explain(words, nats=mesh)
    event = DriftEvent(
        Name("rome"), Name("worker-1"), "plaintext", "out pods 10.200.1.10 10.200.2.10", "raised", because=("Node/rome/worker-2",)
    )
    mesh.put(subjects.drift("rome", "worker-1", "plaintext"), codec.encode(event))
    with pytest.raises(Permanent, match=r"\(its `because`\): on rome/worker-1: Node/rome/worker-2"):
        await explain(words, nats=mesh)


def test_references_and_keys_are_told_apart():
    assert is_reference("Peering/rome/rome-milan")
    assert is_reference("nodes/rome/worker-1")
    assert not is_reference("route 7002 10.200.1.0/24 0")
    assert not is_reference("link a/b/c")
    assert not is_reference("Thing/rome/x")


def test_of_many_keys_those_that_begin_so_come_first():
    assert near("route 7", ["route 7 b", "route 7 a", "rout", "link"]) == "did you mean 'route 7 a' or 'route 7 b'?"
