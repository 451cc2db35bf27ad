"""A survey of one host, as values. `Unknown` stands where something could not be looked at, and says why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

_ALL = 0xFFFFFFFF

AbilityState = Literal["yes", "installed", "no", "unknown"]


class Unknown(Struct, frozen=True):
    """What could not be looked at."""

    reason: str


class Ability(Struct, frozen=True):
    """Whether the kernel can do something. ``installed``: by a module that is there and loads on first use, so it was not tried."""

    state: AbilityState
    detail: str = ""


class MarkUse(Struct, frozen=True):
    """Bits of packet marks that somebody matches or sets. `value` is None where the rule does not say it (from a map, say)."""

    where: str
    verb: Literal["matches", "sets"]
    mask: int
    value: int | None = None

    @property
    def text(self) -> str:
        """For people: ``ip nat KUBE-MARK-MASQ sets 0x4000``."""
        value = "a mark" if self.value is None else f"{self.value:#x}"
        return f"{self.where} {self.verb} {value}{'' if self.mask in (self.value, _ALL) else f'/{self.mask:#x}'}"


class ForeignRule(Struct, frozen=True):
    """Somebody else's policy rule. `family` is 4 or 6; `mask` 0: any mark."""

    family: int
    priority: int
    table: int
    fwmark: int = 0
    mask: int = 0

    @property
    def text(self) -> str:
        """For people: ``IPv4 rule 900 fwmark 0x1/0x1 lookup 300``."""
        mark = f" fwmark {self.fwmark:#x}/{self.mask:#x}" if self.mask else ""
        return f"IPv{self.family} rule {self.priority}{mark} lookup {self.table}"


class ForeignRoutes(Struct, frozen=True):
    """Somebody else's routes in a table: how many, of which family (4 or 6)."""

    family: int
    table: int
    count: int


class LinkSeen(Struct, frozen=True):
    """A link of anybody. `port` is the UDP port that it listens on, 0 for none; None where it could not be asked."""

    name: str
    kind: str
    is_own: bool
    port: int | None = 0


class PortSeen(Struct, frozen=True):
    """A UDP port that is in use, and by which process; None: by none that can be seen from here."""

    port: int
    process: str | None


class Filter(Struct, frozen=True):
    """Somebody else's chain that drops forwarded packets which none of its rules accepts."""

    family: str
    table: str
    chain: str


class Uplink(Struct, frozen=True):
    """A link with a default route, and the rp_filter in effect on it (the higher of its own and all's)."""

    name: str
    rp_filter: int | None


class Netfilter(Struct, frozen=True):
    """What other people's nftables rules say about marks and forwarding. `opaque` are tables with rules that were not understood."""

    marks: tuple[MarkUse, ...] = ()
    drops: tuple[Filter, ...] = ()
    opaque: tuple[str, ...] = ()


class Survey(Struct, frozen=True):
    """All of it.

    `sysctls` are values by name, of those that are there; `abilities` are by name; `legacy` are iptables' tables outside nftables.
    `listeners` are the groups of NFLOG that somebody listens to, with that process's name, empty where it cannot be seen.
    """

    release: str
    is_admin: bool
    libnftables: bool
    abilities: Mapping[str, Ability]
    wireguard_go: bool
    tun: bool
    sysctls: Mapping[str, str]
    sysctls_writable: bool
    netfilter: Netfilter | Unknown
    legacy: tuple[str, ...] | Unknown
    rules: tuple[ForeignRule, ...] | Unknown
    routes: tuple[ForeignRoutes, ...] | Unknown
    links: tuple[LinkSeen, ...] | Unknown
    ports: tuple[PortSeen, ...] | Unknown
    uplinks: tuple[Uplink, ...] | Unknown
    listeners: Mapping[int, str] = {}
