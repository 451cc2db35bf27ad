"""WireGuard peers as values: what a device holds in plan form, and what it has to be told. Pure.

An AllowedIP belongs to one peer of a device; adding it to another takes it from the first, at once and without a word. So a prefix moves by
being added where it goes, and one that goes nowhere is moved to a peer that is then removed: no peer is ever without the others of its
prefixes, as it would be for a moment if all of them were replaced (the same as Cilium's agent does it, ``pkg/wireguard/agent``).
"""

from __future__ import annotations

import base64
from collections.abc import Collection, Iterable, Mapping, Sequence

from msgspec.structs import replace

from schemas.host_objects import PlanObject, WireguardPeer
from schemas.values import Endpoint, Key, Prefix
from services.kernel.transaction import Change, Held, Listed
from services.kernel.wireguard_device import DeviceState, PeerChange, PeerState
from services.kernel.wireguard_key import raw_key
from services.runtime.errors import Permanent

FRESH_HANDSHAKE_S = 180.0
"""A peer that shook hands within this time has a working endpoint: WireGuard renews a session at most every two minutes."""
_SINK = bytes(32)
"""The key of the peer that takes what is to go: it belongs to nobody, so that nobody is reached by it."""


def held_peers(link: str, state: DeviceState, wanted: Mapping[str, PlanObject], now_s: float) -> dict[str, Held]:
    """The peers of a device in plan form: AllowedIPs in order, the wanted endpoint where what was learned is no difference."""
    peers = [_held_peer(link, raw, peer, wanted, now_s) for raw, peer in state.peers.items()]
    return as_planned({peer.key: peer for peer in peers}, wanted)


def as_planned(held: Mapping[str, WireguardPeer], wanted: Mapping[str, PlanObject]) -> dict[str, Held]:
    """The peers of a device, without what is no difference of theirs.

    An endpoint that the plan leaves open, or of which it says the name only, is the device's. A prefix that is at another peer than planned
    is a difference of the planned one alone, and is set right there alone; a peer that is not wanted at all keeps what it has.
    """
    links = {peer.link for peer in held.values()}
    planned = {key: item for key, item in wanted.items() if isinstance(item, WireguardPeer) and item.link in links}
    homes = {(item.link, prefix): key for key, item in planned.items() for prefix in item.allowed_ips}
    known = {key: _with_planned_endpoint(peer, planned.get(key)) for key, peer in held.items()}
    found: dict[str, Held] = dict(known)
    for key, peer in known.items():
        mine = set(planned[key].allowed_ips) if key in planned else set()
        stolen = [prefix for prefix in peer.allowed_ips if prefix not in mine and homes.get((peer.link, prefix), key) != key]
        for prefix in stolen:
            home = homes[peer.link, prefix]
            if home in held:
                found[home] = Listed("wireguard", home, f"{prefix} is at peer {peer.public_key} instead")
        if stolen and key in planned and isinstance(found[key], WireguardPeer):
            found[key] = replace(peer, allowed_ips=tuple(prefix for prefix in peer.allowed_ips if prefix not in stolen))
    return found


def _with_planned_endpoint(peer: WireguardPeer, planned: WireguardPeer | None) -> WireguardPeer:
    if planned is None or peer.endpoint == planned.endpoint or _written(planned.endpoint):
        return peer
    return replace(peer, endpoint=planned.endpoint)


def _written(endpoint: Endpoint | None) -> Endpoint | None:
    """What a device is told of an endpoint: an address. What a name means is found out elsewhere."""
    return endpoint if endpoint is not None and endpoint.name is None else None


def _held_peer(link: str, raw: bytes, peer: PeerState, wanted: Mapping[str, PlanObject], now_s: float) -> WireguardPeer:
    key = Key(base64.b64encode(raw).decode())
    endpoint = Endpoint(peer.endpoint) if peer.endpoint else None
    planned = wanted.get(f"peer {link} {key}")
    if isinstance(planned, WireguardPeer) and _is_fresh(peer, now_s):
        endpoint = planned.endpoint
    return WireguardPeer(link, key, endpoint, sorted_prefixes(peer.allowed_ips), peer.keepalive_seconds)


