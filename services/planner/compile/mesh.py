"""A node's unit of its cluster's mesh: which parts it has, and what each is made of. A unit of its own, `mesh/<cluster>`.

A part for every other node, one for every policy of what leaves the cluster (``compile.egress``), and one for every pod at an address to
which its node's prefixes do not lead (a roaming pod): so a change of one node costs each host that node's part. The part of a node or pod
is the same on all nodes that see others alike, and is made once for them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from schemas.host_objects import PlanObject, WireguardLink, WireguardPeer
from schemas.plan import Entry, SummedUnit
from schemas.topology import Cluster, EgressPolicy, Node, Overlay, Pod, PublicKey, Topology
from schemas.values import IPV4, Family
from services.planner import mesh, names, rotation
from services.planner.allocate import Allocations
from services.planner.compile import egress, encryption, mesh_overlay, strict, uplinks
from services.planner.egress import exits, is_open
from services.planner.rotation import Turn
from services.planner.state import HostId, State, seen_prefixes


class _View(NamedTuple):
    """What of a node's own decides how it sees others: `is_meant` to encrypt it has the device, and `encrypts` once its key is known.

    `host` is its name where it sees a pod of its own, `link` itself and its number where it has a link of its own to each node, `turn` its
    change of keys. `is_exit` says that it lets pods out of the cluster.
    """

    families: tuple[Family, ...]
    is_meant: bool
    encrypts: bool
    roams: bool
    is_exit: bool
    host: str = ""
    link: tuple[Node, int] | None = None
    turn: Turn | None = None


class _Seat(NamedTuple):
    """A node of a cluster, and how it sees others."""

    cluster: Cluster
    node: Node
    view: _View


class Touched(NamedTuple):
    """What a change touches: these parts on every node of its cluster, and all parts of these nodes."""

    sources: set[str]
    nodes: set[str]


class Meshes:
    """The parts of nodes' units. Keeps what it made until something that it was made of is said to have changed (``touched``)."""

    def __init__(self, state: State, allocations: Allocations) -> None:
        self._state = state
        self._allocations = allocations
        self._made: dict[str, dict[str, dict[_View, SummedUnit]]] = defaultdict(lambda: defaultdict(dict))
        """By cluster, source and view."""
        self._roaming: dict[str, set[str]] = {}
        """Pods that roam, by cluster; found when first asked for."""
        self._exits: dict[str, dict[str, tuple[str, ...]]] = {}
        """The nodes that let pods out, with the policies by which they do, by cluster; found when first asked for."""

    def touched(self, item: Topology) -> Touched:
        """Forget the parts that a changed object is in, and say which. The state is what it is after the change."""
        if isinstance(item, Cluster):
            self._made.pop(item.name, None)
            self._roaming.pop(item.name, None)
            return Touched(set(), set())
        sources, nodes = self._outwards(item)
        match item:
            case Node():
                sources |= {item.ref, *self._moved(item)}
            case PublicKey():
                node = self._state.nodes[item.cluster].get(item.name)
                sources |= {f"Node/{item.cluster}/{item.name}", *(self._moved(node) if node is not None else ())}
            case Pod() if self._is_roaming(item.ref, item.cluster):
                sources |= {item.ref, f"Node/{item.cluster}/{item.node}"}
        for source in sources:
            self._made[item.home].pop(source, None)
        return Touched(sources, nodes)

    def turned(self, host: HostId) -> set[str]:
        """Forget the parts that a node's change of keys is in; returns their sources."""
        node = self._state.nodes[host.cluster].get(host.name)
        sources = {f"Node/{host.cluster}/{host.name}", *(self._moved(node) if node is not None else ())}
        for source in sources:
            self._made[host.cluster].pop(source, None)
        return {"", *sources}

    def parts(self, host: HostId) -> Iterator[tuple[str, SummedUnit]]:
        """All parts that a node has, with their sources."""
        seat = self._seat(host)
        if seat is None:
            return
        nodes = (node.ref for node in self._state.nodes[host.cluster].values())
        policies = (item.ref for item in self._state.egress[host.cluster].values())
        for source in ("", *nodes, *policies, *self._roaming_in(host.cluster)):
            if part := self._part(seat, source):
                yield source, part

    def part(self, host: HostId, source: str) -> SummedUnit:
        """What a node has of a source; empty where it has nothing."""
        seat = self._seat(host)
        return self._part(seat, source) if seat is not None else _NOTHING

    def _seat(self, host: HostId) -> _Seat | None:
        node, cluster = self._state.nodes[host.cluster].get(host.name), self._state.clusters.get(host.cluster)
        if node is None or cluster is None:
            return None
        if cluster.routing == "native" and cluster.encryption == "none" and not self._state.egress[host.cluster]:
            return None  # one that opted out has a seat, too: what it sends in clear is to be seen
        families, is_meant = mesh.underlay_families(node), mesh.is_meant_to_encrypt(cluster, node)
        has_links = self._has_overlay(cluster) and cluster.overlay == "geneve"
        link = (node, self._allocations.number(host)) if has_links else None
        turn = self._turn(cluster)
        own = turn if turn is not None and turn.node == node.name else None
        is_exit, encrypts = node.name in self.exits(host.cluster), mesh.encrypts(self._state, node)
        return _Seat(cluster, node, _View(families, is_meant, encrypts, node.roaming, is_exit, link=link, turn=own))

    def _turn(self, cluster: Cluster) -> Turn | None:
        """The change of keys that is under way in a cluster."""
        host = self._allocations.turning.get(cluster.name)
        return rotation.turn(host.name, self._allocations.rotations[host]) if host is not None else None

    def _part(self, seat: _Seat, source: str) -> SummedUnit:
        cluster, node, view = seat
        if source == "":
            return self._base(cluster, node)
        item = self._state.objects.get(source)
        if isinstance(item, EgressPolicy):
            return self._policy(seat, item)
        if isinstance(item, Pod) and mesh.strays(self._state, item):
            view = view._replace(host=node.name if item.node == node.name else "", link=None)
        elif not isinstance(item, Node) or item.name == node.name:
            return _NOTHING
        if view.turn is not None:  # nobody else sees others like that, and this one not for long
            return self._seen(cluster, view, item)
        made = self._made[cluster.name][source]
        if view not in made:
            made[view] = self._seen(cluster, view, item)
        return made[view]

    def _seen(self, cluster: Cluster, view: _View, item: Node | Pod) -> SummedUnit:
        return self._node(cluster, view, item) if isinstance(item, Node) else self._pod(cluster, view, item)

    # What leaves the cluster ----------------------------------------------------------------------------------------------------------

    def exits(self, cluster: str) -> Mapping[str, tuple[str, ...]]:
        """The nodes that let pods out of a cluster, each with the references of the policies by which it does."""
        if cluster not in self._exits:
            found: dict[str, list[str]] = defaultdict(list)
            for item in self._state.egress[cluster].values():
                for name in exits(self._allocations.way(self._state, item), item):
                    found[name].append(item.ref)
            self._exits[cluster] = {name: tuple(sorted(refs)) for name, refs in found.items()}
        return self._exits[cluster]

    def _outwards(self, item: Topology) -> Touched:
        """Find the exits of a cluster anew where a change may touch them."""
        cluster = item.home
        is_exit = isinstance(item, Node) and item.name in self._exits.get(cluster, {})
        if not (is_exit or isinstance(item, EgressPolicy)):
            return Touched(set(), set())
        before = self._exits.pop(cluster, None)
        now = self.exits(cluster)
        if before is None or bool(before) != bool(now):
            # With the first policy all nodes get to know each other's addresses, and with the last one they forget them.
            self._made.pop(cluster, None)
            return Touched(set(), {*self._state.nodes[cluster], *now, *(before or {})})
        sources: set[str] = {item.ref}
        policies: list[Topology | None] = [item]
        if isinstance(item, Node):
            left = set(before.get(item.name, ())) - set(now.get(item.name, ()))  # one that is gone: pods are led elsewhere at once
            sources |= {*now.get(item.name, ()), *left}
            policies = [self._state.objects.get(ref) for ref in left]
        if any(isinstance(policy, EgressPolicy) and policy.destinations for policy in policies):
            sources.add("")
        for name in now.keys() | before.keys():
            node = self._state.nodes[cluster].get(name)
            if node is not None and before.get(name) != now.get(name):
                sources |= {node.ref, *self._moved(node)}
        return Touched(sources, now.keys() ^ before.keys())

    def _has_overlay(self, cluster: Cluster) -> bool:
        """Whether nodes of a cluster speak to each other by an overlay: all of them, or exits and all others."""
        return cluster.routing == "overlay" or bool(self._state.egress[cluster.name])

    def _are_linked(self, cluster: Cluster, view: _View, there: Node) -> bool:
        """Whether the overlay leads from a node to another one."""
        return cluster.routing == "overlay" or view.is_exit or there.name in self.exits(cluster.name)

    def _role(self, cluster: Cluster, node: Node) -> egress.Role:
        """A node's part in what leaves the cluster."""
        attachments = self._state.attachments[cluster.name].values()
        seen = [prefix for attachment in attachments for prefix, _ in seen_prefixes(self._state, attachment)]
        gateways = self._state.gateways[cluster.name].values()
        hosts = sorted({*node.addresses, *(address for gateway in gateways for address in gateway.addresses)})
        narrowed = [item for _, item in sorted(self._state.egress[cluster.name].items()) if item.destinations]
        led = tuple(item for item in narrowed if self._allocations.way(self._state, item).node != node.name)
        let_out = tuple(item for item in narrowed if item.ref in self.exits(cluster.name).get(node.name, ()))
        is_exit, is_meant = node.name in self.exits(cluster.name), mesh.is_meant_to_encrypt(cluster, node)
        return egress.Role(egress.inside(cluster, seen), tuple(hosts), is_exit, is_meant, led, let_out)

    def _way_out(self, cluster: Cluster, view: _View, there: Node) -> Iterator[PlanObject]:
        """What a node of a cluster with policies holds of another one besides the overlay: the way out, if there is one by that."""
        host = HostId(cluster.name, there.name)
        yield from egress.host(cluster, there.addresses)
        if self._are_linked(cluster, view, there):
            yield from _checked(cluster, [names.mesh_link_to(there.name)], "geneve")
        if there.name in self.exits(cluster.name):
            number, slot = self._allocations.number(host), self._allocations.slot(host)
            leads = is_open(self._state, there) and (cluster.strict != "enforce" or view.encrypts or not view.is_meant)
            yield from egress.way_out(cluster, view.families, there, number, slot, leads=leads)

    def _policy(self, seat: _Seat, item: EgressPolicy) -> SummedUnit:
        cluster, node, _ = seat
        way = self._allocations.way(self._state, item)
        objects = [*egress.chosen(cluster, item), *egress.destinations(cluster, item)]
        refs = {cluster.ref, item.ref}
        if way.node != node.name:
            objects += egress.own_maps(cluster, item, "kept")
            objects += egress.led(cluster, item, self._allocations.slot(HostId(cluster.name, way.node)))
            refs.add(f"Node/{cluster.name}/{way.node}")
        if node.name in exits(way, item):
            objects += egress.own_maps(cluster, item, "leaving")
            objects += egress.let_out(cluster, item, node)
            refs.add(node.ref)
        return _entries(objects, refs, None)

    # Which pods roam ------------------------------------------------------------------------------------------------------------------

    def _roaming_in(self, cluster: str) -> set[str]:
        if cluster not in self._roaming:
            self._roaming[cluster] = {pod.ref for pod in self._state.pods[cluster].values() if mesh.strays(self._state, pod)}
        return self._roaming[cluster]

    def _is_roaming(self, ref: str, cluster: str) -> bool:
        """Whether a pod roams, or did when it was last asked."""
        known, pod = self._roaming_in(cluster), self._state.objects.get(ref)
        did = ref in known
        does = isinstance(pod, Pod) and bool(mesh.strays(self._state, pod))
        known.discard(ref)
        if does:
            known.add(ref)
        return did or does

    def _moved(self, node: Node) -> set[str]:
        """The pods of a node that roam, or did before it was changed."""
        pods = (f"Endpoint/{node.cluster}/{name}" for name in self._state.pods_by_node[HostId(node.cluster, node.name)])
        return {ref for ref in pods if self._is_roaming(ref, node.cluster)}

    # What parts are made of -----------------------------------------------------------------------------------------------------------

    def _base(self, cluster: Cluster, node: Node) -> SummedUnit:
        host = HostId(cluster.name, node.name)
        number, key = self._allocations.number(host), self._state.keys.get(host)
        objects: list[PlanObject] = [*uplinks.objects(node)]
        refs = [cluster.ref, node.ref]
        overlay = self._has_overlay(cluster)
        if cluster.routing == "overlay":
            objects += mesh_overlay.base(cluster, node, number)
        elif overlay:
            objects += mesh_overlay.links(cluster, node, number)
        if mesh.is_meant_to_encrypt(cluster, node):
            turn = self._turn(cluster)
            own = turn if turn is not None and turn.node == node.name else None
            first = own.first if own is not None else key.key if key is not None else None
            objects += encryption.device(cluster, node, number, first, overlay=overlay)
            if turn is not None and turn.second is not None and key is not None:
                second = own.second if own is not None else key.key
                objects += encryption.device(cluster, node, number, second, overlay=overlay, beside=True)
            link = own.link if own is not None else names.ENCRYPTION_LINK
            objects += encryption.base(cluster, node, number, link, overlay=overlay)
            objects += strict.base(cluster, node, overlay=overlay)
        if self._state.egress[cluster.name]:
            objects += egress.base(cluster, self._role(cluster, node))
            objects += _checked(cluster, [names.mesh_link(family) for family in mesh.underlay_families(node)], "vxlan")
        return _entries(objects, refs, key)

    def _node(self, cluster: Cluster, view: _View, there: Node) -> SummedUnit:
        host = HostId(cluster.name, there.name)
        number, key = self._allocations.number(host), self._state.keys.get(host)
        objects: list[PlanObject] = []
        refs = [cluster.ref, there.ref]
        overlay, ways = self._are_linked(cluster, view, there), self.exits(cluster.name)
        if overlay:
            if view.link is not None:
                here, own_number = view.link
                objects += mesh_overlay.link_to(cluster, here, there, own_number)
            objects += mesh_overlay.node(cluster, view.families, there, number)
        if ways:
            objects += self._way_out(cluster, view, there)
            refs += ways.get(there.name, ())
        if view.encrypts and key is not None and mesh.encrypts(self._state, there):
            pods = [pod for pod in self._pods_at(there) if mesh.strays(self._state, pod)]
            strays = [address for pod in pods for address in mesh.strays(self._state, pod)]
            prefixes = encryption.allowed(cluster, there, number, strays, overlay=overlay)
            turn = self._between(cluster, view, there)
            turns = turn is not None and turn.second is not None
            for lane in rotation.lanes(turn, there.name, key.key):
                objects.append(encryption.peer(cluster, view.families, there, lane, prefixes, roams=view.roams, turns=turns))
            objects += encryption.said_of(cluster, view.families, there, overlay=overlay)
            link = turn.link if turn is not None else names.ENCRYPTION_LINK
            objects += encryption.way_to(cluster, there, number, link)
            if turn is not None and turn.node == there.name:
                objects += encryption.way_beside(cluster, view.families, there, turn, overlay=overlay)
            if overlay and cluster.routing == "native" and view.link is not None:
                objects += encryption.outer_way(view.link[0], there, link)
            objects += strict.peer(cluster, there)
            if cluster.routing == "native":
                refs += [pod.ref for pod in pods]
        elif view.is_meant:
            objects += encryption.let_out(cluster, there, overlay=overlay)
        return _entries(objects, refs, key)

    def _between(self, cluster: Cluster, view: _View, there: Node) -> Turn | None:
        """The change of keys of a node or of the one that it sees."""
        turn = view.turn or self._turn(cluster)
        return turn if turn is not None and (view.turn is not None or turn.node == there.name) else None

    def _pod(self, cluster: Cluster, view: _View, pod: Pod) -> SummedUnit:
        owner = self._state.nodes[cluster.name][pod.node]
        number = self._allocations.number(HostId(cluster.name, owner.name))
        encrypted = view.encrypts and mesh.encrypts(self._state, owner)
        turn = self._between(cluster, view, owner)
        link = turn.link if turn is not None else names.ENCRYPTION_LINK
        objects: list[PlanObject] = []
        for address in mesh.strays(self._state, pod):
            if self._are_linked(cluster, view, owner):
                far = mesh_overlay.pod_there(cluster, view.families, owner, number, address) if view.host != owner.name else None
                objects.append(far or mesh_overlay.pod_here(address))
            if view.is_meant and view.host == owner.name:
                objects += encryption.pod_here(cluster, address)
            elif view.is_meant:
                objects += encryption.pod_there(cluster, address, link if encrypted else None)
                objects += strict.pod(cluster, address, encrypted=encrypted)
        return _entries(objects, (cluster.ref, owner.ref, pod.ref), None)

    def _pods_at(self, node: Node) -> list[Pod]:
        names = self._state.pods_by_node[HostId(node.cluster, node.name)]
        return [self._state.pods[node.cluster][name] for name in sorted(names)]


_NOTHING = SummedUnit({}, 0)


def _checked(cluster: Cluster, links: Iterable[str], overlay: Overlay) -> Iterator[PlanObject]:
    """How reverse paths are checked on links that are of this kind of overlay."""
    if cluster.overlay == overlay and IPV4 in mesh.pod_families(cluster):
        yield from map(egress.checked, links)


def _entries(objects: list[PlanObject], because: Iterable[str], key: PublicKey | None) -> SummedUnit:
    refs = tuple(sorted(because))
    with_key = tuple(sorted((*refs, key.ref))) if key is not None else refs
    return SummedUnit.of(Entry(item, with_key if isinstance(item, WireguardLink | WireguardPeer) else refs) for item in objects)
