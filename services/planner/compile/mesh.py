"""A node's unit of its cluster's mesh: which parts it has, and what each is made of. A unit of its own, `mesh/<cluster>`.

A part for every other node, and one for every pod at an address to which its node's prefixes do not lead (a roaming pod): so a change of
one node costs each host that node's part. Such a part is the same on all nodes that see others alike, and is made once for them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from schemas.host_objects import PlanObject, WireguardLink, WireguardPeer
from schemas.plan import Entry, SummedUnit
from schemas.topology import Cluster, Node, Pod, PublicKey, Topology
from schemas.values import Family
from services.planner import mesh, names, rotation
from services.planner.allocate import Allocations
from services.planner.compile import encryption, mesh_overlay, strict, trace
from services.planner.rotation import Turn
from services.planner.state import HostId, State


class _View(NamedTuple):
    """What of a node's own decides how it sees others: `is_meant` to encrypt it has the device, and `encrypts` once its key is known.

    `host` is its name where it sees a pod of its own, `link` itself and its number where it has a link of its own to each node, `turn` its
    change of keys.
    """

    families: tuple[Family, ...]
    is_meant: bool
    encrypts: bool
    roams: bool
    host: str = ""
    link: tuple[Node, int] | None = None
    turn: Turn | None = None


class _Seat(NamedTuple):
    """A node of a cluster, and how it sees others."""

    cluster: Cluster
    node: Node
    view: _View


class Meshes:
    """The parts of nodes' units. Keeps what it made until something that it was made of is said to have changed (``touched``)."""

    def __init__(self, state: State, allocations: Allocations) -> None:
        self._state = state
        self._allocations = allocations
        self._made: dict[str, dict[str, dict[_View, SummedUnit]]] = defaultdict(lambda: defaultdict(dict))
        """By cluster, source and view."""
        self._roaming: dict[str, set[str]] = {}
        """Pods that roam, by cluster; found when first asked for."""

    def touched(self, item: Topology) -> set[str]:
        """Forget the parts that a changed object is in; returns their sources. The state is what it is after the change."""
        if isinstance(item, Cluster):
            self._made.pop(item.name, None)
            self._roaming.pop(item.name, None)
            return set()
        sources: set[str] = set()
        match item:
            case Node():
                sources = {item.ref, *self._moved(item)}
            case PublicKey():
                node = self._state.nodes[item.cluster].get(item.name)
                sources = {f"Node/{item.cluster}/{item.name}", *(self._moved(node) if node is not None else ())}
            case Pod() if self._is_roaming(item.ref, item.cluster):
                sources = {item.ref, f"Node/{item.cluster}/{item.node}"}
        for source in sources:
            self._made[item.home].pop(source, None)
        return sources

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
        for source in ("", *nodes, *self._roaming_in(host.cluster)):
            if part := self._part(seat, source):
                yield source, part

    def part(self, host: HostId, source: str) -> SummedUnit:
        """What a node has of a source; empty where it has nothing."""
        seat = self._seat(host)
        return self._part(seat, source) if seat is not None else _NOTHING

    def _seat(self, host: HostId) -> _Seat | None:
        node, cluster = self._state.nodes[host.cluster].get(host.name), self._state.clusters.get(host.cluster)
        if node is None or cluster is None or (cluster.routing == "native" and cluster.encryption == "none"):
            return None  # one that opted out has a seat, too: what it sends in clear is to be seen
        families, is_meant = mesh.underlay_families(node), mesh.is_meant_to_encrypt(cluster, node)
        has_links = cluster.routing == "overlay" and cluster.overlay == "geneve"
        link = (node, self._allocations.number(host)) if has_links else None
        turn = self._turn(cluster)
        own = turn if turn is not None and turn.node == node.name else None
        return _Seat(cluster, node, _View(families, is_meant, mesh.encrypts(self._state, node), node.roaming, link=link, turn=own))

    def _turn(self, cluster: Cluster) -> Turn | None:
        """The change of keys that is under way in a cluster."""
        host = self._allocations.turning.get(cluster.name)
        return rotation.turn(host.name, self._allocations.rotations[host]) if host is not None else None

    def _part(self, seat: _Seat, source: str) -> SummedUnit:
        cluster, node, view = seat
        if source == "":
            return self._base(cluster, node)
        item = self._state.objects.get(source)
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
        objects: list[PlanObject] = [*trace.objects(cluster, node)]
        if cluster.routing == "overlay":
            objects += mesh_overlay.base(cluster, node, number)
        if mesh.is_meant_to_encrypt(cluster, node):
            turn = self._turn(cluster)
            own = turn if turn is not None and turn.node == node.name else None
            first = own.first if own is not None else key.key if key is not None else None
            objects += encryption.device(cluster, node, number, first)
            if turn is not None and turn.second is not None and key is not None:
                objects += encryption.device(cluster, node, number, own.second if own is not None else key.key, beside=True)
            objects += encryption.base(cluster, node, number, own.link if own is not None else names.ENCRYPTION_LINK)
            objects += strict.base(cluster, node)
        return _entries(objects, (cluster.ref, node.ref), key)

    def _node(self, cluster: Cluster, view: _View, there: Node) -> SummedUnit:
        host = HostId(cluster.name, there.name)
        number, key = self._allocations.number(host), self._state.keys.get(host)
        objects: list[PlanObject] = []
        refs = [cluster.ref, there.ref]
        if cluster.routing == "overlay":
            if view.link is not None:
                here, own_number = view.link
                objects += mesh_overlay.link_to(cluster, here, there, own_number)
            objects += mesh_overlay.node(cluster, view.families, there, number)
        if view.encrypts and key is not None and mesh.encrypts(self._state, there):
            pods = [pod for pod in self._pods_at(there) if mesh.strays(self._state, pod)]
            prefixes = encryption.allowed(cluster, there, number, [address for pod in pods for address in mesh.strays(self._state, pod)])
            turn = self._between(cluster, view, there)
            turns = turn is not None and turn.second is not None
            for lane in rotation.lanes(turn, there.name, key.key):
                objects.append(encryption.peer(cluster, view.families, there, lane, prefixes, roams=view.roams, turns=turns))
            objects += encryption.said_of(cluster, view.families, there)
            objects += encryption.way_to(cluster, there, number, turn.link if turn is not None else names.ENCRYPTION_LINK)
            if turn is not None and turn.node == there.name:
                objects += encryption.way_beside(cluster, view.families, there, turn)
            objects += strict.peer(cluster, there)
            if cluster.routing == "native":
                refs += [pod.ref for pod in pods]
        elif view.is_meant:
            objects += encryption.let_out(cluster, there)
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
            if cluster.routing == "overlay":
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


def _entries(objects: list[PlanObject], because: Iterable[str], key: PublicKey | None) -> SummedUnit:
    refs = tuple(sorted(because))
    with_key = tuple(sorted((*refs, key.ref))) if key is not None else refs
    return SummedUnit.of(Entry(item, with_key if isinstance(item, WireguardLink | WireguardPeer) else refs) for item in objects)
