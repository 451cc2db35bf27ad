"""The guided lab: what meshmark does, shown on this machine in about a minute, each claim checked against the kernel or by packets."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
from rich.console import Console

import services
from schemas.drift import DriftEvent
from schemas.topology import Gateway, Node, Peering, Pod, Topology
from schemas.values import FAMILIES, IPV6, Address, Name
from services.cli.files import load
from services.cli.lab import clear, listing, namespaces, probe, readiness, teardown, traffic
from services.cli.lab.board import Board
from services.cli.lab.detach import Progress, in_background
from services.cli.lab.expected import expected
from services.cli.lab.feed import Feed
from services.cli.lab.layout import host_namespace, pod_namespace
from services.cli.lab.state import CURRENT, SOCKETS, Folder
from services.cli.lab.story import Story
from services.cli.lab.supervisor import supervise
from services.runtime.errors import MeshmarkError

EXAMPLE = Path(services.__file__).parent.parent / "examples" / "two-clusters.yaml"
_CHANGE_S = 30.0
_DRIFT_S = 20.0
_TRAFFIC_S = 1.0


class _Watcher:
    """The supervisor's progress, as part of the story."""

    def __init__(self, story: Story) -> None:
        self._story = story

    def say(self, text: str) -> None:
        self._story.show([text])

    def ready(self) -> None:
        self._story.check("the lab is up: every host holds its plan, and all pods reach each other", ok=True)


def demo(folder: Folder, console: Console, files: Sequence[Path] = (), *, keep: bool = False) -> Story:
    """Tell the whole story of these topology files, or of the example, and take the lab down, also when it fails or is interrupted.

    With `keep` the lab stays.
    """
    story = Story(console)
    topology = load(files or [EXAMPLE])
    with _interruptible():
        try:
            with _complaining(story, "the lab comes up"):
                _come_up(story, folder, topology, is_example=not files)
                asyncio.run(_tell(story, folder, topology, keep=keep))
        finally:
            if keep:
                story.show([f"the lab stays up; NATS: {folder.url}, end it with: meshmark lab down"])
            else:
                _go_down(story, folder)
    story.end()
    return story


def _come_up(story: Story, folder: Folder, topology: Sequence[Topology], *, is_example: bool) -> None:
    hosts = [item for item in topology if isinstance(item, Node | Gateway)]
    about = (
        f"{EXAMPLE.name} describes two clusters, rome and milan. Their pods have the very same addresses, 10.200.0.0/16, so each side "
        "sees the other's under a prefix of its own choice: rome dials milan's pods as 10.61.0.0/16, milan dials rome's as 10.63.0.0/16."
    )
    story.chapter(
        "A mesh on this machine",
        *([about] if is_example else []),
        f"Each of the {len(hosts)} hosts becomes a network namespace with an applier and an auditor of its own. The topology goes to NATS, "
        "the planner turns it into one plan per host, and each applier makes its kernel so, in one transaction.",
    )

    def run(progress: Progress) -> None:
        supervise(folder, topology, progress, log=folder.log("lab"))

    in_background(run, _Watcher(story))


async def _tell(story: Story, folder: Folder, topology: Sequence[Topology], *, keep: bool) -> None:
    async with Feed.open(folder.url.read_text(encoding="ascii").strip(), "lab-demo") as feed:
        peering = next((item for item in topology if isinstance(item, Peering)), None)
        nodes = [host_namespace(item.cluster, item.name) for item in topology if isinstance(item, Node)]
        tables = {node: listing.table(node, "ip", "lab-cni") for node in nodes}
        await _probe(story, feed)
        if peering is not None:
            await _break(story, feed, peering)
        await _add_pod(story, feed, topology)
        if peering is not None:
            await _add_tunnel(story, feed, peering)
            if not keep:
                await _remove_peering(story, feed)
        same = [node for node in nodes if listing.table(node, "ip", "lab-cni") == tables[node]]
        story.check(
            "the table of the pods' own network (lab-cni) is what it was on each node",
            ok=same == nodes,
            detail=f"{len(same)} of {len(nodes)}",
        )


async def _probe(story: Story, feed: Feed) -> None:
    story.chapter(
        "Packets between all pods",
        "Every pod sends UDP and TCP to every other one. The receiver says which addresses it saw: between the clusters, the sender must "
        "appear under the prefix that the receiver's side chose for it.",
    )
    topology = feed.board.as_seen()
    with clear.watching(topology) as watch:
        story.add(await probe.check(topology, feed.board.chosen))
    if checks := watch.checks():
        story.chapter(
            "What passed the uplinks meanwhile",
            "These nodes encrypt. What their pods said to each other must have left them inside WireGuard, and nothing of it in clear.",
        )
        story.add(checks)