def peer_changes(changes: Iterable[Change], state: DeviceState, now_s: float) -> list[PeerChange]:
    """What a device has to be told, in order: what comes, then what goes. Nothing for what it holds already."""
    arriving: list[PeerChange] = []
    departing: list[PeerChange] = []
    leaving: set[str] = set()
    for change in changes:
        raw = raw_key(change.key.split(" ")[2])
        held, wanted = state.peers.get(raw), change.new
        if not isinstance(wanted, WireguardPeer):
            departing += [PeerChange(raw, remove=True)] if held is not None else []
            continue
        step = _arriving(change.old, wanted, held, now_s)
        arriving += [step] if held is None or step != PeerChange(raw) else []
        leaving |= held.allowed_ips - frozenset(wanted.allowed_ips) if held is not None else frozenset()
    leaving -= {prefix for step in arriving for prefix in step.allowed_ips}
    sink = [PeerChange(_SINK, allowed_ips=frozenset(leaving)), PeerChange(_SINK, remove=True)] if leaving else []
    return [*arriving, *sink, *departing]


def made_anew(state: DeviceState) -> list[PeerChange]:
    """What a device has to be told for its peers to be what they are, but without any session or handshake."""
    return [step for raw, peer in state.peers.items() for step in _anew(raw, peer, peer.keepalive_seconds)]


def greeted_anew(state: DeviceState, keys: Iterable[bytes]) -> list[PeerChange]:
    """What a device has to be told to greet these peers at once, of those that have never shaken hands and are somewhere.

    WireGuard greets a peer at most every five seconds, but for one that is new. Keepalives that begin are sent something at once.
    """
    found: list[PeerChange] = []
    for raw in keys:
        peer = state.peers.get(raw)
        if peer is not None and peer.endpoint and not peer.handshake_s:
            found += _anew(raw, peer, peer.keepalive_seconds or 1)
            found += [PeerChange(raw, keepalive_seconds=0)] if not peer.keepalive_seconds else []
    return found


def _anew(raw: bytes, peer: PeerState, keepalive_seconds: int) -> list[PeerChange]:
    made = PeerChange(raw, endpoint=peer.endpoint or None, allowed_ips=peer.allowed_ips, keepalive_seconds=keepalive_seconds)
    return [PeerChange(raw, remove=True), made]


def _arriving(old: Held | None, wanted: WireguardPeer, held: PeerState | None, now_s: float) -> PeerChange:
    """One peer's part. An endpoint that was learned stays while handshakes are fresh, unless the plan's own changes."""
    state = held or PeerState()
    endpoint = _written(wanted.endpoint)
    is_moved = isinstance(old, WireguardPeer) and _written(old.endpoint) not in (None, endpoint)
    is_due = is_moved or not state.endpoint or not _is_fresh(state, now_s)
    return PeerChange(
        raw_key(wanted.public_key),
        endpoint=endpoint if is_due and state.endpoint != endpoint else None,
        allowed_ips=frozenset(wanted.allowed_ips) - state.allowed_ips,
        keepalive_seconds=wanted.keepalive_seconds if state.keepalive_seconds != wanted.keepalive_seconds else None,
    )


def refusal(change: Change, own: Collection[Key]) -> Permanent | None:
    """Why no device of a host with the public keys `own` can hold this; None where one can. WireGuard drops an own key without a word."""
    item = change.new
    if item is None:
        return None
    if not isinstance(item, WireguardPeer):
        return Permanent(f"{change.key} is not a peer")
    if item.public_key in own:
        return Permanent(f"{change.key}: a host cannot be its own peer")
    return Permanent(f"{change.key}: the key of zeros is nobody's") if raw_key(item.public_key) == _SINK else None


def _is_fresh(peer: PeerState, now_s: float) -> bool:
    return now_s - peer.handshake_s <= FRESH_HANDSHAKE_S


def sorted_prefixes(prefixes: frozenset[str] | Sequence[Prefix]) -> tuple[Prefix, ...]:
    """Prefixes by address, then length; those of IPv6 come last."""
    return tuple(sorted(map(Prefix, prefixes), key=lambda prefix: (prefix.family, prefix.packed, prefix.length)))
