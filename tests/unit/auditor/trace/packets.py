"""Flow events of one packet and of those that carry it, on up to three hosts, and what they come to."""

from __future__ import annotations

from msgspec.structs import replace

from schemas.flow import IP, Correlation, EventType, FlowEvent, Layer4, PointName, Tunnel, WireguardSeen
from services.auditor.trace.trails import Trail, Way, trails

HERE, THERE, BEYOND = "rome/one", "rome/two", "rome/three"


def at(point: PointName, node: str = HERE, ms: int = 0, group: str = "a", length: int = 84) -> FlowEvent:
    """An inner packet at a point."""
    wg = WireguardSeen("me.0", "peer") if point.endswith("CRYPTO") else None
    return FlowEvent(
        time=f"2026-01-01T00:00:00.{ms:03}000Z",
        uuid=f"{node} {point} {ms} {group}",
        verdict="FORWARDED",
        ip=IP("10.0.0.1", "10.0.0.2", "IPv4"),
        node_name=node,
        event_type=EventType(4),
        trace_observation_point=point,
        length=length,
        corr=Correlation(group, "headers", "high"),
        wg=wg,
    )


def outer(node: str, ms: int, counter: int, length: int = 156, peer: str = "peer") -> FlowEvent:
    """A packet of WireGuard's own, at the uplink: leaving one host, coming to the other."""
    point: PointName = "TO_NETWORK" if node == HERE else "FROM_NETWORK"
    made = at(point, node, ms, f"wg/{counter}", length)
    return replace(
        made, wg=WireguardSeen("me.0", peer, "data", 1, counter), corr=Correlation(f"wg/{counter}", "wireguard-counter", "exact")
    )


def wrapped(node: str, ms: int, group: str = "a", **more: object) -> FlowEvent:
    """An overlay packet of which is known what is inside, leaving one host and coming to the other."""
    made = at("TO_NETWORK" if node == HERE else "FROM_NETWORK", node, ms, group)
    tunnel = Tunnel("VXLAN", IP("192.0.2.1", "192.0.2.2", "IPv4"), Layer4(), 77, 134)
    return replace(made, **{"tunnel": tunnel, "uuid": f"{made.uuid} wrapped", **more})


def _forward(event: FlowEvent) -> tuple[Way, ...]:
    del event
    return ("forward",)


def found(*events: FlowEvent, route: tuple[str, ...] = (HERE, THERE)) -> list[Trail]:
    """The packets of a flow that goes by these hosts."""
    return trails(events, _forward, route)