async def _break(story: Story, feed: Feed, peering: Peering) -> None:
    gateway = _gateways(peering)[0]
    story.chapter(
        "Somebody changes the kernel by hand",
        "Rules vanish, as when another tool or a tired administrator meddles. The auditor hears it from the kernel, publishes a drift "
        "event on NATS (who did it, what is wanted, what is found), and asks the applier to repair just that.",
    )
    chains = {name: listing.chains_with_rules(gateway, name) for name in listing.own_tables(gateway)}
    name, (chain, *_) = max(chains.items(), key=lambda item: len(item[1]))
    await _damage(story, feed, gateway, "nft", ["nft", "flush", "chain", "inet", name, chain])
    family, rule = next((family, rule) for family in FAMILIES for rule in listing.own_rules(gateway, family))
    await _damage(story, feed, gateway, "rule", ["ip", f"-{family}", "rule", "delete", *rule.split()])
    route = next(line for line in listing.own_routes(gateway) if "nexthop" in line)
    where = route.split(" proto ")[0].removeprefix("unicast ").split()
    table = route.split(" table ")[1].split()[0]
    await _damage(story, feed, gateway, "route", ["ip", "route", "delete", where[0], "table", table])


async def _damage(story: Story, feed: Feed, gateway: str, layer: str, command: list[str]) -> None:
    """Do it, and see it raised, repaired and resolved."""
    before = _own_state(gateway)
    first = len(feed.board.drift)
    story.command(f"ip netns exec {gateway} {' '.join(command)}")
    await asyncio.to_thread(listing.run, gateway, *command)
    for state in ("raised", "resolved"):
        found = await _drift(feed, layer, state, first)
        if found:
            story.event(found)
        story.check(f"{layer}: drift is {state} on NATS", ok=found is not None, detail=found.key if found else f"nothing in {_DRIFT_S:g} s")
    await story.eventually(f"{layer}: the kernel's own listing is as before", lambda: _own_state(gateway) == before, _DRIFT_S)


async def _drift(feed: Feed, layer: str, state: str, first: int) -> DriftEvent | None:
    def match(board: Board) -> DriftEvent | None:
        return next((event for event in board.drift[first:] if (event.layer, event.state) == (layer, state)), None)

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DRIFT_S):
            await feed.until(lambda board: match(board) is not None)
    return match(feed.board)


async def _add_pod(story: Story, feed: Feed, topology: Sequence[Topology]) -> None:
    other = next(item for item in topology if isinstance(item, Pod))
    pod = Pod(name=Name("kiosk"), cluster=other.cluster, node=other.node, addresses=tuple(map(_next, other.addresses)))
    where = " and ".join(pod.addresses)
    story.chapter(
        "The topology changes: one more pod",
        f"A publisher says that {pod.cluster} has a pod {pod.name} at {where}. Nobody restarts anything; the pod is reached "
        "from everywhere as soon as it is there.",
    )
    await feed.publish(pod)
    space = pod_namespace(pod.cluster, pod.name)
    if await story.eventually(f"{pod.cluster}/{pod.name} is there", lambda: space in namespaces.existing(), _CHANGE_S):
        await _in_force(feed, [pod])
        checks = await probe.check(feed.board.as_seen(), feed.board.chosen)
        story.add(check for check in checks if f"{pod.cluster}/{pod.name}" in check.name)


