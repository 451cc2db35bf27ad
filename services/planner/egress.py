"""Which nodes let pods out of a cluster, and how a node's part in that is told apart. Pure.

A policy that is given another node moves in steps: first that node is ready for its pods, then all nodes lead them there, then the node
before lets go. Meanwhile both can let them out.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

from msgspec import Struct

from schemas.topology import Cluster, EgressPolicy, Marks, Node
from schemas.values import Address, Family
from services.planner import layout, mesh
from services.planner.state import State

WAY: Literal["way"] = "way"
SLOT: Literal["slot"] = "slot"


class Way(Struct, frozen=True):
    """Through which `node` a policy's pods are led now, and which one still takes what is underway to it (`before`; empty: none).

    `earlier` are those from before that one, latest first: not all nodes had followed when the policy was given yet another one.
    """

    node: str
    before: str = ""
    earlier: tuple[str, ...] = ()

    @property
    def left(self) -> tuple[str, ...]:
        """All from which pods are led away, and which still let them out; latest first."""
        return (self.before, *self.earlier) if self.before else ()

    @classmethod
    def leaving(cls, node: str, left: Sequence[str]) -> Way:
        return cls(node, left[0], tuple(left[1:])) if left else cls(node)


class Slot(Struct, frozen=True):
    """The number of a node through which pods leave, from 1: it makes its table and its value in packets' marks."""

    slot: int


def known(way: Way | None, item: EgressPolicy, state: State) -> Way:
    """How far a policy has moved, with nodes that are there only. Its own one is."""
    nodes = state.nodes[item.cluster]
    if way is None or way.node not in nodes:
        return Way(item.node)
    return Way.leaving(way.node, [name for name in way.left if name in nodes])


def exits(way: Way, item: EgressPolicy) -> set[str]:
    """The nodes that let a policy's pods out."""
    return {item.node, way.node, *way.left}


def advance(way: Way, wanted: str, *, wanted_holds: bool, all_hold: bool) -> Way:
    """The next step towards `wanted`: it is led to once that node holds its part, and those before go once all nodes have followed.

    It does not wait for the end of the step before: with a node down, that would keep pods at an exit that may be down itself.
    """
    if way.node != wanted:
        return Way.leaving(wanted, [name for name in (way.node, *way.left) if name != wanted]) if wanted_holds else way
    return Way(wanted) if way.before and all_hold else way


def is_open(state: State, exit_node: Node) -> bool:
    """Whether pods may be led to a node: where nothing may go in clear, not before it encrypts."""
    return state.clusters[exit_node.cluster].strict != "enforce" or mesh.encrypts(state, exit_node)


def source(node: Node, item: EgressPolicy, family: Family) -> Address | None:
    """The address as which a policy's pods leave through a node; None where it has none of the family."""
    given = next((address for address in item.addresses if address.family == family), None)
    return given or mesh.address_of(node, family)


def families(cluster: Cluster, item: EgressPolicy) -> tuple[Family, ...]:
    """The families of what a policy leads, of those that the cluster's pods have."""
    wanted = {prefix.family for prefix in item.pods}
    if item.destinations:
        wanted &= {prefix.family for prefix in item.destinations}
    return tuple(family for family in mesh.pod_families(cluster) if family in wanted)


def room(marks: Marks) -> int:
    """How many nodes a cluster's field in packets' marks can tell apart, besides its own values and that of answers."""
    return min(layout.EGRESS_SLOTS, (1 << marks.mask.bit_count()) - len(("0", "encrypt", "encrypted", "decrypted", "answers")))


@lru_cache(maxsize=1024)
def mark(marks: Marks, slot: int) -> int:
    """The value of a slot in the field: the lowest ones that are none of its own. 0 is the slot of answers on their way back."""
    value, taken = 0, (0, marks.encrypt, marks.encrypted, marks.decrypted)
    for _ in range(slot + 1):
        value = (value - marks.mask) & marks.mask
        while value in taken:
            value = (value - marks.mask) & marks.mask
    return value
