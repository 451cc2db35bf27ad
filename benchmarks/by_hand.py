"""What somebody would set up by hand where the lab has meshmark: WireGuard, routes and VXLAN links; no rules.

Hosts and pods are wired as the lab's own are (``lab.standing``), under names of their own; the WireGuard is the lab's as well.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from msgspec import Struct

from schemas.host_objects import WireguardLink, WireguardPeer
from schemas.topology import Cluster, Gateway, Node, Pod, Topology
from schemas.values import Address, Endpoint, Key, Name, Prefix
from services.cli.lab import namespaces
from services.cli.lab.layout import host_namespace
from services.kernel.linux import LinuxKernel
from services.kernel.transaction import Change

T = TypeVar("T")

_INTERNAL = Prefix("10.254.0.0/16")
"""A cluster has some; nothing is made of it."""
_PORT = 52000
_VNI, _VXLAN_PORT = 99, 4790
EVERYTHING = Prefix("0.0.0.0/0")


class End(Struct, frozen=True):
    """A host that is an end of tunnels: its namespace, its underlay address, and what is behind it."""

    namespace: str
    address: Address
    allowed: Prefix


class Site(Struct, frozen=True):
    """One cluster by hand: `hosts` are underlay addresses by name, of nodes but for ``gateway``; `pods` are addresses by node."""

    name: str
    pod_prefix: Prefix
    hosts: dict[str, Address]
    pods: dict[str, Address]

    def objects(self) -> Iterator[Topology]:
        """What it is wired by."""
        cluster = Name(self.name)
        yield Cluster(name=cluster, pod_prefixes=(self.pod_prefix,), internal_prefixes=(_INTERNAL,), mtu=1500)
        for name, address in self.hosts.items():
            if name == "gateway":
                yield Gateway(name=Name(name), cluster=cluster, addresses=(address,))
            else:
                yield Node(name=Name(name), cluster=cluster, addresses=(address,), pod_prefixes=(self.node_prefix(name),))
        for node, address in self.pods.items():
            yield Pod(name=Name(f"pod-{node}"), cluster=cluster, node=Name(node), addresses=(address,))

    def node_prefix(self, node: str) -> Prefix:
        """The /24 of the node's pod."""
        return Prefix(f"{self.pods[node].rpartition('.')[0]}.0/24")

    def namespace(self, host: str) -> str:
        return host_namespace(self.name, host)


@contextlib.contextmanager
def tunnels(ends: Sequence[End], count: int, mtu: int) -> Iterator[tuple[list[str], list[str]]]:
    """So many WireGuard tunnels between two ends; the names of the devices of each, which have no addresses and no routes yet."""
    with TemporaryDirectory(prefix="meshmark-bench-") as folder, contextlib.ExitStack() as stack:
        folders = [Path(folder, end.namespace) for end in ends]
        for each in folders:
            each.mkdir()
        keys = [_with_kernel(end.namespace, place, lambda kernel: kernel.public_key()) for end, place in zip(ends, folders, strict=True)]
        made: tuple[list[str], list[str]] = ([], [])
        for side, (end, place) in enumerate(zip(ends, folders, strict=True)):
            links = [WireguardLink(f"mb{os.getpid() % 46656:x}.{side}{number}", _PORT + number, mtu) for number in range(count)]
            stack.callback(_with_kernel, end.namespace, place, lambda kernel, links=links: _remove(kernel, links))
            _with_kernel(end.namespace, place, lambda kernel, links=links, side=side: _make(kernel, links, ends[1 - side], keys[1 - side]))  # type: ignore[misc]
            made[side].extend(link.name for link in links)
        yield made


def _make(kernel: LinuxKernel, links: Sequence[WireguardLink], far: End, key: Key) -> None:
    for link in links:
        kernel.write(Change(None, link))
        kernel.write(Change(None, WireguardPeer(link.name, key, Endpoint.at(far.address, link.listen_port), (far.allowed,))))


def _remove(kernel: LinuxKernel, links: Sequence[WireguardLink]) -> None:
    for link in links:
        kernel.write(Change(link, None))


def _with_kernel(namespace: str, folder: Path, work: Callable[[LinuxKernel], T]) -> T:
    def run() -> T:
        kernel = LinuxKernel(folder)
        try:
            return work(kernel)
        finally:
            kernel.close()

    return namespaces.inside(namespace, run)


def overlay(site: Site, node: str, remote: Prefix, links: Sequence[str], gateway_mtu: int) -> None:
    """A VXLAN link between a node and its gateway, the way of both to `remote`, the gateway's by `links`, and its way to the pods."""
    ends = {name: site.hosts[name] for name in (node, "gateway")}
    inner = {node: "10.255.0.1", "gateway": "10.255.0.2"}
    for here, there in ((node, "gateway"), ("gateway", node)):
        link = f"link add mbo type vxlan id {_VNI} local {ends[here]} remote {ends[there]} dstport {_VXLAN_PORT} dev eth0 noudpcsum"
        address = f"address add {inner[here]} peer {inner[there]} dev mbo"
        namespaces.script([link, f"link set mbo mtu {gateway_mtu} up", address], site.namespace(here))
    hops = " ".join(f"nexthop dev {link}" for link in links)
    namespaces.script([f"route add {remote} via {inner['gateway']} dev mbo"], site.namespace(node))
    namespaces.script(
        [f"route replace {remote} {hops}", f"route add {site.node_prefix(node)} via {inner[node]} dev mbo"], site.namespace("gateway")
    )
    namespaces.set_sysctls(site.namespace("gateway"), (("ipv4/ip_forward", "1"), ("ipv4/fib_multipath_hash_policy", "1")))


def remove_overlay(site: Site, node: str) -> None:
    """Take the links away, and with them the routes; those of the gateway go with its tunnels."""
    for host in (node, "gateway"):
        namespaces.script(["link delete mbo"], site.namespace(host))
