"""What the closing line of a suite counts besides its tests: the properties (``record_property``) that they recorded. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable

Properties = Iterable[tuple[str, object]]
"""Names and values, as tests recorded them."""


def counted(suite: str, passed: Properties, every: Properties) -> str:
    """The words for a suite, `passed` being of the tests that passed and `every` of all; empty for a suite that counts nothing else."""
    count = _COUNTS.get(suite)
    return count(tuple(passed), tuple(every)) if count is not None else ""


def _encryption(passed: Properties, _: Properties) -> str:
    return f"modes={len(_values(passed, 'mode'))} paths={len(_values(passed, 'path'))}"


def _trace(passed: Properties, every: Properties) -> str:
    """Points at which packets were seen as they should be; ways to break it, and those that trace or alert missed, of all tests."""
    ways = {way for way, _ in _told(every)}
    missed = {way for way, by in _told(every) if (way, by) not in _values(every, "detected")}
    alarms = sum(name == "false_alarm" for name, _ in every)
    return f"points={len(_values(passed, 'point'))} broken_ways={len(ways)} undetected={len(missed)} false_alarms={alarms}"


def _told(properties: Properties) -> set[tuple[str, str]]:
    """Each way to break it, by each of those who should tell of it."""
    return {(str(way), by) for way in _values(properties, "broken_way") for by in ("trace", "alert")}


def _values(properties: Properties, wanted: str) -> set[object]:
    return {value if not isinstance(value, list) else tuple(value) for name, value in properties if name == wanted}


_COUNTS: dict[str, Callable[[Properties, Properties], str]] = {"encryption": _encryption, "trace": _trace}
