"""What a host's plan says about what is seen there: which link is what, whose outer packets are whose. Pure."""

from __future__ import annotations

import ipaddress
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Literal

from msgspec import Struct

from schemas.host_objects import HOST_TABLE, UPLINKS, GeneveLink, NftChain, NftElement, PlanObject, VxlanLink, WireguardLink, WireguardPeer
from schemas.nft import Match, SetMark
from schemas.plan import HostPlan
from schemas.values import Address, Family
from services.auditor.plaintext import counts_clear
from services.kernel.headers import UDP, OverlayProtocol, Packet, WireguardHeader, wireguard

Role = Literal["network", "crypto", "overlay", "host", "endpoint"]


class View(Struct, frozen=True):
    """A plan as far as it says what a packet is. `roles` are those of links by name; any other link is an endpoint's.

    `devices` are WireGuard devices by name, `peers` theirs; `overlays` are overlay protocols by UDP port. `decrypted` is the value and the
    mask of the mark that packets have which came out of a WireGuard device, None where they get none. `ways` are peers by device, then by
    family and length of the prefixes that they are allowed, longest first, then by a prefix's first address.
    """

    node: str
    roles: Mapping[str, Role]
    devices: Mapping[str, WireguardLink]
    peers: Mapping[str, tuple[WireguardPeer, ...]]
    overlays: Mapping[int, OverlayProtocol]
    ways: Mapping[str, Mapping[tuple[Family, int], Mapping[int, WireguardPeer]]]
    decrypted: tuple[int, int] | None = None
    clear: frozenset[tuple[str, str]] = frozenset()
    """Tables and chains that count, and in strict mode drop, what should have been encrypted."""

    def role(self, link: str) -> Role | None:
        """None for no link at all."""
        return self.roles.get(link, "endpoint") if link else None

    def was_decrypted(self, mark: int) -> bool:
        return self.decrypted is not None and mark & self.decrypted[1] == self.decrypted[0]

    def overlay(self, item: Packet) -> OverlayProtocol | None:
        return self.overlays.get(item.destination_port) if item.protocol == UDP else None

    def outer(self, item: Packet, *, leaves: bool) -> tuple[WireguardLink, WireguardHeader] | None:
        """The device whose outer packet this is, by its port and what the packet says; None for any other packet."""
        port = item.source_port if leaves else item.destination_port
        device = next((link for link in self.devices.values() if link.listen_port == port), None)
        header = wireguard(item)
        return (device, header) if device is not None and header is not None else None

    def peer_at(self, device: str, address: Address, port: int) -> WireguardPeer | None:
        """The peer with this endpoint; one at another port of the address when it is the only one there."""
        there = [peer for peer in self.peers.get(device, ()) if peer.endpoint and peer.endpoint.address == address]
        exact = [peer for peer in there if peer.endpoint and peer.endpoint.port == port]
        return exact[0] if exact else there[0] if len(there) == 1 else None

    def peer_for(self, device: str, address: Address) -> WireguardPeer | None:
        """The peer whose AllowedIPs hold the address by the longest prefix."""
        number = int(ipaddress.ip_address(address))
        for (family, length), peers in self.ways.get(device, {}).items():
            rest = address.host_prefix.length - length
            if family == address.family and (peer := peers.get(number >> rest << rest)) is not None:
                return peer
        return None


def view_of(plan: HostPlan) -> View:
    """What a plan says."""
    objects = plan.objects()
    roles: dict[str, Role] = {"lo": "host"}
    devices: dict[str, WireguardLink] = {}
    peers: dict[str, list[WireguardPeer]] = {}
    overlays: dict[int, OverlayProtocol] = {}
    for item in objects.values():
        match item:
            case WireguardLink():
                roles[item.name], devices[item.name] = "crypto", item
            case VxlanLink() | GeneveLink():
                roles[item.name] = "overlay"
                overlays[item.port] = "VXLAN" if isinstance(item, VxlanLink) else "GENEVE"
            case WireguardPeer():
                peers.setdefault(item.link, []).append(item)
            case NftElement(table=table, set=name) if (table, name) == (HOST_TABLE, UPLINKS):
                roles[item.element] = "network"
    found = {name: tuple(of) for name, of in peers.items()}
    ways = {name: _ways(of) for name, of in peers.items()}
    clear = frozenset((item.table, item.name) for item in objects.values() if isinstance(item, NftChain) and counts_clear(item))
    return View(f"{plan.cluster}/{plan.host}", roles, devices, found, overlays, ways, _decrypted(objects.values()), clear)


def _ways(peers: Iterable[WireguardPeer]) -> Mapping[tuple[Family, int], Mapping[int, WireguardPeer]]:
    found: defaultdict[tuple[Family, int], dict[int, WireguardPeer]] = defaultdict(dict)
    for peer in peers:
        for prefix in peer.allowed_ips:
            found[prefix.family, prefix.length][int.from_bytes(prefix.packed)] = peer
    return dict(sorted(found.items(), key=lambda item: -item[0][1]))


def _decrypted(objects: Iterable[PlanObject]) -> tuple[int, int] | None:
    """The mark that a chain of the plan gives to all that comes out of WireGuard devices."""
    chains = (item for item in objects if isinstance(item, NftChain) and item.name == "arrivals" and item.hook == "prerouting")
    for chain in chains:
        for rule in chain.rules:
            marks = [item for item in rule if isinstance(item, SetMark)]
            if marks and isinstance(rule[0], Match) and rule[0].selector == "iifname":
                return marks[0].value & marks[0].mask, marks[0].mask
    return None
