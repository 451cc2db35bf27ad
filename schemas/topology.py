"""Topology: what publishers say. One object per message, subject ``mesh.topology.<kind>.<cluster>.<name>``.

Fields are camelCase on the wire; prefixes, addresses and keys are canonical on entry (``schemas.values``). Decoding is strict:
a field that is not listed here is an error. Checks that need other objects are the planner's (``services.planner.admit``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Literal, TypeVar

from msgspec import Meta, Struct, field

from schemas.codec import DecodeError, convert, decode
from schemas.firewall import FirewallConfiguration
from schemas.firewall_check import check as check_firewall
from schemas.hints import hint
from schemas.objects import Object, Strict
from schemas.routing import RouteConfiguration
from schemas.routing_check import check as check_routes
from schemas.values import Address, Endpoint, Family, Key, Name, Prefix

Uplink = Annotated[Name, Meta(extra_json_schema={"default": "eth0"})]
Port = Annotated[int, Meta(ge=1, le=65535)]
Prefixes = Annotated[tuple[Prefix, ...], Meta(max_length=256)]
HostAddresses = Annotated[tuple[Address, ...], Meta(min_length=1, max_length=2)]
TUNNELS_MAX = 64
_LAST_FIRST_PORT = 65535 - TUNNELS_MAX + 1
Policy = Literal["repair", "alert"]
Overlay = Literal["vxlan", "geneve"]
Sources = Literal["per-node", "shared"]
Encryption = Literal["none", "wireguard"]
StrictMode = Literal["off", "audit", "enforce"]
Routing = Literal["native", "overlay"]
MarkBits = Annotated[int, Meta(ge=1, le=0xFFFFFFFF)]
Keepalive = Annotated[int, Meta(ge=0, le=65535)]


class DriftPolicy(Strict, frozen=True, kw_only=True):
    """What the auditor does about a difference, by layer: ask the applier to repair it, or only say so."""

    nft: Policy = "repair"
    rule: Policy = "repair"
    route: Policy = "repair"
    link: Policy = "repair"
    address: Policy = "repair"
    neighbour: Policy = "repair"
    wireguard: Policy = "repair"
    sysctl: Policy = "repair"


class Marks(Strict, frozen=True, kw_only=True):
    """The bits of packets' marks that encryption uses on nodes, and their values: one field, in which a packet has one value at a time.

    `encrypt` asks for a packet to be encrypted, `encrypted` is on WireGuard's own outer packets, `decrypted` on what came out of it. No
    other program on the nodes may use a bit of `mask`; all other bits of a mark are left alone.
    """

    mask: MarkBits = 0xFFF
    encrypt: MarkBits = 0x4D2
    encrypted: MarkBits = 0xE00
    decrypted: MarkBits = 0xD00


class WireguardSettings(Strict, frozen=True, kw_only=True):
    """The nodes' WireGuard device: its UDP port, its persistent keepalive (0: none), and whether what `nodes` say is encrypted as well.

    By NFLOG group `audit_group` the kernel shows packets that left or arrived in clear to the auditor; with null it counts them only, which
    is for kernels without NFLOG.

    Without `nodes`, what a node sends to another node's address, and pods to nodes, goes as it is. With it, all of that is encrypted but
    for what a host sends to `control` addresses or hears from them.
    """

    port: Port = 51871
    keepalive_seconds: Keepalive = 0
    nodes: bool = False
    audit_group: Annotated[int, Meta(ge=0, le=65535)] | None = 5187


class Cluster(Object, frozen=True, kw_only=True, tag=True):
    """A cluster or site. `mtu` is the underlay's, in bytes.

    `pod_prefixes` hold its pods, `external_prefixes` what it shows to peers besides pods, `internal_prefixes` the overlay
    addresses of its nodes and gateways, one prefix for each family of the others; peers never see those. `overlay` carries packets
    between gateways and nodes.

    `pools` are what remaps are taken from where an end of a peering gives none and needs one. `reserved` is held by others at the site:
    pods, nodes and other reservations may lie inside, remaps may not. `control` are the addresses of broker and management: what hosts
    send there is never marked, encrypted, translated or dropped, and no prefix of a remote cluster may hold one.

    `sources` says as what peers see traffic that no pod sent (nodes, NodePorts): as an address of each node's own in the first external
    prefix with room for that, or all as the first address of an external prefix. Without it, per node where there is room.

    `routing` says how pods' packets get to other nodes: `native` by the underlay or the CNI, `overlay` by a mesh of links of the kind
    `overlay` that meshmark makes. With `encryption` they get there encrypted, whichever it is; `strict` counts what does not (`audit`), or
    drops it too (`enforce`).
    """

    pod_prefixes: Annotated[Prefixes, Meta(min_length=1)]
    external_prefixes: Prefixes = ()
    internal_prefixes: Annotated[tuple[Prefix, ...], Meta(min_length=1, max_length=2)]
    pools: Prefixes = ()
    reserved: Prefixes = ()
    control: Annotated[tuple[Prefix, ...], Meta(max_length=16)] = ()
    overlay: Overlay = "vxlan"
    mtu: Annotated[int, Meta(ge=1280, le=65535)] = 1500
    sources: Sources | None = None
    routing: Routing = "native"
    encryption: Encryption = "none"
    strict: StrictMode = "off"
    wireguard: WireguardSettings = WireguardSettings()
    marks: Marks = Marks()
    drift: DriftPolicy = DriftPolicy()

    @property
    def home(self) -> Name:
        return self.name

    @property
    def families(self) -> set[Family]:
        """The families of what peers can reach."""
        return {prefix.family for prefix in (*self.pod_prefixes, *self.external_prefixes)}


class Node(Object, frozen=True, kw_only=True, tag=True):
    """A host that runs pods. `addresses` are the underlay's, one of a family; pods inside `pod_prefixes` are found without an Endpoint.

    Where the cluster encrypts: `opt_out` leaves this node out, in both directions. `endpoint` is where other nodes find its WireGuard
    device, if not at its address and the cluster's port; of a `roaming` node they learn it from its handshakes. `source_addresses` are
    those by which the node itself sends to pods, at most one of a family, each inside a pod prefix and no pod's; without them, the first
    address of the first pod prefix of the family.
    """

    cluster: Name
    addresses: HostAddresses
    uplink: Uplink = field(default_factory=lambda: Name("eth0"))
    pod_prefixes: Prefixes = ()
    opt_out: bool = False
    endpoint: Endpoint | None = None
    roaming: bool = False
    source_addresses: Annotated[tuple[Address, ...], Meta(max_length=2)] = ()

    @property
    def home(self) -> Name:
        return self.cluster


class Gateway(Object, frozen=True, kw_only=True, tag=True):
    """One peering's tunnel end: a network namespace, container or host of its own. `addresses` are the underlay's, one of a family."""

    cluster: Name
    addresses: HostAddresses
    uplink: Uplink = field(default_factory=lambda: Name("eth0"))

    @property
    def home(self) -> Name:
        return self.cluster


class PeeringEnd(Strict, frozen=True, kw_only=True):
    """One end of a peering: who it is, where it is reached, and how it sees the other end.

    `remap_pods` and `remap_external` pair by index with the other cluster's `podPrefixes` and `externalPrefixes`, families and lengths
    equal: the host part of an address is kept. Empty means that the other end's prefixes are used as they are, or where one of them
    overlaps what is in use here, by a remap from the cluster's `pools`. `endpoint` overrides
    the gateway's address and the first port, for a gateway behind a load balancer; tunnel i is reached at its port + i. It may have a DNS
    name for an address, which the other end's gateway looks up.
    """

    cluster: Name
    gateway: Name
    remap_pods: Prefixes = ()
    remap_external: Prefixes = ()
    endpoint: Endpoint | None = None


class Peering(Object, frozen=True, kw_only=True, tag=True):
    """Two clusters joined by `tunnels` parallel WireGuard tunnels; tunnel i listens on UDP port `port` + i at both ends.

    `keepalive_seconds` is WireGuard's persistent keepalive, 0 for none. `weights`, where given, has one entry per tunnel:
    a tunnel of weight 3 gets three times the flows of a tunnel of weight 1.
    """

    cluster: Name
    ends: tuple[PeeringEnd, PeeringEnd]
    tunnels: Annotated[int, Meta(ge=1, le=TUNNELS_MAX)] = 1
    port: Port = 51840
    keepalive_seconds: Keepalive = 25
    weights: tuple[Annotated[int, Meta(ge=1, le=256)], ...] = ()

    @property
    def home(self) -> Name:
        return self.cluster


class Pod(Object, frozen=True, kw_only=True, tag="Endpoint"):
    """A pod (kind ``Endpoint`` on the wire): its addresses, and the node that runs it."""

    cluster: Name
    node: Name
    addresses: Annotated[tuple[Address, ...], Meta(min_length=1, max_length=16)]

    @property
    def home(self) -> Name:
        return self.cluster

    @property
    def kind(self) -> str:
        return "Endpoint"


class PublicKey(Object, frozen=True, kw_only=True, tag=True):
    """A host's WireGuard public key, published by its applier only; `name` is the host's.

    `next` is the one that is to take its place (``meshmark rotate``): other hosts meet it on a second device before the first one has it.
    """

    cluster: Name
    key: Key
    next: Key | None = None

    @property
    def home(self) -> Name:
        return self.cluster


class IpMapping(Object, frozen=True, kw_only=True, tag=True):
    """An address that peers reach although it is in no prefix that they see: they dial `external`, and get to `real`.

    `real` is a pod's address, or any that a node of the cluster reaches: its own, a host's outside, another cluster's as this one sees it.
    `external` is in an external prefix of the cluster; without it, one is chosen and kept. `node` leads to a `real` that is no pod's;
    without it, one is chosen. With `masquerade`, `real` sees that node as the sender, so that the answer comes back to it.
    """

    cluster: Name
    real: Address
    external: Address | None = None
    node: Name | None = None
    masquerade: bool = False

    @property
    def home(self) -> Name:
        return self.cluster


class EgressPolicy(Object, frozen=True, kw_only=True, tag=True):
    """Which pods leave the cluster through which node, and as which address.

    `pods` are prefixes or addresses inside the cluster's pod prefixes; a pod has at most one policy. What they send to `destinations`
    (without any: to everything outside) goes by the overlay to `node`, encrypted where the cluster encrypts, and leaves there from the one
    of `addresses` that is of its family. Without one it is the node's own underlay address. meshmark puts no address on an uplink: those
    that are given must be the node's already, or be led to it.
    """

    cluster: Name
    pods: Annotated[Prefixes, Meta(min_length=1)]
    node: Name
    addresses: Annotated[tuple[Address, ...], Meta(max_length=2)] = ()
    destinations: Prefixes = ()

    @property
    def home(self) -> Name:
        return self.cluster


Topology = Cluster | Node | Gateway | Peering | Pod | PublicKey | IpMapping | EgressPolicy | FirewallConfiguration | RouteConfiguration
KINDS: dict[str, type[Topology]] = {
    "Cluster": Cluster,
    "Node": Node,
    "Gateway": Gateway,
    "Peering": Peering,
    "Endpoint": Pod,
    "PublicKey": PublicKey,
    "IpMapping": IpMapping,
    "EgressPolicy": EgressPolicy,
    "FirewallConfiguration": FirewallConfiguration,
    "RouteConfiguration": RouteConfiguration,
}


def decode_topology(payload: bytes) -> Topology:
    """Decode one topology object from JSON; DecodeError names the field and says what is right."""
    return _check(_named(lambda: decode(payload, Topology), lambda: KINDS[decode(payload, _Tag).kind]))  # type: ignore[arg-type]


def convert_topology(value: object) -> Topology:
    """The same for plain data, as a YAML document gives it."""
    if not isinstance(value, dict):
        reason = f"expected an object with the fields kind, name, …; got {type(value).__name__}"
        raise DecodeError(reason)
    return _check(_named(lambda: convert(value, Topology), lambda: KINDS[value["kind"]]))  # type: ignore[arg-type]


class _Tag(Struct):
    kind: str


def _named(read: Callable[[], Topology], kind: Callable[[], type[Topology]]) -> Topology:
    """Say what would have been right when the kind, or a field or word that this `kind` does not have, is what is wrong."""
    try:
        return read()
    except DecodeError as error:
        if error.field == "$.strict" and "`bool`" in error.reason:
            reason = f'{error.reason}; YAML reads off without quotes as false: write "off"'
            raise DecodeError(reason, "$.strict") from None
        if error.field == "$.kind" or "`kind`" in error.reason:
            reason = f"{error.reason}; the kinds are {', '.join(KINDS)}"
            raise DecodeError(reason, "$.kind") from None
        if added := hint(error.reason, error.field, kind):
            reason = f"{error.reason}{added}"
            raise DecodeError(reason, error.field) from None
        raise


def _check(item: Topology) -> Topology:
    """What one object can get wrong across its own fields."""
    match item:
        case Cluster():
            _one_of_a_family(item.internal_prefixes, "$.internalPrefixes")
            missing = item.families - {prefix.family for prefix in item.internal_prefixes}
            if missing:
                family = min(missing)
                reason = f"the cluster has IPv{family} prefixes, and no IPv{family} prefix for the overlay's own addresses; add one"
                raise DecodeError(reason, "$.internalPrefixes")
            _check_encryption(item)
        case Node():
            _one_of_a_family(item.addresses, "$.addresses")
            _one_of_a_family(item.source_addresses, "$.sourceAddresses")
            _check_node(item)
        case Gateway():
            _one_of_a_family(item.addresses, "$.addresses")
        case IpMapping() if item.external is not None and item.external.family != item.real.family:
            reason = f"{item.external} and the real address {item.real} are of two families; give an IPv{item.real.family} address"
            raise DecodeError(reason, "$.external")
        case EgressPolicy():
            _check_egress(item)
        case FirewallConfiguration():
            check_firewall(item)
        case RouteConfiguration():
            check_routes(item)
        case Peering():
            _check_peering(item)
    return item


def _check_encryption(item: Cluster) -> None:
    if item.strict != "off" and item.encryption == "none":
        reason = f"{item.strict!r} is for a cluster that encrypts; set `encryption`, or leave this out"
        raise DecodeError(reason, "$.strict")
    values = {name: getattr(item.marks, name) for name in ("encrypt", "encrypted", "decrypted")}
    for index, (name, value) in enumerate(values.items()):
        if value & ~item.marks.mask:
            reason = f"{value:#x} has bits outside of the mask {item.marks.mask:#x}"
            raise DecodeError(reason, f"$.marks.{name}")
        for earlier in list(values)[:index]:
            if value == values[earlier]:
                reason = f"{value:#x} is the value of `{earlier}` too; a packet must show which of them is meant"
                raise DecodeError(reason, f"$.marks.{name}")


def _check_node(item: Node) -> None:
    if item.roaming and item.endpoint is not None:
        reason = f"others learn where a roaming node is from its handshakes; leave {item.endpoint} out, or `roaming`"
        raise DecodeError(reason, "$.endpoint")
    for index, address in enumerate(item.source_addresses):
        if not any(prefix.covers(address) for prefix in item.pod_prefixes):
            reason = f"{address} is in none of the node's pod prefixes; only from there do other nodes take it"
            raise DecodeError(reason, f"$.sourceAddresses[{index}]")


def _check_egress(item: EgressPolicy) -> None:
    _one_of_a_family(item.addresses, "$.addresses")
    pods = {prefix.family for prefix in item.pods}
    families: dict[str, list[tuple[str, Family]]] = {
        "addresses": [(address, address.family) for address in item.addresses],
        "destinations": [(prefix, prefix.family) for prefix in item.destinations],
    }
    for name, values in families.items():
        for index, (value, family) in enumerate(values):
            if family not in pods:
                reason = f"{value} is of IPv{family}, and no prefix of `pods` is; add one, or leave it out"
                raise DecodeError(reason, f"$.{name}[{index}]")
    for name, prefixes in (("pods", item.pods), ("destinations", item.destinations)):
        for index, prefix in enumerate(prefixes):
            other = next((earlier for earlier in prefixes[:index] if earlier.overlaps(prefix)), None)
            if other is not None:
                reason = f"{prefix} overlaps {other}, which is there already; leave one of them out"
                raise DecodeError(reason, f"$.{name}[{index}]")


def _check_peering(item: Peering) -> None:
    if item.weights and len(item.weights) != item.tunnels:
        reason = f"{len(item.weights)} weights for {item.tunnels} tunnels; give one for each"
        raise DecodeError(reason, "$.weights")
    if item.cluster not in (item.ends[0].cluster, item.ends[1].cluster):
        reason = f"{item.cluster!r} is at neither end; a peering belongs to the cluster of one of its ends"
        raise DecodeError(reason, "$.cluster")
    if item.ends[0].cluster == item.ends[1].cluster:
        reason = f"both ends are in {item.ends[0].cluster!r}; a peering joins two clusters"
        raise DecodeError(reason, "$.ends[1].cluster")
    ports = {
        "$.port": item.port,
        **{f"$.ends[{place}].endpoint": end.endpoint.port for place, end in enumerate(item.ends) if end.endpoint},
    }
    for at, port in ports.items():
        if port > _LAST_FIRST_PORT:
            reason = f"port {port} leaves no room for {TUNNELS_MAX} tunnels, one port each; use at most {_LAST_FIRST_PORT}"
            raise DecodeError(reason, at)


_Familiar = TypeVar("_Familiar", Address, Prefix)


def _one_of_a_family(values: Sequence[_Familiar], field: str) -> None:
    for index, value in enumerate(values):
        if any(earlier.family == value.family for earlier in values[:index]):
            reason = f"{value} is the second of IPv{value.family}; give at most one of each family"
            raise DecodeError(reason, f"{field}[{index}]")
