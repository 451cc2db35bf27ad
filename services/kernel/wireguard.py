"""WireGuard devices and peers, in the kernel or in userspace.

Owns devices with our alias and all peers on them; found after a restart by the alias, and told apart by kind (``wireguard`` is the
module's, ``tun`` with a UAPI socket is wireguard-go's). A device that holds a private key that is none of the host's (``wireguard_key``) is
`Listed`, which is always a difference. A process without the key tells devices by their public keys instead, and takes one that does not
answer it for unreadable.

Peers are changed one by one and never replaced as a whole, which would cut their sessions; those of one device go to it together. An
endpoint is written only for a new peer, when the plan's endpoint changed, or when the one that a device has learned works no more: while a
handshake is fresh what it learned is no difference, so `read` gives the wanted endpoint then (``peers``). Fails with Waiting when the
device is not there, Conflict when its port is taken, OutcomeUnknown when its answer was lost.
"""

from __future__ import annotations

import base64
import errno
import time
from collections.abc import Collection, Mapping, Sequence

from schemas.host_objects import PlanObject, WireguardLink, WireguardPeer
from schemas.values import Endpoint, Key
from services.kernel.failures import mapped, unreadable
from services.kernel.links import Device, Links
from services.kernel.peers import greeted_anew, held_peers, made_anew, peer_changes, refusal
from services.kernel.port import PeerSeen
from services.kernel.survey.ports import in_use
from services.kernel.transaction import Change, Held, Listed
from services.kernel.uapi import serves
from services.kernel.wireguard_device import DeviceState, Implementation, PeerChange, Settings
from services.kernel.wireguard_key import KeyFiles, public_half, raw_key
from services.runtime.errors import Conflict, MeshmarkError, Permanent, Transient, Waiting

_GONE = (errno.ENOENT, errno.ENODEV, errno.ECONNREFUSED)
_KINDS = ("wireguard", "tun")
_LEAVING_S = 1.0
"""A wireguard-go whose device is gone lets go of its port within this time."""
_POLL_S = 0.01


