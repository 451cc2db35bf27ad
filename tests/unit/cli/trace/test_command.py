"""``meshmark trace``: forms, filters and exit codes over what real hosts told, and what it asks of whom."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from schemas import codec, subjects
from schemas.topology import EgressPolicy
from schemas.values import Name, Prefix
from services.auditor.trace.trails import Trail
from services.cli.trace import command, stream
from services.cli.trace.command import Form, Teller, trace
from services.cli.trace.ends import Session
from services.cli.trace.filters import Filters, span_s
from services.planner.core import Core
from services.runtime.errors import Permanent
from services.runtime.messages import Message
from tests.topologies import encrypting, tell
from tests.unit.auditor.trace.test_recorded import told
from tests.unit.cli.broker import StubBroker
from tests.unit.cli.trace.said import messages


@pytest.fixture
def recorded(tmp_path: Path) -> dict[str, Path]:
    """Files as ``--output json`` writes them."""
    found = {}
    for name in ("native", "reply-in-clear", "dropped"):
        found[name] = tmp_path / f"{name}.json"
        found[name].write_bytes(b"".join(codec.encode(message) + b"\n" for message in messages(name)))
    return found


async def shown(capsys: pytest.CaptureFixture[str], broker: StubBroker, path: Path, **options: object) -> tuple[int, str]:
    ends = {"source": "rome/shop", "destination": "rome/stock", "output": "compact", **options}
    code = await trace(**ends, input_file=path, nats=broker)  # type: ignore[arg-type]
    return code, capsys.readouterr().out


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


async def test_a_recording_of_any_length_is_judged_whole(mesh: StubBroker, recorded, capsys, monkeypatch: pytest.MonkeyPatch):
    """No event is given up that is in a file: what can be held of a live trace is no bound there."""
    _, whole = await shown(capsys, mesh, recorded["native"])
    monkeypatch.setattr(stream, "_EVENTS_MAX", 3)
    assert await shown(capsys, mesh, recorded["native"]) == (0, whole)


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


@pytest.mark.parametrize(
    "filters,lines",
    [
        (Filters(), 14),
        (Filters(first=1), 7),
        (Filters(last=1), 7),
        (Filters(since="1s"), 14),
        (Filters(node=["rome/worker-2"]), 7),
        (Filters(ip=["172.18.0.11"]), 4),
        (Filters(ip=["172.18.0.11/32"]), 4),
        (Filters(ip=["172.18.0.0/16"]), 4),
        (Filters(ip=["10.200.2.0/24"]), 10),
        (Filters(ip=["10.200.2.0/24", "172.18.0.0/16"]), 14),
        (Filters(ip=["192.0.2.0/24", "fd00::/8"]), 0),
        (Filters(verdict="DROPPED"), 0),
        (Filters(protocol=["icmp"]), 14),
        (Filters(protocol=["tcp"]), 0),
        (Filters(port=[443]), 0),
    ],
)
async def test_filters_are_named_as_hubbles(mesh: StubBroker, recorded, capsys, filters: Filters, lines: int):
    """Whole packets by what they are, and points by host, address and verdict."""
    _, out = await shown(capsys, mesh, recorded["native"], filters=filters)
    assert sum("]: " in line for line in out.splitlines()) == lines


@pytest.mark.parametrize("text", ["FD00:200:0:2::10", "fd00:0200:0000:0002:0:0:0:10", "fd00:200:0:2::/64", " fd00::/8 "])
def test_an_address_may_be_spelled_in_any_way(text: str) -> None:
    """In capitals, with its zeros, as a prefix; a host's spelling does not count either, and what is no address is in no prefix."""
    _, (event, *_) = told("native")
    assert event.ip is not None
    told_so, other, none = (
        replace(event, ip=replace(event.ip, source="192.0.2.1", destination=found))
        for found in ("fd00:200:0:2:0::10", "fe00::1", "nowhere")
    )
    chosen = Filters(ip=[text]).points(("forward", each) for each in (told_so, other, none))
    assert [each for _, each in chosen] == [told_so]


