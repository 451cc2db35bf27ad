"""What would have been right where a payload has a field or a word that does not exist. Pure.

msgspec names the place and the word, not the alternatives; these are found by walking the types along the place.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable

from msgspec import inspect

_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `([^`]*)`")
_UNKNOWN_WORD = re.compile(r"Invalid enum value '([^']*)'")
_UNKNOWN_TAG = re.compile(r"Invalid value '([^']*)'$")
_NEAR = 0.75
_STEP = re.compile(r"\.(\w+)|\[[^]]*\]")


def hint(reason: str, field: str, kind: Callable[[], type]) -> str:
    """What to add to `reason`, msgspec's words about the place `field` of a payload of type `kind`; empty when nothing is known."""
    if (found := _UNKNOWN_FIELD.search(reason)) is not None:
        return _among(found[1], {item.encode_name for one in _at(kind(), field) for item in _fields(one)}, "fields")
    if (found := _UNKNOWN_WORD.search(reason)) is not None:
        return _among(found[1], {str(value) for one in _at(kind(), field) for value in _words(one)}, "words")
    if (found := _UNKNOWN_TAG.search(reason)) is not None:
        owner, _, name = field.rpartition(".")
        tags = {str(one.tag) for one in _at(kind(), owner) if isinstance(one, inspect.StructType) and one.tag_field == name}
        return _among(found[1], tags, "words")
    return ""


def _among(word: str, known: Iterable[str], what: str) -> str:
    near = difflib.get_close_matches(word, sorted(known), n=1, cutoff=_NEAR)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; the {what} are {', '.join(sorted(known))}" if known else ""


def _at(kind: type, place: str) -> list[inspect.Type]:
    """The types that may stand at a place as ``$.ends[0].endpoint``."""
    found = _alternatives(inspect.type_info(kind))
    for step in _STEP.finditer(place.removeprefix("$")):
        found = [inner for one in found for inner in _alternatives(_below(one, step[1]))]
    return found


def _below(kind: inspect.Type, name: str | None) -> inspect.Type | None:
    """The type of a field, or (`name` None) of what a collection holds."""
    if name is not None:
        return next((item.type for item in _fields(kind) if item.encode_name == name), None)
    if isinstance(kind, inspect.VarTupleType | inspect.ListType):
        return kind.item_type
    return kind.item_types[0] if isinstance(kind, inspect.TupleType) else None


def _alternatives(kind: inspect.Type | None) -> list[inspect.Type]:
    if isinstance(kind, inspect.Metadata):
        return _alternatives(kind.type)
    if isinstance(kind, inspect.UnionType):
        return [inner for one in kind.types for inner in _alternatives(one)]
    return [kind] if kind is not None else []


def _fields(kind: inspect.Type) -> tuple[inspect.Field, ...]:
    return kind.fields if isinstance(kind, inspect.StructType) else ()


def _words(kind: inspect.Type) -> tuple[object, ...]:
    return kind.values if isinstance(kind, inspect.LiteralType) else ()
