"""WireGuard devices and peers, in the kernel or in userspace.

Owns devices with our alias and all peers on them; found after a restart by the alias, and told apart by kind (``wireguard`` is the
module's, ``tun`` with a UAPI socket is wireguard-go's). The private key is made on first use in ``<state_dir>/wireguard.key`` (mode 0600)
and never leaves the host; a device that holds another key is `Listed`, which is always a difference.

Peers are changed one by one and never replaced as a whole, which would cut their sessions. An endpoint is written only for a new peer or
when the plan's endpoint changed: a device learns endpoints, and while a handshake is fresh what it learned is no difference, so `read`
gives the wanted endpoint then. Fails with Waiting when the device is not there, OutcomeUnknown when its answer was lost.
"""

from __future__ import annotations

import base64
import errno
from collections.abc import Mapping
from pathlib import Path

from schemas.host_objects import PlanObject, WireguardLink, WireguardPeer
from schemas.values import Endpoint, Key, Prefix
from services.kernel.curve25519 import new_private_key, public_key
from services.kernel.failures import mapped, unreadable
from services.kernel.links import Device, Links
from services.kernel.sysctls import write_durably
from services.kernel.transaction import Change, Held, Listed
from services.kernel.wireguard_device import DeviceState, Implementation, PeerChange, PeerState, Settings
from services.runtime.errors import Conflict, Permanent, Waiting

FRESH_HANDSHAKE_S = 180.0
"""A peer that shook hands within this time has a working endpoint: WireGuard renews a session at most every two minutes."""
_GONE = (errno.ENOENT, errno.ENODEV, errno.ECONNREFUSED)
_KINDS = ("wireguard", "tun")


class KeyFile:
    """The host's private key, in a file that is made on first use."""

    def __init__(self, state_dir: Path) -> None:
        self._file = state_dir / "wireguard.key"
        self._private = b""
        self._public: Key | None = None

    def private(self) -> bytes:
        if not self._private:
            self._private = self._load()
        return self._private

    def known(self) -> bytes | None:
        """The private key if there is one already."""
        return self.private() if self._private or self._file.exists() else None

    def public(self) -> Key:
        if self._public is None:
            self._public = public_key(self.private())
        return self._public

    def _load(self) -> bytes:
        try:
            if not self._file.exists():
                write_durably(self._file, base64.b64encode(new_private_key()) + b"\n", 0o600)
            return raw_key(Key.parse(self._file.read_text().strip()))
        except OSError as error:
            raise mapped(error, f"WireGuard key {self._file}") from error
        except ValueError as error:
            msg = f"{self._file} does not hold a WireGuard private key; move it away to have a new one made"
            raise Permanent(msg) from error


