"""``docs/reference.md``: every field that people may publish, with its type and default, as the types say it. Pure.

What a field means stands in the docstring of its kind, which is printed above the fields; names are as on the wire.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import cast

import msgspec
from msgspec import inspect as types

from schemas.topology import KINDS
from schemas.values import Text

_HEAD = """\
# Fields of what you publish

Made from the types by `python -m schemas.generate`; do not edit. [topology.md](topology.md) says what the objects are for, and
`schemas/json/` holds the same as JSON Schema. Each object is one message, with its `kind` among its fields, on
`mesh.topology.<kind>.<cluster>.<name>`: the kind in lower case there, and of a Cluster the name twice.
"""


def document() -> str:
    """The whole page."""
    structs = _structs()
    parts = [_HEAD, *(_section(kind, title, structs) for kind, title in structs.items())]
    parts += ["## Values\n", *(f"- **{_words(kind)}**: {_prose(kind, {}).partition(chr(10) * 2)[0]}" for kind in _scalars(structs))]
    return "\n".join(parts).rstrip() + "\n"


def _structs() -> dict[type, str]:
    """All structs by title: the kinds, then what they are made of, in the order in which they are met."""
    found: dict[type, str] = {kind: name for name, kind in KINDS.items()}
    waiting = list(found)
    while waiting:
        for inner in _inside(waiting.pop(0)):
            if inner not in found:
                found[inner] = inner.__name__
                waiting.append(inner)
    return found


def _inside(struct: type) -> Iterator[type]:
    for item in _fields(struct):
        yield from (kind.cls for kind in _walk(item.type) if isinstance(kind, types.StructType))


def _scalars(structs: Mapping[type, str]) -> list[type[Text]]:
    met = {kind.cls for struct in structs for item in _fields(struct) for kind in _walk(item.type) if isinstance(kind, types.CustomType)}
    return sorted(met, key=lambda kind: kind.__name__)


def _fields(struct: type) -> tuple[types.Field, ...]:
    return _info(struct).fields


def _info(struct: type) -> types.StructType:
    return cast("types.StructType", types.type_info(struct))


def _walk(kind: types.Type) -> Iterator[types.Type]:
    yield kind
    match kind:
        case types.Metadata():
            yield from _walk(kind.type)
        case types.UnionType():
            for inner in kind.types:
                yield from _walk(inner)
        case types.VarTupleType():
            yield from _walk(kind.item_type)
        case types.TupleType():
            for inner in kind.item_types:
                yield from _walk(inner)


def _section(kind: type, title: str, structs: Mapping[type, str]) -> str:
    info = _info(kind)
    rows = [f"| `{item.encode_name}` | {_type(item.type, structs)} | {_default(item)} |" for item in info.fields]
    if info.tag_field not in (None, "kind"):
        rows.insert(0, f"| `{info.tag_field}` | `{info.tag}` | needed |")
    table = ["| field | type | default |", "|---|---|---|", *rows, ""] if rows else []
    return "\n".join([f"## {title}\n", _prose(kind, {item.name: item.encode_name for item in info.fields}), "", *table])


def _prose(kind: type, names: Mapping[str, str]) -> str:
    """A docstring as Markdown, with fields as they are called on the wire."""
    text = (inspect.getdoc(kind) or "").replace("``", "`")
    return re.sub(r"`(\w+)`", lambda found: f"`{names.get(found[1], found[1])}`", text)


def _type(kind: types.Type, structs: Mapping[type, str]) -> str:  # noqa: PLR0911, C901 - one line for each kind of type
    match kind:
        case types.Metadata():
            return _type(kind.type, structs)
        case types.UnionType():
            return " or ".join(_type(inner, structs) for inner in kind.types if not isinstance(inner, types.NoneType))
        case types.StructType():
            title = structs[kind.cls]
            return f"[{title}](#{title.lower()})"
        case types.CustomType():
            return f"[{_words(kind.cls)}](#values)"
        case types.LiteralType():
            return " or ".join(f"`{value}`" for value in kind.values)
        case types.VarTupleType():
            return f"list of {_type(kind.item_type, structs)}{_range(kind.min_length, kind.max_length, ', ')}"
        case types.TupleType():
            return f"list of {len(kind.item_types)} {_type(kind.item_types[0], structs)}"
        case types.IntType():
            return f"integer{_range(kind.ge, kind.le, ' (')}{')' if (kind.ge, kind.le) != (None, None) else ''}"
        case types.BoolType():
            return "true or false"
        case types.StrType():
            return "text"
    raise NotImplementedError(kind)


def _range(least: int | None, most: int | None, before: str) -> str:
    if least is not None and most is not None:
        return f"{before}{least} to {most}"
    if most is not None:
        return f"{before}at most {most}"
    return f"{before}at least {least}" if least is not None else ""


def _default(item: types.Field) -> str:
    if item.required:
        return "needed"
    value = item.default if item.default is not msgspec.NODEFAULT else item.default_factory()
    if value is None or value == () or isinstance(value, msgspec.Struct):
        return ""
    return f"`{'true' if value is True else 'false' if value is False else value}`"


def _words(kind: type) -> str:
    """``HostPattern`` as people say it: host pattern."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", kind.__name__).lower()