async def _add_tunnel(story: Story, feed: Feed, peering: Peering) -> None:
    wider = msgspec.structs.replace(peering, tunnels=peering.tunnels + 1)
    gateways = _gateways(peering)
    rules = {gateway: [*listing.own_rules(gateway), *listing.own_rules(gateway, IPV6)] for gateway in gateways}
    pods = [item for item in feed.board.objects.values() if isinstance(item, Pod)]
    client, server = (next(pod for pod in pods if pod.cluster == end.cluster) for end in peering.ends)
    walks = (expected(feed.board.as_seen(), client, server, family) for family in FAMILIES)
    walk = next(walk for walk in walks if walk is not None)
    story.chapter(
        f"One more tunnel, under traffic: {peering.tunnels} become {wider.tunnels}",
        f"Flows run from {client.cluster}/{client.name} to {server.cluster}/{server.name} while both gateways get another WireGuard "
        "tunnel. First the devices at both ends, then the routes: not one packet may be lost. And because packets are routed by a mark "
        "and not by the interface they came in by, there is not one policy rule more than before.",
    )
    spaces = pod_namespace(client.cluster, client.name), pod_namespace(server.cluster, server.name)
    async with traffic.running(*spaces, walk.dial) as flows:
        await asyncio.sleep(_TRAFFIC_S)  # flows that run before, during and after the change
        await feed.publish(wider)
        for gateway in gateways:
            await story.eventually(f"{gateway} spreads flows over {wider.tunnels} tunnels", _spreads(gateway, wider.tunnels), _CHANGE_S)
        await _in_force(feed, [wider])
        await asyncio.sleep(_TRAFFIC_S)
    story.check("running flows lost nothing", ok=flows.lost == 0 and flows.sent > 0, detail=f"{flows.lost} of {flows.sent} datagrams lost")
    for gateway in gateways:
        now = [*listing.own_rules(gateway), *listing.own_rules(gateway, IPV6)]
        story.check(f"{gateway} has the policy rules it had", ok=now == rules[gateway], detail=f"{len(now)} rules")
        story.show(now)
    checks = await probe.check(feed.board.as_seen(), feed.board.chosen)
    passed = sum(check.ok for check in checks)
    story.check("all pods still reach each other", ok=passed == len(checks), detail=f"{passed} of {len(checks)} probes")


async def _remove_peering(story: Story, feed: Feed) -> None:
    story.chapter(
        "The peering ends",
        "What was made for it goes, in an order that lets nothing out on the way; what others made stays.",
    )
    peering = next(item for item in feed.board.objects.values() if isinstance(item, Peering))
    hosts = [host_namespace(item.cluster, item.name) for item in feed.board.objects.values() if isinstance(item, Node | Gateway)]
    await feed.delete(peering)
    deadline = time.monotonic() + _CHANGE_S
    for host in sorted(hosts):
        await story.eventually(f"nothing of ours is left on {host}", _clean(host), deadline - time.monotonic(), _leftovers(host))


def _go_down(story: Story, folder: Folder) -> None:
    record = folder.read()
    sockets = [SOCKETS] if record is not None and record.socket_folder else []
    story.chapter("Down", "Services, namespaces and files go; the machine is as it was.")
    with _complaining(story, "the lab goes down"):
        teardown.down(folder)
    left = sorted(namespaces.existing())
    story.check("no namespace is left", ok=not left, detail=", ".join(left))
    files = [path for path in (folder.path, CURRENT, *sockets) if path.exists()]
    story.check("no file is left", ok=not files, detail=", ".join(map(str, files)))


async def _in_force(feed: Feed, wanted: Sequence[Topology]) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_CHANGE_S):
            await readiness.until_in_force(feed, wanted, lambda _: None)


def _gateways(peering: Peering) -> list[str]:
    return [host_namespace(end.cluster, end.gateway) for end in peering.ends]


def _own_state(host: str) -> list[str]:
    """All that is ours in a host's kernel, in words that do not change by themselves."""
    tables = [listing.table(host, "inet", name) for name in listing.own_tables(host)]
    return [
        *tables,
        *(rule for family in FAMILIES for rule in listing.own_rules(host, family)),
        *listing.own_routes(host),
        *listing.own_links(host),
    ]


def _spreads(gateway: str, tunnels: int) -> Callable[[], bool]:
    return lambda: any(route.count("nexthop ") == tunnels for route in listing.own_routes(gateway))


def _clean(host: str) -> Callable[[], bool]:
    return lambda: not listing.leftovers(host)


def _leftovers(host: str) -> Callable[[], str]:
    return lambda: "; ".join(listing.leftovers(host))


def _next(address: Address) -> Address:
    return Address(ipaddress.ip_address(address) + 1)


@contextlib.contextmanager
def _complaining(story: Story, name: str) -> Iterator[None]:
    """Turn an error into a failed check."""
    try:
        yield
    except* MeshmarkError as group:
        for error in _leaves(group):
            story.check(name, ok=False, detail=str(error))


def _leaves(group: BaseExceptionGroup[MeshmarkError]) -> Iterator[MeshmarkError]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM ends the story as Ctrl-C does: by way of the teardown."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
