"""The applier without its loop: what is wanted, what is held, and the turns between them. Blocking; runs in the kernel's thread.

What is held is believed only after a turn that ended well. Before the first turn, and after anything unclear, the kernel is read and the
plan applied as a difference against it: unchanged objects, counters, tracked flows and learned endpoints survive a restart.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType

from msgspec import Struct

from schemas.commands import EncryptionNow
from schemas.host_objects import Layer, PlanObject, WireguardLink
from schemas.plan import HostPlan, Unit, digest_of, unit_tag
from schemas.status import ApplyReport, Outcome, Timings, TunnelHealth, UnitReport
from schemas.values import Key
from services.applier.encryption import encryption_now
from services.applier.health import found_withdrawn
from services.applier.keys import settle
from services.applier.lookups import Addresses, as_known
from services.applier.steps import is_guard, order
from services.applier.turn import STRAY, Failure, Result, Scope, Turn
from services.kernel.port import ALL_LAYERS, Kernel, PeerSeen
from services.kernel.transaction import Held, Observed, changes, repairs
from services.runtime.errors import Conflict, MeshmarkError, OutcomeUnknown, Waiting


class Difference(Struct, frozen=True):
    """One object in which the kernel differs from the wanted plan. `wanted` and `found` are for people; empty: not there."""

    key: str
    unit: str
    wanted: str
    found: str


class Wanted(Struct, frozen=True):
    """A plan to apply, which one it is, and what the host knows that the plan does not.

    What is wanted is the plan without hops through withdrawn tunnels, and with the addresses of endpoints that are names.
    """

    plan: HostPlan
    epoch: int
    generation: int
    received_s: float
    tunnels: TunnelHealth
    addresses: Addresses

    def objects(self) -> Mapping[str, PlanObject]:
        return as_known(self.plan.objects(), self.tunnels.links, self.addresses)


_ALL_WELL = TunnelHealth()
_NO_NAMES: Addresses = MappingProxyType({})
_ROUTES: tuple[Layer, ...] = ("route",)


class Applier:
    """Brings one host's kernel to its plan."""

    def __init__(self, kernel: Kernel, now: Callable[[], float]) -> None:
        self._kernel = kernel
        self._now = now
        self._held: dict[str, Unit] = {}
        self._leftovers: dict[str, PlanObject] = {}
        self._tunnels = _ALL_WELL
        self._addresses = _NO_NAMES
        self._trusted = False
        self.failures: Mapping[str, Failure] = {}

    def apply(
        self,
        plan: HostPlan,
        epoch: int,
        generation: int,
        received_s: float = 0.0,
        tunnels: TunnelHealth = _ALL_WELL,
        *,
        addresses: Addresses = _NO_NAMES,
    ) -> ApplyReport:
        """Make one turn towards `plan` and report what came of it. Raises only what makes the kernel unreadable as a whole."""
        wanted = Wanted(plan, epoch, generation, received_s, tunnels, addresses)
        if self._trusted:
            try:
                return self._finish(wanted, self._from_memory(wanted), self._held)
            except (Conflict, OutcomeUnknown):
                self._trusted = False
        return self._apply_from_kernel(wanted, ALL_LAYERS)

    def repair(
        self,
        plan: HostPlan,
        epoch: int,
        generation: int,
        leave: Collection[Layer] = (),
        tunnels: TunnelHealth = _ALL_WELL,
        *,
        addresses: Addresses = _NO_NAMES,
    ) -> ApplyReport:
        """Read the kernel and bring it back to `plan`, but for the layers of `leave`, which are not looked at."""
        wanted = Wanted(plan, epoch, generation, self._now(), tunnels, addresses)
        self._trusted = False
        return self._apply_from_kernel(wanted, ALL_LAYERS - set(leave))

    def refuse(self, plan: HostPlan, epoch: int, generation: int, error: MeshmarkError) -> ApplyReport:
        """The report when the kernel could not be read at all: nothing is known to be held, nothing was changed."""
        self._trusted = False
        self._held = {}
        self.failures = {name: Failure("kernel", error) for name in plan.units} or {STRAY: Failure("kernel", error)}
        return self._report(Wanted(plan, epoch, generation, 0.0, _ALL_WELL, _NO_NAMES), Timings(reported_s=self._now()), 0)

    def stand(self, plan: HostPlan, epoch: int, generation: int, why: str) -> ApplyReport:
        """The report of a host that leaves `plan` alone and stays with what it holds, which is of `epoch` and `generation`.

        After a restart, what is held is what the kernel's marker says; a unit that `plan` does not have is then named by its tag.
        """
        held = {name: (digest_of(unit), len(unit)) for name, unit in self._held.items()}
        if not held and (marker := self._kernel.marker()) is not None:
            names = {unit_tag(name): name for name in plan.units}
            held = {names.get(tag, tag): (digest, 0) for tag, digest in marker.units.items()}
        wanted = plan.digests()
        units = tuple(
            UnitReport(name, digest, wanted.get(name, ""), "degraded", why, count)
            for name, (digest, count) in sorted((held or {STRAY: ("", 0)}).items())
        )
        capabilities = self._kernel.capabilities()
        times = Timings(reported_s=self._now())
        return ApplyReport(plan.cluster, plan.host, epoch, generation, units, 0, times, capabilities, self._tunnels)

    def settle_keys(self, plan: HostPlan) -> bool:
        """Let go of private keys that no device has any more; whether any went."""
        return settle(self._kernel, plan, {key for unit in self._held.values() for key in unit})

    def uses_key(self) -> bool:
        """Whether a WireGuard device of ours is in the kernel, read now."""
        return any(isinstance(item, WireguardLink) for item in self._kernel.read({}, {"link"}).values())

    def held(self) -> dict[str, str]:
        """The digest of each unit that the last turn left in the kernel."""
        return {name: digest_of(unit) for name, unit in self._held.items()}

    def withdrawn(self) -> tuple[str, ...]:
        """The links whose hops the last turn left out of the routes, sorted."""
        return tuple(sorted(self._tunnels.links))

    def found_withdrawn(self, plan: HostPlan) -> frozenset[str]:
        """The links whose hops an applier before this one has left out of the kernel's routes, read now."""
        objects = plan.objects()
        return found_withdrawn(objects, self._kernel.read(objects, _ROUTES))

    def handshakes(self, links: Collection[str]) -> dict[str, float]:
        """When each of these tunnels last shook hands: Unix time, 0 for never."""
        return {link: max((peer.handshake_s for peer in peers), default=0.0) for link, peers in self.peers(links).items()}

    def peers(self, links: Collection[str]) -> dict[str, Sequence[PeerSeen]]:
        """The peers of each of these links, read now."""
        return {link: self._kernel.peers(link) for link in links}

    def greet(self, link: str, keys: Collection[Key]) -> None:
        """Greet peers of a link again that have never shaken hands."""
        self._kernel.greet(link, keys)

    def encryption(self, plan: HostPlan) -> EncryptionNow:
        """What the kernel says of the host's part in its cluster's encryption, read now."""
        return encryption_now(self._kernel, plan, self._now())

    def differences(self, plan: HostPlan) -> list[Difference]:
        """Where the kernel differs from `plan` as this host knows it, read now."""
        units = {key: name for name, unit in plan.units.items() for key in unit}
        objects = as_known(plan.objects(), self._tunnels.links, self._addresses)
        found = repairs(objects, self._kernel.reference(objects), self._kernel.read(objects))
        return [Difference(change.key, units.get(change.key, STRAY), _show(change.new), _show(change.old)) for change in found]

    def _apply_from_kernel(self, wanted: Wanted, layers: Collection[Layer]) -> ApplyReport:
        """A turn against the kernel; a second one when somebody changed it meanwhile or an answer was lost."""
        try:
            result = self._from_kernel(wanted, layers, final=False)
        except (Conflict, OutcomeUnknown):
            result = self._from_kernel(wanted, layers, final=True)
        return self._finish(wanted, result, {})

    # Where changes come from ---------------------------------------------------------------------------------------------------------

    def _from_memory(self, wanted: Wanted) -> Result:
        plan = wanted.plan
        known = as_known(HostPlan(plan.cluster, plan.host, self._held).objects(), self._tunnels.links, self._addresses)
        held = {**known, **self._leftovers}
        leaving = {key for name, unit in self._held.items() if name not in plan.units for key in unit}
        scope = Scope(
            self._held,
            plan.units,
            wanted.epoch,
            wanted.generation,
            from_kernel=False,
            final=False,
            damaged=frozenset(),
            failures={},
            withdrawn=self._tunnels.links,
            addresses=self._addresses,
        )
        objects = wanted.objects()
        return Turn(self._kernel, scope, self._now).run(order(changes(held, objects), held, objects, leaving))

    def _from_kernel(self, wanted: Wanted, layers: Collection[Layer], *, final: bool) -> Result:
        plan = wanted.plan
        whole = wanted.objects()
        objects = {key: item for key, item in whole.items() if item.layer in layers}
        reference, failures = self._reference(plan, objects)
        given_up = {key for name in failures for key in plan.units[name]} - reference.keys()
        observed = {key: item for key, item in self._kernel.read(objects, layers).items() if key not in given_up}
        found = repairs({key: item for key, item in objects.items() if key in reference}, reference, observed)
        leaving = set() if plan.units else {change.key for change in found}
        # Guards and sysctls stay through an undo or are others' too: only more than these is a unit that was here.
        damaged = {name for name, unit in plan.units.items() if any(key in observed and _is_telling(observed[key]) for key in unit)}
        # What nobody plans has no old version either: one object that cannot be removed does not bring the others back.
        scope = Scope(
            {},
            plan.units,
            wanted.epoch,
            wanted.generation,
            from_kernel=True,
            final=final,
            damaged=frozenset({*damaged, STRAY}),
            failures=failures,
        )
        return Turn(self._kernel, scope, self._now).run(order(found, observed, whole, leaving))

    def _reference(self, plan: HostPlan, objects: Mapping[str, PlanObject]) -> tuple[Observed, dict[str, Failure]]:
        """How the kernel would list `objects`, and the units of which it refuses to say."""
        try:
            return self._kernel.reference(objects), {}
        except MeshmarkError:
            if len(plan.units) == 0:
                raise
        found: dict[str, Held] = {}
        failures: dict[str, Failure] = {}
        for name, unit in plan.units.items():
            try:
                found.update(self._kernel.reference({key: objects[key] for key in unit if key in objects}))
            except MeshmarkError as error:
                failures[name] = Failure("nft", error)
        return found, failures

    # What came of it -----------------------------------------------------------------------------------------------------------------

    def _finish(self, wanted: Wanted, result: Result, held: Mapping[str, Unit]) -> ApplyReport:
        units = wanted.plan.units
        self.failures = result.failures
        self._held = {name: unit for name, unit in units.items() if name not in result.failures}
        # A unit that failed is what it was, whether it is still planned or not; after a turn from the kernel nobody knows what that is.
        self._held.update({name: held[name] for name in result.failures if name in held})
        self._leftovers = dict(result.leftovers)
        # A unit that was put back to what it was lacks the hops of then, and no two units are told apart here.
        stays = self._tunnels.links == wanted.tunnels.links and self._addresses == wanted.addresses
        known = (bool(held) and stays) or not result.failures
        self._tunnels, self._addresses = wanted.tunnels, wanted.addresses
        self._trusted = result.trusted and known and STRAY not in result.failures
        timings = Timings(wanted.received_s, result.staged_s, result.committed_s, result.connected_s, self._now())
        return self._report(wanted, timings, result.operations)

    def _report(self, wanted: Wanted, timings: Timings, operations: int) -> ApplyReport:
        units = wanted.plan.units
        reports = []
        for name in sorted(units.keys() | self._held.keys() | self.failures.keys()):
            failure = self.failures.get(name)
            held = digest_of(self._held[name]) if name in self._held else ""
            target = digest_of(units[name]) if name in units else ""
            objects = len(self._held.get(name, ()))
            reports.append(UnitReport(name, held, target, _outcome(failure), _explain(failure), objects))
        plan = wanted.plan
        capabilities = self._kernel.capabilities()
        return ApplyReport(
            plan.cluster, plan.host, wanted.epoch, wanted.generation, tuple(reports), operations, timings, capabilities, wanted.tunnels
        )


def _is_telling(item: Held) -> bool:
    return not is_guard(item) and item.layer != "sysctl"


def _outcome(failure: Failure | None) -> Outcome:
    if failure is None:
        return "applied"
    return "waiting" if isinstance(failure.error, Waiting) else "degraded"


def _explain(failure: Failure | None) -> str:
    return f"{failure.key}: {failure.error}" if failure else ""


def _show(item: object) -> str:
    return str(item) if item is not None else ""


__all__ = ["Applier", "Difference"]
