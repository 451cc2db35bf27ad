"""Recordings that ``meshmark trace`` wrote: read again whole, and what is none is named by its line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.cli.trace import stream
from services.runtime.errors import Permanent
from tests.unit.cli.broker import StubBroker
from tests.unit.cli.trace.said import shown


async def test_a_recording_of_any_length_is_judged_whole(mesh: StubBroker, recorded, capsys, monkeypatch: pytest.MonkeyPatch):
    """No event is given up that is in a file: what can be held of a live trace is no bound there."""
    _, whole = await shown(capsys, mesh, recorded["native"])
    monkeypatch.setattr(stream, "_EVENTS_MAX", 3)
    assert await shown(capsys, mesh, recorded["native"]) == (0, whole)


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
