"""All changes of keys: who begins, who waits, whose is over. No clock; what is written is in the allocations.

One at a time in a cluster, by name: each makes plans for the second device of all nodes, which is one node's at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from schemas.allocation import Rotation, RotationStage
from schemas.plan import HostPlan, mesh_unit
from schemas.status import ApplyReport
from schemas.values import Key
from services.planner import mesh, rotation
from services.planner.allocate import Allocations
from services.planner.rotation import Asked
from services.planner.state import HostId, State


class Rotations:
    """Moves rotations on. `holds` says whether a host has reported to hold the mesh that is planned and published for it."""

    def __init__(
        self, state: State, allocations: Allocations, reports: Mapping[HostId, ApplyReport], holds: Callable[[HostId], bool]
    ) -> None:
        self._state = state
        self._allocations = allocations
        self._reports = reports
        self._holds = holds
        self._held: dict[HostId, tuple[Key, RotationStage, set[HostId]]] = {}
        """By node that changes its key, who has held the plan of its stage: other changes of plans do not undo that."""

    def advance(self) -> list[HostId]:
        """Move on as far as the reports allow; returns the nodes whose plans, and those of the nodes around them, are others now."""
        changed: list[HostId] = []
        clusters = {cluster for cluster, names in self._state.changing.items() if names} | self._allocations.turning.keys()
        clusters |= {host.cluster for host, one in self._allocations.rotations.items() if one.stage == "queued"}
        for cluster in sorted(clusters):
            if (turning := self._allocations.turning.get(cluster)) is not None and self._move(turning):
                changed.append(turning)
            if (begun := self._begin(cluster)) is not None:
                changed.append(begun)
        return changed

    def recover(self, published: Mapping[HostId, HostPlan]) -> None:
        """Take over the rotations that published plans were made with, where none are known."""
        for cluster, names in self._state.changing.items():
            for host in (HostId(cluster, name) for name in sorted(names)):
                plan = published.get(host)
                unit = plan.units.get(mesh_unit(cluster), {}) if plan is not None else {}
                found = rotation.recovered(self._state.keys[host], [entry.object for entry in unit.values()])
                if found is not None and host not in self._allocations.rotations and cluster not in self._allocations.turning:
                    self._allocations.set_rotation(host, found)

    def forget(self, host: HostId) -> bool:
        """A host is gone. Whether its change of keys was under way."""
        was = self._allocations.turning.get(host.cluster) == host
        if host in self._allocations.rotations:
            self._allocations.set_rotation(host, None)
        return was

    def _move(self, host: HostId) -> bool:
        """Move the rotation that is under way in a cluster; whether plans change by it."""
        before, key = self._allocations.rotations[host], self._state.keys.get(host)
        if not self._encrypts(host) or rotation.is_void(before, key, self._reports.get(host)):
            after = rotation.ended(before, key)
        else:
            asked = Asked(host, before, self._state, self._reports, lambda other: self._has_held(host, before, other))
            after = rotation.advance(before, rotation.unmet(asked))
        self._allocations.set_rotation(host, after)
        return after is None or after.stage != before.stage

    def _has_held(self, host: HostId, one: Rotation, other: HostId) -> bool:
        """Whether a node has held the plan of this stage. The node that changes its key must hold it now: its handshakes count."""
        if other == host:
            return self._holds(host)
        key, stage, held = self._held.get(host, (None, None, set()))
        if (key, stage) != (one.new, one.stage):
            held = set()
            self._held = {host: (one.new, one.stage, held), **{at: kept for at, kept in self._held.items() if at.cluster != host.cluster}}
        if other not in held and self._holds(other):
            held.add(other)
        return other in held

    def _begin(self, cluster: str) -> HostId | None:
        """Let the first that waits in a cluster begin when none is under way, and the others know for whom they wait."""
        turning = self._allocations.turning.get(cluster)
        waiting = [host for name in sorted(self._state.changing[cluster]) if (host := HostId(cluster, name)) != turning]
        begun: HostId | None = None
        for host in waiting:
            before = self._allocations.rotations.get(host)
            wish = rotation.begun(self._state.keys[host], before, self._reports.get(host)) if self._encrypts(host) else None
            if wish is None:
                self._drop_queued(host)
            elif (first := self._allocations.turning.get(cluster)) is None:
                self._allocations.set_rotation(host, wish)
                begun = host
            else:
                self._allocations.set_rotation(host, rotation.queued(wish, f"Node/{first}"))
        for host, one in list(self._allocations.rotations.items()):
            if one.stage == "queued" and host.cluster == cluster and host.name not in self._state.changing[cluster]:
                self._drop_queued(host)
        return begun

    def _drop_queued(self, host: HostId) -> None:
        """A node that waited does not want to any more."""
        one = self._allocations.rotations.get(host)
        if one is not None and one.stage == "queued":
            self._allocations.set_rotation(host, rotation.ended(one, None))

    def _encrypts(self, host: HostId) -> bool:
        node, known = self._state.nodes[host.cluster].get(host.name), host.cluster in self._state.clusters
        return known and node is not None and mesh.encrypts(self._state, node)
