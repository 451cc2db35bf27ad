"""A node's part of the mesh overlay: links to all other nodes of the cluster, and the routes to their pods.

VXLAN: one device for each family of outer packets, and for each node a planned forwarding entry and neighbours; nobody is asked for
anything. Geneve has no forwarding entries: a link for each node. Ethernet addresses are made of nodes' numbers, so that a device that is
made again is found at once. In overlay routing, what is for pods leaves by the overlay only: the table, which all packets look up, and
main hold `unreachable` for their prefixes, and let the node's own pods through. In native routing, the overlay is there where pods leave
the cluster through other nodes (``compile.egress``), and only packets of these look the table up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from schemas.host_objects import (
    MAIN_TABLE,
    FdbEntry,
    GeneveLink,
    LinkAddress,
    Neighbour,
    NextHop,
    PlanObject,
    PolicyRule,
    Route,
    Sysctl,
    VxlanLink,
)
from schemas.topology import Cluster, Node
from schemas.values import Address, Family
from services.planner import layout, mesh, names
from services.planner.compile.gateway import guard
from services.planner.compile.words import FORWARDING
from services.planner.families import overlay_address


def base(cluster: Cluster, node: Node, number: int) -> Iterator[PlanObject]:
    """What does not depend on other nodes, in overlay routing."""
    for family in mesh.pod_families(cluster):
        yield Sysctl(FORWARDING[family], "1")
        yield PolicyRule(layout.RULE_MESH, layout.MESH_TABLE, family=family)
    yield from (guard(MAIN_TABLE, prefix) for prefix in cluster.pod_prefixes)
    yield from links(cluster, node, number)


def links(cluster: Cluster, node: Node, number: int) -> Iterator[PlanObject]:
    """The devices that lead to all nodes, and the table by which pods are found there, whoever looks it up."""
    yield from (guard(layout.MESH_TABLE, prefix) for prefix in cluster.pod_prefixes)
    yield from (Route(layout.MESH_TABLE, prefix, "throw") for prefix in node.pod_prefixes)
    if cluster.overlay == "vxlan":
        for outer in mesh.underlay_families(node):
            link, local = names.mesh_link(outer), mesh.address_of(node, outer)
            assert local is not None, "the family is that of one of its addresses"
            port = layout.OVERLAY_PORT[cluster.overlay]
            yield VxlanLink(link, layout.MESH_VNI, local, None, mesh.mac(number), mesh.overlay_mtu(cluster, node, outer), port)
            yield from _addresses(cluster, link, number)


def node(cluster: Cluster, families: Iterable[Family], there: Node, number: int) -> Iterator[PlanObject]:
    """The way to another node and its pods, for one with underlay addresses of `families`."""
    outer = mesh.outer(families, there)
    link = _link_to(cluster, there, outer)
    far = mesh.address_of(there, outer)
    assert far is not None, "both have an address of the family"
    if cluster.overlay == "vxlan":
        yield FdbEntry(link, mesh.mac(number), far)
    for family in mesh.pod_families(cluster):
        address = overlay_address(cluster, number, family)
        yield Neighbour(link, address, mesh.mac(number))
        yield Route(layout.MESH_TABLE, address.host_prefix, hops=(NextHop(link),))
    for prefix in there.pod_prefixes:
        yield Route(layout.MESH_TABLE, prefix, hops=(_hop(cluster, link, number, prefix.family),))


def link_to(cluster: Cluster, here: Node, there: Node, number: int) -> Iterator[PlanObject]:
    """The Geneve link to another node; `number` is that of the node itself."""
    outer = mesh.outer(mesh.underlay_families(here), there)
    link, far = _link_to(cluster, there, outer), mesh.address_of(there, outer)
    assert far is not None, "both have an address of the family"
    yield GeneveLink(
        link, layout.MESH_VNI, far, mesh.mac(number), mesh.overlay_mtu(cluster, here, outer), layout.OVERLAY_PORT[cluster.overlay]
    )
    yield from _addresses(cluster, link, number)


def pod_here(address: Address) -> Route:
    """The way to a pod of the node itself, at an address outside of its prefixes: not by the overlay."""
    return Route(layout.MESH_TABLE, address.host_prefix, "throw")


def pod_there(cluster: Cluster, families: Iterable[Family], there: Node, number: int, address: Address) -> Route:
    """The way to a pod of another node, at an address outside of its prefixes."""
    link = _link_to(cluster, there, mesh.outer(families, there))
    return Route(layout.MESH_TABLE, address.host_prefix, hops=(_hop(cluster, link, number, address.family),))


def _addresses(cluster: Cluster, link: str, number: int) -> Iterator[LinkAddress]:
    for family in mesh.pod_families(cluster):
        address = overlay_address(cluster, number, family)
        yield LinkAddress(link, address, address.host_prefix.length)


def link_to_node(cluster: Cluster, families: Iterable[Family], there: Node) -> str:
    """Name of the link to another node, for one with underlay addresses of `families`."""
    return _link_to(cluster, there, mesh.outer(families, there))


def _link_to(cluster: Cluster, there: Node, outer: Family) -> str:
    return names.mesh_link_to(there.name) if cluster.overlay == "geneve" else names.mesh_link(outer)


def _hop(cluster: Cluster, link: str, number: int, family: Family) -> NextHop:
    return NextHop(link, overlay_address(cluster, number, family), onlink=True)
