"""``meshmark trace``: forms and exit codes over what real hosts told, and what is asked of whom."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from schemas import codec, subjects
from schemas.topology import EgressPolicy
from schemas.values import Name, Prefix
from services.auditor.trace.trails import Trail
from services.cli.trace import command
from services.cli.trace.command import Form, Teller, trace
from services.cli.trace.ends import Session
from services.cli.trace.filters import Filters
from services.planner.core import Core
from services.runtime.messages import Message
from tests.topologies import encrypting, tell
from tests.unit.auditor.trace.test_recorded import told
from tests.unit.cli.broker import StubBroker
from tests.unit.cli.trace.said import shown


def packets(name: str) -> tuple[Session, list[Trail]]:
    """A recorded flow, and its packets: a request and its answer."""
    wanted, events = told(name)
    return wanted, wanted.trails(events)


@pytest.mark.parametrize("form", ["compact", "table", "json", "path"])
@pytest.mark.parametrize("ticks", [1, 3])
def test_one_packet_in_clear_is_not_forgotten(capsys, monkeypatch: pytest.MonkeyPatch, form: Form, ticks: int):
    """However many encrypted ones follow, the exit code and the closing summary are of all packets; one that cannot be held is said."""
    monkeypatch.setattr(command, "_TRAILS_MAX", 2)
    wanted, (request, answer) = packets("reply-in-clear")
    teller = Teller(wanted, Filters(), form, is_live=True)
    teller.tell([answer])
    for _ in range(ticks):
        teller.tell([request])
    assert teller.end() == 2
    printed = capsys.readouterr()
    if form != "json":
        assert printed.out.splitlines()[-1] == "rome/shop ↔ rome/stock: partial (→ encrypted, ← plaintext)"
        assert f"rome/shop → rome/stock: encrypted ({ticks} packet" in printed.out
    is_said = form in ("table", "path") and ticks == 3
    assert printed.err == ("2 packets before the last 2 are judged, but not shown: no more are held\n" if is_said else "")


def test_a_recording_is_shown_whole(capsys, monkeypatch: pytest.MonkeyPatch):
    """What is in a file is held anyway: no packet of it is left out at the end."""
    monkeypatch.setattr(command, "_TRAILS_MAX", 1)
    wanted, found = packets("native")
    teller = Teller(wanted, Filters(), "path", is_live=False)
    teller.tell([*found, *found, *found])
    assert teller.end() == 0
    printed = capsys.readouterr()
    assert printed.out.count("of 3, the first that was seen") == 2
    assert printed.err == ""


def test_packets_that_were_asked_for_by_number_are_held(capsys, monkeypatch: pytest.MonkeyPatch):
    """--last and --first are of those that the filters choose, whatever else comes between them."""
    monkeypatch.setattr(command, "_TRAILS_MAX", 1)
    wanted, (request, answer) = packets("reply-in-clear")
    last = Teller(wanted, Filters(unencrypted=True, last=2), "table", is_live=True)
    first = Teller(wanted, Filters(unencrypted=True, first=2), "table", is_live=True)
    for teller in (last, first):
        for some in ([answer, request], [answer, request], [request]):
            assert not (teller is last and teller.is_full)
            teller.tell(some)
        assert teller.end() == 2
        printed = capsys.readouterr()
        assert "rome/stock → rome/shop: plaintext (2 packets)" in printed.out
        assert printed.err == ""
    assert first.is_full


def test_each_packet_is_judged_once_as_it_comes(monkeypatch: pytest.MonkeyPatch):
    """Those that are held for the end are not looked at again by each that comes."""
    wanted, (request, answer) = packets("native")
    looked = []
    chosen = Filters.chosen
    monkeypatch.setattr(Filters, "chosen", lambda self, found: looked.extend(found) or chosen(self, found))
    teller = Teller(wanted, Filters(encrypted=True), "table", is_live=True)
    for trail in (request, answer, request):
        teller.tell([trail])
    teller.end()
    assert looked == [request, answer, request]


async def test_compact_has_a_line_for_each_point_and_the_answer(mesh: StubBroker, recorded, capsys):
    """In Hubble's manner: the first end on the left, whichever way the packet goes."""
    code, out = await shown(capsys, mesh, recorded["native"])
    lines = out.splitlines()
    assert code == 0
    assert "[rome/worker-1]: 10.200.1.10 (rome/shop) -> 10.200.2.10 (rome/stock) to-crypto FORWARDED (ICMPv4 EchoRequest) dev me.0" in out
    assert "[rome/worker-1]: 10.200.1.10 (rome/shop) <- 10.200.2.10 (rome/stock) from-crypto FORWARDED (ICMPv4 EchoReply) dev me.0" in out
    assert lines[-5:] == [
        "rome/shop → rome/stock: encrypted (1 packet)",
        "    rome/worker-1 → rome/worker-2: encrypted (1 encrypted)",
        "rome/stock → rome/shop: encrypted (1 packet)",
        "    rome/worker-2 → rome/worker-1: encrypted (1 encrypted)",
        "rome/shop ↔ rome/stock: encrypted",
    ]


