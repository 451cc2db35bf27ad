"""What one host's kernel can hold of ours, as values: links, addresses, peers, routes, rules, sysctls, nftables objects.

An object's `key` is what the kernel keys it by: two objects with one key cannot both exist. `layer` says which part of the kernel
it lives in. Objects are values; equality is equality of what the kernel should hold.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from schemas.nft import ChainType, DataType, Hook, Policy, Rule
from schemas.routes import METRIC_MAX, RouteType, Scope, kernel_metric
from schemas.values import IPV4, IPV6, Address, Endpoint, Family, Key, Mac, Prefix

# Defaults are written, not omitted: msgspec omits a default by identity, so that equal objects would have unequal bytes and digests.
_VALUE = {"frozen": True, "rename": "camel", "tag_field": "kind"}

OWN_PROTOCOL = 77
"""Protocol number of every route and rule that is ours."""
OWN_TABLE_PREFIX = "meshmark."
"""Every nftables table that is ours is in family inet and begins so; nothing else is ever listed."""
HOST_TABLE = f"{OWN_TABLE_PREFIX}host"
UPLINKS = "uplinks"
"""The table and the set in it that say which link is the host's uplink. No packet meets them."""
TRACE_TABLE = f"{OWN_TABLE_PREFIX}trace"
"""By whose chains traced packets are seen. Part of no plan, and there only while a flow is traced: see ``services.kernel.trace_table``."""
TRACE_GROUP, TRACE_PREFIX = 5188, "meshmark trace"
"""The NFLOG group by which that table's rules show overlay packets, and what they say with each."""
OWN_ALIAS = "meshmark"
"""Interface alias (IFLA_IFALIAS) of every link that is ours."""
MAIN_TABLE = 254
_PER_LINK_PARTS = 4
GUARD_METRIC = METRIC_MAX + 1
"""Metric of routes that only stand in when nothing better does: any other route wins."""


class Sysctl(Struct, **_VALUE, tag="sysctl"):
    """One file under /proc/sys, named with slashes (``net/ipv4/ip_forward``). The old value is kept and given back."""

    name: str
    value: str

    layer = "sysctl"

    @property
    def key(self) -> str:
        return f"sysctl {self.name}"

    @property
    def link(self) -> str:
        """The link whose setting it is (``net/ipv4/conf/LINK/…``), which comes and goes with that; empty for all others."""
        parts = self.name.split("/")
        is_per_link = len(parts) > _PER_LINK_PARTS and parts[2] in ("conf", "neigh") and parts[3] not in ("all", "default")
        return parts[3] if is_per_link else ""


class VxlanLink(Struct, **_VALUE, tag="vxlan"):
    """A VXLAN device from `local` to `remote`, of one family, UDP port `port`, without learning. `mtu` in bytes.

    Without a `remote` it leads to many: each `FdbEntry` says where one Ethernet address is, and what has none goes nowhere.
    """

    name: str
    vni: int
    local: Address
    remote: Address | None
    mac: Mac
    mtu: int
    port: int = 4789

    layer = "link"

    @property
    def key(self) -> str:
        return f"link {self.name}"


class GeneveLink(Struct, **_VALUE, tag="geneve"):
    """A point-to-point Geneve device to `remote`, UDP port `port`, without options. `mtu` in bytes.

    It has no near end to set: an outer packet's source is what the route to `remote` says.
    """

    name: str
    vni: int
    remote: Address
    mac: Mac
    mtu: int
    port: int = 6081

    layer = "link"

    @property
    def key(self) -> str:
        return f"link {self.name}"


class WireguardLink(Struct, **_VALUE, tag="wireguard"):
    """A WireGuard device with the host's private key. `public_key` is the one the planner knows, if any.

    The device's own outer packets have the mark `fwmark`, for policy rules to tell them from what goes in; 0 for none.
    """

    name: str
    listen_port: int
    mtu: int
    public_key: Key | None = None
    fwmark: int = 0

    layer = "link"

    @property
    def key(self) -> str:
        return f"link {self.name}"


class WireguardPeer(Struct, **_VALUE, tag="peer"):
    """A peer of a WireGuard device. An `endpoint` that the device learned later is not a difference; with None there is never any.

    One that is a name is looked up by the host; until that is done, the peer speaks first or not at all.
    """

    link: str
    public_key: Key
    endpoint: Endpoint | None
    allowed_ips: tuple[Prefix, ...]
    keepalive_seconds: int = 0

    layer = "wireguard"

    @property
    def key(self) -> str:
        return f"peer {self.link} {self.public_key}"


class LinkAddress(Struct, **_VALUE, tag="address"):
    """An address with its prefix length on one of our links. Usable at once: duplicates are not looked for.

    The kernel gives links IPv6 link-local addresses by itself: such an address is ours only where a plan names it.
    """

    link: str
    address: Address
    length: int

    layer = "address"

    @property
    def key(self) -> str:
        return f"address {self.link} {self.address}/{self.length}"


