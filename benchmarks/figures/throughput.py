"""How fast TCP streams go through a gateway's tunnels and between nodes that encrypt, beside the same WireGuard set up by hand.

Both stand at the same time: the lab of an example, with all services, and hosts that are wired like its own (``benchmarks.by_hand``), with
the same WireGuard, the same number of tunnels, routes, and for gateways a VXLAN link to each node, but without any rule of nftables, and
without the translation of addresses that the lab's clusters need. Six streams between two pods carry a few MiB through one and then through
the other, in turns; the same segments, the same MTU. Both ends of a tunnel share this machine's processors: compare, and do not take it for
what two machines carry.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from msgspec.structs import replace

from benchmarks import by_hand, lab, streams
from benchmarks.by_hand import End, Site
from benchmarks.interval import interval
from benchmarks.result import Details, Figure, Result, median, result, rounded
from benchmarks.streams import Streams
from schemas.topology import Peering, Pod, Topology
from schemas.values import Address, Prefix
from services.cli.files import load
from services.cli.lab import namespaces, readiness
from services.cli.lab.expected import expected
from services.cli.lab.feed import Feed
from services.cli.lab.layout import PREFIX
from services.runtime.errors import Transient

_ROUNDS, _WARM_UP = 16, 2
_ROUND_S = 0.4
"""About how long a round takes one of the two: what it carries is chosen by this."""
_MIB = 1 << 20
_FIRST_BYTES = 4 * _MIB
_READY_S, _POLL_S = 60.0, 0.2

Round = tuple[float, float]
"""Seconds of meshmark, and by hand, for the same bytes."""


def _site(name: str, number: int, *, nodes: int = 1) -> Site:
    """A site of one or two nodes with a pod each, and a gateway; `number` keeps its addresses apart from others'."""
    workers = {f"worker-{node}": Address(f"172.18.{number}.1{node}") for node in range(1, nodes + 1)}
    pods = {node: Address(f"10.{number}.{place}.10") for place, node in enumerate(workers, 1)}
    return Site(name, Prefix(f"10.{number}.0.0/16"), {"gateway": Address(f"172.18.{number}.10"), **workers}, pods)


# Gateways ---------------------------------------------------------------------------------------------------------------------------------


def run_gateways(say: Callable[[str], None]) -> list[Result]:
    return asyncio.run(_gateways(say))


async def _gateways(say: Callable[[str], None]) -> list[Result]:
    left, right = _site("left", 101), _site("right", 102)
    topology = load([lab.EXAMPLE])
    pods = {f"{item.cluster}/{item.name}": item for item in topology if isinstance(item, Pod)}
    (peering,) = (item for item in topology if isinstance(item, Peering))
    walk = expected(topology, pods["rome/shop"], pods["milan/bank"])
    assert walk is not None
    found = []
    async with lab.standing(say, beside=[*left.objects(), *right.objects()]) as standing:
        for count in (peering.tunnels, 1):
            if count != peering.tunnels:
                await _publish(standing, topology, replace(peering, tunnels=count))
            gateway = f"{PREFIX}rome.gateway"
            mtu, node_mtu = _mtu(gateway, "mt.0"), _mtu(gateway, "mo.worker-1")
            with (
                _joined_by_hand(left, right, count, (mtu, node_mtu)) as own,
                streams.opened(f"{PREFIX}rome.pod.shop", f"{PREFIX}milan.pod.bank", walk.dial) as ours,
                streams.opened(_pod(left, "worker-1"), _pod(right, "worker-1"), right.pods["worker-1"]) as theirs,
            ):
                tunnels = [f"mt.{number}" for number in range(count)]
                with _encrypted((gateway, tunnels), (left.namespace("gateway"), own)) as check:
                    rounds, count_bytes = await asyncio.to_thread(_measured, ours, theirs)
                    check(count_bytes)
            name = f"throughput-gateway-{count}-tunnel{'s' if count > 1 else ''}"
            found.append(_summed_up(name, rounds, count_bytes))
            say(f"{name}: {found[-1].details}")
    return found


@contextlib.contextmanager
def _joined_by_hand(left: Site, right: Site, count: int, mtus: tuple[int, int]) -> Iterator[list[str]]:
    """So many tunnels between two sites, with these MTUs of tunnels and of the links to nodes; the names of the left one's."""
    ends = [End(site.namespace("gateway"), site.hosts["gateway"], by_hand.EVERYTHING) for site in (left, right)]
    with by_hand.tunnels(ends, count, mtus[0]) as links, contextlib.ExitStack() as stack:
        for site, far, own in ((left, right, links[0]), (right, left, links[1])):
            by_hand.overlay(site, "worker-1", far.pod_prefix, own, mtus[1])
            stack.callback(by_hand.remove_overlay, site, "worker-1")
        yield links[0]


async def _publish(standing: lab.Lab, topology: Sequence[Topology], peering: Peering) -> None:
    """Let the lab have another number of tunnels, until the last of the others has gone and all probes pass."""
    async with Feed.open(standing.url, "bench") as feed:
        await feed.publish(peering)
        end = time.monotonic() + _READY_S
        while any(_has(f"{PREFIX}{cluster}.gateway", f"mt.{peering.tunnels}") for cluster in ("rome", "milan")):
            if time.monotonic() > end:
                msg = f"mt.{peering.tunnels} is still there after {_READY_S:.0f} s"
                raise Transient(msg)
            await asyncio.sleep(_POLL_S)
        items = [peering if item.ref == peering.ref else item for item in topology]
        await readiness.get_ready(feed, items, lambda _: None, _READY_S)


