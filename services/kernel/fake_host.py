"""The machine of a fake kernel: what it holds, whoever looks at it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from schemas.commands import TraceFlow
from schemas.host_objects import Sysctl
from schemas.values import Endpoint, Key
from services.kernel.curve25519 import public_key
from services.kernel.port import Flow, KeyRing
from services.kernel.transaction import Held, Marker

_DEFAULT_SYSCTL = "0"


@dataclass
class FakeHost:
    """The machine's state. `objects` are ours by key, `foreign` are somebody else's: never listed, changed or removed.

    `handshakes_s` are the last ones by link or by peer, `learned` the endpoints that peers spoke from last by peer, and `ports` the UDP
    ports that others have, with their names. `counts` are packets and bytes that rules have counted, by the rule's comment.
    """

    objects: dict[str, Held] = field(default_factory=dict)
    foreign: dict[str, Held] = field(default_factory=dict)
    sysctls: dict[str, str] = field(default_factory=dict)
    kept_sysctls: dict[str, str] = field(default_factory=dict)
    marker: Marker | None = None
    flows: list[Flow] = field(default_factory=list)
    handshakes_s: dict[str, float] = field(default_factory=dict)
    learned: dict[str, Endpoint] = field(default_factory=dict)
    ports: dict[int, str] = field(default_factory=dict)
    counts: dict[str, tuple[int, int]] = field(default_factory=dict)
    greeted: list[str] = field(default_factory=list)
    """Peers that were greeted on request, in order."""
    private_key: bytes = bytes(range(32))
    next_key: bytes = b""
    withdrawn_key: bytes = b""
    wireguard: Literal["kernel", "userspace", "none"] = "kernel"
    geneve: bool = True
    commits: int = 0
    traced: dict[TraceFlow, int] = field(default_factory=dict)
    """Flows that are traced, but for their time, and for how many seconds; nothing here lets time pass."""

    def links(self) -> set[str]:
        """Names of all links, ours and others'."""
        return {key.removeprefix("link ") for key in (*self.objects, *self.foreign) if key.startswith("link ")} | {"lo"}

    def public_key(self) -> Key:
        """The public half of the key in force."""
        return _public(self.private_key)

    def keys(self) -> KeyRing:
        """The public halves of all keys."""
        others = (_public(private) if private else None for private in (self.next_key, self.withdrawn_key))
        return KeyRing(self.public_key(), *others)

    def sysctl(self, name: str) -> str | None:
        """The value that a sysctl has; None for one of a link that is not there."""
        link = Sysctl(name, "").link
        if link and link not in self.links():
            return None
        return self.sysctls.get(name, _DEFAULT_SYSCTL)


@lru_cache(maxsize=64)
def _public(private: bytes) -> Key:
    """The public half of a key; it takes a millisecond."""
    return public_key(private)
