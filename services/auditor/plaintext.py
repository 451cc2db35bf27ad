"""Packets in clear → alerts: raised, changed, resolved. Pure; time is an argument.

A packet that the kernel showed is an alert when the plan of that moment and the one a third of a second later both say that its far end
encrypts, and have said so for a while: keys reach two nodes at different moments, and what goes between them until both have each
other's is no leak. For the same reason nothing is raised while the kernel is on its way to another form of the plan, for so long at most.

The kernel shows a few packets a second of each kind, so that an alert's count is of those; an alert stays open as long as more of its kind
are counted than were shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from msgspec import Struct
from msgspec.structs import replace

from schemas.drift import PLAINTEXT, ClearPacket, DriftEvent, DriftState
from schemas.encryption import Direction, Point, Traffic, point_of
from schemas.host_objects import GeneveLink, NftChain, NftElement
from schemas.nft import Comment, Log, Verdict
from schemas.plan import HostPlan, Unit
from schemas.values import Address, Name, Prefix
from services.kernel.headers import OverlayProtocol

GRACE_S = 5.0
"""For so long after a far end is first planned to encrypt, what goes in clear between the two is no alert."""
HOLD_S = 0.3
"""For so long an alert is held back, since the plan may change in the same moment."""
UNSETTLED_MAX_S = 30.0
"""A kernel that is not brought to its plan for longer than this is no excuse any more."""
QUIET_S = 10.0
TELL_S = 5.0
_KEYS_MAX = 200
_PODS, _NODES = ("enc", "enc6", "roaming", "roaming6"), ("encnodes", "encnodes6")
_BITS = {4: 32, 6: 128}
_WAY: dict[Direction, str] = {"out": "left", "in": "arrived"}


class Watched(Struct, frozen=True):
    """What of a plan the audit goes by: where packets are counted and shown, and which far ends encrypt, each with its object's key.

    `group` is None where the kernel shows nothing. `shape` are the chains, which decide what is counted. `dropped` says whether
    strict mode drops what it counts.
    """

    unit: str
    table: str
    group: int | None
    dropped: bool
    overlay: OverlayProtocol
    shape: tuple[NftChain, ...]
    pods: Mapping[Prefix, str]
    nodes: Mapping[Prefix, str]

    def ends(self, traffic: Traffic) -> Mapping[Prefix, str]:
        return self.pods if traffic == "pods" else self.nodes

    def end(self, traffic: Traffic, far: Address) -> Prefix | None:
        """The prefix by which a far end of this traffic is known to encrypt, the longest one; None for one that is not."""
        ends, bits, number = self.ends(traffic), _BITS[far.family], int.from_bytes(far.packed)
        masked = ((number >> bits - length << bits - length).to_bytes(bits // 8) for length in range(bits, -1, -1))
        covering = (Prefix.of(packed, length) for packed, length in zip(masked, range(bits, -1, -1), strict=True))
        return next((prefix for prefix in covering if prefix in ends), None)


def watched(plan: HostPlan) -> Watched | None:
    """What a plan says of packets in clear; None where it has no encryption."""
    for name, unit in plan.units.items():
        chains = [entry.object for entry in unit.values() if isinstance(entry.object, NftChain)]
        clear = [chain for chain in chains if counts_clear(chain)]
        if clear:
            return _of_unit(name, unit, chains, clear)
    return None


def _of_unit(name: str, unit: Unit, chains: list[NftChain], clear: list[NftChain]) -> Watched:
    pods: dict[Prefix, str] = {}
    nodes: dict[Prefix, str] = {}
    overlay: OverlayProtocol = "VXLAN"
    for key, entry in unit.items():
        match entry.object:
            case NftElement(set=kind, element=text) if kind in _PODS + _NODES:
                prefix = Prefix(text) if "/" in text else Address(text).host_prefix
                (pods if kind in _PODS else nodes)[prefix] = key
            case GeneveLink():
                overlay = "GENEVE"
    statements = [item for chain in clear for rule in chain.rules for item in rule]
    group = next((item.group for item in statements if isinstance(item, Log)), None)
    return Watched(name, clear[0].table, group, Verdict("drop") in statements, overlay, tuple(chains), pods, nodes)


def counts_clear(chain: NftChain) -> bool:
    """Whether packets in clear are counted by a chain."""
    points = (point_of(item.text) for rule in chain.rules for item in rule if isinstance(item, Comment))
    return any(point is not None and point.state == "plaintext" for point in points)


class _Seen(Struct):
    """What is known of packets with one key. `end` is the far end that encrypts, None where no packet was shown."""

    point: Point
    end: Prefix | None
    packet: ClearPacket | None
    because: tuple[str, ...]
    first_s: float
    last_s: float
    count: int = 0
    at_point: int = 0
    told_s: float = 0.0
    told_count: int = 0
    is_open: bool = False


class Alerts:
    """What is open on one host, and what is about to be."""

    def __init__(self, cluster: str, host: str) -> None:
        self._cluster, self._host = Name(cluster), Name(host)
        self._plan = HostPlan(self._cluster, self._host, {})
        self._watched: Watched | None = None
        self._generation = 0
        self._since_s: dict[tuple[Traffic, Prefix], float] = {}
        self._shaped_s = self._changed_s = float("-inf")
        self._seen: dict[str, _Seen] = {}
        self._shown: dict[Point, int] = {}
        self._missed_s: dict[Point, float] = {}
        self._unheard = ""
        self._began_s = self._heard_s = float("inf")
        self._has_taken_over = False

    @property
    def open(self) -> int:
        return sum(item.is_open for item in self._seen.values())

    @property
    def pending(self) -> bool:
        """Whether something is held back."""
        return any(not item.is_open for item in self._seen.values())

    def follow(self, plan: HostPlan, found: Watched | None, generation: int, now_s: float) -> None:
        """Go by this plan from now on."""
        before = self._watched
        self._plan, self._watched, self._generation, self._changed_s = plan, found, generation, now_s
        if found is None:
            self._since_s.clear()
            return
        self._began_s = min(self._began_s, now_s)
        kinds: tuple[Traffic, ...] = ("pods", "nodes")
        if before is None or before.shape != found.shape:
            self._shaped_s = now_s
            self._since_s.clear()
        self._since_s = {
            (traffic, prefix): self._since_s.get((traffic, prefix), now_s) for traffic in kinds for prefix in found.ends(traffic)
        }

    def saw(self, point: Point, packet: ClearPacket, far: Address, now_s: float) -> bool:
        """Take in a packet that was shown; whether it is the first of its kind, which is now held back.

        `far` is the address by which the rule knew that it should be encrypted.
        """
        self._shown[point] = self._shown.get(point, 0) + 1
        found = self._watched
        end = found.end(point.traffic, far) if found is not None else None
        if found is None or end is None or now_s - self._since(point.traffic, end) < GRACE_S:
            return False
        key = f"{point.direction} {point.traffic} {packet.source} {packet.destination}"
        if key not in self._seen and len(self._seen) >= _KEYS_MAX:
            key = f"{point.direction} {point.traffic} others"
        is_new = key not in self._seen
        if is_new:
            self._seen[key] = _Seen(point, end, packet, self._plan.because(found.ends(point.traffic)[end]), now_s, now_s)
        item = self._seen[key]
        item.packet, item.last_s, item.count = packet, now_s, item.count + 1
        return is_new

    def counted(self, deltas: Mapping[Point, int], now_s: float) -> None:
        """Take in how many packets were counted at each point since the last time."""
        for point, packets in deltas.items():
            if point.state != "plaintext" or not packets:
                continue
            if packets > self._shown.get(point, 0):
                self._missed_s[point] = now_s
            for item in self._seen.values():
                if item.point == point:
                    item.at_point += packets
            if self._shows_nothing() and now_s - max((self._shaped_s, *self._since_s.values())) >= GRACE_S:
                self._count_unshown(point, packets, now_s)
        self._shown.clear()

    def unheard(self, reason: str, now_s: float) -> Iterator[DriftEvent]:
        """Nobody shows packets, for this reason; an empty one says that somebody does again. Told when it changes."""
        if bool(reason) != bool(self._unheard):
            yield self._layer_event("unknown" if reason else "resolved", reason, now_s)
        self._unheard = reason
        self._heard_s = now_s

    def due(self, now_s: float, *, settled: bool) -> Iterator[DriftEvent]:
        """What is to be told now. `settled` says whether the kernel is at the plan.

        Once it is known, that what an auditor before this one had open is over, but for what was raised anew: nobody else would say so.
        """
        if not self._has_taken_over and not self._unheard and now_s - self._listens_since_s() >= GRACE_S + QUIET_S:
            self._has_taken_over = True
            yield self._layer_event("resolved", "", now_s)
        is_excused = not settled and now_s - self._changed_s < UNSETTLED_MAX_S
        for key, item in list(self._seen.items()):
            if item.is_open:
                yield from self._go_on(key, item, now_s)
            elif now_s - item.first_s >= HOLD_S:
                if is_excused or not self._is_wrong(item):
                    del self._seen[key]
                else:
                    item.is_open = True
                    yield self._event(key, item, "raised", now_s)

    def _go_on(self, key: str, item: _Seen, now_s: float) -> Iterator[DriftEvent]:
        last_s = max(item.last_s, self._missed_s.get(item.point, 0.0))
        if now_s - last_s >= QUIET_S:
            del self._seen[key]
            yield self._event(key, item, "resolved", now_s)
        elif item.count > item.told_count and now_s - item.told_s >= TELL_S:
            yield self._event(key, item, "changed", now_s)

    def _is_wrong(self, item: _Seen) -> bool:
        """Whether by the plan of now the packets should be encrypted."""
        if self._watched is None:
            return False
        return item.end is None or item.end in self._watched.ends(item.point.traffic)

    def _listens_since_s(self) -> float:
        return self._began_s if self._heard_s == float("inf") else max(self._began_s, self._heard_s)

    def _layer_event(self, state: DriftState, found: str, now_s: float) -> DriftEvent:
        """About the layer as a whole. Resolved is also what was open before its `first_seen_s`."""
        since_s = self._began_s if self._has_taken_over else 0.0
        key = f"layer {PLAINTEXT}"
        return DriftEvent(self._cluster, self._host, PLAINTEXT, key, state, found=found, first_seen_s=since_s, at_s=now_s)

    def _shows_nothing(self) -> bool:
        return bool(self._unheard) or (self._watched is not None and self._watched.group is None)

    def _since(self, traffic: Traffic, end: Prefix) -> float:
        return self._since_s.get(("pods" if traffic == "pods" else "nodes", end), float("inf"))

    def _count_unshown(self, point: Point, packets: int, now_s: float) -> None:
        key = f"{point.direction} {point.traffic}"
        item = self._seen.setdefault(key, _Seen(point, None, None, (), now_s, now_s))
        item.last_s, item.count, item.at_point = now_s, item.count + packets, item.at_point + packets

    def _event(self, key: str, item: _Seen, state: DriftState, now_s: float) -> DriftEvent:
        item.told_s, item.told_count = now_s, item.count
        packet = replace(item.packet, at_point=max(item.at_point, item.count)) if item.packet is not None else None
        return DriftEvent(
            self._cluster,
            self._host,
            PLAINTEXT,
            key,
            state,
            "encrypted",
            said(packet) if packet is not None else f"{item.count} packets {_WAY[item.point.direction]} in clear",
            self._watched.unit if self._watched is not None else "",
            item.because,
            None,
            item.first_s,
            now_s,
            item.count,
            self._generation,
            packet,
        )


def said(packet: ClearPacket) -> str:
    """A packet in one line."""
    one, other = _end(packet.source, packet.source_port), _end(packet.destination, packet.destination_port)
    by = f" by {packet.link}" if packet.link else ""
    inside = f" in {packet.tunnel.protocol} {packet.tunnel.source} -> {packet.tunnel.destination}" if packet.tunnel is not None else ""
    dropped = ", dropped" if packet.dropped else ""
    return f"{packet.protocol} {one} -> {other}{inside} {_WAY[packet.direction]} in clear{by}{dropped}"


def _end(address: Address, port: int) -> str:
    if not port:
        return address
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