# Nodes ------------------------------------------------------------------------------------------------------------------------------------


def run_nodes(say: Callable[[str], None]) -> list[Result]:
    return asyncio.run(_nodes(say))


async def _nodes(say: Callable[[str], None]) -> list[Result]:
    example = lab.EXAMPLE.parent / "encryption.yaml"
    site = _site("left", 103, nodes=2)
    ends = [End(site.namespace(node), site.hosts[node], site.node_prefix(node)) for node, _ in _PAIR]
    (stock,) = (item for item in load([example]) if isinstance(item, Pod) and item.name == "stock")
    async with lab.standing(say, example, beside=list(site.objects())):
        with by_hand.tunnels(ends, 1, _mtu(f"{PREFIX}rome.worker-1", "me.0")) as links:
            for (node, far), (link,) in zip(_PAIR, links, strict=True):
                namespaces.script([f"route replace {site.node_prefix(far)} dev {link}"], site.namespace(node))
            with (
                streams.opened(f"{PREFIX}rome.pod.shop", f"{PREFIX}rome.pod.stock", stock.addresses[0]) as ours,
                streams.opened(_pod(site, "worker-1"), _pod(site, "worker-2"), site.pods["worker-2"]) as theirs,
            ):
                device = (f"{PREFIX}rome.worker-1", ["me.0"])
                with _encrypted(device, (site.namespace("worker-1"), links[0])) as check:
                    rounds, count_bytes = await asyncio.to_thread(_measured, ours, theirs)
                    check(count_bytes)
    return [_summed_up("throughput-nodes", rounds, count_bytes)]


_PAIR = (("worker-1", "worker-2"), ("worker-2", "worker-1"))


# Measuring --------------------------------------------------------------------------------------------------------------------------------


def _measured(ours: Streams, theirs: Streams) -> tuple[list[Round], int]:
    """Rounds, and the bytes of each. Who is first changes from round to round."""
    count = _FIRST_BYTES
    for _ in range(_WARM_UP):
        took_s = [each.carry(count) for each in (ours, theirs)]
        count = max(_MIB, int(count * _ROUND_S / (sum(took_s) / 2)))
    rounds: list[Round] = []
    for number in range(_ROUNDS):
        if number % 2:
            their_s, our_s = theirs.carry(count), ours.carry(count)
        else:
            our_s, their_s = ours.carry(count), theirs.carry(count)
        rounds.append((our_s, their_s))
    return rounds, count


@contextlib.contextmanager
def _encrypted(*places: tuple[str, Sequence[str]]) -> Iterator[Callable[[int], None]]:
    """Yields what raises Transient when not all rounds, of so many bytes, went out by these links of these namespaces."""
    before = [_sent_bytes(*place) for place in places]

    def check(count_bytes: int) -> None:
        for (namespace, links), sent_bytes in zip(places, before, strict=True):
            if _sent_bytes(namespace, links) - sent_bytes < _ROUNDS * count_bytes:
                msg = f"packets of {namespace} went around {', '.join(links)}"
                raise Transient(msg)

    yield check


def _summed_up(name: str, rounds: Sequence[Round], count_bytes: int) -> Result:
    """Milliseconds for a MiB: less is better, as in every figure."""
    per_mib = 1000 * _MIB / count_bytes
    our_s, their_s = ([pair[place] for pair in rounds] for place in (0, 1))
    over = interval(rounds, lambda part: median(mine / other for mine, other in part))
    details: Details = {
        "Mbit/s": rounded(8 * count_bytes / median(our_s) / 1e6),
        "by hand Mbit/s": rounded(8 * count_bytes / median(their_s) / 1e6),
        "time over that by hand, same round": {"median": over.value, "from": over.low, "to": over.high},
        "MiB a round": rounded(count_bytes / _MIB),
    }
    return result(name, [took_s * per_mib for took_s in our_s], "ms", peer=median(their_s) * per_mib, details=details)


def _pod(site: Site, node: str) -> str:
    return f"{PREFIX}{site.name}.pod.pod-{node}"


def _mtu(namespace: str, link: str) -> int:
    return int(_link(namespace, link)["mtu"])


def _sent_bytes(namespace: str, links: Sequence[str]) -> int:
    return sum(int(_link(namespace, link)["stats64"]["tx"]["bytes"]) for link in links)


def _link(namespace: str, link: str) -> Any:  # noqa: ANN401 - what `ip -j` says
    shown = subprocess.run(["ip", "-n", namespace, "-j", "-s", "link", "show", link], capture_output=True, text=True, check=False)
    if shown.returncode:
        msg = f"{namespace} has no link {link}: {shown.stderr.strip()}"
        raise Transient(msg)
    return json.loads(shown.stdout)[0]


def _has(namespace: str, link: str) -> bool:
    return subprocess.run(["ip", "-n", namespace, "link", "show", link], capture_output=True, check=False).returncode == 0


GATEWAYS = Figure(
    "gateway-throughput", "TCP through three tunnels and one of a gateway, beside the same by hand", run_gateways, needs_root=True
)
NODES = Figure("node-throughput", "TCP between two nodes that encrypt, beside the same by hand", run_nodes, needs_root=True)
