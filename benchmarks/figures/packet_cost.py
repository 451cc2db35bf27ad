"""What a packet costs a gateway with 8 tunnels and 1,000 nodes on its way from a tunnel to the node of its pod, beyond plain forwarding.

The same packets are written into gateways that differ only in what leads them (`gateways`): meshmark's plan, the seed's rule per node, its
rule per node and tunnel before that, its NAT with no rule at all, and no nftables and no rules. One round sends a slice of packets through
each, in random order; a sample is the difference to plain forwarding in the same round. The clock is the processor time of the sending
thread: the kernel does all the forwarding within its writes, and what else runs on the machine is not counted.

Peer: the seed's N rules. Floor: the seed's NAT, with all nodes' prefixes in the main table.
"""

from __future__ import annotations

import gc
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from benchmarks import gateways, lab, seed_rules
from benchmarks.datagrams import datagram, ends_of
from benchmarks.figures.rules_per_gateway import compiled
from benchmarks.gateways import Gateway
from benchmarks.interval import Interval, interval
from benchmarks.result import Details, Figure, Result, median, result, rounded
from benchmarks.seed_rules import Target
from schemas.plan import HostPlan
from services.runtime.errors import Transient

MESHMARK, SEED_N, SEED_MXN, NAT, PLAIN = _VARIANTS = ("meshmark", "seed-n", "seed-mxn", "nat-alone", "plain")
_NODES, _TUNNELS = 1000, 8
_ROUNDS = 40
_SLICE, _WARM_UP = 1000, 100
_SEED = 1
_REMOTE_POD, _REMOTE_POD_SEEN = "10.200.77.1", "10.61.77.1"
_PORTS = (40_000, 5001)
_PAYLOAD = bytes(18)
_POD_PLACE = 10

Round = Mapping[str, float]
"""Nanoseconds per packet through each gateway, measured one after the other."""
Way = tuple[int, bytes]
"""A packet, and the number of the tunnel that it comes out of."""


class Destination(Struct, frozen=True):
    """Whom packets are for. `ways` is one slice; `last` is a node that gets one of them at least."""

    name: str
    ways: tuple[Way, ...]
    last: Target


def run(say: Callable[[str], None]) -> list[Result]:
    plan = compiled("per-node", _TUNNELS, _NODES)
    nodes = seed_rules.targets(plan)
    with lab.claimed(), gateways.standing(plan, fillings(plan, nodes)) as made:
        say(f"{len(made)} gateways with {len(nodes)} nodes each stand")
        found = []
        for destination in (last_node(nodes, _TUNNELS), any_node(nodes, _TUNNELS)):
            rounds = _measure(made, destination)
            found.append(summed_up(f"packet-cost-{destination.name}", rounds))
    return found


def fillings(plan: HostPlan, nodes: Sequence[Target]) -> dict[str, Callable[[str], None]]:
    """What leads packets in each gateway."""
    tunnels = list(gateways.tunnel_addresses(plan))
    by_mark, by_interface = (seed_rules.nftables(plan, marks_tunnels=marks) for marks in (True, False))
    return {
        MESHMARK: gateways.applied(plan),
        SEED_N: gateways.written(plan, seed_rules.rule_per_node(nodes), by_mark),
        SEED_MXN: gateways.written(plan, seed_rules.rule_per_node_and_tunnel(nodes, tunnels), by_interface),
        NAT: gateways.written(plan, seed_rules.one_table(nodes), by_interface),
        PLAIN: gateways.written(plan, seed_rules.one_table(nodes)),
    }


def last_node(nodes: Sequence[Target], tunnels: int) -> Destination:
    """One flow out of the last tunnel to the last node: whoever goes through rules in order goes through all."""
    return Destination("last-node", ((tunnels - 1, _packet(nodes[-1])),) * _SLICE, nodes[-1])


def any_node(nodes: Sequence[Target], tunnels: int) -> Destination:
    """One flow to each node, out of the tunnels in turn, in an order of no meaning."""
    ways = [(number % tunnels, _packet(node)) for number, node in enumerate(nodes)]
    random.Random(_SEED).shuffle(ways)
    return Destination("any-node", tuple(ways), nodes[-1])


