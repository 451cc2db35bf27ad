"""The real kernel behind ``port.Kernel``: drivers put together, one for each layer.

Owns the sockets of the drivers, made in the network namespace of the thread that makes the object. Nothing is remembered between calls
but the chains' normal forms: after a restart everything is found by ownership. A read takes one dump of the links first where its layers
name links by number.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from msgspec.structs import replace

from schemas.commands import TraceFlow
from schemas.host_objects import Layer, NftObject, OverlayLink, PlanObject, Route, Sysctl, WireguardLink, WireguardPeer
from schemas.status import Capabilities
from schemas.values import Key
from services.kernel.addresses import Addresses
from services.kernel.conntrack import Conntrack
from services.kernel.interfaces import Interfaces
from services.kernel.links import Links, held_overlay, rtnetlink
from services.kernel.neighbours import Neighbours
from services.kernel.netlink import NETLINK_GENERIC, NETLINK_ROUTE, NetlinkSocket
from services.kernel.nfnetlink.engine import Nfnetlink
from services.kernel.nft.engine import LibNftables, NftEngine
from services.kernel.nft.loading import LOADING
from services.kernel.nft.reference import Reference
from services.kernel.nftread.dumps import Dumps
from services.kernel.nftread.reading import Reading
from services.kernel.peers import sorted_prefixes
from services.kernel.port import ALL_LAYERS, Flow, KeyRing, PeerSeen, RuleCount
from services.kernel.pyroute import Library
from services.kernel.route_messages import in_kernel_form
from services.kernel.routes import Routes
from services.kernel.rules import Rules
from services.kernel.sysctls import Sysctls, normal
from services.kernel.trace_table import TraceTable
from services.kernel.transaction import Change, Held, Listed, Marker, Observed
from services.kernel.uapi import Userspace
from services.kernel.wireguard import Wireguard
from services.kernel.wireguard_kernel import KernelModule
from services.kernel.wireguard_key import KeyFiles
from services.runtime.errors import MeshmarkError, Permanent
from services.runtime.settings import NftEngineName

_BY_DEVICE: frozenset[Layer] = frozenset(("link", "address", "neighbour", "wireguard"))


_ENGINES: dict[NftEngineName, Callable[[], NftEngine]] = {"nfnetlink": Nfnetlink, "libnftables": LibNftables}


class LinuxKernel:
    """The kernel of the namespace that the calling thread is in.

    `state_dir` holds the private keys and the sysctls' old values. None is for a process that only looks, and is to see no private key of
    ours: it gives WireGuard links with the public key that they have, and wanted ones with the one that the plan knows. One that
    `remembers` keeps what it read of nftables and routes last, and makes only what has changed since: for who reads again and again.
    `nft_engine` is what writes and reads nftables objects: our own messages, or libnftables.
    """

    def __init__(self, state_dir: Path | None, *, remembers: bool = False, nft_engine: NftEngineName = "nfnetlink") -> None:
        self._netlink = NetlinkSocket(NETLINK_ROUTE)
        self._library = Library()
        links = rtnetlink(self._library)
        self._conntrack = Conntrack(self._library)
        self._engine = _ENGINES[nft_engine]()
        self._raw = Dumps()
        self._traced = TraceTable()
        self._reference = Reference(LOADING[nft_engine])
        reading = Reading(self._raw, remembers=remembers, known=self._reference.known)
        # libnftables' listings and the kernel's own bytes do not compare: who writes by one of them reads and refers by it as well.
        self._read_tables = self._engine.read_all if isinstance(self._engine, LibNftables) else reading.read
        self._seen: bytes | None = None
        self._marked: tuple[int, Marker | None] | None = None
        self._links = Links(links)
        self._addresses = Addresses(links, self._netlink)
        self._neighbours = Neighbours(self._netlink)
        self._routes = Routes(self._netlink, Interfaces(self._netlink), remembers=remembers)
        self._rules = Rules(self._netlink)
        self._sysctls = Sysctls(state_dir)
        self._keys = KeyFiles(state_dir)
        self._generic = NetlinkSocket(NETLINK_GENERIC)
        self._module = KernelModule(self._generic, links)
        userspace = Userspace(lambda name: self._links.device(name) is not None)
        preferred = "wireguard" if self._module.is_available() else "tun" if userspace.is_available() else ""
        self._wireguard = Wireguard(self._links, self._keys, {"wireguard": self._module, "tun": userspace}, preferred)
        kinds = {"wireguard": "kernel", "tun": "userspace", "": "none"}
        self._capabilities = Capabilities(platform.release(), self._engine.version, kinds[preferred])  # type: ignore[arg-type]

    def capabilities(self) -> Capabilities:
        return self._capabilities

    def public_key(self) -> Key:
        return self._keys.public()

    def keys(self) -> KeyRing:
        return self._keys.ring()

    def make_next_key(self) -> None:
        self._keys.make_next()

    def withdraw_next_key(self) -> None:
        self._keys.withdraw_next()

    def forget_withdrawn_key(self) -> None:
        self._keys.forget_withdrawn()

    def promote_key(self, key: Key) -> None:
        self._keys.promote(key)

    def read(self, wanted: Mapping[str, PlanObject], layers: Collection[Layer] = ALL_LAYERS) -> Observed:
        found: dict[str, Held] = {}
        devices = self._links.devices() if _BY_DEVICE & set(layers) else {}
        if "sysctl" in layers:
            found.update(self._sysctls.read(wanted))
        if "link" in layers:
            own = [device for device in devices.values() if device.is_own]
            unknown = {
                f"link {item.name}": Listed("link", f"link {item.name}", f"a link of kind {item.kind or 'physical'}") for item in own
            }
            overlay = {f"link {item.name}": held for item in own if (held := held_overlay(item)) is not None}
            found |= unknown | overlay
        if "address" in layers:
            found.update(self._addresses.read(devices, wanted))
        if "neighbour" in layers:
            found |= self._neighbours.read(devices)
        if {"link", "wireguard"} & set(layers):
            found |= self._wireguard.read(devices, layers, wanted, time.time())
        if "nft" in layers:
            generation = self.fingerprint("nft")
            self._seen = None
            self._engine.looking()
            found |= self._read_tables(wanted)
            self._seen = generation
        if "rule" in layers:
            found |= self._rules.read()
        if "route" in layers:
            found |= self._routes.read(wanted)
        return found

    def fingerprint(self, layer: Layer) -> bytes | None:
        match layer:
            case "nft":
                return self._raw.generation().to_bytes(4, "big")
            case "rule":
                return self._rules.fingerprint()
            case "route":
                return self._routes.fingerprint()
        return None

    def seen(self, layer: Layer) -> bytes | None:
        return {"nft": self._seen, "rule": self._rules.seen, "route": self._routes.seen}.get(layer)

    def reference(self, wanted: Mapping[str, PlanObject]) -> Observed:
        found: dict[str, Held] = {}
        tables: dict[str, NftObject] = {}
        for key, item in wanted.items():
            if isinstance(item, NftObject):
                tables[key] = item
            elif isinstance(item, Route):
                found[key] = in_kernel_form(item)
            else:
                found[key] = self._normal(item)
        found.update(self._reference.of(tables))
        return found

    def write(self, change: Change) -> None:
        match change.subject.layer:
            case "sysctl":
                self._sysctls.write(change)
            case "link" if isinstance(change.subject, OverlayLink | Listed) and not isinstance(change.new, WireguardLink):
                self._links.write(change)
            case "link":
                self._wireguard.write_link(change)
            case "address" | "neighbour" as layer:
                driver = self._addresses if layer == "address" else self._neighbours
                driver.write(change, self._links.device(change.key.split(" ")[1]))
            case "wireguard":
                self._wireguard.write_peer(change)
            case "rule" | "route":
                for error in self.write_all([change]).values():
                    raise error
            case "nft":
                msg = f"{change.key}: nftables objects are written by commit"
                raise Permanent(msg)

    def write_all(self, changes: Sequence[Change]) -> Mapping[str, MeshmarkError]:
        errors: dict[str, MeshmarkError] = {}
        layers = [(change.new or change.old).layer for change in changes]  # type: ignore[union-attr]
        behind = 0
        for layer, group in groupby(layers):
            start, behind = behind, behind + len(list(group))
            run = changes[start:behind]
            if layer in ("rule", "route"):
                driver = self._rules if layer == "rule" else self._routes
                errors.update((run[place].key, error) for place, error in driver.write_all(run).items())
            elif layer == "wireguard":
                errors |= self._wireguard.write_peers(run)
            else:
                for change in run:
                    try:
                        self.write(change)
                    except MeshmarkError as error:
                        errors[change.key] = error
        return errors

    def commit(self, batch: Sequence[Change], marker: Marker | None) -> None:
        self._engine.commit(batch, marker)

    def trace(self, wish: TraceFlow) -> bool:
        return self._traced.trace(wish, time.monotonic())

    def forget_traced(self) -> float | None:
        return self._traced.forget(time.monotonic())

    def links(self) -> Mapping[str, bool]:
        return {name: device.up for name, device in self._links.devices().items()}

    def marker(self) -> Marker | None:
        generation = self._raw.generation()
        if self._marked is None or self._marked[0] != generation:
            self._marked = generation, self._raw.marker()
        return self._marked[1]

    def peers(self, link: str) -> Sequence[PeerSeen]:
        return self._wireguard.peers(link)

    def greet(self, link: str, keys: Collection[Key]) -> None:
        self._wireguard.greet(link, keys)

    def counted(self, table: str) -> Sequence[RuleCount]:
        return self._raw.counted(table)

    def flows(self) -> Iterable[Flow]:
        return self._conntrack.flows()

    def drop_flows(self, flows: Iterable[Flow]) -> int:
        return self._conntrack.drop(list(flows))

    def close(self) -> None:
        self._traced.close()
        self._engine.close()
        self._raw.close()
        self._library.close()
        self._netlink.close()
        self._generic.close()

    def _normal(self, item: PlanObject) -> Held:
        """An object that is neither a route nor of nftables as ``read`` would show it."""
        match item:
            case Sysctl():
                return Sysctl(item.name, normal(item.value))
            case WireguardLink():
                return replace(item, public_key=self._keys.planned(item.public_key)) if self._keys.is_ours else item
            case WireguardPeer():
                return replace(item, allowed_ips=sorted_prefixes(item.allowed_ips))
            case _:
                return item
