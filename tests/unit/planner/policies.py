"""Policies of what leaves a cluster through which node, for tests: the example's, and others."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from schemas.host_objects import NftElement, PlanObject
from schemas.plan import HostPlan, unit_digest
from schemas.status import ApplyReport, UnitReport
from schemas.topology import Cluster, EgressPolicy, PublicKey, Topology
from schemas.values import Key, Name, Prefix
from services.cli.files import load
from services.planner.core import Core
from services.planner.state import HostId
from tests.topologies import EXAMPLES, tell


def items(**changes: object) -> list[Topology]:
    """The example with keys, and other fields of its cluster."""
    third = PublicKey(name=Name("worker-3"), cluster=Name("rome"), key=Key("3" * 42 + "A="))
    found = [*load([EXAMPLES / "egress.yaml", EXAMPLES / "encryption-keys.yaml"]), third]
    unique = {item.ref: item for item in found}
    return [replace(item, **changes) if isinstance(item, Cluster) else item for item in unique.values()]


def policy(name: str = "more", **changes: object) -> EgressPolicy:
    return replace(EgressPolicy(name=Name(name), cluster=Name("rome"), pods=(Prefix("10.200.3.0/24"),), node=Name("worker-1")), **changes)


def shop(**changes: object) -> EgressPolicy:
    found = next(item for item in items() if item.ref == "EgressPolicy/rome/shop")
    assert isinstance(found, EgressPolicy)
    return replace(found, **changes)


def objects(plans: dict[HostId, HostPlan], host: HostId) -> list[PlanObject]:
    return list(plans[host].objects().values())


def elements(found: Iterable[PlanObject], name: str) -> dict[str, str]:
    """What a set or map holds."""
    return {item.element: item.value for item in found if isinstance(item, NftElement) and item.set == name}


def refused(*these: Topology) -> list[tuple[str, str, str]]:
    """Object, field and other object of each refusal."""
    return [(f"{item.kind}/{item.name}", item.field, item.other) for item in tell(Core(), these).refused]


def publish_and_hold(core: Core, *silent: HostId) -> None:
    """All hosts hold what is published now, but for silent ones."""
    publish(core)
    for host, plan in core.published.items():
        if host not in silent:
            units = tuple(
                UnitReport(name, digest, digest, "applied")
                for name, digest in ((name, unit_digest(unit.values())) for name, unit in plan.units.items())
            )
            core.report(ApplyReport(Name(host.cluster), Name(host.name), 1, 1, units))


def publish(core: Core) -> None:
    for step in core.steps():
        core.publish(step)
