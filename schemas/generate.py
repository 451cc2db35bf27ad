"""Write the JSON Schema of every message to ``schemas/json/``, and ``docs/reference.md``: ``python -m schemas.generate [--check]``.

The files are for publishers and subscribers that do not import meshmark. They are generated, committed, and checked: with ``--check``
nothing is written, and the exit code is 1 when a file is stale, missing or left over.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from schemas.allocation import Remaps, Rotation
from schemas.drift import DriftEvent
from schemas.flow import FlowMessage
from schemas.plan import PlanDiff, SnapshotChunk, SnapshotHead
from schemas.reference import document
from schemas.status import ApplyReport, DeadLetter, Freeze, Refusal
from schemas.topology import KINDS
from schemas.values import Text

FOLDER = Path(__file__).parent / "json"
PAGE = Path(__file__).parent.parent / "docs" / "reference.md"
DIALECT = "https://json-schema.org/draft/2020-12/schema"
MESSAGES: dict[str, type] = {
    **KINDS,
    **{
        kind.__name__: kind
        for kind in (
            PlanDiff,
            SnapshotHead,
            SnapshotChunk,
            ApplyReport,
            DriftEvent,
            FlowMessage,
            Refusal,
            DeadLetter,
            Freeze,
            Remaps,
            Rotation,
        )
    },
}


def schema(kind: type) -> dict[str, Any]:
    """The JSON Schema of one message, self-contained: what it refers to stands under ``$defs``."""
    (root,), definitions = msgspec.json.schema_components([kind], schema_hook=_scalar, ref_template="#/$defs/{name}")
    name = root.pop("$ref").rpartition("/")[2]
    return {"$schema": DIALECT, **definitions.pop(name), **({"$defs": definitions} if definitions else {})}


def render(kind: type) -> str:
    return json.dumps(schema(kind), indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def files() -> dict[str, str]:
    """What must stand in the folder, by file name."""
    return {f"{name}.json": render(kind) for name, kind in sorted(MESSAGES.items())}


def stale(folder: Path = FOLDER) -> list[str]:
    """What is wrong with the folder, in one line per file; nothing when it is current."""
    wanted = files()
    held = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.json")}
    found = [f"{name} is {'stale' if name in held else 'missing'}" for name, text in wanted.items() if held.get(name) != text]
    return found + [f"{name} is of no message" for name in sorted(held.keys() - wanted.keys())]


def write(folder: Path = FOLDER) -> None:
    wanted = files()
    folder.mkdir(exist_ok=True)
    for path in folder.glob("*.json"):
        if path.name not in wanted:
            path.unlink()
    for name, text in wanted.items():
        (folder / name).write_text(text, encoding="utf-8")


def stale_page(page: Path = PAGE) -> list[str]:
    """The same of the page for people."""
    held = page.read_text(encoding="utf-8") if page.exists() else None
    return [] if held == document() else [f"{page.name} is {'missing' if held is None else 'stale'}"]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m schemas.generate", description="Write the JSON Schema of every message.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a file is not current")
    if not parser.parse_args(arguments).check:
        write()
        PAGE.write_text(document(), encoding="utf-8")
        print(f"{FOLDER.name}: {len(MESSAGES)} schemas written, and {PAGE.name}")
        return 0
    found = [f"schemas/json/{line}" for line in stale()] + [f"docs/{line}" for line in stale_page()]
    for line in found:
        print(line, file=sys.stderr)
    if found:
        print("refresh with: python -m schemas.generate", file=sys.stderr)
    return 1 if found else 0


def _scalar(kind: type) -> dict[str, Any]:
    if issubclass(kind, Text):
        first_paragraph = (kind.__doc__ or "").partition("\n\n")[0]
        return {"type": "string", "description": " ".join(first_paragraph.split()), **kind.json_schema}
    raise NotImplementedError(kind)


if __name__ == "__main__":
    sys.exit(main())
