"""A layout in the kernel: the underlay's router, hosts on its bridge, pods on their nodes.

The wiring is what a data centre and a CNI would have done before meshmark comes: addresses, routes within a cluster, and the CNI's
masquerading in a table of its own (``ip lab-cni``). meshmark never touches any of it; the lab never touches what is meshmark's.
"""

from __future__ import annotations

from collections.abc import Iterable

from schemas.values import IPV4, IPV6, Address, Prefix
from services.cli.lab import namespaces
from services.cli.lab.layout import BROKER, ROUTER, UNDERLAY, Host, Layout, PodSpace

_NO_IPV6 = (
    # Where nothing speaks IPv6; without this each link sends router solicitations and multicast reports into every capture.
    ("ipv6/conf/all/disable_ipv6", "1"),
    ("ipv6/conf/default/disable_ipv6", "1"),
)
_IPV6 = (
    ("ipv6/conf/all/disable_ipv6", "0"),
    ("ipv6/conf/default/disable_ipv6", "0"),
    # Addresses of use at once, and none but those that are given.
    ("ipv6/conf/default/accept_dad", "0"),
    ("ipv6/conf/default/accept_ra", "0"),
    ("ipv6/conf/default/router_solicitations", "0"),
    # The router sends hosts of its one link to each other, and they stay with the router.
    ("ipv6/conf/default/accept_redirects", "0"),
)
_QUIET = (
    # A new namespace inherits these from the machine, and the lab is to be the same everywhere.
    ("ipv4/conf/all/rp_filter", "0"),
    ("ipv4/conf/default/rp_filter", "0"),
    ("ipv4/conf/all/accept_redirects", "0"),
    ("ipv4/conf/default/accept_redirects", "0"),
    ("ipv4/conf/all/send_redirects", "0"),
    ("ipv4/conf/default/send_redirects", "0"),
)
_NFT_FAMILY = {IPV4: "ip", IPV6: "ip6"}
_ROUTER_MAC = "02:4d:00:00:00:01"
_FORWARD = (("ipv4/ip_forward", "1"), ("ipv6/conf/all/forwarding", "1"))
_NO_FORWARD = (("ipv4/ip_forward", "0"), ("ipv6/conf/all/forwarding", "0"))


