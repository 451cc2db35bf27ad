"""A WireGuard device as values, whichever implementation holds it; and the two verbs each implementation has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from msgspec import Struct


class PeerState(Struct, frozen=True):
    """One peer as the device holds it. `endpoint` is empty when none is known; `handshake_s` is Unix time, 0 for never.

    `received_bytes` and `sent_bytes` count what was in the tunnel since the peer was made.
    """

    endpoint: str = ""
    allowed_ips: frozenset[str] = frozenset()
    keepalive_seconds: int = 0
    handshake_s: float = 0.0
    received_bytes: int = 0
    sent_bytes: int = 0


class DeviceState(Struct, frozen=True):
    """A device: the keys as raw bytes (empty: none set), the UDP port, its peers by raw public key, and the mark of its outer packets."""

    private_key: bytes
    public_key: bytes
    listen_port: int
    peers: Mapping[bytes, PeerState]
    fwmark: int = 0


class Settings(Struct, frozen=True):
    """What to change on a device itself. None leaves a field as it is; a `fwmark` of 0 marks nothing."""

    private_key: bytes | None = None
    listen_port: int | None = None
    fwmark: int | None = None


class PeerChange(Struct, frozen=True):
    """What to change on one peer. None leaves a field as it is; `allowed_ips` are added to those it has, and taken from other peers."""

    public_key: bytes
    remove: bool = False
    endpoint: str | None = None
    allowed_ips: frozenset[str] = frozenset()
    keepalive_seconds: int | None = None


class Implementation(Protocol):
    """Kernel module or userspace program. Errors are OSError; `get` raises one of ENOENT, ENODEV, ECONNREFUSED for no device."""

    def get(self, name: str) -> DeviceState: ...

    def set(self, name: str, settings: Settings, peers: Sequence[PeerChange]) -> None:
        """Make these changes, in this order. Never all peers at once: that would cut every session of the device."""
        ...

    def create(self, name: str) -> None:
        """Make a device that is down and without alias."""
        ...
