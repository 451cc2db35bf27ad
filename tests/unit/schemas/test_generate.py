"""The JSON Schema files are current, whole and deterministic, and staleness is noticed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from schemas import generate, topology
from schemas.reference import document
from schemas.status import ApplyReport
from schemas.values import Address, Endpoint, Key, Mac, Name, Prefix


def test_the_files_are_current():
    assert generate.stale() == [], "refresh with: python -m schemas.generate"


def test_the_page_is_current_and_names_every_field():
    """Each kind has a section with all its fields as they are on the wire, and with what is needed."""
    assert generate.stale_page() == [], "refresh with: python -m schemas.generate"
    page = document()
    for name, kind in generate.KINDS.items():
        section = page.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == set(kind.__struct_encode_fields__)
    assert "| `tunnels` | integer (1 to 64) | `1` |" in page
    assert "| `ends` | list of 2 [PeeringEnd](#peeringend) | needed |" in page
    assert set(re.findall(r"\(#(\w+)\)", page)) <= set(re.findall(r"^## (\w+)", page.lower(), re.MULTILINE)), "every link leads somewhere"


def test_a_page_that_is_missing_or_stale_is_noticed(tmp_path: Path):
    """Both are told by name."""
    page = tmp_path / "reference.md"
    assert generate.stale_page(page) == ["reference.md is missing"]
    page.write_text("old")
    assert generate.stale_page(page) == ["reference.md is stale"]


def test_every_message_has_a_file_that_stands_alone():
    assert set(generate.KINDS) == set(topology.KINDS)
    for name, text in generate.files().items():
        schema = json.loads(text)
        defined = {f"#/$defs/{key}" for key in schema.get("$defs", {})}
        assert set(re.findall(r'"\$ref": "([^"]+)"', text)) == defined, name
        assert schema["type"] == "object"
        assert schema["description"]


def test_the_same_schema_is_rendered_every_time():
    assert generate.files() == generate.files()


def test_what_people_write_is_strict_and_what_services_say_is_not():
    assert generate.schema(topology.Node)["additionalProperties"] is False
    assert "additionalProperties" not in generate.schema(ApplyReport)


@pytest.mark.parametrize(
    "kind,good,bad",
    [
        (Prefix, "10.61.0.0/16", "10.61.0.0/255.255.0.0"),
        (Address, "10.61.0.5", "10.61.0.5/32"),
        (Endpoint, "192.0.2.7:51840", "192.0.2.7"),
        (Endpoint, "gw.example.net:51840", "gw_1.example.net:51840"),
        (Name, "node-1.example", "node/1"),
        (Key, "A" * 43 + "=", "A" * 44),
        (Mac, "02:00:00:00:00:01", "02-00-00-00-00-01"),
    ],
)
def test_patterns_agree_with_the_parsers(kind: type, good: str, bad: str):
    pattern = kind.json_schema["pattern"]
    assert re.search(pattern, kind.parse(good))
    assert not re.search(pattern, bad)
    with pytest.raises(ValueError, match=re.escape(repr(bad))):
        kind.parse(bad)


def test_a_stale_a_missing_and_a_foreign_file_are_named(tmp_path: Path):
    generate.write(tmp_path)
    assert generate.stale(tmp_path) == []
    (tmp_path / "Node.json").write_text("{}")
    (tmp_path / "Peering.json").unlink()
    (tmp_path / "Old.json").write_text("{}")
    assert generate.stale(tmp_path) == ["Node.json is stale", "Peering.json is missing", "Old.json is of no message"]
    generate.write(tmp_path)
    assert generate.stale(tmp_path) == []


def test_the_check_says_how_to_refresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(generate, "stale", lambda: ["Node.json is stale"])
    assert generate.main(["--check"]) == 1
    assert capsys.readouterr().err.splitlines() == ["schemas/json/Node.json is stale", "refresh with: python -m schemas.generate"]
    monkeypatch.setattr(generate, "stale", list)
    assert generate.main(["--check"]) == 0
