"""What a packet between a tunnel and a node costs a gateway with 8 tunnels and 1,000 nodes, beyond plain forwarding.

The same packets are written into gateways that differ only in what leads them (`gateways`): meshmark's plan, the seed's rule per node, its
rule per node and tunnel before that, its NAT with no rule at all, and no nftables and no rules. One round sends a slice of packets through
each, in random order; a sample is the difference to plain forwarding in the same round. The kernel does all the forwarding within the
sending thread's writes. Where that is all the thread's own, the clock is its processor time, and what else runs on the machine is not
counted. What comes out of VXLAN is forwarded by a softirq, which some kernels leave out of that: there the clock is the wall's.

Peer: the seed's N rules. Floor: the seed's NAT, with all nodes' prefixes in the main table.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from benchmarks import gateways, lab, seed_rules
from benchmarks.datagrams import datagram, ends_of, in_vxlan
from benchmarks.figures.rules_per_gateway import compiled
from benchmarks.gateways import Gateway
from benchmarks.interval import Interval, interval
from benchmarks.result import Details, Figure, Result, median, result, rounded
from benchmarks.rounds import Round, interleaved
from benchmarks.seed_rules import Target
from schemas.plan import HostPlan
from services.runtime.errors import Transient

MESHMARK, SEED_N, SEED_MXN, NAT, PLAIN = _VARIANTS = ("meshmark", "seed-n", "seed-mxn", "nat-alone", "plain")
_NODES, _TUNNELS = 1000, 8
_ROUNDS = 40
_SLICE, _WARM_UP, _BATCH = 1000, 100, 5
_SEED = 1
_REMOTE_POD, _REMOTE_POD_SEEN = "10.200.255.1", "10.61.255.1"
_PORTS = (40_000, 5001)
_PAYLOAD = bytes(18)
_POD_PLACE = 10

Way = tuple[int, bytes]
"""A packet, and the number of the tunnel that it comes out of."""


class Traffic(Struct, frozen=True):
    """One slice of packets, and where they end (`sinks`).

    Through `watched` goes one of them at least, of which `end` (0 source, 1 destination) is the first of `names` where nothing is
    translated, and else the second.
    """

    name: str
    ways: tuple[Way, ...]
    sinks: tuple[str, ...]
    watched: str
    end: int
    names: tuple[str, str]
    clock: Callable[[], int]


def run(say: Callable[[str], None]) -> list[Result]:
    plan = compiled("per-node", _TUNNELS, _NODES)
    nodes, tunnels = seed_rules.targets(plan), list(gateways.tunnel_addresses(plan))
    with lab.claimed(), gateways.standing(plan, fillings(plan, nodes)) as made:
        say(f"{len(made)} gateways with {len(nodes)} nodes each stand")
        kinds = (last_node(nodes, _TUNNELS), any_node(nodes, _TUNNELS), outgoing(nodes, tunnels))
        return [summed_up(f"packet-cost-{traffic.name}", _measure(made, traffic)) for traffic in kinds]


def fillings(plan: HostPlan, nodes: Sequence[Target]) -> dict[str, Callable[[str], None]]:
    """What leads packets in each gateway."""
    tunnels = list(gateways.tunnel_addresses(plan))
    by_mark, by_interface = (seed_rules.nftables(plan, marks_tunnels=marks) for marks in (True, False))
    return {
        MESHMARK: gateways.applied(plan),
        SEED_N: gateways.written(plan, seed_rules.rule_per_node(nodes, tunnels), by_mark),
        SEED_MXN: gateways.written(plan, seed_rules.rule_per_node_and_tunnel(nodes, tunnels), by_interface),
        NAT: gateways.written(plan, seed_rules.one_table(nodes, tunnels), by_interface),
        PLAIN: gateways.written(plan, seed_rules.one_table(nodes, tunnels)),
    }


def last_node(nodes: Sequence[Target], tunnels: int) -> Traffic:
    """One flow out of the last tunnel to the last node: whoever goes through rules in order goes through all."""
    return _incoming("last-node", [(tunnels - 1, _to(nodes[-1]))] * _SLICE, nodes[-1])


def any_node(nodes: Sequence[Target], tunnels: int) -> Traffic:
    """One flow to each node, out of the tunnels in turn, in an order of no meaning."""
    ways = [(number % tunnels, _to(node)) for number, node in enumerate(nodes)]
    random.Random(_SEED).shuffle(ways)
    return _incoming("any-node", ways, nodes[-1])


def outgoing(nodes: Sequence[Target], tunnels: Sequence[str]) -> Traffic:
    """One flow from each node, over whichever tunnel the kernel takes, in an order of no meaning."""
    ways = [(len(tunnels), _from(node)) for node in nodes]
    random.Random(_SEED).shuffle(ways)
    names = (_REMOTE_POD_SEEN, _REMOTE_POD)
    return Traffic("outgoing", tuple(ways), tuple(tunnels), tunnels[0], 1, names, time.perf_counter_ns)


def _incoming(name: str, ways: Sequence[Way], watched: Target) -> Traffic:
    names = (_REMOTE_POD, _REMOTE_POD_SEEN)
    return Traffic(name, tuple(ways), (gateways.UPLINK,), watched.link.name, 0, names, time.thread_time_ns)


def _to(node: Target) -> bytes:
    """What comes out of a tunnel for a pod of the node."""
    return datagram(_REMOTE_POD, node.pods.address(_POD_PLACE), _PORTS, _PAYLOAD)


def _from(node: Target) -> bytes:
    """What a pod of the node sends to the remote one, as it comes over the underlay."""
    inner = datagram(node.pods.address(_POD_PLACE), _REMOTE_POD_SEEN, _PORTS, _PAYLOAD)
    payload = in_vxlan(inner, node.link.vni, (gateways.NEIGHBOUR_MAC, node.link.mac))
    return datagram(node.underlay, node.link.local, (_PORTS[0], node.link.port), payload)


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


def _measure(made: Mapping[str, Gateway], traffic: Traffic) -> list[Round]:
    """The rounds, after one slice through each gateway that is not counted: it makes the tracked flows, and shows that packets arrive."""
    for name, gateway in made.items():
        require_arrival(gateway, traffic, traffic.names[name != PLAIN])
    return interleaved(made, _ROUNDS, lambda name: _ns_per_packet(made[name], traffic))


def require_arrival(gateway: Gateway, traffic: Traffic, name: str) -> None:
    """Send one slice. Transient when a packet does not come through, or the watched one not under this name."""
    ways, before = _into(gateway, traffic.ways), gateway.ended(traffic.sinks)

    def send() -> None:
        for inlet, packet in ways:
            os.write(inlet, packet)

    seen = gateway.first_through(traffic.watched, send)
    ended = gateway.ended(traffic.sinks) - before
    if ended != len(ways) or not seen or ends_of(seen)[traffic.end] != name:
        who, what = f"{gateway.namespace}, {traffic.name}", f"{ended} of {len(ways)} packets came through"
        msg = f"{who}: {what}; the first one by {traffic.watched} was {seen.hex() or 'none'}"
        raise Transient(msg)


def _ns_per_packet(gateway: Gateway, traffic: Traffic) -> float:
    """The median over short batches of a slice, so that a batch that the machine was taken away from does not count."""
    ways, write, clock = _into(gateway, traffic.ways), os.write, traffic.clock
    for inlet, packet in ways[:_WARM_UP]:
        write(inlet, packet)
    took = []
    for batch in (ways[place : place + _BATCH] for place in range(0, len(ways), _BATCH)):
        began = clock()
        for inlet, packet in batch:
            write(inlet, packet)
        took.append((clock() - began) / len(batch))
    return median(took)


def _into(gateway: Gateway, ways: Sequence[Way]) -> list[Way]:
    """The packets with file descriptors in place of tunnels' numbers."""
    return [(gateway.inlets[tunnel], packet) for tunnel, packet in ways]


FIGURE = Figure("packet-cost", "ns per packet between tunnels and nodes, 8 tunnels and 1,000 nodes", run, needs_root=True)
