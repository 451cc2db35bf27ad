"""When plans are held back: what an operator has to accept before it goes. Pure; the time is an argument.

A mistake in the topology, or a store that is lost or emptied, must not tear down a mesh that carries traffic. Two things freeze a planner:

- hosts hold more than the plans here would leave them, and these plans do not account for it (`Claim`): the store is another one;
- more than a fifth of the units of all hosts, or of one cluster's, would go within a minute, 20 units at the least.

While it is frozen no plan goes out that takes something away; others do. It lasts until nothing would go any more, or until somebody
accepts what would go, named by a token: what changed since it was shown is not accepted.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from schemas.plan import HostPlan
from schemas.status import Freeze, UnitLoss
from services.planner.state import HostId
from services.planner.step import Claim, Loss, Step

FLOOR = 20
"""Fewer units than these may always go: the whole of a small mesh is few."""
WINDOW_S = 60.0
_SHARE = 5
_SHOWN = 100
_TOKEN_BYTES = 6

LIFTED = Freeze("lifted")


class Verdict(NamedTuple):
    """Which steps go out now, which are held back, what is so from now on, and whether that is an acceptance's doing."""

    go: list[Step]
    held: list[Step]
    freeze: Freeze
    accepted: bool


class _Gone(NamedTuple):
    """When a unit went, and whether nothing of it is left."""

    at_s: float
    whole: bool


class Freezer:
    """Remembers what went lately, and whether it is frozen: `freeze`, as it was told last."""

    def __init__(self, freeze: Freeze = LIFTED) -> None:
        self.freeze = freeze
        self._gone: dict[tuple[HostId, str], _Gone] = {}

    def judge(self, steps: Sequence[Step], published: Mapping[HostId, HostPlan], now_s: float, accepted: Collection[str] = ()) -> Verdict:
        """Decide about all steps that are to be made. `accepted` are the tokens that somebody accepts now."""
        self._gone = {key: gone for key, gone in self._gone.items() if now_s - gone.at_s < WINDOW_S}
        losses = [loss for step in steps for loss in step.losses()]
        if not losses:
            lifted = Freeze("lifted", "nothing would go any more", since_s=now_s) if self.freeze.is_on else self.freeze
            return self._let_go(steps, [], lifted, now_s, accepted=False)
        now = self._assess(steps, losses, published, now_s)
        if now is None:
            return self._let_go(steps, losses, self.freeze, now_s, accepted=False)
        if self.freeze.is_on and now.token in accepted:
            lifted = Freeze("lifted", "accepted", now.count, now.planned, now.hosts, now.losses, now_s, now.token)
            return self._let_go(steps, losses, lifted, now_s, accepted=True)
        self.freeze = now
        held = [step for step in steps if step.takes_away]
        return Verdict([step for step in steps if not step.takes_away], held, now, accepted=False)

    def _let_go(self, steps: Sequence[Step], losses: Iterable[Loss], freeze: Freeze, now_s: float, *, accepted: bool) -> Verdict:
        for step in steps:
            for diff in step.diffs:
                # What came back, or grows again, did not go.
                if diff.put and diff.target:
                    self._gone.pop((step.host, diff.unit), None)
        if accepted:
            self._gone.clear()
        else:
            self._gone.update({(loss.host, loss.unit): _Gone(now_s, whole=not loss.kept) for loss in losses})
        self.freeze = freeze
        return Verdict(list(steps), [], freeze, accepted)

    def _assess(self, steps: Sequence[Step], losses: Sequence[Loss], published: Mapping[HostId, HostPlan], now_s: float) -> Freeze | None:
        """The freeze that these losses are, or None when they may go."""
        claims = {step.host: step.claim for step in steps if step.claim is not None}
        planned = self._planned(published, claims)
        if any(loss.host in claims for loss in losses):
            reason = "the store was lost or emptied: hosts hold more than what was published since would leave them"
        elif self._is_much(losses, planned):
            reason = f"more than a fifth of all units, or of one cluster's, would go within {WINDOW_S:g} s"
        elif self.freeze.is_on:
            reason = self.freeze.reason
        else:
            return None
        since_s = self.freeze.since_s if self.freeze.is_on else now_s
        shown = tuple(UnitLoss(str(loss.host), loss.unit, loss.objects, loss.kept) for loss in losses[:_SHOWN])
        hosts = len({loss.host for loss in losses})
        return Freeze("frozen", reason, len(losses), planned.total(), hosts, shown, since_s, _token(losses))

    def _planned(self, published: Mapping[HostId, HostPlan], claims: Mapping[HostId, Claim]) -> Counter[HostId]:
        """How many units each host had before any of this: published, claimed, or gone a moment ago."""
        found = Counter({host: len(plan.units) for host, plan in published.items()})
        for host, claim in claims.items():
            found[host] = max(found[host], len(claim.units))
        found.update(host for (host, _), gone in self._gone.items() if gone.whole)
        return found

    def _is_much(self, losses: Iterable[Loss], planned: Counter[HostId]) -> bool:
        """Whether what would go and what went a moment ago are too much of the whole, or of one cluster."""
        going = {*self._gone, *((loss.host, loss.unit) for loss in losses)}
        going_in, planned_in = Counter(host.cluster for host, _ in going), Counter[str]()
        for host, count in planned.items():
            planned_in[host.cluster] += count
        parts = [(len(going), planned.total()), *((count, planned_in[cluster]) for cluster, count in going_in.items())]
        return any(count >= FLOOR and count * _SHARE > whole for count, whole in parts)


def _token(losses: Iterable[Loss]) -> str:
    """A name for exactly these units, and for which of them nothing would be left."""
    lines = sorted(f"{loss.host} {loss.unit} {'part' if loss.kept else 'whole'}" for loss in losses)
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=_TOKEN_BYTES).hexdigest()


__all__ = ["FLOOR", "LIFTED", "WINDOW_S", "Freezer", "Verdict"]