class Wiring:
    """The hosts and pods that are made, and the way from there to another layout. Not safe for two threads at once."""

    def __init__(self) -> None:
        self.made = Layout({}, {})
        self._routes_ipv6 = False

    def make_underlay(self) -> None:
        """The router in the middle: one bridge, one address, a route to each host."""
        namespaces.script([f"netns add {UNDERLAY}"])
        namespaces.set_sysctls(UNDERLAY, (*_NO_IPV6, *_QUIET, *_FORWARD))
        namespaces.script(
            [
                "link set lo up",
                # An address of its own: else it is the lowest of the ports' and changes under the hosts' feet as hosts come and go.
                f"link add br0 address {_ROUTER_MAC} type bridge stp_state 0 forward_delay 0 mcast_snooping 0",
                f"address add {ROUTER[IPV4]}/32 dev br0",
                "link set br0 up",
            ],
            UNDERLAY,
        )

    def turn_into(self, wanted: Layout) -> None:
        """Make, change and remove until the kernel holds `wanted`. After a failure, what was made is known, and a second call goes on."""
        made = self.made
        for pod in [pod for name, pod in made.pods.items() if wanted.pods.get(name) != pod or _remade(made, wanted, pod.node)]:
            self._remove_pod(pod)
        for host in [host for name, host in made.hosts.items() if _remade(made, wanted, name)]:
            self._remove_host(host)
        for name, host in wanted.hosts.items():
            if name not in made.hosts:
                self._make_host(host)
        # Routes before pods: a pod that comes back to its node is not to find the route by which the node followed it elsewhere.
        for name, host in wanted.hosts.items():
            if made.hosts[name] != host:
                self._set_routes(made.hosts[name], host)
        for name, pod in wanted.pods.items():
            if name not in made.pods:
                self._make_pod(pod, wanted.hosts[pod.node])

    def _route_ipv6(self) -> None:
        """Let the underlay's router speak IPv6, on its own link alone."""
        if not self._routes_ipv6:
            quiet = (name.replace("/default/", "/br0/") for name, _ in _IPV6 if "/default/" in name)
            namespaces.set_sysctls(UNDERLAY, ((name, "0") for name in quiet))
            namespaces.script([f"address add {ROUTER[IPV6]}/64 dev br0 nodad", f"address add {BROKER[IPV6]}/128 dev br0 nodad"], UNDERLAY)
            self._routes_ipv6 = True

    def _make_host(self, host: Host) -> None:
        namespaces.remove([host.namespace])
        near, far = f"name {host.cable} mtu {host.mtu} netns {UNDERLAY}", f"name {host.uplink} mtu {host.mtu} netns {host.namespace}"
        _make_namespace(host, _FORWARD if host.runs_pods else _NO_FORWARD)
        if host.address(IPV6):
            self._route_ipv6()
        routes = [f"route replace {address.host_prefix} dev br0 proto static" for address in host.addresses]
        namespaces.script([f"link add {near} type veth peer {far}"])
        namespaces.script([f"link set {host.cable} master br0 up", *routes], UNDERLAY)
        namespaces.script(
            [
                "link set lo up",
                *(f"address add {address.host_prefix} dev {host.uplink}" for address in host.addresses),
                f"link set {host.uplink} up",
                *(f"route add default via {ROUTER[address.family]} dev {host.uplink} onlink proto static" for address in host.addresses),
                # What a node has no way to it does not answer for; without IPv4 itself it is still its pods' router.
                *([] if host.address(IPV4) else [f"route add {ROUTER[IPV4]}/32 dev {host.uplink} proto static"]),
            ],
            host.namespace,
        )
        if host.runs_pods:
            namespaces.load_nft(host.namespace, cni_table(host))
        self.made.hosts[host.namespace] = host.machine

    def _remove_host(self, host: Host) -> None:
        del self.made.hosts[host.namespace]
        routes = [f"route delete {address.host_prefix} dev br0" for address in host.addresses]
        # Should it come back, the router is not to send to where it was for half a minute.
        neighbours = [f"neigh flush to {address.host_prefix} dev br0" for address in host.addresses]
        namespaces.script([*routes, *neighbours, f"link delete {host.cable}"], UNDERLAY)
        namespaces.remove([host.namespace])

    def _set_routes(self, made: Host, wanted: Host) -> None:
        lines = [f"route delete {_cni_route(wanted, *route)}" for route in sorted(made.routes - wanted.routes)]
        lines += [f"route add {_cni_route(wanted, *route)}" for route in sorted(wanted.routes - made.routes)]
        namespaces.script(lines, wanted.namespace)
        self.made.hosts[wanted.namespace] = wanted

    def _make_pod(self, pod: PodSpace, node: Host) -> None:
        namespaces.remove([pod.namespace])
        near, far = f"name {pod.cable} mtu {pod.mtu} netns {pod.node}", f"name eth0 mtu {pod.mtu} netns {pod.namespace}"
        _make_namespace(pod, _NO_FORWARD)
        namespaces.script([f"link add {near} type veth peer {far}"])
        # The node answers for the router's address as Calico does: without holding it, since on the uplink it is another machine's.
        namespaces.set_sysctls(pod.node, ((f"ipv4/conf/{pod.cable}/proxy_arp", "1"), (f"ipv4/neigh/{pod.cable}/proxy_delay", "0")))
        namespaces.script(
            [
                "link set lo up",
                *(f"address add {address.host_prefix} dev eth0" for address in pod.addresses),
                "link set eth0 up",
                *(f"route add default via {ROUTER[family]} dev eth0 onlink" for family in sorted({item.family for item in pod.addresses})),
            ],
            pod.namespace,
        )
        namespaces.script(
            [
                f"link set {pod.cable} up",
                *([f"address add {ROUTER[IPV6]}/64 dev {pod.cable} nodad"] if pod.speaks_ipv6 else []),
                *(f"route add {address.host_prefix} dev {pod.cable}{_source(node, address)} proto static" for address in pod.addresses),
            ],
            pod.node,
        )
        self.made.pods[pod.namespace] = pod

    def _remove_pod(self, pod: PodSpace) -> None:
        del self.made.pods[pod.namespace]
        namespaces.script([f"link delete {pod.cable}"], pod.node)
        namespaces.remove([pod.namespace])


def cni_table(host: Host) -> str:
    """The tables that the lab's CNI keeps on a node: pods that leave the cluster take the node's address."""
    prefixes = [(word, [prefix for prefix in host.pod_prefixes if prefix.family == family]) for family, word in _NFT_FAMILY.items()]
    return "".join(_masquerading(word, ", ".join(pods), host.uplink) for word, pods in prefixes if pods)


def _masquerading(family: str, pods: str, uplink: str) -> str:
    return f"""\
table {family} lab-cni {{
    chain postrouting {{
        type nat hook postrouting priority srcnat; policy accept;
        {family} saddr {{ {pods} }} {family} daddr != {{ {pods} }} oifname "{uplink}" masquerade
    }}
}}
"""


def _make_namespace(item: Host | PodSpace, forwarding: Iterable[tuple[str, str]]) -> None:
    """A namespace whose links to come are what the lab's are."""
    namespaces.script([f"netns add {item.namespace}"])
    namespaces.set_sysctls(item.namespace, (*(_IPV6 if item.speaks_ipv6 else _NO_IPV6), *_QUIET, *forwarding))


def _source(node: Host, address: Address) -> str:
    """The node's own address of the family, where it has one, for what it says itself to its pods."""
    own = node.address(address.family)
    return f" src {own}" if own else ""


def _cni_route(host: Host, prefix: Prefix, node: Address) -> str:
    return f"{prefix} via {node} dev {host.uplink} onlink proto static"


def _remade(made: Layout, wanted: Layout, namespace: str) -> bool:
    """Whether a host that is there goes away, if only to come back different."""
    host, other = made.hosts.get(namespace), wanted.hosts.get(namespace)
    return host is not None and (other is None or host.machine != other.machine)
