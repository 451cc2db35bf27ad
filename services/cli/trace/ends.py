"""The two ends of a flow, and what is asked of which host so that every step between them is seen. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec import Struct
from msgspec.structs import replace

from schemas.commands import TraceFlow, TraceProtocol
from schemas.flow import FlowEnd, FlowEvent
from schemas.host_objects import GeneveLink, VxlanLink, WireguardLink, WireguardPeer
from schemas.topology import EgressPolicy, Gateway, IpMapping, Node, Pod
from schemas.values import FAMILIES, Address
from services.auditor.trace.trails import Trail, Way, trails
from services.cli.hosts import near
from services.planner import egress, mesh
from services.planner.allocate import Allocations
from services.planner.compile import compile_host
from services.planner.compile.egress import inside
from services.planner.state import Attachment, HostId, State, seen_prefixes
from services.runtime.errors import Permanent, Transient


class End(Struct, frozen=True):
    """One end of a flow. `host` is where it is, None for somebody outside of all clusters. `known` says who it is, for people.

    `addresses` are its own, `seen` those by which the other end knows it; of these, `shared` are of nodes that let it out, and theirs, too.
    """

    name: str
    known: FlowEnd
    host: HostId | None
    addresses: tuple[Address, ...]
    seen: tuple[Address, ...] = ()
    shared: tuple[Address, ...] = ()

    def has(self, address: str) -> bool:
        """Whether it is this end's."""
        return address in self.addresses or address in self.seen

    def is_told_apart(self, *addresses: str) -> bool:
        """Whether one of them is nobody else's; always where it shares none."""
        return not self.shared or any(address in self.addresses for address in addresses)


class Session(Struct, frozen=True):
    """A flow between two ends, and what each host on its way is asked to tell of, in the order of the way."""

    source: End
    destination: End
    hosts: dict[HostId, TraceFlow]

    @property
    def route(self) -> tuple[str, ...]:
        """The hosts on the way, as events call them."""
        return tuple(map(str, self.hosts))

    def ways(self, event: FlowEvent) -> tuple[Way, ...]:
        """Which way a packet of the flow may go, by where it comes from and where it ends, whatever is translated; none for any other."""
        if event.ip is None:
            return ()
        source, destination = event.ip.source, event.ip.destination_xlated or event.ip.destination
        forward = self.source.has(source) and self.destination.has(destination)
        reply = self.destination.has(source) and self.source.has(destination)
        found: tuple[tuple[bool, Way], ...] = ((forward, "forward"), (reply, "reply"))
        return tuple(way for holds, way in found if holds)

    def trails(self, events: Iterable[FlowEvent]) -> list[Trail]:
        """The flow's packets, in the order of time.

        What has the address of a node that lets pods out and nothing else is what that node says itself: a packet of the flow is seen
        there with its own address, too.
        """
        return [trail for trail in trails(events, self.ways, self.route) if any(map(self._is_surely_its, trail.seen))]

    def _is_surely_its(self, event: FlowEvent) -> bool:
        if event.ip is None:
            return False
        addresses = (event.ip.source, event.ip.source_xlated, event.ip.destination, event.ip.destination_xlated)
        return self.source.is_told_apart(*addresses) and self.destination.is_told_apart(*addresses)


class Only(Struct, frozen=True):
    """Which packets between the two ends are meant: of these protocols, from or to these ports; empty ones are any.

    One of `sample` packets is told of.
    """

    protocols: tuple[TraceProtocol, ...] = ()
    ports: tuple[int, ...] = ()
    sample: int = 1


_ANY = Only()


