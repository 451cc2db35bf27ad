"""A gateway's tunnels: WireGuard devices side by side, each with a network of its own, and the routes into all of them.

How many there are is what the rollout says (``allocate.Rollout``). While one of the two gateways changes its key, there is one device more
at both, which takes the place of one tunnel after the other (``tunnel_rotation``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from schemas.host_objects import LinkAddress, NextHop, PlanObject, Route, WireguardLink, WireguardPeer
from schemas.topology import Peering
from schemas.values import IPV6, Address, Endpoint, Family, Key, Prefix
from services.planner import layout, mesh, names
from services.planner.allocate import Allocations, peering_id
from services.planner.compile.words import EVERYWHERE
from services.planner.families import carried, tunnel_endpoint, tunnel_mtu
from services.planner.state import Attachment, HostId, State, seen_prefixes
from services.planner.tunnel_rotation import TunnelTurn, tunnel_turn


class _Tunnel(NamedTuple):
    """A device: its name, and the number by which it has its port and its addresses."""

    link: str
    number: int


def objects(state: State, allocations: Allocations, attachment: Attachment) -> Iterator[PlanObject]:
    """Devices, peers, and the ways into the tunnels."""
    families, turn = carried(state, attachment.peering), _turn(allocations, attachment.peering)
    for tunnel in _devices(allocations, attachment):
        yield from _device(state, attachment, tunnel, turn)
    for family in families:
        # By these the far end finds its way back to the tunnel that a probe came through, whatever hops the routes below have left.
        own = (_Tunnel(names.tunnel_link(index), index) for index in range(_used(allocations, attachment)))
        yield from (_own_route(family, tunnel) for tunnel in (*own, *_beside(allocations, attachment)))
        if hops := tunnel_hops(state, allocations, attachment, family):
            for _, real in seen_prefixes(state, attachment):
                if real.family == family:
                    yield Route(layout.OUTGOING_TABLE, real, hops=hops)


def tunnel_links(allocations: Allocations, attachment: Attachment) -> tuple[str, ...]:
    """The links of all tunnels that a gateway has."""
    return tuple(tunnel.link for tunnel in _devices(allocations, attachment))


def tunnel_hops(state: State, allocations: Allocations, attachment: Attachment, family: Family) -> tuple[NextHop, ...]:
    """The tunnels that carry traffic, as next hops of a family; none of a family that the peering does not carry."""
    if family not in carried(state, attachment.peering):
        return ()
    turn = _turn(allocations, attachment.peering)
    led = turn.led if turn is not None else -1
    beside = next(_beside(allocations, attachment), None)
    found = []
    for index in range(_used(allocations, attachment)):
        tunnel = beside if beside is not None and index == led else _Tunnel(names.tunnel_link(index), index)
        found.append(_hop(attachment, family, tunnel, index))
    return tuple(found)


def _turn(allocations: Allocations, peering: Peering) -> TunnelTurn | None:
    """The change of keys that is under way between a peering's gateways."""
    host = allocations.turning.get(peering.ref)
    return tunnel_turn(host, allocations.rotations[host]) if host is not None else None


def _devices(allocations: Allocations, attachment: Attachment) -> list[_Tunnel]:
    count = allocations.rollout(peering_id(attachment)).devices(attachment.place)
    return [*(_Tunnel(names.tunnel_link(index), index) for index in range(count)), *_beside(allocations, attachment)]


def _beside(allocations: Allocations, attachment: Attachment) -> Iterator[_Tunnel]:
    """The device beside those of the tunnels, if there is one: with the next number, which nobody has while tunnels do not come."""
    turn = _turn(allocations, attachment.peering)
    if turn is not None and turn.is_beside:
        yield _Tunnel(names.TUNNEL_BESIDE, allocations.rollout(peering_id(attachment)).present)


def _device(state: State, attachment: Attachment, tunnel: _Tunnel, turn: TunnelTurn | None) -> Iterator[PlanObject]:
    peering = attachment.peering
    families = carried(state, peering)
    own, far = (_key(state, host, tunnel, turn) for host in (attachment.host, attachment.far_host))
    yield WireguardLink(tunnel.link, peering.port + tunnel.number, tunnel_mtu(state, peering), own)
    for family in families:
        yield LinkAddress(tunnel.link, _address(family, tunnel.number, attachment.place), layout.TUNNEL_LENGTH[family])
    if far is not None:
        allowed, keepalive = tuple(EVERYWHERE[family] for family in families), peering.keepalive_seconds
        if turn is not None and tunnel.link in (names.TUNNEL_BESIDE, turn.greeted):
            # Whatever is sent, somebody waits for the handshake. Tunnels that carry packets stay as they are, and as they were judged.
            keepalive = min(keepalive or mesh.TURNING_KEEPALIVE_SECONDS, mesh.TURNING_KEEPALIVE_SECONDS)
        yield WireguardPeer(tunnel.link, far, _endpoint(state, attachment, tunnel.number), allowed, keepalive)


def _key(state: State, host: HostId, tunnel: _Tunnel, turn: TunnelTurn | None) -> Key | None:
    """A gateway's public key on a device; None while it is not known."""
    if turn is not None and turn.host == host:
        return turn.new if tunnel.link == names.TUNNEL_BESIDE else turn.key(tunnel.number)
    item = state.keys.get(host)
    return item.key if item is not None else None


def _used(allocations: Allocations, attachment: Attachment) -> int:
    """How many tunnels carry traffic."""
    return min(allocations.rollout(peering_id(attachment)).used, attachment.peering.tunnels)


def _hop(attachment: Attachment, family: Family, tunnel: _Tunnel, place: int) -> NextHop:
    """A tunnel as one of several next hops, with the weight of this place; of IPv6 the kernel wants the far end's address too."""
    weights = attachment.peering.weights
    via = _address(family, tunnel.number, 1 - attachment.place) if family == IPV6 else None
    return NextHop(tunnel.link, via, onlink=via is not None, weight=weights[place] if weights else 1)


def _own_route(family: Family, tunnel: _Tunnel) -> Route:
    """The way to a tunnel's own addresses."""
    first = layout.TUNNEL_NETWORK[family].address(4 * tunnel.number)
    return Route(layout.OUTGOING_TABLE, Prefix(f"{first}/{layout.TUNNEL_LENGTH[family]}"), hops=(NextHop(tunnel.link),))


def _address(family: Family, index: int, place: int) -> Address:
    return layout.TUNNEL_NETWORK[family].address(4 * index + 1 + place)


def _endpoint(state: State, attachment: Attachment, index: int) -> Endpoint:
    first = tunnel_endpoint(state, attachment)
    assert first is not None, "admission refuses gateways without a family in common"
    return first.moved(index)