@pytest.mark.parametrize("form", ["compact", "table", "path"])
async def test_a_flow_is_encrypted_only_where_both_directions_are(mesh: StubBroker, recorded, capsys, form: str):
    """The last line says it of both, and names the one in clear; of one direction alone there is no such line."""
    _, out = await shown(capsys, mesh, recorded["reply-in-clear"], output=form)
    assert out.splitlines()[-1] == "rome/shop ↔ rome/stock: partial (→ encrypted, ← plaintext)"
    _, out = await shown(capsys, mesh, recorded["dropped"], output=form)
    assert "↔" not in out


async def test_what_went_in_clear_is_a_difference(mesh: StubBroker, recorded, capsys):
    """The exit code says so; and --unencrypted shows nothing else."""
    assert (await shown(capsys, mesh, recorded["reply-in-clear"]))[0] == 2
    code, out = await shown(capsys, mesh, recorded["reply-in-clear"], filters=Filters(unencrypted=True))
    assert (code, "EchoReply" in out, "EchoRequest" in out) == (2, True, False)
    code, out = await shown(capsys, mesh, recorded["reply-in-clear"], filters=Filters(encrypted=True))
    assert (code, "EchoReply" in out, "EchoRequest" in out) == (0, False, True)


@pytest.mark.parametrize("form", ["compact", "table", "json", "path"])
async def test_nothing_seen_is_neither_good_nor_bad(mesh: StubBroker, capsys, tmp_path: Path, form: str):
    """An exit code of its own, and a word beside the result, also where that is for programs."""
    empty = tmp_path / "empty.json"
    empty.touch()
    code = await trace(source="rome/shop", destination="rome/stock", output=form, input_file=empty, nats=mesh)  # type: ignore[arg-type]
    printed = capsys.readouterr()
    assert code == 3
    assert printed.err == "no packet was seen between rome/shop and rome/stock\n"
    assert printed.out == ""


async def test_a_path_says_which_packet_it_draws(mesh: StubBroker, recorded, capsys, tmp_path: Path):
    """Of several; of one there is nothing to say."""
    _, out = await shown(capsys, mesh, recorded["native"], output="path")
    assert "packet 1 of" not in out
    whole, both = recorded["native"].read_text(), tmp_path / "both.json"
    earlier = whole.replace(":40.", ":39.").replace("id 28728", "id 28727").replace("id 49122", "id 49121").replace('"uuid":"', '"uuid":"0')
    both.write_text("".join(line for line in earlier.splitlines(keepends=True) if line.startswith('{"node_name":"rome/worker-1"')) + whole)
    _, out = await shown(capsys, mesh, both, output="path")
    assert "  packet 2 of 2, the first that was seen at most points, at Sep  9 01:46:40.009895:\n  rome/worker-1\n" in out


async def test_a_drop_names_what_dropped_it(mesh: StubBroker, recorded, capsys):
    """And a packet that never left is neither encrypted nor not."""
    code, out = await shown(capsys, mesh, recorded["dropped"], output="path")
    assert code == 0
    assert "DROPPED" in out
    assert "dropped by inet meshmark.mesh.rome" in out
    assert "because Cluster/rome/rome" in out
    assert "unknown (1 packet, 1 dropped)" in out


async def test_a_table_has_the_same_points(mesh: StubBroker, recorded, capsys):
    _, out = await shown(capsys, mesh, recorded["native"], output="table")
    assert out.split()[:2] != []
    assert "ENCRYPT" in out


async def test_what_is_admitted_meanwhile_has_what_it_was_given(mesh: StubBroker, recorded, capsys, monkeypatch: pytest.MonkeyPatch):
    """Allocations are written before what they are for is admitted, and so they are read after that."""
    policy, core = EgressPolicy(name=Name("out"), cluster=Name("rome"), pods=(Prefix("10.200.1.10/32"),), node=Name("worker-2")), Core()
    tell(core, [*encrypting(), policy])
    replay = mesh.replay

    async def then_admitted(stream: str, filter_subject: str) -> AsyncIterator[Message]:
        async for message in replay(stream, filter_subject):
            yield message
        for place in (("slot", "rome", "worker-2"), ("way", "rome", "out")):
            mesh.put(subjects.allocation(*place), codec.encode(core.allocations.value(*place)))
        mesh.admit(policy)

    monkeypatch.setattr(mesh, "replay", then_admitted)
    assert (await shown(capsys, mesh, recorded["native"]))[0] == 0