def session(
    state: State,
    allocations: Allocations,
    names: tuple[str, str],
    cluster: str | None,
    seconds: int,
    *,
    only: Only = _ANY,
    services: Iterable[Address] = (),
) -> Session:
    """The flow between two ends, as they are called: ``cluster/pod``, ``cluster/node``, or an address.

    Permanent says what is wrong with a name, Transient what of the topology came or went as it was read. With `cluster`, names are of it,
    and addresses are looked for there alone. By `services` the first end may dial the second: somebody else translates them on its host.
    """
    source, destination = names
    if cluster is not None and cluster not in state.clusters:
        msg = f"no cluster {cluster!r}; {near(cluster, sorted(state.clusters))}"
        raise Permanent(msg)
    for name, what in _lacking(state, allocations):
        msg = f"{name} has no {what} yet, or no more: the topology changes; trace again in a moment"
        raise Transient(msg)
    ends = [_end(state, allocations, name, cluster) for name in names]
    if {*ends[0].addresses} & {*ends[1].addresses} and ends[0].host == ends[1].host:
        msg = f"{source} and {destination} are the same end; give two"
        raise Permanent(msg)
    attachments = _between(state, *ends)
    exits = _exits(state, allocations, *ends)
    ends = [_let_out(_also_seen(end, _seen(state, end, attachments)), exits.values()) for end in ends]
    ends[1] = _also_seen(ends[1], services)
    between = (*(each.host for each in attachments), *exits)
    hosts = [host for host in (ends[0].host, *between, ends[1].host) if host is not None]
    if not hosts:
        msg = f"neither {source} nor {destination} is in a cluster; give a pod or node, as rome/shop, or one's address"
        raise Permanent(msg)
    flow = tuple(dict.fromkeys(address for end in ends for address in (*end.addresses, *end.seen)))
    hosts = list(dict.fromkeys(hosts))
    ports, overlay_ports, places = _held(state, allocations, hosts)
    outer = tuple(dict.fromkeys((*_outer(state, hosts), *sorted(places))))
    every, overlays = tuple(sorted(ports | overlay_ports)), tuple(sorted(overlay_ports))
    wish = TraceFlow(flow, outer, every, seconds, only.protocols, only.ports, only.sample, overlays)
    return Session(ends[0], ends[1], dict.fromkeys(hosts, wish))


def _lacking(state: State, allocations: Allocations) -> Iterator[tuple[str, str]]:
    """What is in the topology without what plans of it need: the two are read one after the other."""
    for item in state.objects.values():
        match item:
            case Node() | Gateway():
                if HostId(item.cluster, item.name) not in allocations.numbers:
                    yield f"{item.cluster}/{item.name}", "number"
            case EgressPolicy():
                for name in sorted(egress.exits(allocations.way(state, item), item)):
                    if HostId(item.cluster, name) not in allocations.slots:
                        yield f"{item.cluster}/{name}", "slot"
            case IpMapping(external=None):
                if (item.cluster, item.name) not in allocations.externals:
                    yield item.ref, "external address"


def _end(state: State, allocations: Allocations, name: str, cluster: str | None) -> End:
    try:
        address = Address.parse(name)
    except ValueError:
        return _named(state, allocations, name, cluster)
    for home in [cluster] if cluster else sorted(state.clusters):
        if (found := owner(state, home, address)) is not None:
            return found
    return End(name, FlowEnd(), None, (address,))


def owner(state: State, cluster: str, address: Address) -> End | None:
    """Whose address it is in a cluster: a pod's, a host's, or some pod's that no Endpoint tells of."""
    pod = next((pod for pod in state.pods[cluster].values() if address in pod.addresses), None)
    if pod is not None:
        return End(f"{cluster}/{pod.name}", _pod(pod), HostId(cluster, pod.node), (address,))
    host = state.host_with(cluster, address)
    if host is not None:
        return End(f"{cluster}/{host.name}", _host(host), HostId(cluster, host.name), (address,))
    node = next((node for node in state.nodes[cluster].values() if any(prefix.covers(address) for prefix in node.pod_prefixes)), None)
    if node is None:
        return None
    return End(address, FlowEnd(cluster_name=cluster, node_name=f"{cluster}/{node.name}"), HostId(cluster, node.name), (address,))


def _named(state: State, allocations: Allocations, name: str, cluster: str | None) -> End:
    home, slash, rest = name.partition("/")
    if not slash and cluster:
        home, rest = cluster, name
    rest = rest.removeprefix("pod/")  # as the lab writes it
    pod, host = state.pods[home].get(rest), state.host(HostId(home, rest)) if rest else None
    if pod is not None:
        return End(f"{home}/{rest}", _pod(pod), HostId(home, pod.node), pod.addresses)
    if host is not None:
        own = tuple(_senders(state, allocations, host)) if isinstance(host, Node) else ()
        return End(f"{home}/{rest}", _host(host), HostId(home, host.name), (*host.addresses, *own))
    known = sorted(f"{of}/{each}" for of in state.clusters for each in (*state.pods[of], *state.nodes[of], *state.gateways[of]))
    msg = f"no pod, host or address {name!r}; {near(name, known)}"
    raise Permanent(msg)


def _senders(state: State, allocations: Allocations, node: Node) -> Iterator[Address]:
    """By which addresses a node itself sends to pods, where that is not the underlay's."""
    cluster, number = state.clusters[node.cluster], allocations.number(HostId(node.cluster, node.name))
    found = (mesh.source(cluster, node, number, family) for family in FAMILIES)
    return (address for address in found if address is not None)


