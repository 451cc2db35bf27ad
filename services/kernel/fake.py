"""A kernel in memory that behaves: the same interface, ownership, atomicity and errors as ``linux``, without privileges.

A `FakeHost` is the machine and outlives any `FakeKernel` that looks at it, as a real one outlives a restart. It owns nothing outside
itself. It fails where the kernel fails (a link that is not there, somebody else's object in the way, a batch that does not fit), and
wherever `fail` says so. Both kernels pass the same contract suite; packets are the one thing that does not move here.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from msgspec.structs import replace

from schemas.commands import TraceFlow
from schemas.host_objects import (
    MAIN_TABLE,
    FdbEntry,
    GeneveLink,
    Layer,
    Link,
    LinkAddress,
    Neighbour,
    NftChain,
    OnLink,
    OverlayLink,
    PlanObject,
    PolicyRule,
    Route,
    Sysctl,
    VxlanLink,
    WireguardLink,
    WireguardPeer,
)
from schemas.nft import Comment, Counter
from schemas.status import Capabilities
from schemas.values import IPV6, Address, Endpoint, Key
from services.kernel.curve25519 import public_key
from services.kernel.failures import missing_kind
from services.kernel.fake_nft import committed, listed
from services.kernel.links import changes_in_place
from services.kernel.neighbours import check as check_entry
from services.kernel.peers import as_planned, refusal, sorted_prefixes
from services.kernel.port import ALL_LAYERS, Flow, KeyRing, PeerSeen, RuleCount
from services.kernel.route_messages import check as check_route
from services.kernel.route_messages import in_kernel_form
from services.kernel.sysctls import general_of, normal, stricter
from services.kernel.trace_rules import SESSIONS_MAX
from services.kernel.transaction import Change, Held, Listed, Marker, Observed
from services.runtime.errors import Conflict, MeshmarkError, OutcomeUnknown, Permanent, Waiting

_DEFAULT_SYSCTL = "0"
_GREETING_BYTES = 148
"""WireGuard's first message of a handshake."""


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


