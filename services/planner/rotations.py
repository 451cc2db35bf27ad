"""All changes of keys: who begins, who waits, whose is over. No clock; what is written is in the allocations.

One at a time in a *ring*, by name. The nodes of a cluster are one, by the cluster's name: each change makes plans for the second device of
all, which is one node's at a time. So are the two gateways of a peering, by its reference.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from schemas.allocation import Rotation
from schemas.plan import HostPlan, mesh_unit
from schemas.status import ApplyReport
from schemas.topology import TUNNELS_MAX, Peering
from services.planner import mesh, rotation, tunnel_rotation
from services.planner.allocate import Allocations, Rollout
from services.planner.compile.parts import unit_name
from services.planner.rotation import Asked
from services.planner.state import HostId, State, peering_key


class Rotations:
    """Moves rotations on. `holds` says whether a host has reported to hold the unit that is planned and published for it."""

    def __init__(
        self, state: State, allocations: Allocations, reports: Mapping[HostId, ApplyReport], holds: Callable[[HostId, str], bool]
    ) -> None:
        self._state = state
        self._allocations = allocations
        self._reports = reports
        self._holds = holds
        self._held: dict[HostId, tuple[Rotation, set[HostId]]] = {}
        """By host that changes its key, who has held the plan of its step: other changes of plans do not undo that."""

    def advance(self) -> list[HostId]:
        """Move on as far as the reports allow; returns the hosts whose plans, and those of the others of their rings, are others now."""
        waiting = self._waiting()
        self._drop_idle(waiting)
        changed: list[HostId] = []
        for ring in sorted(waiting.keys() | self._allocations.turning.keys()):
            if (turning := self._allocations.turning.get(ring)) is not None and self._move(turning):
                changed.append(turning)
            if (begun := self._begin(ring, waiting[ring])) is not None:
                changed.append(begun)
        return changed

    def recover(self, published: Mapping[HostId, HostPlan]) -> None:
        """Take over the rotations that published plans were made with, where none are known."""
        for ring, hosts in self._waiting().items():
            for host in hosts:
                if host not in self._allocations.rotations and ring not in self._allocations.turning:
                    found = self._recovered(host, published.get(host))
                    if found is not None:
                        self._allocations.set_rotation(host, found)

    def forget(self, host: HostId) -> bool:
        """A host is gone. Whether its change of keys was under way."""
        was = host in self._allocations.turning.values()
        if host in self._allocations.rotations:
            self._allocations.set_rotation(host, None)
        return was

    def _recovered(self, host: HostId, plan: HostPlan | None) -> Rotation | None:
        key, peering = self._state.keys[host], self._peering(host)
        unit = plan.units.get(self._unit(host), {}) if plan is not None else {}
        objects = [entry.object for entry in unit.values()]
        return tunnel_rotation.recovered(key, peering, objects) if peering is not None else rotation.recovered(key, objects)

    # Who is in which ring -------------------------------------------------------------------------------------------------------------

    def _peering(self, host: HostId) -> Peering | None:
        """The peering of a gateway that has one."""
        attachment = self._state.attachments[host.cluster].get(host.name)
        return attachment.peering if attachment is not None else None

    def _ring(self, host: HostId) -> str:
        """The ring of a host; empty for a gateway without a peering, which has no device."""
        if host.name in self._state.gateways[host.cluster]:
            peering = self._peering(host)
            return peering.ref if peering is not None else ""
        return host.cluster

    def _unit(self, host: HostId) -> str:
        """The unit that has a host's devices."""
        attachment = self._state.attachments[host.cluster].get(host.name)
        return unit_name(attachment) if attachment is not None else mesh_unit(host.cluster)

    def _rollout(self, peering: Peering) -> Rollout:
        return self._allocations.rollout(peering_key(peering))

    def _waiting(self) -> defaultdict[str, list[HostId]]:
        """By ring, those that have said which key is to follow theirs, by name."""
        found: defaultdict[str, list[HostId]] = defaultdict(list)
        for cluster, names in self._state.changing.items():
            for host in (HostId(cluster, name) for name in names):
                if ring := self._ring(host):
                    found[ring].append(host)
        for hosts in found.values():
            hosts.sort()
        return found

    # Moving -----------------------------------------------------------------------------------------------------------------------------

    def _move(self, host: HostId) -> bool:
        """Move a rotation that is under way; whether plans change by it."""
        before, key = self._allocations.rotations[host], self._state.keys.get(host)
        if not self._goes_on(host, before) or rotation.is_void(before, key, self._reports.get(host)):
            after = rotation.ended(before, key)
        else:
            after = self._advanced(host, before)
        self._allocations.set_rotation(host, after)
        return after is None or (after.stage, after.tunnel) != (before.stage, before.tunnel)

    def _advanced(self, host: HostId, before: Rotation) -> Rotation:
        asked = Asked(host, before, self._state, self._reports, lambda other: self._has_held(host, before, other))
        attachment = self._state.attachments[host.cluster].get(host.name)
        if attachment is None:
            return rotation.advance(before, rotation.unmet(asked))
        tunnels = self._rollout(attachment.peering).present
        return rotation.advance(before, tunnel_rotation.unmet(asked, attachment, unit_name(attachment), tunnels), tunnels)

    def _has_held(self, host: HostId, one: Rotation, other: HostId) -> bool:
        """Whether a host has held the plan of this step. The one that changes its key must hold it now: its handshakes count."""
        if other == host:
            return self._holds(host, self._unit(host))
        before, held = self._held.get(host, (None, set()))
        if before is None or _step(before) != _step(one):
            held = set()
            turning = set(self._allocations.turning.values())
            self._held = {host: (one, held), **{at: kept for at, kept in self._held.items() if at != host and at in turning}}
        if other not in held and self._holds(other, self._unit(other)):
            held.add(other)
        return other in held

    # Beginning --------------------------------------------------------------------------------------------------------------------------

    def _begin(self, ring: str, waiting: Sequence[HostId]) -> HostId | None:
        """Let the first that waits in a ring begin when none is under way, and the others know for what they wait."""
        begun: HostId | None = None
        turning = self._allocations.turning.get(ring)
        for host in waiting:
            if host == turning:
                continue
            before, peering = self._allocations.rotations.get(host), self._peering(host)
            reference = peering.ref if peering is not None else ""
            wish = rotation.begun(self._state.keys[host], before, self._reports.get(host), reference) if self._has_devices(host) else None
            if wish is None:
                self._drop_queued(host)
            elif reason := self._in_the_way(ring, peering):
                self._allocations.set_rotation(host, rotation.queued(wish, reason))
            else:
                self._allocations.set_rotation(host, wish)
                begun = host
        return begun

    def _in_the_way(self, ring: str, peering: Peering | None) -> str:
        """Why nobody of a ring can begin now; empty where the next one can."""
        first = self._allocations.turning.get(ring)
        if first is not None and self._state.host(first) is not None:
            return f"{first} changes its key first"
        if peering is None:
            return ""
        if peering.tunnels == TUNNELS_MAX:
            return f"{peering.ref} has {TUNNELS_MAX} tunnels, and no port is left for the device beside them: take one away meanwhile"
        is_complete = self._rollout(peering) == Rollout.complete(peering.tunnels)
        return "" if is_complete else f"the tunnels of {peering.ref} are still being rolled out, or taken back"

    def _drop_idle(self, waiting: Mapping[str, Sequence[HostId]]) -> None:
        """Those that wait for their turn, and do not want to any more."""
        wishing = {host for hosts in waiting.values() for host in hosts}
        for host in [host for host, one in self._allocations.rotations.items() if one.stage == "queued" and host not in wishing]:
            self._drop_queued(host)

    def _drop_queued(self, host: HostId) -> None:
        one = self._allocations.rotations.get(host)
        if one is not None and one.stage == "queued":
            self._allocations.set_rotation(host, rotation.ended(one, None))

    def _has_devices(self, host: HostId) -> bool:
        """Whether a host has a WireGuard device, and a key."""
        if host not in self._state.keys or host.cluster not in self._state.clusters:
            return False
        node = self._state.nodes[host.cluster].get(host.name)
        return mesh.encrypts(self._state, node) if node is not None else self._peering(host) is not None

    def _goes_on(self, host: HostId, one: Rotation) -> bool:
        """Whether what a rotation changes the key of is there: a node that encrypts, or the tunnels that it began with."""
        peering = self._peering(host)
        if not self._has_devices(host) or (peering.ref if peering is not None else "") != one.peering:
            return False
        rollout = self._rollout(peering) if peering is not None else Rollout.complete(1)
        return 0 < rollout.present == rollout.joined


def _step(one: Rotation) -> tuple[object, ...]:
    return one.new, one.stage, one.tunnel