class Wireguard:
    """WireGuard links and peers. `implementations` by link kind; `preferred` makes new devices."""

    def __init__(self, links: Links, keys: KeyFiles, implementations: Mapping[str, Implementation], preferred: str) -> None:
        self._links = links
        self._keys = keys
        self._implementations = implementations
        self._preferred = preferred

    def read(
        self, devices: Mapping[str, Device], layers: Collection[str], wanted: Mapping[str, PlanObject], now_s: float
    ) -> dict[str, Held]:
        """Own devices, their peers or both, each device asked once."""
        found: dict[str, Held] = {}
        planned: dict[str, dict[str, PlanObject]] = {}
        for key, item in wanted.items():
            if isinstance(item, WireguardPeer):
                planned.setdefault(item.link, {})[key] = item
        for device in self._own(devices):
            state = self._state(device)
            if state is None and not self._keys.is_ours:
                if self._links.device(device.name) is None:
                    continue
                msg = f"cannot read WireGuard device {device.name}: it does not answer; is its socket's folder to be seen here?"
                raise Transient(msg)
            if "link" in layers:
                found[f"link {device.name}"] = self._held_link(device, state)
            if "wireguard" in layers and state is not None:
                found |= held_peers(device.name, state, planned.get(device.name, {}), now_s)
        return found

    def _held_link(self, device: Device, state: DeviceState | None) -> Held:
        key = f"link {device.name}"
        if state is None:
            return Listed("link", key, f"a device of kind {device.kind} without WireGuard behind it")
        if not device.up:
            return Listed("link", key, "down")
        public = self._keys.known().get(state.private_key) if self._keys.is_ours else public_half(state)
        if self._keys.is_ours and public is None:
            return Listed("link", key, "a WireGuard device with another private key")
        return WireguardLink(device.name, state.listen_port, device.mtu, public, state.fwmark)

    def peers(self, link: str) -> list[PeerSeen]:
        """The peers of an own device as they are now, by key; none for no device."""
        device = self._links.device(link)
        state = self._state(device) if device is not None and device.is_own and device.kind in _KINDS else None
        return [
            PeerSeen(
                Key(base64.b64encode(raw).decode()),
                Endpoint(peer.endpoint) if peer.endpoint else None,
                peer.handshake_s,
                peer.received_bytes,
                peer.sent_bytes,
            )
            for raw, peer in sorted(state.peers.items() if state else ())
        ]

    def greet(self, link: str, keys: Collection[Key]) -> None:
        """Make peers of an own device anew that have never shaken hands, so that they are greeted at once."""
        device = self._links.device(link)
        state = self._state(device) if device is not None and device.is_own and device.kind in _KINDS else None
        if device is not None and state is not None and (steps := greeted_anew(state, map(raw_key, keys))):
            self._set(device, Settings(), steps, f"peers of {link} that are greeted again")

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
            self._need_port(wanted)
            device = self._create(wanted.name)
        self._configure(device, wanted)
        self._links.finish(wanted.name, wanted.mtu)

    def write_peer(self, change: Change) -> None:
        """Make one change, and raise its error."""
        for error in self.write_peers([change]).values():
            raise error

    def write_peers(self, changes: Sequence[Change]) -> dict[str, MeshmarkError]:
        """Make changes of peers of one device together, and read back that they hold; the errors of those that failed, by key."""
        refused: dict[str, MeshmarkError] = {
            change.key: error for change in changes if (error := refusal(change, self._keys.ring().all)) is not None
        }
        left = [change for change in changes if change.key not in refused]
        try:
            return refused | (self._written(left) if left else {})
        except Waiting as error:
            return refused | {change.key: error for change in left}
        except MeshmarkError as error:
            if len(left) == 1:
                return refused | {left[0].key: error}
        # One that the device does not take is no reason to leave the others out.
        for change in left:
            refused |= self.write_peers([change])
        return refused

    def _written(self, changes: Sequence[Change]) -> dict[str, MeshmarkError]:
        link = changes[0].key.split(" ")[1]
        device = self._links.device(link)
        state = self._state(device) if device is not None and device.is_own else None
        if device is None or state is None:
            reason = f"there is no WireGuard device {link} of ours"
            return {change.key: Waiting(f"{change.key}: {reason}", f"link {link}") for change in changes if change.new is not None}
        steps = peer_changes(changes, state, time.time())
        if not steps:
            return {}
        what = changes[0].key if len(changes) == 1 else f"{len(changes)} peers of {link}"
        self._set(device, Settings(), steps, what)
        return self._lacking(changes, self._state(device))

    @staticmethod
    def _lacking(changes: Sequence[Change], state: DeviceState | None) -> dict[str, MeshmarkError]:
        """The changes that the device does not hold after they were written."""
        found: dict[str, MeshmarkError] = {}
        for change in changes if state is not None else ():
            peer = state.peers.get(raw_key(change.key.split(" ")[2])) if state is not None else None
            wanted = change.new
            if isinstance(wanted, WireguardPeer) and (peer is None or peer.allowed_ips != frozenset(wanted.allowed_ips)):
                msg = f"{change.key}: the device does not hold what was written; another writer may have taken its AllowedIPs"
                found[change.key] = Conflict(msg)
        return found

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
        if state.listen_port != wanted.listen_port or not device.up:
            self._need_port(wanted)
        private = self._keys.private(wanted.public_key)
        has_other = bool(state.private_key) and state.private_key != private
        settings = Settings(
            None if state.private_key == private else private,
            None if state.listen_port == wanted.listen_port else wanted.listen_port,
            None if state.fwmark == wanted.fwmark else wanted.fwmark,
        )
        if settings != Settings():
            # With another key no session goes on. Peers that are made anew have no handshake of the old one to show for the new one.
            anew = made_anew(state) if has_other else []
            self._set(device, settings, anew, f"link {wanted.name}")

    def _need_port(self, wanted: WireguardLink) -> None:
        """Conflict where the port is somebody else's, whom it names. wireguard-go says nothing of it, and the kernel not by whom.

        A wireguard-go keeps the port of its device while that is down: that is nobody else.
        """
        end = time.monotonic() + _LEAVING_S
        while taken := self._takers(wanted):
            if not all(taker.startswith("wireguard-go ") for taker in taken) or time.monotonic() > end:
                msg = f"link {wanted.name}: UDP port {wanted.listen_port} is taken by {', '.join(taken)}; end that or plan another port"
                raise Conflict(msg)
            time.sleep(_POLL_S)

    @staticmethod
    def _takers(wanted: WireguardLink) -> list[str]:
        try:
            takers = [seen.process or "" for seen in in_use([wanted.listen_port])]
            return [taker or "no process that can be seen, as a device of the kernel" for taker in takers if not serves(taker, wanted.name)]
        except OSError as error:
            msg = f"link {wanted.name}: cannot see whether UDP port {wanted.listen_port} is free: {error}"
            raise Transient(msg) from error

    def _set(self, device: Device, settings: Settings, peers: Sequence[PeerChange], what: str) -> None:
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
        """True for a device of a kill between its making and its alias: down, without alias, without a key of somebody else.

        While keys are changed, the key may be any of the host's.
        """
        if device.up or device.alias or device.kind not in self._implementations:
            return False
        state = self._state(device)
        return state is not None and not state.peers and state.private_key in (b"", *self._keys.known())

    @staticmethod
    def _own(devices: Mapping[str, Device]) -> list[Device]:
        return [device for device in devices.values() if device.is_own and device.kind in _KINDS]