class FakeKernel:
    """``port.Kernel`` over a `FakeHost`.

    `fail` is asked before every change, also those of a batch. An error that it returns is raised instead of making the change; an
    OutcomeUnknown is raised after making it, since that is the case which callers forget. With `looks_only` it is the kernel of a process
    that has no private key.
    """

    def __init__(
        self,
        host: FakeHost | None = None,
        fail: Callable[[Change], Exception | None] = lambda _change: None,
        *,
        looks_only: bool = False,
    ) -> None:
        self.host = host or FakeHost()
        self.fail = fail
        self._looks_only = looks_only
        self._seen: dict[Layer, bytes | None] = {}

    def capabilities(self) -> Capabilities:
        return Capabilities("fake", "fake", self.host.wireguard)

    def public_key(self) -> Key:
        return _public(self.host.private_key)

    def keys(self) -> KeyRing:
        others = (_public(private) if private else None for private in (self.host.next_key, self.host.withdrawn_key))
        return KeyRing(self.public_key(), *others)

    def make_next_key(self) -> None:
        if not self.host.next_key:
            made = self.host.withdrawn_key or hashlib.blake2b(self.host.private_key, digest_size=32).digest()
            self.host.next_key, self.host.withdrawn_key = made, b""

    def withdraw_next_key(self) -> None:
        if self.host.next_key:
            self.host.next_key, self.host.withdrawn_key = b"", self.host.next_key

    def forget_withdrawn_key(self) -> None:
        self.host.withdrawn_key = b""

    def promote_key(self, key: Key) -> None:
        ring = self.keys()
        if key == ring.next:
            self.host.private_key, self.host.next_key = self.host.next_key, b""
        elif key == ring.withdrawn:
            self.host.private_key, self.host.withdrawn_key = self.host.withdrawn_key, b""

    def read(self, wanted: Mapping[str, PlanObject], layers: Collection[Layer] = ALL_LAYERS) -> Observed:
        self._seen.update((layer, self.fingerprint(layer)) for layer in layers)
        found = {key: listed(item) for key, item in self.host.objects.items() if item.layer in layers}
        if "wireguard" in layers:
            found |= as_planned({key: item for key, item in found.items() if isinstance(item, WireguardPeer)}, wanted)
        if "sysctl" in layers:
            names = {item.name for item in wanted.values() if isinstance(item, Sysctl)}
            names |= set() if self._looks_only else set(self.host.kept_sysctls)
            for name in sorted(names):
                if (value := self._sysctl(name)) is not None:
                    general = general_of(name)
                    found[f"sysctl {name}"] = Sysctl(name, stricter(value, self._sysctl(general)) if general else value)
        return found

    def fingerprint(self, layer: Layer) -> bytes | None:
        if layer not in ("nft", "rule", "route"):
            return None
        held = [item for item in self.host.objects.values() if item.layer == layer]
        return repr((held, self.host.marker if layer == "nft" else None)).encode()

    def seen(self, layer: Layer) -> bytes | None:
        return self._seen.get(layer)

    def reference(self, wanted: Mapping[str, PlanObject]) -> Observed:
        return {key: self._normal(item) for key, item in wanted.items()}

    def write(self, change: Change) -> None:
        error = self.fail(change)
        if error is not None and not isinstance(error, OutcomeUnknown):
            raise error
        if change.new is None:
            self._remove(change)
        else:
            self._put(change.new)
        if error is not None:
            raise error

    def write_all(self, changes: Sequence[Change]) -> Mapping[str, MeshmarkError]:
        errors: dict[str, MeshmarkError] = {}
        # Routes may rest on one another, so they alone are made in the order that they come in.
        for change in sorted(changes, key=lambda change: change.new is None and change.subject.layer != "route"):
            try:
                self.write(change)
            except MeshmarkError as error:
                errors[change.key] = error
        return errors

    def commit(self, batch: Sequence[Change], marker: Marker | None) -> None:
        errors = [error for change in batch if (error := self.fail(change)) is not None]
        refused = next((error for error in errors if not isinstance(error, OutcomeUnknown)), None)
        if refused is not None:
            raise refused
        self.host.objects = committed(self.host.objects, batch)
        self.host.marker = marker
        self.host.commits += 1
        if errors:
            raise errors[0]

    def trace(self, wish: TraceFlow) -> None:
        flow = replace(wish, seconds=1)
        traced = self.host.traced
        if flow not in traced and len(traced) >= SESSIONS_MAX:
            msg = f"{SESSIONS_MAX} flows are traced here already; wait for one to end"
            raise Conflict(msg)
        traced[flow] = max(wish.seconds, traced.get(flow, 0))

    def forget_traced(self) -> float | None:
        return min(self.host.traced.values(), default=None)

    def links(self) -> Mapping[str, bool]:
        return {name: not isinstance(self.host.objects.get(f"link {name}"), Listed) for name in self.host.links()}

    def marker(self) -> Marker | None:
        return self.host.marker

    def peers(self, link: str) -> Sequence[PeerSeen]:
        times, by_link = self.host.handshakes_s, self.host.handshakes_s.get(link, 0.0)
        held = [item for item in self.host.objects.values() if isinstance(item, WireguardPeer) and item.link == link]
        learned, greeted = self.host.learned, self.host.greeted
        return [
            PeerSeen(
                item.public_key,
                learned.get(item.key, item.endpoint),
                times.get(item.key, by_link),
                sent_bytes=_GREETING_BYTES if item.key in greeted else 0,
            )
            for item in held
        ]

    def greet(self, link: str, keys: Collection[Key]) -> None:
        for peer in self.peers(link):
            if peer.public_key in keys and peer.endpoint is not None and not peer.handshake_s:
                self.host.greeted.append(f"peer {link} {peer.public_key}")

    def counted(self, table: str) -> Sequence[RuleCount]:
        return [
            RuleCount(chain.name, number, item.text, *self.host.counts.get(item.text, (0, 0)))
            for chain in self.host.objects.values()
            if isinstance(chain, NftChain) and chain.table == table
            for number, rule in enumerate(chain.rules, 1)
            if Counter() in rule
            for item in rule
            if isinstance(item, Comment)
        ]

    def flows(self) -> Iterable[Flow]:
        return list(self.host.flows)

    def drop_flows(self, flows: Iterable[Flow]) -> int:
        gone = set(flows)
        before = len(self.host.flows)
        self.host.flows = [flow for flow in self.host.flows if flow not in gone]
        return before - len(self.host.flows)

    def close(self) -> None:
        self.host.traced.clear()

    # One object ----------------------------------------------------------------------------------------------------------------------

    def _put(self, wanted: PlanObject) -> None:
        if wanted.key in self.host.foreign and not isinstance(wanted, PolicyRule):  # the kernel holds equal rules of two owners
            msg = f"{wanted.key} belongs to somebody else"
            raise Conflict(msg)
        match wanted:
            case Sysctl():
                self._set_sysctl(wanted)
            case VxlanLink() | GeneveLink() | WireguardLink():
                self._put_link(wanted)
            case LinkAddress() | Neighbour() | FdbEntry():
                self._need_link(wanted.key, wanted.link)
                if isinstance(wanted, FdbEntry):
                    check_entry(wanted, is_vxlan=isinstance(self.host.objects[f"link {wanted.link}"], VxlanLink))
                self.host.objects[wanted.key] = wanted
            case WireguardPeer():
                self._put_peer(wanted)
            case Route():
                self._put_route(wanted)
            case PolicyRule():
                self.host.objects[wanted.key] = wanted
            case _:
                msg = f"{wanted.key}: nftables objects are written by commit"
                raise Permanent(msg)

    def _put_link(self, wanted: Link) -> None:
        held = self.host.objects.get(wanted.key)
        if isinstance(wanted, WireguardLink) and self.host.wireguard == "none":
            msg = f"{wanted.key}: this host has no WireGuard; load the kernel module or install wireguard-go"
            raise Permanent(msg)
        if isinstance(wanted, OverlayLink):
            self._check_tunnel(wanted)
        elif not isinstance(held, WireguardLink) or held.listen_port != wanted.listen_port:
            self._need_port(wanted)
        if held is not None and not _changes_in_place(held, wanted):
            self._remove_link(wanted.name)
        elif isinstance(held, WireguardLink) and isinstance(wanted, WireguardLink) and held.public_key != self._planned(wanted.public_key):
            self._forget_handshakes(wanted.name)
        elif isinstance(held, Listed) or (isinstance(held, OverlayLink) and isinstance(wanted, OverlayLink) and held.mac != wanted.mac):
            self._forget_neighbours(wanted.name)
        if isinstance(wanted, GeneveLink) and not self.host.geneve:
            raise Permanent(missing_kind(wanted.name, "geneve"))
        self.host.objects[wanted.key] = self._normal(wanted)

    def _need_port(self, wanted: WireguardLink) -> None:
        others = {item.listen_port: item.key for item in self.host.objects.values() if isinstance(item, WireguardLink)}
        if taker := (self.host.ports | others).get(wanted.listen_port):
            msg = f"{wanted.key}: UDP port {wanted.listen_port} is taken by {taker}; end that or plan another port"
            raise Conflict(msg)

    def _check_tunnel(self, wanted: OverlayLink) -> None:
        for other in self.host.objects.values():
            same_ends = isinstance(other, OverlayLink) and (other.vni, other.port, _far(other)) == (wanted.vni, wanted.port, _far(wanted))
            if same_ends and type(other) is type(wanted) and other.key != wanted.key:
                msg = f"{wanted.key}: {other.key} has the same VNI, port and remote"
                raise Conflict(msg)

    def _put_peer(self, wanted: WireguardPeer) -> None:
        if not isinstance(self.host.objects.get(f"link {wanted.link}"), WireguardLink):
            msg = f"{wanted.key}: there is no WireGuard device {wanted.link} of ours"
            raise Waiting(msg, f"link {wanted.link}")
        if (refused := refusal(Change(None, wanted), self.keys().all)) is not None:
            raise refused
        taken = set(wanted.allowed_ips)
        for key, other in list(self.host.objects.items()):
            if isinstance(other, WireguardPeer) and other.link == wanted.link and key != wanted.key:
                self.host.objects[key] = replace(other, allowed_ips=tuple(prefix for prefix in other.allowed_ips if prefix not in taken))
        self.host.objects[wanted.key] = self._normal(wanted)

    def _put_route(self, wanted: Route) -> None:
        check_route(wanted)
        for hop in wanted.hops:
            if hop.link not in self.host.links() or isinstance(self.host.objects.get(f"link {hop.link}"), Listed):
                msg = f"{wanted.key}: link {hop.link} is not there or down"
                raise Waiting(msg, f"link {hop.link}")
            if hop.via is not None and not hop.onlink and not self._reaches(hop.link, hop.via):
                msg = f"{wanted.key}: next hop {hop.via} cannot be reached by {hop.link}"
                raise Waiting(msg, f"link {hop.link}")
        if wanted.source is not None and wanted.source not in self._addresses():
            msg = f"{wanted.key}: this host does not have the source address {wanted.source}"
            raise Waiting(msg, f"address {wanted.source}")
        self.host.objects[wanted.key] = in_kernel_form(wanted)

    def _addresses(self) -> set[str]:
        """The addresses of all links, ours and others'."""
        return {item.address for item in (*self.host.objects.values(), *self.host.foreign.values()) if isinstance(item, LinkAddress)}

    def _reaches(self, link: str, via: Address) -> bool:
        networks = [
            ipaddress.ip_interface(f"{item.address}/{item.length}").network
            for item in self.host.objects.values()
            if isinstance(item, LinkAddress) and item.link == link
        ]
        by_route = [item.prefix for item in self.host.objects.values() if isinstance(item, Route) and _leads_straight_to(item, link)]
        return any(ipaddress.ip_address(via) in network for network in networks) or any(prefix.covers(via) for prefix in by_route)

    def _need_link(self, key: str, link: str) -> None:
        if f"link {link}" in self.host.foreign or link == "lo":
            msg = f"{key}: link {link} is not ours"
            raise Conflict(msg)
        if f"link {link}" not in self.host.objects:
            msg = f"{key}: there is no link {link}"
            raise Waiting(msg, f"link {link}")

    def _remove(self, change: Change) -> None:
        if change.subject.layer == "nft":
            msg = f"{change.key}: nftables objects are written by commit"
            raise Permanent(msg)
        if change.subject.layer == "sysctl":
            name = change.key.removeprefix("sysctl ")
            value = self.host.kept_sysctls.pop(name, None)
            if value is not None and self._sysctl(name) is not None:
                self.host.sysctls[name] = value
        elif change.subject.layer == "link":
            self._remove_link(change.key.removeprefix("link "))
        else:
            self.host.objects.pop(change.key, None)
            self.host.handshakes_s.pop(change.key, None)
            self._forget_sources()

    def _remove_link(self, name: str) -> None:
        """A link takes what is on it and its routes along; an IPv4 route over several links goes with the first, of IPv6 one its hop."""
        if self.host.objects.pop(f"link {name}", None) is None:
            return
        self._forget_handshakes(name)
        self.host.sysctls = {other: value for other, value in self.host.sysctls.items() if Sysctl(other, value).link != name}
        for key, item in list(self.host.objects.items()):
            member = isinstance(item, OnLink) and item.link == name
            hops = item.hops if isinstance(item, Route) else ()
            left = tuple(hop for hop in hops if hop.link != name)
            if isinstance(item, Route) and item.prefix.family == IPV6 and hops != left and left:
                self.host.objects[key] = replace(item, hops=left)
            elif member or hops != left:
                del self.host.objects[key]
        self._forget_sources()

    def _forget_handshakes(self, link: str) -> None:
        for key in [key for key in self.host.handshakes_s if key == link or key.startswith(f"peer {link} ")]:
            del self.host.handshakes_s[key]

    def _forget_neighbours(self, link: str) -> None:
        for key in [key for key, item in self.host.objects.items() if isinstance(item, Neighbour) and item.link == link]:
            del self.host.objects[key]

    def _forget_sources(self) -> None:
        """IPv6 routes whose source is no address of this host any more lose it; IPv4 ones go from main, and stay as they are elsewhere."""
        there = self._addresses()
        for key, item in list(self.host.objects.items()):
            if isinstance(item, Route) and item.source is not None and item.source not in there:
                if item.prefix.family == IPV6:
                    self.host.objects[key] = replace(item, source=None)
                elif item.table == MAIN_TABLE:
                    del self.host.objects[key]

    # Sysctls and normal forms --------------------------------------------------------------------------------------------------------

    def _sysctl(self, name: str) -> str | None:
        link = Sysctl(name, "").link
        if link and link not in self.host.links():
            return None
        return self.host.sysctls.get(name, _DEFAULT_SYSCTL)

    def _set_sysctl(self, wanted: Sysctl) -> None:
        held = self._sysctl(wanted.name)
        if held is None:
            link = wanted.name.split("/")[3]
            msg = f"{wanted.key}: there is no link {link}"
            raise Waiting(msg, f"link {link}")
        if held != normal(wanted.value):
            self.host.kept_sysctls.setdefault(wanted.name, held)
            self.host.sysctls[wanted.name] = normal(wanted.value)

    def _planned(self, key: Key | None) -> Key:
        return key if key is not None and key in self.keys().all else self.public_key()

    def _normal(self, item: PlanObject) -> Held:
        match item:
            case Sysctl():
                return Sysctl(item.name, normal(item.value))
            case Route():
                return in_kernel_form(item)
            case WireguardLink():
                return item if self._looks_only else replace(item, public_key=self._planned(item.public_key))
            case WireguardPeer():
                return replace(item, allowed_ips=sorted_prefixes(item.allowed_ips))
            case _:
                return listed(item)


@lru_cache(maxsize=64)
def _public(private: bytes) -> Key:
    """The public half of a key; it takes a millisecond."""
    return public_key(private)


def _leads_straight_to(item: Route, link: str) -> bool:
    return item.table == MAIN_TABLE and any(hop.link == link and hop.via is None for hop in item.hops)


def _changes_in_place(held: Held, wanted: Link) -> bool:
    if isinstance(held, Listed):  # a device that is down
        return True
    if isinstance(held, OverlayLink) and isinstance(wanted, OverlayLink):
        return changes_in_place(held, wanted)
    return isinstance(held, WireguardLink) and isinstance(wanted, WireguardLink)


def _far(link: OverlayLink) -> str | int:
    """What tells devices of one VNI and port apart: where they lead, and, of those that lead to many, their family."""
    return link.local.family if isinstance(link, VxlanLink) and link.remote is None else str(link.remote)