def summed_up(name: str, rounds: Sequence[Round]) -> Result:
    """The figure of one destination. What is added to plain forwarding has a 95 % interval, and so have the ratios to meshmark."""
    details: Details = {}
    for variant in (MESHMARK, SEED_N, SEED_MXN, NAT):
        details[f"{variant} adds ns"] = _as_detail(interval(rounds, lambda part, variant=variant: _added(part, variant)))  # type: ignore[misc]
    for variant in (SEED_N, SEED_MXN, NAT):
        ratio = interval(rounds, lambda part, variant=variant: _added(part, variant) / _added(part, MESHMARK))  # type: ignore[misc]
        details[f"{variant} over {MESHMARK}"] = _as_detail(ratio)
    whole = {variant: median(part[variant] for part in rounds) for variant in _VARIANTS}
    details["ns per packet"] = {variant: rounded(value) for variant, value in whole.items()}
    details["1,000 packets per second"] = {variant: rounded(1e6 / value) for variant, value in whole.items()}
    return result(
        name,
        [part[MESHMARK] - part[PLAIN] for part in rounds],
        "ns",
        peer=_added(rounds, SEED_N),
        floor=_added(rounds, NAT),
        details=details,
    )


def _added(rounds: Sequence[Round], variant: str) -> float:
    """The median over rounds of what a packet costs more than by plain forwarding."""
    return median(part[variant] - part[PLAIN] for part in rounds)


def _as_detail(found: Interval) -> dict[str, float]:
    return {"median": found.value, "from": found.low, "to": found.high}


def _packet(node: Target) -> bytes:
    return datagram(_REMOTE_POD, _pod(node), _PORTS, _PAYLOAD)


def _pod(node: Target) -> str:
    return node.pods.address(_POD_PLACE)


def _measure(made: Mapping[str, Gateway], destination: Destination) -> list[Round]:
    """The rounds, after one slice through each gateway that is not counted: it makes the tracked flows, and shows that packets arrive."""
    for name, gateway in made.items():
        _require_arrival(gateway, destination, _REMOTE_POD if name == PLAIN else _REMOTE_POD_SEEN)
    draw = random.Random(_SEED)
    order = list(made)
    rounds: list[Round] = []
    gc.disable()
    try:
        for _ in range(_ROUNDS):
            draw.shuffle(order)
            rounds.append({name: _ns_per_packet(made[name], destination.ways) for name in order})
    finally:
        gc.enable()
    return rounds


def _require_arrival(gateway: Gateway, destination: Destination, source: str) -> None:
    """Send one slice. Transient when a packet does not come through, or the last node gets none, or not from this source."""
    ways, before = _into(gateway, destination.ways), gateway.passed()

    def send() -> None:
        for inlet, packet in ways:
            os.write(inlet, packet)

    seen = gateway.first_through(destination.last.link, send)
    passed = gateway.passed() - before
    if passed != len(ways) or not seen or ends_of(seen) != (source, _pod(destination.last)):
        msg = f"{gateway.namespace}: {passed} of {len(ways)} packets came through; to {destination.last.link}: {seen.hex() or 'none'}"
        raise Transient(msg)


def _ns_per_packet(gateway: Gateway, ways: Sequence[Way]) -> float:
    """Processor time of a slice, after the start of it has been sent to warm the caches."""
    sendings, write = _into(gateway, ways), os.write
    for inlet, packet in sendings[:_WARM_UP]:
        write(inlet, packet)
    began = time.thread_time_ns()
    for inlet, packet in sendings:
        write(inlet, packet)
    return (time.thread_time_ns() - began) / len(sendings)


def _into(gateway: Gateway, ways: Sequence[Way]) -> list[Way]:
    """The packets with file descriptors in place of tunnels' numbers."""
    return [(gateway.inlets[tunnel], packet) for tunnel, packet in ways]


FIGURE = Figure("packet-cost", "ns per packet from a tunnel to a node, 8 tunnels and 1,000 nodes", run, needs_root=True)
