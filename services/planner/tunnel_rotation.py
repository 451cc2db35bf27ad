"""A gateway's change of WireGuard keys, tunnel by tunnel: what each step is, and what it waits for. Pure, without a clock.

The stages are those of a node (``rotation``), but for one thing: one device more carries the packets of one tunnel after the other, while
that gets its new key. So a peering keeps as many ways as it has tunnels, needs one port more and not as many again, and what goes by the
other tunnels stays where it is. Of tunnels 0 to n - 1, tunnel t is in turn:

stage    tunnels' devices   device beside   packets of t by   goes on when
queued   old key            none            t                 no other gateway of the peering changes its key, all tunnels are rolled out
beside   old key            new key         t                 both ends hold it, and have shaken hands on the device beside
moved    new key before t   new key         beside            both hold it
rekeyed  new key up to t    new key         beside            both hold it, and have shaken hands on t; then t + 1 is moved, and t is back
back     new key            new key         t                 both hold it
leaving  new key            none            t                 the gateway says that it has no other key than the new one
done     new key            none            t

These are the keys of the gateway itself; the far one has its own on all devices, and for a peer on each what is the gateway's key there.
Every device takes in whatever the peering carries, so that it does not matter who follows a step first.

The far end is waited for as long as it is away. It is the only one: who goes on without it wins nothing, and when it is back, it would be
met by the new key before it has heard of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from schemas.allocation import Rotation
from schemas.host_objects import PlanObject, Route, WireguardLink
from schemas.topology import TUNNELS_MAX, Peering, PublicKey
from schemas.values import Key
from services.planner import layout, names
from services.planner.rotation import Asked, behind, greeted_on, not_met, old_key_kept
from services.planner.state import Attachment, HostId


class TunnelTurn(NamedTuple):
    """What a rotation under way of a gateway, `host`, means for plans of both ends.

    The first `turned` tunnels have the new key. `led` is the number of the tunnel whose packets go by the device beside, -1 for none;
    `is_beside` says that there is that device. Both ends shake hands on `greeted`, a link's name, empty for none.
    """

    host: HostId
    old: Key
    new: Key
    turned: int
    led: int
    is_beside: bool
    greeted: str

    def key(self, index: int) -> Key:
        """The gateway's key on the device of a tunnel."""
        return self.new if index < self.turned else self.old


def tunnel_turn(host: HostId, rotation: Rotation) -> TunnelTurn:
    """What a gateway's rotation that is under way means for plans."""
    stage, number = rotation.stage, rotation.tunnel
    turned = {"beside": 0, "moved": number, "rekeyed": number + 1}.get(stage, TUNNELS_MAX)
    led = number if stage in ("moved", "rekeyed") else -1
    return TunnelTurn(host, rotation.old, rotation.new, turned, led, stage != "leaving", greeted_on(rotation))


def unmet(asked: Asked, attachment: Attachment, unit: str, beside: int) -> Iterator[str]:
    """What keeps a gateway's rotation from its next step, in words that name a gateway.

    `unit` is that of the peering, and `beside` the number by which the device beside has its port.
    """
    host, far, rotation = attachment.host, attachment.far_host, asked.rotation
    report, key = asked.reports.get(host), asked.state.keys.get(far)
    if rotation.stage == "leaving":
        yield from old_key_kept(asked)
    elif key is None:
        yield f"{far} has not said its public key yet"
    elif report is None or not asked.holds(host):
        yield f"{host} {behind(report, unit)}"
    elif key.key in report.greetings.away:
        yield f"{far} is away: it shakes hands on no tunnel, and the change goes on when it is back"
    else:
        yield from _not_greeted(asked, attachment, beside)
        if not asked.holds(far):
            yield f"{far} {behind(asked.reports.get(far), unit)}"


def _not_greeted(asked: Asked, attachment: Attachment, beside: int) -> Iterator[str]:
    rotation = asked.rotation
    link = greeted_on(rotation)
    if not link:
        return
    found = asked.reports[asked.host].greetings.on(link, rotation.new)
    if found is None:
        yield f"{asked.host} has not looked at handshakes on {link} yet"
    elif found.lacking:
        number = beside if link == names.TUNNEL_BESIDE else rotation.tunnel
        yield not_met(attachment.far_host, asked.host, link, attachment.peering.port + number)


def recovered(key: PublicKey, peering: Peering, planned: Iterable[PlanObject]) -> Rotation | None:
    """The rotation that the published unit of the gateway was made with, where nothing else is known of it; None for none."""
    if key.next is None:
        return None
    devices: dict[str, Key | None] = {}
    used: set[str] = set()
    for item in planned:
        if isinstance(item, WireguardLink):
            devices[item.name] = item.public_key
        elif isinstance(item, Route) and item.table == layout.OUTGOING_TABLE:
            is_own = layout.TUNNEL_NETWORK[item.prefix.family].contains(item.prefix)
            used.update(hop.link for hop in item.hops if not is_own)
    tunnels = len(devices.keys() - {names.TUNNEL_BESIDE})
    host = HostId(key.cluster, key.name)
    for found in _all(key.key, key.next, peering.ref, tunnels):
        turn = tunnel_turn(host, found)
        wanted: dict[str, Key | None] = {names.tunnel_link(index): turn.key(index) for index in range(tunnels)}
        if turn.is_beside:
            wanted[names.TUNNEL_BESIDE] = turn.new
        led = names.tunnel_link(turn.led) not in used if turn.led >= 0 else True
        if wanted == devices and led and (names.TUNNEL_BESIDE in used) == (turn.led >= 0):
            return found
    return None


def _all(old: Key, new: Key, peering: str, tunnels: int) -> Iterator[Rotation]:
    """Every rotation that is under way."""
    yield Rotation(old, new, "beside", peering=peering)
    for number in range(tunnels):
        yield Rotation(old, new, "moved", peering=peering, tunnel=number)
        yield Rotation(old, new, "rekeyed", peering=peering, tunnel=number)
    yield Rotation(old, new, "back", peering=peering)
    yield Rotation(old, new, "leaving", peering=peering)
