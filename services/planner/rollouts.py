"""How far new tunnels, and new ways out of clusters, are rolled out: a step further when the hosts concerned report to hold the one before.

Which steps there are is in ``allocate`` and ``egress``; how far each is stands in the allocations.
"""

from __future__ import annotations

from collections.abc import Mapping

from schemas.plan import HostPlan, digest_of, mesh_unit
from schemas.status import ApplyReport
from services.planner.allocate import Allocations, Rollout, advance, peering_id
from services.planner.compile import Compiler
from services.planner.compile.parts import unit_name
from services.planner.egress import Way, is_open
from services.planner.egress import advance as advance_way
from services.planner.state import Attachment, HostId, State
from services.planner.step import Claim


class Rollouts:
    """Moves rollouts on. Of `published`, `reports` and `claims` what they are when it is asked counts."""

    def __init__(
        self,
        state: State,
        allocations: Allocations,
        compiler: Compiler,
        *,
        published: Mapping[HostId, HostPlan],
        reports: Mapping[HostId, ApplyReport],
        claims: Mapping[HostId, Claim],
    ) -> None:
        self._state = state
        self._allocations = allocations
        self._compiler = compiler
        self._published = published
        self._reports = reports
        self._claims = claims

    def advance(self) -> set[HostId]:
        """Move on as far as the reports allow; returns the hosts whose plans may be others now."""
        return self._advance_tunnels() | self._advance_ways()

    def _advance_tunnels(self) -> set[HostId]:
        touched: set[HostId] = set()
        for item in list(self._state.peerings.values()):
            attachments = (Attachment(item, 0), Attachment(item, 1))
            key = peering_id(attachments[0])
            first, second = map(self._in_sync, attachments)
            greeted = all(attachment.host in self._state.keys for attachment in attachments)
            before = self._allocations.rollout(key)
            moved = advance(before, item.tunnels, first_holds=first, both_hold=first and second and greeted)
            if item.ref in self._allocations.turning and 0 < before.present == before.joined:
                moved = before  # while keys are changed, tunnels neither come nor go
            if self._is_rolled_out(attachments):
                moved = Rollout.complete(item.tunnels)
            if moved != before:
                self._allocations.set_rollout(key, moved)
                touched |= self._compiler.refresh([item])
        return touched

    def _advance_ways(self) -> set[HostId]:
        """Lead pods to the node that their policy names now once that is ready, and let the one before go once all have followed."""
        touched: set[HostId] = set()
        for policies in list(self._state.egress.values()):
            for item in policies.values():
                way = self._allocations.way(self._state, item)
                if way == Way(item.node):
                    continue
                all_hold = way.node == item.node and all(
                    self._holds_mesh(HostId(item.cluster, name)) for name in self._state.nodes[item.cluster]
                )
                wanted_holds = self._holds_mesh(HostId(item.cluster, item.node))
                wanted_holds = wanted_holds and is_open(self._state, self._state.nodes[item.cluster][item.node])
                moved = advance_way(way, item.node, wanted_holds=wanted_holds, all_hold=all_hold)
                if moved != way:
                    self._allocations.set_way((item.cluster, item.name), moved)
                    touched |= self._compiler.refresh([item])
        return touched

    def _is_rolled_out(self, attachments: tuple[Attachment, Attachment]) -> bool:
        """True when how far the tunnels were rolled out was lost with a store, and both ends have them: nothing is to begin anew.

        Ends that claim to hold the peering tell it, or, where only the allocations were lost, the published plans.
        """
        claims = [self._claims.get(attachment.host) for attachment in attachments]
        unit = unit_name(attachments[0])
        if all(claim is not None and claim.epoch and claim.unit(unit) is not None for claim in claims):
            return True
        plans = [self._published.get(attachment.host) for attachment in attachments]
        known = peering_id(attachments[0]) in self._allocations.rollouts
        return not known and all(plan is not None and plan.units.get(unit) for plan in plans)

    def _in_sync(self, attachment: Attachment) -> bool:
        """True when the end holds the very unit that is published and still wanted."""
        return self.holds(attachment.host, unit_name(attachment))

    def _holds_mesh(self, host: HostId) -> bool:
        return self.holds(host, mesh_unit(host.cluster))

    def holds(self, host: HostId, unit: str) -> bool:
        """True when a host holds the very unit that is published and still wanted."""
        plan, report = self._published.get(host), self._reports.get(host)
        if plan is None or report is None:
            return False
        wanted = self._compiler.unit(host, unit)
        published = plan.units.get(unit)
        if wanted is None or published is None:
            return False
        held = next((entry.held for entry in report.units if entry.unit == unit), "")
        return held == digest_of(wanted) == digest_of(published)


def settle_rollouts(state: State, allocations: Allocations) -> None:
    """Set every rollout to its end: what the plans are once all hosts have followed (for plans on paper)."""
    for item in state.peerings.values():
        allocations.set_rollout((item.cluster, item.name), Rollout.complete(item.tunnels))
    for policies in state.egress.values():
        for policy in policies.values():
            allocations.set_way((policy.cluster, policy.name), Way(policy.node))
