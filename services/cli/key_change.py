"""A host's change of keys, as people are told of it: how far it is, and for whom it waits. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from schemas.allocation import Rotation, RotationStage
from schemas.values import wire_name
from services.planner import names

_NEWS_S = 5.0
_WORDS: Mapping[RotationStage, str] = {
    "queued": "waits for its turn",
    "beside": "a second device with the new key comes on all nodes",
    "moved": "packets go by the second device",
    "rekeyed": "the first device gets the new key",
    "back": "packets go by the first device again",
    "leaving": "the second device and the old key go",
    "done": "done",
}
_TUNNEL_WORDS: Mapping[RotationStage, str] = {
    **_WORDS,
    "beside": "a device with the new key comes beside the tunnels, at both ends",
    "moved": "packets of {tunnel} go by the device beside",
    "rekeyed": "{tunnel} gets the new key",
    "back": "packets go by all tunnels again",
    "leaving": "the device beside and the old key go",
}


class KeyChange(Struct, frozen=True, rename=wire_name):
    """How far a host's change of keys is, as the planner has said it since `since_s`, Unix time by the broker's clock."""

    rotation: Rotation
    since_s: float

    @property
    def is_over(self) -> bool:
        """Whether it is done, or was taken back."""
        return self.rotation.stage == "done"


def step(change: KeyChange) -> str:
    """The step that is under way, in words."""
    rotation = change.rotation
    words = _TUNNEL_WORDS if rotation.peering else _WORDS
    return words[rotation.stage].format(tunnel=names.tunnel_link(rotation.tunnel))


def waits(change: KeyChange, now_s: float) -> tuple[str, ...]:
    """What it waits for, in words; nothing in the first seconds of a wait, as each step of a sound change has one, but for its turn.

    A clock that is behind the broker's shows waits too early rather than never.
    """
    rotation = change.rotation
    if rotation.stage != "queued" and 0 <= now_s - change.since_s < _NEWS_S:
        return ()
    left = rotation.waiting - len(rotation.reasons)
    return (*rotation.reasons, *([f"for {left} more"] if left > 0 else []))


def unheard(asked_s: float, now_s: float) -> tuple[str, ...]:
    """What one waits for who has asked for a change of which the planner says nothing."""
    return ("the planner has not taken it up: does it run?",) if now_s - asked_s >= _NEWS_S else ()


def under_way(change: KeyChange, now_s: float) -> str:
    """All of it in one line, for a change that is not over."""
    reasons = waits(change, now_s)
    return f"changes its key, and waits: {'; '.join(reasons)}" if reasons else f"changes its key: {step(change)}"
