"""What the lab makes for a topology: namespaces, their addresses and routes, as values.

One namespace ``mm.<cluster>.<host>`` per Node and Gateway, one ``mm.<cluster>.pod.<name>`` per Endpoint. Equality of two
values is equality of what has to exist, so that a new topology is met by comparing layouts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable

from msgspec import Struct
from msgspec.structs import replace

from schemas.topology import Cluster, Gateway, Node, Pod, Topology
from schemas.values import IPV4, IPV6, Address, Family, Name, Prefix

PREFIX = "mm."
"""Every network namespace of the lab begins so, and none else does."""
UNDERLAY = "mm.underlay"
ROUTER = {IPV4: Address("169.254.1.1"), IPV6: Address("fe80::1")}
"""The underlay's router as each host sees it, and each node as its pods see it (link-local, as in many CNIs), by family."""
BROKER = {IPV4: ROUTER[IPV4], IPV6: Address("fd6d:6573:6800::1")}
"""Where hosts find the broker, which is in the router's namespace: a link-local address would need a zone."""


class Host(Struct, frozen=True):
    """A node or gateway. `routes` are the CNI's: which pods of the cluster are behind which other node.

    `speaks_ipv6` is False where nothing ever does: such a host is spared what IPv6 says by itself.
    """

    cluster: Name
    name: Name
    addresses: tuple[Address, ...]
    uplink: Name
    mtu: int
    pod_prefixes: tuple[Prefix, ...] = ()
    routes: frozenset[tuple[Prefix, Address]] = frozenset()
    runs_pods: bool = False
    speaks_ipv6: bool = False

    @property
    def namespace(self) -> str:
        return host_namespace(self.cluster, self.name)

    @property
    def cable(self) -> str:
        """The underlay's end of the host's uplink."""
        return interface("host", self.namespace)

    @property
    def machine(self) -> Host:
        """The host without its routes: what cannot change but by making the host anew."""
        return replace(self, routes=frozenset())

    def address(self, family: Family) -> Address | None:
        """Its underlay address of a family, if it has one."""
        return next((address for address in self.addresses if address.family == family), None)


class PodSpace(Struct, frozen=True):
    """A pod: its addresses, and the namespace of the node that it hangs on."""

    cluster: Name
    name: Name
    node: str
    addresses: tuple[Address, ...]
    mtu: int

    @property
    def speaks_ipv6(self) -> bool:
        return any(address.family == IPV6 for address in self.addresses)

    @property
    def namespace(self) -> str:
        return pod_namespace(self.cluster, self.name)

    @property
    def cable(self) -> str:
        """The node's end of the pod's link."""
        return interface("pod", self.namespace)


class Layout(Struct, frozen=True):
    """All hosts and pods, by namespace. `unplaced` says what has no place in the lab, and why."""

    hosts: dict[str, Host]
    pods: dict[str, PodSpace]
    unplaced: tuple[str, ...] = ()


def host_namespace(cluster: str, host: str) -> str:
    return f"{PREFIX}{cluster}.{host}"


def pod_namespace(cluster: str, name: str) -> str:
    return f"{PREFIX}{cluster}.pod.{name}"


def find_namespace(place: str, known: Collection[str]) -> str | None:
    """The one of these namespaces that somebody means by CLUSTER/HOST, CLUSTER/pod/POD, or CLUSTER/POD where no host is called so.

    A dot may stand for each slash. None when there is none.
    """
    cluster, _, name = place.partition("/" if "/" in place else ".")
    meant = (f"{PREFIX}{place.replace('/', '.')}", pod_namespace(cluster, name.replace("/", ".")))
    return next((namespace for namespace in meant if namespace in known), None)


def spelled(namespace: str) -> str:
    """A namespace as people name the host or pod that it is of."""
    cluster, dot, name = namespace.removeprefix(PREFIX).partition(".")
    return f"{cluster}/pod/{pod}" if (pod := name.removeprefix("pod.")) != name else f"{cluster}{dot and '/'}{name}"


def interface(word: str, namespace: str) -> str:
    """An interface name of at most 15 bytes that belongs to `namespace` alone."""
    return f"{word}{hashlib.blake2b(namespace.encode(), digest_size=5).hexdigest()}"


def layout(objects: Iterable[Topology]) -> Layout:
    """Place every Node, Gateway and Endpoint; what its cluster or node lacks, or whose namespace is taken, stays unplaced."""
    items = sorted(objects, key=lambda item: item.ref)
    clusters = {item.name: item for item in items if isinstance(item, Cluster)}
    nodes = {(item.cluster, item.name): item for item in items if isinstance(item, Node)}
    pods = [item for item in items if isinstance(item, Pod)]
    hosts: dict[str, Host] = {}
    spaces: dict[str, PodSpace] = {}
    unplaced = []
    for item in items:
        if not isinstance(item, Node | Gateway | Pod):
            continue
        cluster = clusters.get(item.cluster)
        namespace = pod_namespace(item.cluster, item.name) if isinstance(item, Pod) else host_namespace(item.cluster, item.name)
        if cluster is None:
            unplaced.append(f"{item.ref}: cluster {item.cluster} is not there")
        elif isinstance(item, Pod) and (item.cluster, item.node) not in nodes:
            unplaced.append(f"{item.ref}: node {item.node} is not there")
        elif namespace in hosts or namespace in spaces or namespace == UNDERLAY:
            unplaced.append(f"{item.ref}: the namespace {namespace} is taken")
        elif isinstance(item, Pod):
            node = host_namespace(item.cluster, item.node)
            spaces[namespace] = PodSpace(item.cluster, item.name, node, item.addresses, cluster.mtu)
        else:
            hosts[namespace] = _host(item, cluster, nodes.values(), pods)
    return Layout(hosts, spaces, tuple(unplaced))


def _host(item: Node | Gateway, cluster: Cluster, nodes: Iterable[Node], pods: Iterable[Pod]) -> Host:
    speaks_ipv6 = any(value.family == IPV6 for value in [*(address.host_prefix for address in item.addresses), *cluster.internal_prefixes])
    made = Host(item.cluster, item.name, item.addresses, item.uplink, cluster.mtu, speaks_ipv6=speaks_ipv6)
    if isinstance(item, Gateway):
        return made
    routes = set()
    for node in nodes:
        if node.cluster != item.cluster or node.name == item.name:
            continue
        strays = (address.host_prefix for pod in pods if (pod.cluster, pod.node) == (node.cluster, node.name) for address in pod.addresses)
        for prefix in (*node.pod_prefixes, *_outside(strays, node.pod_prefixes)):
            # Without an underlay of its family, a prefix is reached by nobody but peers.
            routes |= {(prefix, address) for address in node.addresses if address.family == prefix.family and made.address(prefix.family)}
    return replace(made, pod_prefixes=cluster.pod_prefixes, routes=frozenset(routes), runs_pods=True)


def _outside(prefixes: Iterable[Prefix], covering: tuple[Prefix, ...]) -> list[Prefix]:
    return [prefix for prefix in prefixes if not any(cover.contains(prefix) for cover in covering)]
