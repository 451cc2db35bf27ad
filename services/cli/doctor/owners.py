"""Who is known to use which packet marks, by what public sources of these programs say. A guess by number, and told as one."""

from __future__ import annotations

_ALL = 0xFFFFFFFF
_VALUES = {0xCA6C: "wg-quick", 0x6D6F6C65: "Mullvad"}
"""Marks that are matched and set as a whole."""
_FIELDS = (
    (0x4000, "kube-proxy"),
    (0x8000, "kube-proxy"),
    (0xC000, "kube-proxy"),
    (0x2000, "CNI plugins and netavark"),
    (0x0F00, "Cilium"),
    (0xFF0000, "Tailscale"),
    (0xFFFF0000, "Calico"),
)
"""Masks; the first that holds all bits of a use names its owner."""


def owner(mask: int, value: int | None) -> str:
    """The program that is known to use these bits so; empty when none is."""
    if mask == _ALL:
        return _VALUES.get(value or 0, "")
    return next((name for field, name in _FIELDS if mask & ~field == 0), "")
