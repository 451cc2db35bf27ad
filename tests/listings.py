"""What ip and nft print about a kernel, in words that do not depend on when each object was made."""

from __future__ import annotations

import re
from collections.abc import Callable

_COMMANDS = {
    "rules": "ip rule; ip -6 rule",
    "routes": "ip -d route show table all",
    "addresses": "ip -o address",
    "links": "ip -d -o link",
    "nft": "nft -s list ruleset",
}
_END = "=====\n"
_BLOCK = re.compile(r"^\t(?=(?:set|map|chain) )", re.MULTILINE)
_ELEMENTS = re.compile(r"(?<=elements = \{ )[^}]*(?= \})")
_INDEX = re.compile(r"^\d+: ", re.MULTILINE)
_GENERATION = re.compile(r"(?<= generation )\d+")


def listings(run: Callable[..., str]) -> dict[str, list[str]]:
    """All that a kernel lists of any owner, by what it is; `run` is given the words of a command and returns what it prints.

    Without what the kernel puts on links by itself, for IPv6 only a while after they are up; and without the generation in the marker.
    """
    script = "; ".join(f"{command}; printf '{_END[:-1]}\\n'" for command in _COMMANDS.values())
    found = run("sh", "-ec", script).split(_END)
    lines: dict[str, Callable[[str], list[str]]] = {"links": _links, "routes": _routes, "addresses": _links, "nft": _ruleset}
    return {what: lines.get(what, str.splitlines)(text) for what, text in zip(_COMMANDS, found, strict=False)}


def _links(text: str) -> list[str]:
    return sorted(line for line in _INDEX.sub("", text).splitlines() if "fe80::" not in line)


def _routes(text: str) -> list[str]:
    """One line each, next hops with their route."""
    whole = text.replace("\n\t", " ").splitlines()
    return sorted(line for line in whole if not ("proto kernel" in line and ("fe80::" in line or "ff00::/8" in line)))


def _ruleset(text: str) -> list[str]:
    """Each set and chain with its table's first line; rules in their order."""
    found = []
    for table in _GENERATION.sub("…", text).split("\n}\n"):
        first, *blocks = _BLOCK.split(_ELEMENTS.sub(_sorted, table))
        found += [f"{first}{block}" for block in blocks or [""] if first]
    return sorted(found)


def _sorted(elements: re.Match[str]) -> str:
    return ", ".join(sorted(element.strip() for element in elements[0].split(",")))
