"""What one change outside nftables does to the machine of a fake kernel: what the kernel refuses, and what goes along.

Owns nothing: it writes to the `FakeHost` that it is given.
"""

from __future__ import annotations

import ipaddress

from msgspec.structs import replace

from schemas.host_objects import (
    MAIN_TABLE,
    FdbEntry,
    GeneveLink,
    Link,
    LinkAddress,
    Neighbour,
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
from schemas.values import IPV6, Address, Key
from services.kernel.failures import missing_kind
from services.kernel.fake_host import FakeHost
from services.kernel.fake_nft import listed
from services.kernel.links import changes_in_place
from services.kernel.neighbours import check as check_entry
from services.kernel.peers import refusal, sorted_prefixes
from services.kernel.route_messages import check as check_route
from services.kernel.route_messages import in_kernel_form
from services.kernel.sysctls import normal
from services.kernel.transaction import Change, Held, Listed
from services.runtime.errors import Conflict, Permanent, Waiting


class FakeObjects:
    """The objects of a host but for nftables. With `looks_only`, as a process sees them that has no private key."""

    def __init__(self, host: FakeHost, *, looks_only: bool) -> None:
        self._host = host
        self._looks_only = looks_only

    def put(self, wanted: PlanObject) -> None:
        """Make or change one object outside nftables, as the kernel does, or fail as it does."""
        if wanted.key in self._host.foreign and not isinstance(wanted, PolicyRule):  # the kernel holds equal rules of two owners
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
                    check_entry(wanted, is_vxlan=isinstance(self._host.objects[f"link {wanted.link}"], VxlanLink))
                self._host.objects[wanted.key] = wanted
            case WireguardPeer():
                self._put_peer(wanted)
            case Route():
                self._put_route(wanted)
            case PolicyRule():
                self._host.objects[wanted.key] = wanted
            case _:
                msg = f"{wanted.key}: nftables objects are written by commit"
                raise Permanent(msg)

    def _put_link(self, wanted: Link) -> None:
        held = self._host.objects.get(wanted.key)
        if isinstance(wanted, WireguardLink) and self._host.wireguard == "none":
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
        if isinstance(wanted, GeneveLink) and not self._host.geneve:
            raise Permanent(missing_kind(wanted.name, "geneve"))
        self._host.objects[wanted.key] = self.normal(wanted)

    def _need_port(self, wanted: WireguardLink) -> None:
        others = {item.listen_port: item.key for item in self._host.objects.values() if isinstance(item, WireguardLink)}
        if taker := (self._host.ports | others).get(wanted.listen_port):
            msg = f"{wanted.key}: UDP port {wanted.listen_port} is taken by {taker}; end that or plan another port"
            raise Conflict(msg)

    def _check_tunnel(self, wanted: OverlayLink) -> None:
        for other in self._host.objects.values():
            same_ends = isinstance(other, OverlayLink) and (other.vni, other.port, _far(other)) == (wanted.vni, wanted.port, _far(wanted))
            if same_ends and type(other) is type(wanted) and other.key != wanted.key:
                msg = f"{wanted.key}: {other.key} has the same VNI, port and remote"
                raise Conflict(msg)

    def _put_peer(self, wanted: WireguardPeer) -> None:
        if not isinstance(self._host.objects.get(f"link {wanted.link}"), WireguardLink):
            msg = f"{wanted.key}: there is no WireGuard device {wanted.link} of ours"
            raise Waiting(msg, f"link {wanted.link}")
        if (refused := refusal(Change(None, wanted), self._host.keys().all)) is not None:
            raise refused
        taken = set(wanted.allowed_ips)
        for key, other in list(self._host.objects.items()):
            if isinstance(other, WireguardPeer) and other.link == wanted.link and key != wanted.key:
                self._host.objects[key] = replace(other, allowed_ips=tuple(prefix for prefix in other.allowed_ips if prefix not in taken))
        self._host.objects[wanted.key] = self.normal(wanted)

    def _put_route(self, wanted: Route) -> None:
        check_route(wanted)
        for hop in wanted.hops:
            if hop.link not in self._host.links() or isinstance(self._host.objects.get(f"link {hop.link}"), Listed):
                msg = f"{wanted.key}: link {hop.link} is not there or down"
                raise Waiting(msg, f"link {hop.link}")
            if hop.via is not None and not hop.onlink and not self._reaches(hop.link, hop.via):
                msg = f"{wanted.key}: next hop {hop.via} cannot be reached by {hop.link}"
                raise Waiting(msg, f"link {hop.link}")
        if wanted.source is not None and wanted.source not in self._addresses():
            msg = f"{wanted.key}: this host does not have the source address {wanted.source}"
            raise Waiting(msg, f"address {wanted.source}")
        self._host.objects[wanted.key] = in_kernel_form(wanted)

    def _addresses(self) -> set[str]:
        """The addresses of all links, ours and others'."""
        return {item.address for item in (*self._host.objects.values(), *self._host.foreign.values()) if isinstance(item, LinkAddress)}

    def _reaches(self, link: str, via: Address) -> bool:
        networks = [
            ipaddress.ip_interface(f"{item.address}/{item.length}").network
            for item in self._host.objects.values()
            if isinstance(item, LinkAddress) and item.link == link
        ]
        by_route = [item.prefix for item in self._host.objects.values() if isinstance(item, Route) and _leads_straight_to(item, link)]
        return any(ipaddress.ip_address(via) in network for network in networks) or any(prefix.covers(via) for prefix in by_route)

    def _need_link(self, key: str, link: str) -> None:
        if f"link {link}" in self._host.foreign or link == "lo":
            msg = f"{key}: link {link} is not ours"
            raise Conflict(msg)
        if f"link {link}" not in self._host.objects:
            msg = f"{key}: there is no link {link}"
            raise Waiting(msg, f"link {link}")

    def remove(self, change: Change) -> None:
        """Take one object away, with what goes along; nothing for one that is not there."""
        if change.subject.layer == "nft":
            msg = f"{change.key}: nftables objects are written by commit"
            raise Permanent(msg)
        if change.subject.layer == "sysctl":
            name = change.key.removeprefix("sysctl ")
            value = self._host.kept_sysctls.pop(name, None)
            if value is not None and self._host.sysctl(name) is not None:
                self._host.sysctls[name] = value
        elif change.subject.layer == "link":
            self._remove_link(change.key.removeprefix("link "))
        else:
            self._host.objects.pop(change.key, None)
            self._host.handshakes_s.pop(change.key, None)
            self._forget_sources()

    def _remove_link(self, name: str) -> None:
        """A link takes what is on it and its routes along; an IPv4 route over several links goes with the first, of IPv6 one its hop."""
        if self._host.objects.pop(f"link {name}", None) is None:
            return
        self._forget_handshakes(name)
        self._host.sysctls = {other: value for other, value in self._host.sysctls.items() if Sysctl(other, value).link != name}
        for key, item in list(self._host.objects.items()):
            member = isinstance(item, OnLink) and item.link == name
            hops = item.hops if isinstance(item, Route) else ()
            left = tuple(hop for hop in hops if hop.link != name)
            if isinstance(item, Route) and item.prefix.family == IPV6 and hops != left and left:
                self._host.objects[key] = replace(item, hops=left)
            elif member or hops != left:
                del self._host.objects[key]
        self._forget_sources()

    def _forget_handshakes(self, link: str) -> None:
        for key in [key for key in self._host.handshakes_s if key == link or key.startswith(f"peer {link} ")]:
            del self._host.handshakes_s[key]

    def _forget_neighbours(self, link: str) -> None:
        for key in [key for key, item in self._host.objects.items() if isinstance(item, Neighbour) and item.link == link]:
            del self._host.objects[key]

    def _forget_sources(self) -> None:
        """IPv6 routes whose source is no address of this host any more lose it; IPv4 ones go from main, and stay as they are elsewhere."""
        there = self._addresses()
        for key, item in list(self._host.objects.items()):
            if isinstance(item, Route) and item.source is not None and item.source not in there:
                if item.prefix.family == IPV6:
                    self._host.objects[key] = replace(item, source=None)
                elif item.table == MAIN_TABLE:
                    del self._host.objects[key]

    # Sysctls and normal forms --------------------------------------------------------------------------------------------------------

    def _set_sysctl(self, wanted: Sysctl) -> None:
        held = self._host.sysctl(wanted.name)
        if held is None:
            link = wanted.name.split("/")[3]
            msg = f"{wanted.key}: there is no link {link}"
            raise Waiting(msg, f"link {link}")
        if held != normal(wanted.value):
            self._host.kept_sysctls.setdefault(wanted.name, held)
            self._host.sysctls[wanted.name] = normal(wanted.value)

    def _planned(self, key: Key | None) -> Key:
        return key if key is not None and key in self._host.keys().all else self._host.public_key()

    def normal(self, item: PlanObject) -> Held:
        """The object as the kernel shows it."""
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