def _pod(pod: Pod) -> FlowEnd:
    return FlowEnd(pod.cluster, f"{pod.cluster}/{pod.name}", f"{pod.cluster}/{pod.node}")


def _host(host: Node | Gateway) -> FlowEnd:
    return FlowEnd(host.cluster, node_name=f"{host.cluster}/{host.name}")


def _between(state: State, here: End, there: End) -> tuple[Attachment, ...]:
    """Both ends of the peering between two clusters; nothing inside one, or to somebody outside."""
    if here.host is None or there.host is None or here.host.cluster == there.host.cluster:
        return ()
    for attachment in state.attachments[here.host.cluster].values():
        if attachment.far.cluster == there.host.cluster:
            far = state.attachments[there.host.cluster].values()
            return (attachment, *(other for other in far if other.peering == attachment.peering))
    msg = f"no peering joins {here.host.cluster} and {there.host.cluster}"
    raise Permanent(msg)


def _exits(state: State, allocations: Allocations, here: End, there: End) -> dict[HostId, Address]:
    """The nodes that let a pod out to somebody outside, with the address as which it leaves: those of policies, in mid-move all of them.

    Without a policy it is its own node, which mostly gives it its address.
    """
    pod, outside = (here, there) if there.host is None else (there, here)
    if pod.host is None or outside.host is not None:
        return {}
    cluster, (to,) = pod.host.cluster, outside.addresses
    seen = [shown for attachment in state.attachments[cluster].values() for shown, _ in seen_prefixes(state, attachment)]
    if any(prefix.covers(to) for prefix in inside(state.clusters[cluster], seen)):
        return {}
    node = state.nodes[cluster].get(pod.host.name)
    if node is None:
        return {}
    nodes_own = {*node.addresses, *_senders(state, allocations, node)}  # some are among its pods', but led nowhere
    led = [address for address in pod.addresses if address.family == to.family and address not in nodes_own]
    found: dict[HostId, Address] = {}
    for item in state.egress[cluster].values():
        is_chosen = any(prefix.covers(address) for prefix in item.pods for address in led)
        if is_chosen and (not item.destinations or any(prefix.covers(to) for prefix in item.destinations)):
            for name in sorted(egress.exits(allocations.way(state, item), item)):
                if address := egress.source(state.nodes[cluster][name], item, to.family):
                    found[HostId(cluster, name)] = address
    own = next((address for address in node.addresses if address.family == to.family), None)
    if led and not found and own is not None:
        found[pod.host] = own
    return found


def _seen(state: State, end: End, attachments: Iterable[Attachment]) -> list[Address]:
    """The addresses by which the other cluster knows an end."""
    return [
        real.translate(address, shown)
        for attachment in attachments
        if end.host is not None and attachment.far.cluster == end.host.cluster
        for shown, real in seen_prefixes(state, attachment)
        for address in end.addresses
        if real.covers(address)
    ]


def _also_seen(end: End, addresses: Iterable[Address]) -> End:
    """The end with more addresses by which the other one knows it."""
    found = dict.fromkeys((*end.seen, *addresses))
    return replace(end, seen=tuple(each for each in found if each not in end.addresses))


def _let_out(end: End, addresses: Iterable[Address]) -> End:
    """The end as nodes let it out: seen by their addresses, if it is in a cluster."""
    return replace(_also_seen(end, addresses), shared=tuple(addresses)) if end.host is not None else end


def _outer(state: State, hosts: Iterable[HostId]) -> Iterator[Address]:
    """Where outer packets come from and go to: hosts, and where others find them."""
    for host in hosts:
        known = state.host(host)
        yield from known.addresses if known is not None else ()
        if isinstance(known, Node) and known.endpoint is not None and (address := known.endpoint.address) is not None:
            yield address


def _held(state: State, allocations: Allocations, hosts: Iterable[HostId]) -> tuple[set[int], set[int], set[Address]]:
    """The UDP ports of WireGuard's and of overlays' outer packets, as the hosts' plans have them, and where gateways find each other."""
    ports: set[int] = set()
    overlay_ports: set[int] = set()
    places: set[Address] = set()
    for host in hosts:
        is_gateway = isinstance(state.host(host), Gateway)
        for item in compile_host(state, allocations, host).objects().values():
            match item:
                case WireguardLink():
                    ports.add(item.listen_port)
                case VxlanLink() | GeneveLink():
                    overlay_ports.add(item.port)
                case WireguardPeer(endpoint=endpoint) if endpoint is not None:
                    ports.add(endpoint.port)
                    if is_gateway and endpoint.address is not None:
                        places.add(endpoint.address)
    return ports, overlay_ports, places