async def test_a_host_may_be_named_without_the_cluster_that_is_given(mesh: StubBroker, recorded, capsys):
    """As ends may; and of a recording, hosts count that it has, whatever is on the way by now."""
    options = {"cluster": "rome", "source": "shop", "destination": "stock"}
    _, out = await shown(capsys, mesh, recorded["native"], filters=Filters(node=["worker-2"]), **options)
    assert sum("]: " in line for line in out.splitlines()) == 7
    recorded["native"].write_text(recorded["native"].read_text().replace("rome/worker-2", "rome/worker-7"))
    _, out = await shown(capsys, mesh, recorded["native"], filters=Filters(node=["rome/worker-7"]))
    assert sum("[rome/worker-7]: " in line for line in out.splitlines()) == 7


async def test_packets_that_the_filters_leave_out_were_seen(mesh: StubBroker, recorded, capsys):
    """Whoever asks for what is in clear, and gets none, is told that something was looked at: that is fine."""
    options = {"source": "rome/shop", "destination": "rome/stock", "filters": Filters(unencrypted=True), "output": "json"}
    assert await trace(**options, input_file=recorded["native"], nats=mesh) == 0  # type: ignore[arg-type]
    assert "2 packets of the flow were seen, none of those that the filters choose" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["compact", "table", "json"])
async def test_packets_of_which_no_point_is_shown_were_seen(mesh: StubBroker, recorded, capsys, form: str):
    """An address that none of them has looks like a quiet flow otherwise."""
    options = {"source": "rome/shop", "destination": "rome/stock", "output": form}
    said = "2 packets of the flow were seen, at no point that --node, --ip and --verdict choose"
    for address, is_said in (("192.0.2.99", True), ("10.200.1.10", False)):
        assert await trace(**options, filters=Filters(ip=[address]), input_file=recorded["native"], nats=mesh) == 0  # type: ignore[arg-type]
        assert (said in capsys.readouterr().err) == is_said


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


async def test_json_is_what_it_reads(mesh: StubBroker, recorded, capsys, tmp_path: Path):
    """One message a line, with the verdict and who the ends are, which can be read again."""
    _, out = await shown(capsys, mesh, recorded["native"], output="json")
    first = json.loads(out.splitlines()[0])["flow"]
    assert first["IP"] == {"source": "10.200.1.10", "destination": "10.200.2.10", "ipVersion": "IPv4"}
    assert (first["source"]["pod_name"], first["encryption"]) == ("rome/shop", "encrypted")
    assert (first["trace_observation_point"], first["event_type"]) == ("FROM_ENDPOINT", {"type": 4, "sub_type": 5})
    again = tmp_path / "again.json"
    again.write_text(out, encoding="utf-8")
    assert (await shown(capsys, mesh, again, output="json"))[1] == out


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