class FdbEntry(Struct, **_VALUE, tag="fdb"):
    """Where one Ethernet address is: frames to `mac` on the VXLAN device `link` go to the host `remote`. Permanent.

    `mac` is one host's, no group's, and has one entry. Where the device has a remote of its own, its entry for all other addresses is part
    of the link.
    """

    link: str
    mac: Mac
    remote: Address

    layer = "neighbour"

    @property
    def key(self) -> str:
        return f"fdb {self.link} {self.mac}"


class Neighbour(Struct, **_VALUE, tag="neighbour"):
    """The Ethernet address of a neighbour on one of our links. Permanent: nobody is asked for it, by ARP or by neighbour discovery."""

    link: str
    address: Address
    mac: Mac

    layer = "neighbour"

    @property
    def key(self) -> str:
        return f"neighbour {self.link} {self.address}"


class NextHop(Struct, frozen=True, rename="camel"):
    """Where a route goes: out of `link`, to the neighbour `via` if given. A hop of weight 3 gets three times the flows of weight 1."""

    link: str
    via: Address | None = None
    onlink: bool = False
    weight: int = 1


class Route(Struct, **_VALUE, tag="route"):
    """A route of the family of its prefix. `hops` is empty for every type but unicast; several IPv6 hops need a `via` each.

    Packets that the host itself sends get the address `source`, which must be one of its own. Without a `scope` it is ``link`` where no
    hop has a `via`, else ``global``; IPv6 routes have none.
    """

    table: int
    prefix: Prefix
    type: RouteType = "unicast"
    metric: int = 0
    hops: tuple[NextHop, ...] = ()
    source: Address | None = None
    scope: Scope | None = None

    layer = "route"

    @property
    def key(self) -> str:
        return f"route {self.table} {self.prefix} {self.kernel_metric}"

    @property
    def kernel_metric(self) -> int:
        """The metric under which the kernel holds the route."""
        return self.metric or kernel_metric(self.metric, self.prefix.family)

    @property
    def usual_scope(self) -> Scope:
        """The scope where none is given."""
        return "link" if self.prefix.family == IPV4 and self.hops and not any(hop.via for hop in self.hops) else "global"

    @property
    def is_guard(self) -> bool:
        """True for a route that fails closed: it stands in for routes that are not there."""
        return self.type == "unreachable" and self.metric == GUARD_METRIC


class PolicyRule(Struct, **_VALUE, tag="rule"):
    """A policy rule of one family, that of `source` and `to` where these are given: packets that match all that is given look `table` up.

    Interfaces are matched by name and need not exist. The kernel keeps neither host bits nor prefixes of length 0.
    """

    priority: int
    table: int
    fwmark: int = 0
    mask: int = 0
    iif: str = ""
    to: Prefix | None = None
    family: Family = IPV4
    source: Prefix | None = None
    oif: str = ""

    layer = "rule"

    @property
    def key(self) -> str:
        family = "inet6 " if self.family == IPV6 else ""
        more = (f" from {self.source}" if self.source else "") + (f" oif {self.oif}" if self.oif else "")
        return f"rule {family}{self.priority} fwmark {self.fwmark:#x}/{self.mask:#x} iif {self.iif or '-'} to {self.to or '-'}{more}"


class NftTable(Struct, **_VALUE, tag="table"):
    """A table of family inet."""

    name: str

    layer = "nft"

    @property
    def table(self) -> str:
        return self.name

    @property
    def key(self) -> str:
        return f"table {self.name}"


class NftSet(Struct, **_VALUE, tag="set"):
    """A named set, or a map where `value_type` is given. `interval` allows prefixes, ranges and names that end in ``*``.

    The elements of one with `timeout` are no part of a plan: they are lent for a while, and the kernel takes them back by itself.
    """

    table: str
    name: str
    key_type: DataType
    value_type: DataType | None = None
    interval: bool = False
    value_interval: bool = False
    timeout: bool = False

    layer = "nft"

    @property
    def key(self) -> str:
        return f"set {self.table} {self.name}"


class NftElement(Struct, **_VALUE, tag="element"):
    """One element of a named set or map. In a verdict map, the value is ``jump CHAIN``, ``accept``, ``drop`` or ``return``."""

    table: str
    set: str
    element: str
    value: str = ""

    layer = "nft"

    @property
    def key(self) -> str:
        return f"element {self.table} {self.set} {self.element}"


class NftChain(Struct, **_VALUE, tag="chain"):
    """A chain with all its rules, in order. Without a `hook` it is reached by jumps only, and has no policy. `priority` is numeric."""

    table: str
    name: str
    rules: tuple[Rule, ...]
    type: ChainType | None = None
    hook: Hook | None = None
    priority: int = 0
    policy: Policy = "accept"

    layer = "nft"

    @property
    def key(self) -> str:
        return f"chain {self.table} {self.name}"


NftObject = NftTable | NftSet | NftElement | NftChain
OverlayLink = VxlanLink | GeneveLink
Link = OverlayLink | WireguardLink
OnLink = LinkAddress | FdbEntry | Neighbour | WireguardPeer
"""What is on a link, and goes with it."""
PlanObject = Sysctl | Link | OnLink | Route | PolicyRule | NftObject
Layer = Literal["sysctl", "link", "address", "neighbour", "wireguard", "nft", "rule", "route"]
