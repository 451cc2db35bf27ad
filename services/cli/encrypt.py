"""``meshmark encrypt status``: who encrypts what goes to whom, as the hosts' kernels have it now."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from typing import Literal

from cyclopts import App
from msgspec import Struct
from msgspec.structs import replace
from rich.markup import escape

from schemas import codec
from schemas.commands import EncryptionNow, PeerNow, PointNow
from schemas.drift import PLAINTEXT, DriftEvent
from schemas.topology import Gateway, Node, StrictMode, Topology
from schemas.values import wire_name
from services.cli import records
from services.cli.far_ends import FarEnd, Part, far_ends, part, said
from services.cli.hosts import HostName, asked, choose, parse_host
from services.cli.key_change import KeyChange, under_way
from services.cli.output import EXIT_DIFFERENT, Output, console, default_format, emit, show_table
from services.cli.session import Nats
from services.planner.state import HostId, State
from services.runtime.broker import Broker
from services.runtime.errors import MeshmarkError, Permanent

encrypt = App(name="encrypt", help="Encryption between the nodes of a cluster.")

HostState = Part | Literal["silent"]
_COLOURS: dict[HostState, str] = {"encrypts": "green", "optedOut": "yellow", "noKey": "yellow", "off": "dim", "silent": "red"}
_AT_ONCE = 32
_AGAIN_S = 1.0
"""How long after the first look the second one is, at nodes that let something out in clear some time."""
_FRESH_S = 180.0
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_STEP = 1024
_MINUTE_S, _HOUR_S, _DAY_S = 60, 3600, 86400


class HostEncryption(Struct, frozen=True, rename=wire_name):
    """One node: what the topology says of it, and what its applier answered; `error` says why it did not.

    `leaked` are packets in clear that should have been encrypted, counted since the host's rules were last written, `leaking` those of
    them that came while the command looked, about a second (None where it looked once); `alerts` are the auditor's that are open.
    `key_change` is the node's change of keys that is under way, None for none. `far_ends` are the other nodes with which something leaks
    by open alerts, and, of a host that was named, those with which all is in clear on purpose: `leaked` is counted for all together.
    """

    cluster: str
    host: str
    state: HostState
    mode: Literal["native", "overlay"]
    strict: StrictMode
    nodes: bool
    leaked: int = 0
    leaking: int | None = None
    now: EncryptionNow | None = None
    alerts: tuple[DriftEvent, ...] = ()
    error: str = ""
    key_change: KeyChange | None = None
    far_ends: tuple[FarEnd, ...] = ()

    @property
    def is_fine(self) -> bool:
        """True unless the host does not answer, lacks a peer, has one too many, or lets something out in clear."""
        peers = self.now.peers if self.now else ()
        return not self.error and not self.alerts and all(peer.is_there and peer.node for peer in peers)


def register(app: App) -> None:
    """Add the commands to the application."""
    encrypt.command(status)
    app.command(encrypt)


async def status(host: HostName = None, /, *, output: Output = None, nats: Nats | None = None) -> int:
    """Show of each node, or of one HOST, whom it encrypts for, handshakes, bytes, and what went in clear.

    Appliers are asked; a host whose applier does not answer is *silent*, and all else is shown. A node may have *optedOut*, or have *noKey*
    yet; it is *off* where its cluster does not encrypt. LEAKED are packets that should have been encrypted and were seen in clear, since
    the host's rules were last written: a few may be counted as keys become known, and stay in the count. Where there are any, the command
    looks again a second later, and says how many more there are. An open alert of the auditor is said by itself; it is over ten seconds
    after the last packet. A change of the node's key is said, too, with what it waits for.

    Handshakes and bytes are of each pair of nodes, LEAKED is not: the kernel counts what leaves or arrives in clear for all far ends
    together. Which pair it is between is known from open alerts, of the few packets a second that are shown: of one HOST, each far end is
    named with at least so many packets. Those that opted out, or have no key yet, are named, too: all between them and HOST is in clear
    on purpose, and is not counted.

    Gateways are not among them: their tunnels join clusters, whether nodes encrypt or not, and `meshmark status` shows them.

    The exit code is 2 when a host is silent, lacks a peer, has a strange one, or has an open alert.

    ```sh
    meshmark encrypt status
    meshmark encrypt status rome/worker-1
    meshmark encrypt status --output json | jq '.[] | select(.leaking > 0)'
    ```
    """
    form = default_format(output)
    async with (nats or Nats()).connect() as broker:
        items = await records.admitted(broker)
        alerts = [event for event in await records.open_drift(broker) if event.layer == PLAINTEXT]
        changes = await records.key_changes(broker)
        state, nodes = State(items), _chosen(items, host)
        found = await _asked(broker, [_on_paper(state, node) for node in nodes], alerts)
        found = await _asked_again(broker, found, alerts)
    found = [
        replace(
            one,
            key_change=changes.get(HostId(one.cluster, one.host)),
            far_ends=far_ends(state, node, one.alerts, on_purpose=host is not None),
        )
        for one, node in zip(found, nodes, strict=True)
    ]
    if form != "table":
        emit(found[0] if host else found, form)
    elif host:
        _show_one(found[0], time.time())
    else:
        show_table(("HOST", "STATE", "MODE", "PEERS", "IN TUNNELS", "LEAKED", "WHAT"), [_row(one, time.time()) for one in found])
    return 0 if all(one.is_fine for one in found) else EXIT_DIFFERENT


def _chosen(items: Iterable[Topology], host: str | None) -> list[Node]:
    """All nodes in order, or the one that is named; Permanent when there is no such node."""
    hosts = {HostId(item.cluster, item.name): item for item in items if isinstance(item, Node | Gateway)}
    if host is not None and isinstance(hosts.get(parse_host(host)), Gateway):
        msg = f"{host} is a gateway, whose tunnels are no encryption between nodes; see: meshmark status {host}"
        raise Permanent(msg)
    nodes = {name: item for name, item in hosts.items() if isinstance(item, Node)}
    return [nodes[name] for name in choose(nodes, host)]


def _on_paper(state: State, node: Node) -> HostEncryption:
    """A node as the topology has it."""
    cluster = state.clusters[node.cluster]
    return HostEncryption(node.cluster, node.name, part(state, node), cluster.routing, cluster.strict, cluster.wireguard.nodes)


async def _asked(broker: Broker, hosts: list[HostEncryption], alerts: list[DriftEvent]) -> list[HostEncryption]:
    """The same with what the appliers answer, a few dozen asked at once."""
    free = asyncio.Semaphore(_AT_ONCE)

    async def ask(one: HostEncryption) -> HostEncryption:
        own = tuple(event for event in alerts if (event.cluster, event.host) == (one.cluster, one.host))
        if one.state in ("off", "optedOut"):
            return _with(one, None, own)
        try:
            async with free:
                answer = await asked(broker, HostId(one.cluster, one.host), "encryption")
            return _with(one, codec.decode(answer, EncryptionNow), own)
        except (MeshmarkError, codec.DecodeError) as error:
            return _with(one, None, own, str(error))

    return list(await asyncio.gather(*map(ask, hosts)))


async def _asked_again(broker: Broker, found: list[HostEncryption], alerts: list[DriftEvent]) -> list[HostEncryption]:
    """The same, with whether packets still leak where some did: those hosts are asked once more, a little later."""
    if not (leaky := [one for one in found if one.leaked]):
        return found
    await asyncio.sleep(_AGAIN_S)
    later = {(one.cluster, one.host): one for one in await _asked(broker, leaky, alerts) if not one.error}

    def compared(one: HostEncryption) -> HostEncryption:
        again = later.get((one.cluster, one.host))
        return one if again is None else replace(again, leaking=max(0, again.leaked - one.leaked))

    return [compared(one) for one in found]


def _with(one: HostEncryption, now: EncryptionNow | None, alerts: tuple[DriftEvent, ...], error: str = "") -> HostEncryption:
    leaked = sum(point.packets for point in now.points if point.state == "plaintext") if now else 0
    state: HostState = "silent" if error else one.state
    return replace(one, state=state, leaked=leaked, now=now, alerts=alerts, error=error)


# For people -------------------------------------------------------------------------------------------------------------------------------


def _row(one: HostEncryption, now_s: float) -> tuple[str, ...]:
    peers = one.now.peers if one.now else ()
    fresh = sum(now_s - peer.handshake_s <= _FRESH_S for peer in peers)
    count = one.now.peer_count if one.now else 0
    inside, outside = (_size(sum(getattr(peer, name) for peer in peers)) for name in ("received_bytes", "sent_bytes"))
    what = "; ".join(
        (
            *_wrong(peers),
            *(f"alert: {event.found}" for event in one.alerts),
            *([one.error] if one.error else []),
            *_changing(one, now_s),
        )
    )
    return (
        f"{one.cluster}/{one.host}",
        f"[{_COLOURS[one.state]}]{one.state}[/]",
        _mode(one),
        f"{count}, {fresh} fresh" if one.now else "-",
        f"{inside} in, {outside} out" if peers else "-",
        _leaked(one),
        escape(what or "-"),
    )


def _show_one(one: HostEncryption, now_s: float) -> None:
    """All about one host: a line for each fact, then peers, then counts."""
    console.print(f"[bold]{one.cluster}/{one.host}[/] [{_COLOURS[one.state]}]{one.state}[/], {_mode(one)}")
    for text in (one.error, *(f"alert: {event.found} ({event.count} seen)" for event in one.alerts)):
        if text:
            console.print(f"  [red]{escape(text)}[/]")
    for text in (*said(one.far_ends), *_changing(one, now_s)):
        console.print(escape(f"  {text}"))
    if one.now is None or not one.now.device:
        return
    console.print(f"  device      {one.now.device}, UDP port {one.now.port}")
    console.print(f"  leaked      {_leaked(one)}\n")
    rows = [
        (
            peer.link,
            escape(peer.node) or "[red]not planned[/]",
            "[red]missing[/]" if not peer.is_there else _age(now_s - peer.handshake_s) if peer.handshake_s else "never",
            _size(peer.received_bytes),
            _size(peer.sent_bytes),
            escape(str(peer.endpoint or "-")),
            peer.public_key,
        )
        for peer in one.now.peers
    ]
    show_table(("DEVICE", "PEER", "HANDSHAKE", "RECEIVED", "SENT", "ENDPOINT", "KEY"), rows)
    if (more := one.now.peer_count - len(one.now.peers)) > 0:
        console.print(f"and {more} more peers")
    console.print()
    show_table(("POINT", "STATE", "WHOSE", "PACKETS", "BYTES"), [_point_row(point) for point in one.now.points])


def _point_row(point: PointNow) -> tuple[str, ...]:
    colour = "red" if point.state == "plaintext" and point.packets else "default"
    return (point.point, f"[{colour}]{point.state}[/]", point.traffic, str(point.packets), _size(point.bytes))


def _changing(one: HostEncryption, now_s: float) -> list[str]:
    """What to say of a change of keys that is under way."""
    return [under_way(one.key_change, now_s)] if one.key_change is not None else []


def _wrong(peers: Iterable[PeerNow]) -> list[str]:
    """What is to be said of peers that are not as planned."""
    missing = dict.fromkeys(peer.node for peer in peers if not peer.is_there)
    strange = sum(not peer.node for peer in peers)
    return [f"lacks its peer {node}" for node in missing] + ([f"{strange} peers that are not planned"] if strange else [])


def _mode(one: HostEncryption) -> str:
    return ", ".join((one.mode, *(["nodes"] if one.nodes else []), f"strict {one.strict}"))


def _leaked(one: HostEncryption) -> str:
    if one.now is None:
        return "-"
    if not one.leaked:
        return "0"
    by_way: Mapping[str, int] = {
        way: sum(point.packets for point in one.now.points if (point.state, point.direction) == ("plaintext", way)) for way in ("out", "in")
    }
    total = ", ".join(f"{count} {way}" for way, count in by_way.items() if count)
    if one.leaking is None:
        return f"[red]{total}[/]"
    return f"[red]{total}; {one.leaking} of them now[/]" if one.leaking else f"[yellow]{total}[/]; none now"


def _age(seconds: float) -> str:
    for unit_s, word in ((_DAY_S, "d"), (_HOUR_S, "h"), (_MINUTE_S, "min")):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.0f} {word} ago"
    return f"{max(0.0, seconds):.0f} s ago"


def _size(count: int) -> str:
    size, unit = float(count), 0
    while size >= _STEP and unit < len(_UNITS) - 1:
        size, unit = size / _STEP, unit + 1
    return f"{size:.1f} {_UNITS[unit]}" if unit else f"{count} B"