@pytest.mark.parametrize(
    "options,words",
    [
        ({"source": "rome/shob"}, r"did you mean rome/shop\?"),
        ({"source": "rome/worker-9"}, "no pod, host or address rome/worker-9; did you mean rome/worker-"),
        ({"source": "x"}, "no pod, host or address x; there are "),
        ({"destination": "rome/shop"}, "the same end"),
        ({"source": "192.0.2.1", "destination": "192.0.2.2"}, "neither 192.0.2.1 nor 192.0.2.2 is in a cluster"),
        ({"service": ["shop.example"]}, "--service: "),
        ({"duration": "2h"}, "between 1s and 10m"),
        ({"duration": "soon"}, "30s, 5m or 500ms"),
        ({"sample": 3}, "a power of two between 1 and 128"),
        ({"sample": 256}, "a power of two between 1 and 128"),
        ({"cluster": "roma"}, r"no cluster roma; did you mean rome\?"),
        ({"source": "10.200.1.10", "destination": "192.0.2.1", "cluster": "x"}, "no cluster x; there are rome"),
        ({"filters": Filters(ip=["shop"])}, "--ip takes an address or a prefix: 'shop' is not a prefix"),
        ({"filters": Filters(ip=["10.200.1.10", "10.200.1.10/16"])}, "--ip .*: '10.200.1.10/16' has host bits set; write 10.200.0.0/16"),
        ({"filters": Filters(ip=["fe80::1%eth0"])}, "--ip .*zone"),
        ({"filters": Filters(node=["rome/worker-9"])}, "--node rome/worker-9: .* there are rome/worker-1, rome/worker-2"),
        ({"filters": Filters(node=["rome/worker-3"])}, "--node rome/worker-3: .* there are rome/worker-1, rome/worker-2"),
        ({"filters": Filters(node=["worker-1"])}, "--node worker-1: .* there are rome/worker-1, rome/worker-2"),
        ({"filters": Filters(port=[443, 0])}, "--port 0: between 1 and 65535"),
        ({"filters": Filters(port=[65536])}, "--port 65536: between 1 and 65535"),
        ({"filters": Filters(port=[443], protocol=["icmp"])}, "packets of ICMP have none"),
        ({"filters": Filters(since="lately")}, "'lately' is no span of time"),
        ({"filters": Filters(since="9" * 400 + "s")}, "s' is no span of time"),
        ({"filters": Filters(since="\u0665s")}, "'\u0665s' is no span of time"),
        ({"filters": Filters(since="1.5s")}, "without fractions"),
        ({"filters": Filters(since="0ms")}, "--since 0ms: more than 0"),
        ({"duration": "9" * 5000}, "' is no span of time"),
        ({"filters": Filters(first=0)}, "--first 0: at least 1"),
        ({"filters": Filters(last=-1)}, "--last -1: at least 1"),
    ],
)
async def test_a_bad_word_is_named(mesh: StubBroker, recorded, options: dict[str, object], words: str):
    """Before anything is asked of a host, also where no packet comes that would be judged by it."""
    recorded["native"].write_bytes(b"")
    ends = {"source": "rome/shop", "destination": "rome/stock", **options}
    with pytest.raises(Permanent, match=words):
        await trace(**ends, input_file=recorded["native"], nats=mesh)  # type: ignore[arg-type]


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


def test_spans_of_time():
    assert [span_s(text) for text in ("30s", "5m", "500ms", "2", "1h")] == [30, 300, 0.5, 2, 3600]


async def test_a_recording_is_read_whatever_ends_its_lines(mesh: StubBroker, recorded, capsys, tmp_path: Path):
    """Blank lines are nothing, and a line separator in a word is no end of a line."""
    known, strange = recorded["native"].read_bytes(), tmp_path / "strange.json"
    first, _, rest = known.partition(b"\n")
    named = first.replace(b'"Summary":"', '"Summary":"\u2028\x85'.encode(), 1)
    assert named != first
    strange.write_bytes(b"\n" + named + b"\r\n\n" + rest + b"\n")
    code, out = await shown(capsys, mesh, strange)
    assert code == 0
    assert out.splitlines()[-1] == (await shown(capsys, mesh, recorded["native"]))[1].splitlines()[-1]


@pytest.mark.parametrize(
    "change, words",
    [
        ((b'{"node_name"', b"\xff\xfe"), "line 2: not valid JSON"),
        ((b'"time":"2', b'"time":"x2'), r"line 2: \$.flow: .*isoformat"),
        ((b'"verdict":"FORWARDED"', b'"verdict":"\xff"'), "line 2: not valid JSON"),
    ],
)
async def test_a_line_that_is_no_message_is_named(mesh: StubBroker, recorded, capsys, change: tuple[bytes, bytes], words: str):
    """Also one that is no text, or whose time is none."""
    lines = recorded["native"].read_bytes().splitlines()
    assert change[0] in lines[1]
    lines[1] = lines[1].replace(*change)
    recorded["native"].write_bytes(b"\n".join(lines))
    with pytest.raises(Permanent, match=words):
        await shown(capsys, mesh, recorded["native"])
