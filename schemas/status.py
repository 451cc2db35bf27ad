"""Reports: what an applier says it did, what was refused, what could not be handled, what a planner holds back."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from schemas.in_use import InUse
from schemas.values import Key, Name, wire_name

Outcome = Literal["applied", "degraded", "waiting"]

_REPORT = {"frozen": True, "omit_defaults": True, "rename": wire_name}


class UnitReport(Struct, **_REPORT):
    """One unit on one host: the digest held in the kernel, the digest wanted, and why they differ if they do.

    `objects` is how many objects are held, 0 when that is not known. A unit that only the kernel's marker names has its tag for a name.
    """

    unit: str
    held: str
    wanted: str
    outcome: Outcome
    error: str = ""
    objects: int = 0


class Timings(Struct, **_REPORT):
    """When each step of an application ended, Unix time in seconds; 0 for a step that did not happen."""

    received_s: float = 0.0
    staged_s: float = 0.0
    committed_s: float = 0.0
    connected_s: float = 0.0
    reported_s: float = 0.0


class Capabilities(Struct, **_REPORT):
    """What the host's kernel and tools can do."""

    kernel: str = ""
    nftables: str = ""
    wireguard: Literal["kernel", "userspace", "none"] = "none"


class DeadTunnel(Struct, **_REPORT):
    """A tunnel that carries nothing as far as the host can tell, since when (Unix time), and why it thinks so."""

    link: str
    since_s: float
    reason: str


class TunnelHealth(Struct, **_REPORT):
    """What a host makes of its tunnels. Routes are without the hops through `withdrawn` ones; that is no drift.

    `dead` are the tunnels when all of them are: their hops stay. `judged_by` is ``handshake`` where the host may not send probes.
    """

    judged_by: Literal["echo", "handshake"] = "echo"
    withdrawn: tuple[DeadTunnel, ...] = ()
    dead: tuple[DeadTunnel, ...] = ()

    @property
    def links(self) -> frozenset[str]:
        """The links of the withdrawn tunnels."""
        return frozenset(tunnel.link for tunnel in self.withdrawn)


class Peers(Struct, **_REPORT):
    """A host's WireGuard peers in numbers: all of them, those that shook hands within three minutes, those that did so before that.

    Of those with a fresh handshake, `roamed` speak from elsewhere than planned, which is right behind NAT. `waiting` endpoints' names have
    no address yet; `waiting_for` are the first of them, each with the reason.
    """

    count: int = 0
    fresh: int = 0
    stale: int = 0
    roamed: int = 0
    waiting: int = 0
    waiting_for: tuple[str, ...] = ()


class Greeted(Struct, **_REPORT):
    """How far the peers of a WireGuard device have shaken hands with it since it has its `key`, as it is planned.

    `lacking` is how many have not, though they are there; `first` are some of these, by their public keys.
    """

    link: str
    key: Key | None = None
    lacking: int = 0
    first: tuple[Key, ...] = ()


class Greetings(Struct, **_REPORT):
    """The handshakes of a host that has more than one device of its mesh, of the peers that it has on all of them.

    `away` are those that answer on none, in spite of keepalives; when they are more than can be listed, they count as lacking instead.
    """

    devices: tuple[Greeted, ...] = ()
    away: tuple[Key, ...] = ()

    def on(self, link: str, key: Key) -> Greeted | None:
        """The handshakes on a device since it has this key; None when nothing is known of that."""
        return next((found for found in self.devices if (found.link, found.key) == (link, key)), None)


class ApplyReport(Struct, **_REPORT):
    """The state of one host after the applier's last turn.

    `in_use` are the numbers that others use there (None: not looked yet); `collisions` say which of them the host's own plan has as well.
    `keys` are the public halves of all private keys that the host has, the one in force first; empty when that was not said.
    """

    cluster: Name
    host: Name
    epoch: int
    generation: int
    units: tuple[UnitReport, ...]
    operations: int = 0
    timings: Timings = Timings()
    capabilities: Capabilities = Capabilities()
    tunnels: TunnelHealth = TunnelHealth()
    in_use: InUse | None = None
    collisions: tuple[str, ...] = ()
    peers: Peers = Peers()
    greetings: Greetings = Greetings()
    keys: tuple[Key, ...] = ()

    @property
    def outcome(self) -> Outcome:
        """The worst outcome among the units."""
        found = {unit.outcome for unit in self.units}
        return "degraded" if "degraded" in found else "waiting" if "waiting" in found else "applied"


class Refusal(Struct, **_REPORT):
    """Why an object was not admitted. `other` names the object it conflicts with, `field` the field that is wrong."""

    kind: str
    cluster: str
    name: str
    reason: str
    field: str = ""
    other: str = ""
    sequence: int = 0

    @property
    def what(self) -> str:
        """The field, where there is one, and the reason, in one line."""
        return f"{self.field}: {self.reason}" if self.field else self.reason


class DeadLetter(Struct, **_REPORT):
    """A message that could not be handled: where it came from, why, and its first bytes."""

    subject: str
    reason: str
    sequence: int = 0
    deliveries: int = 0
    payload: bytes = b""


class UnitLoss(Struct, **_REPORT):
    """A unit that a host would lose, or most of it: how many objects it has (0: unknown), and how many it would keep."""

    host: str
    unit: str
    objects: int
    kept: int


class Freeze(Struct, **_REPORT):
    """Whether a planner holds back every plan that takes something away, and why.

    `count` of `planned` units on `hosts` hosts would go; `losses` are the first of them. `token` names exactly this loss: an acceptance of
    it is none of another. `since_s` is Unix time.
    """

    state: Literal["frozen", "lifted"]
    reason: str = ""
    count: int = 0
    planned: int = 0
    hosts: int = 0
    losses: tuple[UnitLoss, ...] = ()
    since_s: float = 0.0
    token: str = ""

    @property
    def is_on(self) -> bool:
        return self.state == "frozen"


class Accept(Struct, **_REPORT):
    """A request to a planner: let go what it holds back, if that is still what `token` names."""

    token: str