class Wireguard:
    """WireGuard links and peers. `implementations` by link kind; `preferred` makes new devices."""

    def __init__(self, links: Links, keys: KeyFile, implementations: Mapping[str, Implementation], preferred: str) -> None:
        self._links = links
        self._keys = keys
        self._implementations = implementations
        self._preferred = preferred

    def read_links(self, devices: Mapping[str, Device]) -> dict[str, Held]:
        found: dict[str, Held] = {}
        for device in self._own(devices):
            key = f"link {device.name}"
            state = self._state(device)
            if state is None:
                found[key] = Listed("link", key, f"a device of kind {device.kind} without WireGuard behind it")
            elif not device.up:
                found[key] = Listed("link", key, "down")
            elif state.private_key != self._keys.known():
                found[key] = Listed("link", key, "a WireGuard device with another private key")
            else:
                found[key] = WireguardLink(device.name, state.listen_port, device.mtu, self._keys.public(), state.fwmark)
        return found

    def read_peers(self, devices: Mapping[str, Device], wanted: Mapping[str, PlanObject], now_s: float) -> dict[str, Held]:
        found: dict[str, Held] = {}
        for device in self._own(devices):
            state = self._state(device)
            for raw, peer in state.peers.items() if state else ():
                item = held_peer(device.name, raw, peer, wanted, now_s)
                found[item.key] = item
        return found

    def handshake_s(self, link: str) -> float:
        """Unix time of the last handshake with any peer of an own device, 0 for never and for no device."""
        device = self._links.device(link)
        state = self._state(device) if device is not None and device.is_own and device.kind in _KINDS else None
        return max((peer.handshake_s for peer in state.peers.values()), default=0.0) if state else 0.0

    def write_link(self, change: Change) -> None:
        wanted = change.new
        if not isinstance(wanted, WireguardLink):
            self._links.remove(change.key.split(" ")[1])
            return
        device = self._links.device(wanted.name)
        if device is not None and device.is_own and device.kind not in self._implementations:
            self._links.remove(wanted.name)
            device = None
        if device is not None and not device.is_own and not self._is_half_made(device):
            msg = (
                f"link {wanted.name} is there and not ours (kind {device.kind or 'physical'}, alias {device.alias!r}); rename or remove it"
            )
            raise Conflict(msg)
        if device is None:
            device = self._create(wanted.name)
        self._configure(device, wanted)
        self._links.finish(wanted.name, wanted.mtu)

    def write_peer(self, change: Change) -> None:
        """Add, change or remove one peer, and read back that it holds."""
        item = change.subject
        if not isinstance(item, WireguardPeer):
            msg = f"{change.key} is not a peer"
            raise Permanent(msg)
        device = self._links.device(item.link)
        state = self._state(device) if device is not None and device.is_own else None
        if device is None or state is None:
            if change.new is None:
                return
            msg = f"{change.key}: there is no WireGuard device {item.link} of ours"
            raise Waiting(msg, f"link {item.link}")
        step = peer_change(change, state.peers.get(raw_key(item.public_key)))
        if step is None:
            return
        if step.public_key == raw_key(self._keys.public()):
            msg = f"{change.key}: a host cannot be its own peer"
            raise Permanent(msg)
        self._set(device, Settings(), (step,), change.key)
        self._confirm(device, change)

    def _confirm(self, device: Device, change: Change) -> None:
        state = self._state(device)
        wanted = change.new
        if state is None or not isinstance(wanted, WireguardPeer):
            return
        peer = state.peers.get(raw_key(wanted.public_key))
        if peer is None or peer.allowed_ips != frozenset(wanted.allowed_ips):
            msg = f"{change.key}: the device does not hold what was written; another writer may have taken its AllowedIPs"
            raise Conflict(msg)

    def _create(self, name: str) -> Device:
        if not self._preferred:
            msg = f"link {name}: this host has no WireGuard; load the kernel module or install wireguard-go"
            raise Permanent(msg)
        try:
            self._implementations[self._preferred].create(name)
        except OSError as error:
            raise mapped(error, f"make WireGuard device {name}") from error
        device = self._links.device(name)
        if device is None:
            msg = f"link {name} went away while it was being made"
            raise Conflict(msg)
        return device

    def _configure(self, device: Device, wanted: WireguardLink) -> None:
        state = self._state(device)
        if state is None:
            msg = f"link {wanted.name} does not answer as a WireGuard device"
            raise Conflict(msg)
        settings = Settings(
            None if state.private_key == self._keys.private() else self._keys.private(),
            None if state.listen_port == wanted.listen_port else wanted.listen_port,
            None if state.fwmark == wanted.fwmark else wanted.fwmark,
        )
        if settings != Settings():
            self._set(device, settings, (), f"link {wanted.name}")

    def _set(self, device: Device, settings: Settings, peers: tuple[PeerChange, ...], what: str) -> None:
        try:
            self._implementations[device.kind].set(device.name, settings, peers)
        except OSError as error:
            if error.errno in _GONE:
                msg = f"{what}: the WireGuard device {device.name} does not answer"
                raise Waiting(msg, f"link {device.name}") from error
            raise mapped(error, f"write {what}") from error

    def _state(self, device: Device) -> DeviceState | None:
        implementation = self._implementations.get(device.kind)
        if implementation is None:
            return None
        try:
            return implementation.get(device.name)
        except OSError as error:
            if error.errno in _GONE:
                return None
            raise unreadable(error, f"WireGuard device {device.name}") from error

    def _is_half_made(self, device: Device) -> bool:
        """True for a device of a kill between its making and its alias: down, without alias, without a key of somebody else."""
        if device.up or device.alias or device.kind not in self._implementations:
            return False
        state = self._state(device)
        return state is not None and not state.peers and state.private_key in (b"", self._keys.private())

    @staticmethod
    def _own(devices: Mapping[str, Device]) -> list[Device]:
        return [device for device in devices.values() if device.is_own and device.kind in _KINDS]


def held_peer(link: str, raw: bytes, peer: PeerState, wanted: Mapping[str, PlanObject], now_s: float) -> WireguardPeer:
    """A peer in plan form: AllowedIPs in order, the wanted endpoint in place of a learned one while the handshake is fresh."""
    key = Key(base64.b64encode(raw).decode())
    endpoint = Endpoint(peer.endpoint) if peer.endpoint else None
    planned = wanted.get(f"peer {link} {key}")
    if isinstance(planned, WireguardPeer) and (planned.endpoint is None or now_s - peer.handshake_s <= FRESH_HANDSHAKE_S):
        endpoint = planned.endpoint
    return WireguardPeer(link, key, endpoint, sorted_prefixes(peer.allowed_ips), peer.keepalive_seconds)


def peer_change(change: Change, held: PeerState | None) -> PeerChange | None:
    """What the device has to be told; None when it holds that already."""
    item = change.new
    if not isinstance(item, WireguardPeer):
        return PeerChange(raw_key(change.key.split(" ")[2]), remove=True) if held is not None else None
    old = change.old
    moved = held is None or not held.endpoint or (isinstance(old, WireguardPeer) and old.endpoint != item.endpoint)
    allowed = frozenset(item.allowed_ips)
    step = PeerChange(
        raw_key(item.public_key),
        endpoint=item.endpoint if moved and (held is None or held.endpoint != item.endpoint) else None,
        allowed_ips=allowed if held is None or held.allowed_ips != allowed else None,
        keepalive_seconds=item.keepalive_seconds if held is None or held.keepalive_seconds != item.keepalive_seconds else None,
    )
    return None if held is not None and step == PeerChange(step.public_key) else step


def sorted_prefixes(prefixes: frozenset[str] | tuple[Prefix, ...]) -> tuple[Prefix, ...]:
    """Prefixes by address, then length; those of IPv6 come last."""
    return tuple(sorted(map(Prefix, prefixes), key=lambda prefix: (prefix.family, prefix.packed, prefix.length)))


def raw_key(key: str) -> bytes:
    return base64.b64decode(key)
