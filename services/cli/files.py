"""Topology files: YAML with any number of documents (JSON is YAML), to typed objects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import yaml

from schemas.codec import DecodeError
from schemas.topology import Topology, convert_topology
from services.runtime.errors import Permanent

# The one in C is twenty times as fast, where PyYAML was built with it.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


_UNNAMED = ' in "<unicode string>",'
"""How PyYAML calls a text that was given to it as such."""
_SHOWN = 63
"""Characters of a name, and so of what may be one, that an error shows."""


class FileError(Permanent):
    """A topology file cannot be read; the text names the file, the document and the field."""


def load(paths: Iterable[Path]) -> list[Topology]:
    """The objects of these files, in their order; a document may also be a list of objects.

    FileError says where one is wrong; a file without any object is wrong too.
    """
    return [item for path in paths for item in _load_file(path)]


def _load_file(path: Path) -> Iterator[Topology]:
    documents = _documents(path)
    if not documents or documents == [[]]:
        msg = f"{path}: no topology object in it; docs/topology.md and examples/two-clusters.yaml show how they are written"
        raise FileError(msg)
    for index, document in enumerate(documents, start=1):
        for value in document if isinstance(document, list) else [document]:
            try:
                yield convert_topology(value)
            except DecodeError as error:
                msg = f"{path}: document {index}{_called(value)}: {error}"
                raise FileError(msg) from None


def _documents(path: Path) -> list[object]:
    """The file's documents; empty ones, as a trailing ``---`` makes, do not count."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        msg = f"{path}: {reason}"
        raise FileError(msg) from None
    try:
        return [document for document in yaml.load_all(text, Loader=_LOADER) if document is not None]
    # ValueError: what looks like a date and is none; RecursionError: the parser in Python has no bound of its own.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        msg = f"{path}: not valid YAML: {' '.join(str(error).split()).replace(_UNNAMED, '')}"
        raise FileError(msg) from None


def _called(value: object) -> str:
    """`` (Kind name)`` as far as the document says so, to find it by eye."""
    if not isinstance(value, dict):
        return ""
    words = [found[:_SHOWN] for field in ("kind", "name") if isinstance(found := value.get(field), str)]
    return f" ({' '.join(words)})" if words else ""
